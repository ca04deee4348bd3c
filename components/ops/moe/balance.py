"""Balance between experts: losses, and the update of a router's correction bias. Padding counts nowhere.

N tokens, K choices a token, E experts. All losses are float32 scalars; the caller multiplies them by their coefficient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from zoo.components.contracts import RouterModule, Routing


def load(routing: Routing) -> Tensor:
    """[E] int64: how many tokens chose each expert."""
    return _counts(routing.experts, routing.count)


def switch_loss(routing: Routing) -> Tensor:
    """E sum_e f_e P_e with f the share of choices and P the mean probability; 1 when uniform.

    Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6. transformers' load_balancing_loss_func is K times this.
    """
    counts = load(routing).float()
    return routing.count * (counts / counts.sum().clamp(min=1) * _mean_probability(routing)).sum()


def gshard_loss(routing: Routing) -> Tensor:
    """mean_e (c_e / N) P_e with c the tokens whose first choice is e; 1 / E^2 when uniform.

    Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1, line 13.
    """
    first = _counts(routing.experts[:, 0], routing.count).float()
    return (first / first.sum().clamp(min=1) * _mean_probability(routing)).mean()


def z_loss(routing: Routing) -> Tensor:
    """Mean square of log sum exp of the logits. Zoph et al. 2022 (ST-MoE), arXiv:2202.08906, equation 5."""
    return _mean_over_tokens(routing.logits.logsumexp(-1).square(), routing)


@torch.no_grad()
def update_correction(correction: Tensor, counts: Tensor, rate: float = 1e-3) -> None:
    """Raise the correction bias [E] of experts with less than the mean load, lower the others', by ``rate``, in place.

    counts: [E] tokens per expert in the step, over all devices. Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    counts = counts.to(correction.dtype)
    correction += rate * torch.sign(counts.mean() - counts)


@contextmanager
def routings(model: nn.Module) -> Iterator[dict[str, Routing]]:
    """Within the context, the latest routing of every router of a model under its module path, in the order of the layers."""
    found: dict[str, Routing] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, RouterModule):
                hook = module.register_forward_hook(lambda _module, _args, routing, name=name: found.update({name: routing}))
                stack.callback(hook.remove)
        yield found


def _counts(experts: Tensor, count: int) -> Tensor:
    flat = experts.flatten() + 1  # padding's -1 becomes a bin of its own
    return torch.zeros(count + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))[1:]


def _mean_probability(routing: Routing) -> Tensor:
    return _mean_over_tokens(routing.logits.softmax(-1), routing)


def _mean_over_tokens(x: Tensor, routing: Routing) -> Tensor:
    if routing.valid is None:
        return x.mean(0)
    valid = routing.valid.view(-1, *[1] * (x.dim() - 1))
    return torch.where(valid, x, 0).sum(0) / routing.valid.sum().clamp(min=1)
