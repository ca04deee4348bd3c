"""Parity of a family with transformers, over tiny random checkpoints that transformers wrote to disk.

A case is a config and model class of transformers with options; a check is a function of a case's folder and transformers' model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import zoo
from tests.zoo.oracle import relative_error

TOLERANCE = 1e-5
T = 40  # beyond the trained context
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """name: family and option, as the table shows them. model: transformers' class. options: over ``BASE``; None removes a field.

    cached: False where a cache changes the numbers by definition. tolerance: relative, fp32.
    """

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    cached: bool = True
    tolerance: float = TOLERANCE

    def write(self, folder: Path) -> Any:
        """Save a random checkpoint; returns transformers' model, in evaluation mode with eager attention."""
        kind = getattr(transformers, self.model)
        config = kind.config_class(**{k: v for k, v in (BASE | self.options).items() if v is not None})
        config._attn_implementation = "eager"
        model = randomized(kind(config))
        model.save_pretrained(folder)
        return model


def randomized(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Every parameter and persistent buffer random: matrices at 1/sqrt(fan in), vectors about 1, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for tensor in saved.values():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 1 + 0.5 * noise)
    return model.eval()


def ids(rows: int, length: int = T, seed: int = 1, vocab: int = 97) -> Tensor:
    return torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, case: Case) -> None:
    error = relative_error(got, want)
    assert error < case.tolerance, f"{case.name}: relative error {error:.2e}"


@torch.no_grad()
def whole(case: Case, folder: Path, theirs: Any) -> None:
    x = ids(2)
    for kernel in ("", "eager"):  # as the family says, and the plain reference
        spec = zoo.spec(folder)
        swap = [f"layers.{i}.mixer.kernel={kernel}" for i, s in enumerate(spec.layers) if kernel and s.mixer.kernel.name == "sdpa"]
        close(zoo.load(folder, override=swap)(x), theirs(x).logits, case)


@torch.no_grad()
def padded(case: Case, folder: Path, theirs: Any) -> None:
    ours, lengths = zoo.load(folder), [T, T - 13, 1]
    for side in ("left", "right"):
        x, pos = ids(3), torch.full((3, T), -1)
        for row, n in enumerate(lengths):
            pos[row, slice(T - n, T) if side == "left" else slice(0, n)] = torch.arange(n)
        got = ours(x, positions=pos)
        assert torch.isfinite(got).all()
        for row in range(3):
            keep = pos[row] >= 0
            close(got[row, keep], theirs(x[row : row + 1, keep]).logits[0], case)


@torch.no_grad()
def cached(case: Case, folder: Path, theirs: Any) -> None:
    if not case.cached:
        return
    ours, x = zoo.load(folder), ids(2)
    cache = ours.new_cache(2)
    parts = [ours(x[:, :7], cache=cache), ours(x[:, 7:20], cache=cache), *(ours(x[:, i : i + 1], cache=cache) for i in range(20, T))]
    cache.check()
    close(torch.cat(parts, 1), theirs(x).logits, case)


@torch.no_grad()
def bfloat16(case: Case, folder: Path, theirs: Any) -> None:
    x = ids(2, 24)
    exact = theirs(x).logits
    other = relative_error(copy.deepcopy(theirs).to(torch.bfloat16)(x).logits, exact)
    ours = zoo.load(folder, dtype="bfloat16")(x)
    assert ours.dtype == torch.bfloat16
    error = relative_error(ours, exact)
    assert error <= 2 * other, f"{case.name}: bfloat16 error {error:.2e}, transformers' own {other:.2e}"


@torch.no_grad()
def saved(case: Case, folder: Path, theirs: Any) -> None:
    """Load, save, load in transformers: the same logits to the bit as from the original files; and the same spec."""
    out = folder.parent / f"{folder.name}-saved"
    result = zoo.save(zoo.load(folder), out, shard_bytes=20_000)
    assert result.transformers is None, result.transformers
    kind, x = getattr(transformers, case.model), ids(2)
    back = kind.from_pretrained(out, attn_implementation="eager")
    original = kind.from_pretrained(folder, attn_implementation="eager")
    assert torch.equal(back(x).logits, original(x).logits)
    assert torch.equal(zoo.load(out)(x), zoo.load(folder)(x))
    assert zoo.spec(out) == zoo.spec(folder)


Check = Callable[[Case, Path, Any], None]
CHECKS: dict[str, Check] = {"whole": whole, "padded": padded, "cached": cached, "bfloat16": bfloat16, "saved": saved}
