"""A causal convolution over a few tokens, one filter per channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(x: Tensor, weight: Tensor, state: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """``short_convolution`` row by row and token by token."""
    y, states = torch.zeros_like(x), []
    for row in range(x.shape[0]):
        past = state[row]
        for t in range(x.shape[1]):
            if valid[row, t]:
                window = torch.cat([past, x[row, t][None]])
                y[row, t] = (window * weight.T).sum(0)
                past = window[1:]
        states.append(past)
    return y, torch.stack(states)


def short_convolution(x: Tensor, weight: Tensor, state: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [B, T, C], weight [C, W] (the last tap is the token itself), state [B, W-1, C] the inputs before -> y [B, T, C], new state.

    valid: [B, T] bool; tokens that are not do not enter the window and their y means nothing. None: all are.
    """
    if valid is None:
        window = torch.cat([state, x], 1)
        return convolve(window, weight), window[:, x.shape[1] :]
    taps, rank = weight.shape[1], valid.long().cumsum(1)
    room = torch.cat([state, x.new_zeros(x.shape[0], x.shape[1] + 1, x.shape[2])], 1)
    place = torch.where(valid, taps - 2 + rank, room.shape[1] - 1)  # packed behind the state; what is not valid goes to a spare column
    packed = room.scatter(1, spread(place, x), x)[:, :-1]
    y = convolve(packed, weight).gather(1, spread((rank - 1).clamp(min=0), x))
    last = rank[:, -1:] + torch.arange(taps - 1, device=x.device)
    return y, packed.gather(1, spread(last, x))


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """[B, W-1+T, C] -> [B, T, C]."""
    return F.conv1d(x.mT, weight[:, None], groups=weight.shape[0]).mT


def spread(index: Tensor, x: Tensor) -> Tensor:
    """[B, N] -> [B, N, C], for gather and scatter."""
    return index[..., None].expand(-1, -1, x.shape[-1])
