"""Calibration data: windows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from zoo import corpus
from zoo.model import Model

SAMPLES, LENGTH = 32, 512

Calibration = str | Path | Sequence[str] | Sequence[int] | Tensor
"""Text, a text file (as a ``Path``), texts, or token ids: a run of them, or a tensor [samples, length] that is used as it is."""


def windows(model: Model, calibration: Calibration | None, samples: int | None, length: int | None, seed: int) -> Tensor:
    """Token ids [samples, length] int64: windows of a text that do not overlap, chosen by ``seed``.

    calibration: None is the English text that ships with the zoo. samples, length: by default 32 windows of 512 tokens, or of the
    model's context where that is shorter. Raises ValueError for a text too short, a length beyond the context and ids outside the
    vocabulary.
    """
    given = torch.as_tensor(calibration) if _are_ids(calibration) else None
    if given is not None and given.dim() == 2:
        if samples is not None or length is not None:
            raise ValueError(
                f"calibration ids {list(given.shape)} are used as they are; leave out samples and length, or pass one long run of ids"
            )
        if not given.numel() or given.is_floating_point() or given.dtype == torch.bool:
            raise ValueError(f"calibration ids must be integers and at least one, got {list(given.shape)} {given.dtype}")
        return _checked(model, given.long())
    samples = SAMPLES if samples is None else samples
    length = min(LENGTH, model.spec.context) if length is None else length
    if samples < 1 or length < 1:
        raise ValueError(f"calibration needs samples and a length of at least 1, got {samples} and {length}")
    ids = tokenize(model, calibration) if given is None else given.long()
    return _checked(model, cut(ids, samples, length, seed))


def cut(ids: Tensor, samples: int, length: int, seed: int) -> Tensor:
    """``samples`` of the windows of ``length`` that a run of ids divides into."""
    there = ids.numel() // length
    if there < samples:
        raise ValueError(
            f"the calibration text has {ids.numel()} tokens, {there} windows of {length}, but {samples} are wanted; "
            "give more text, fewer samples or a shorter length"
        )
    chosen = torch.randperm(there, generator=torch.Generator().manual_seed(seed))[:samples]
    return ids[: there * length].view(there, length)[chosen]


def tokenize(model: Model, calibration: Calibration | None) -> Tensor:
    """The token ids of a text, texts (joined by blank lines) or a file, without special tokens."""
    if calibration is None:
        text = corpus.text("calibration")
    elif isinstance(calibration, Path):
        text = calibration.read_text(encoding="utf-8")
    else:
        text = calibration if isinstance(calibration, str) else "\n\n".join(map(str, calibration))
    return torch.tensor(model.tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _are_ids(calibration: Calibration | None) -> bool:
    if isinstance(calibration, Tensor):
        return True
    return isinstance(calibration, Sequence) and not isinstance(calibration, str) and all(isinstance(x, int) for x in calibration)


def _checked(model: Model, ids: Tensor) -> Tensor:
    if ids.shape[1] > model.spec.context:
        raise ValueError(
            f"calibration windows of {ids.shape[1]} tokens exceed the model's context of {model.spec.context}; give a shorter length"
        )
    model.step(ids)  # raises for ids outside the vocabulary
    return ids
