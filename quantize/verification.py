"""A saved model is read back and compared with the one in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zoo.components.spec import diff
from zoo.loading import load, weight_bytes
from zoo.model import Model
from zoo.weights import linears

SIZE = 0.05  # share by which the files may differ from what the spec's tensors take
PROMPT = 24  # tokens compared: enough rows for the products of many, the last of them alone for the products of few


class VerificationError(ValueError):
    """A saved model that is not the one in memory; lists every difference."""


@dataclass(frozen=True)
class Verified:
    """What was found. bytes: of the weight files. logit_difference: the largest, as a share of the largest logit."""

    tensors: int
    bytes: int
    expected_bytes: int
    logit_difference: float


@torch.no_grad()
def verify(model: Model, folder: str | Path, *, seed: int = 0) -> Verified:
    """Load a saved model from ``folder`` and compare storage, names, sizes, every tensor and the outputs for random inputs.

    Raises VerificationError listing all differences, and tensors that are NaN, infinite or constant (packed words that were never
    written, say); CheckpointError where the folder does not load.
    """
    folder = Path(folder)
    saved = load(folder, dtype=model.dtype, device=model.device)
    size, expected = sum(p.stat().st_size for p in folder.glob("*.safetensors")), weight_bytes(model.spec, model.dtype)
    difference = logit_difference(model, saved, seed)
    problems = [*_storages(model, saved), *_tensors(model, saved)]
    if abs(size - expected) > SIZE * expected + 4096 * len(saved.state_dict()):
        problems.append(f"the weight files take {size} bytes, the model's tensors {expected}")
    if not difference <= 64 * torch.finfo(model.dtype).eps:
        problems.append(f"the logits differ by {difference:.2e} of the largest")
    if problems:
        raise VerificationError(f"{folder} is not the model in memory:\n  " + "\n  ".join(problems))
    return Verified(len(saved.state_dict()), size, expected, difference)


def logit_difference(a: Model, b: Model, seed: int) -> float:
    """The largest difference of two models' outputs on random inputs, of many tokens and of one, over the largest output."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [a.spec.embed.draw(tokens, generator).to(a.device) for tokens in (PROMPT, 1)]
    pairs = [(a(x).float(), b(x).float()) for x in inputs]
    return max(float((x - y).abs().max() / x.abs().max()) for x, y in pairs)


def _storages(model: Model, saved: Model) -> Iterator[str]:
    theirs = dict(linears(saved.spec))
    for path, child in linears(model.spec):
        for place, ours, other in diff(child.spec, theirs[path].spec):
            if place != "matmul":
                yield f"{path}.{place}: {ours} in memory, {other} in the folder"


def _tensors(model: Model, saved: Model) -> Iterator[str]:
    ours, theirs = model.state_dict(), saved.state_dict()
    yield from (
        f"{name}: only in {place}"
        for place, names in (("memory", ours.keys() - theirs), ("the folder", theirs.keys() - ours))
        for name in names
    )
    for name in ours.keys() & theirs.keys():
        yield from (f"{name}: {reason}" for reason in _faults(ours[name], theirs[name]))


def _faults(ours: Tensor, theirs: Tensor) -> Iterator[str]:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        yield f"{list(ours.shape)} {ours.dtype} in memory, {list(theirs.shape)} {theirs.dtype} in the folder"
    elif not torch.equal(ours, theirs):
        yield "the values differ"
    if not theirs.isfinite().all():
        yield "holds NaN or infinity"
    if theirs.dim() > 1 and theirs.numel() > 1 and (theirs == theirs.flatten()[0]).all():
        yield f"every element is {theirs.flatten()[0].item()}"
