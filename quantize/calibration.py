"""Calibration data: windows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo import corpus
from zoo.arguments import check_arguments
from zoo.model import Model

SAMPLES, LENGTH = 32, 512

# integers before texts: a check ends at the first kind that fits, and those that do not are told of every item
Calibration = str | Path | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor
"""Text, a text file (as a ``Path``), texts, or token ids: a run of them, several runs that may differ in length, or a tensor
[samples, length] that is used as it is."""


def windows(model: Model, calibration: Calibration | None, samples: int | None, length: int | None, seed: int) -> Tensor:
    """Token ids [samples, length] int64: windows of a text that do not overlap, chosen by ``seed``.

    calibration: None is the English text that ships with the zoo. samples, length: by default 32 windows of 512 tokens, or of the
    model's context where that is shorter. Raises TypeError for what is neither text nor integers, ValueError for a text too short, a
    length beyond the context and ids outside the vocabulary.
    """
    check_arguments(windows, {"calibration": calibration, "samples": samples, "length": length, "seed": seed})
    if isinstance(calibration, Tensor) and calibration.dim() == 2:
        if samples is not None or length is not None:
            raise ValueError(
                f"calibration ids {list(calibration.shape)} are used as they are; leave out samples and length, or pass one long run of ids"
            )
        if not calibration.numel():
            raise ValueError(f"calibration ids must be at least one, got {list(calibration.shape)}")
        return _checked(model, _integers(calibration, 2, "calibration"))
    samples = SAMPLES if samples is None else samples
    length = min(LENGTH, model.spec.context) if length is None else length
    if samples < 1 or length < 1:
        raise ValueError(f"calibration needs samples and a length of at least 1, got {samples} and {length}")
    return _checked(model, cut(_runs(model, calibration), samples, length, seed))


def cut(runs: Sequence[Tensor], samples: int, length: int, seed: int) -> Tensor:
    """``samples`` of the windows of ``length`` that runs of ids divide into."""
    there = torch.cat([run[: len(run) // length * length].view(-1, length) for run in runs])
    if len(there) < samples:
        raise ValueError(
            f"the calibration text has {sum(map(len, runs))} tokens, {len(there)} windows of {length}, but {samples} are wanted; "
            "give more text, fewer samples or a shorter length"
        )
    chosen = torch.randperm(len(there), generator=torch.Generator().manual_seed(seed))[:samples]
    return there[chosen]


def _runs(model: Model, calibration: Calibration | None) -> list[Tensor]:
    """Runs of token ids, each [tokens] int64; one of a text, of texts (joined by blank lines) and of a file."""
    if isinstance(calibration, Tensor):
        return [_integers(calibration, 1, "calibration")]
    if calibration is None:
        return [_tokenized(model, corpus.text("calibration"))]
    if isinstance(calibration, Path):
        return [_tokenized(model, calibration.expanduser().read_text(encoding="utf-8"))]
    if isinstance(calibration, str):
        return [_tokenized(model, calibration)]
    given: list[Any] = list(calibration)
    if not given:
        raise ValueError("calibration is empty; give text or token ids, or leave it out for the text that ships with the zoo")
    if isinstance(given[0], str):
        return [_tokenized(model, "\n\n".join(given))]
    if isinstance(given[0], int):
        return [torch.tensor(given)]
    return [_integers(torch.as_tensor(one, dtype=None if len(one) else torch.int64), 1, f"calibration[{i}]") for i, one in enumerate(given)]


def _tokenized(model: Model, text: str) -> Tensor:
    """[tokens] int64, without special tokens."""
    return torch.tensor(model.tokenizer.encode(text, add_special_tokens=False, verbose=False), dtype=torch.int64)


def _integers(ids: Tensor, dims: int, place: str) -> Tensor:
    if ids.dim() != dims or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(
            f"{place}: token ids are integers, in a run [tokens] or as a tensor of windows [samples, length], got {list(ids.shape)} "
            f"{ids.dtype}"
        )
    return ids.long()


def _checked(model: Model, ids: Tensor) -> Tensor:
    if ids.shape[1] > model.spec.context:
        raise ValueError(
            f"calibration windows of {ids.shape[1]} tokens exceed the model's context of {model.spec.context}; give a shorter length"
        )
    model.step(ids)  # raises for ids outside the vocabulary
    return ids
