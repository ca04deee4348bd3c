"""Parity of a family with transformers, over tiny random checkpoints that transformers wrote to disk.

A case is a config and model class of transformers with options; a check is a function of a case's folder and transformers' model that
returns what it measured: the largest relative error, or in bfloat16 its ratio to transformers' own.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from tests.zoo.oracle import relative_error
from zoo.compare import first_difference
from zoo.model import Model

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
    """name: family and option, as the table shows them. model: transformers' class. options: over ``BASE``, of which None removes a field.

    cached: False where a cache changes the numbers by definition. tolerance: relative, fp32. output: the field of transformers' result.
    attention: its implementation. tables: pattern of saved buffers that follow from the config, so they are not random.
    """

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    cached: bool = True
    tolerance: float = TOLERANCE
    output: str = "logits"
    attention: str = "eager"
    tables: str = r"(?!)"

    def write(self, folder: Path) -> Any:
        """Save a random checkpoint; returns transformers' model, in evaluation mode."""
        kind = getattr(transformers, self.model)
        config = kind.config_class(**{k: v for k, v in (BASE | self.options).items() if v is not None or k not in BASE})
        config._attn_implementation = self.attention
        model = randomized(kind(config), self.tables)
        model.save_pretrained(folder)
        return model

    def want(self, theirs: Any, x: Tensor) -> Tensor:
        """What transformers answers to ids."""
        return getattr(theirs(x), self.output)


def slow(case: Case) -> Any:
    """The case, left out of the default run."""
    return pytest.param(case, marks=pytest.mark.slow)


def randomized(model: Any, tables: str = r"(?!)", seed: int = 0) -> Any:
    """All parameters and persistent buffers but ``tables`` random: matrices at 1/sqrt(fan in), vectors about 1, so that errors show."""
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in saved.items():
            if tensor.is_floating_point() and not re.search(tables, name):
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 1 + 0.5 * noise)
    return model.eval()


def ids(rows: int, length: int = T, seed: int = 1, vocab: int = 97) -> Tensor:
    return torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, case: Case, blame: Callable[[], object] = str) -> float:
    """The relative error. blame: what to say if it is too large."""
    error = relative_error(got, want)
    assert error < case.tolerance, f"{case.name}: relative error {error:.2e}; {blame()}"
    return error


def blamed(ours: Model, theirs: Any, x: Tensor) -> str:
    try:
        return f"the first module that differs is {first_difference(ours, theirs, x)}"
    except ValueError as e:  # transformers renames the modules of some families when it loads them
        return f"no module can be compared: {e}"


@torch.no_grad()
def whole(case: Case, folder: Path, theirs: Any) -> float:
    x, errors = ids(2), []
    for kernel in ("", "eager"):  # as the family says, and the plain reference
        spec = zoo.spec(folder)
        swap = [f"layers.{i}.mixer.kernel={kernel}" for i, s in enumerate(spec.layers) if kernel and s.mixer.kernel.name == "sdpa"]
        ours = zoo.load(folder, override=swap)
        errors.append(close(ours(x), case.want(theirs, x), case, partial(blamed, ours, theirs, x)))
    return max(errors)


@torch.no_grad()
def padded(case: Case, folder: Path, theirs: Any) -> float:
    ours, lengths, errors = zoo.load(folder), [T, T - 13, 1], []
    for side in ("left", "right"):
        x, pos = ids(3), torch.full((3, T), -1)
        for row, n in enumerate(lengths):
            pos[row, slice(T - n, T) if side == "left" else slice(0, n)] = torch.arange(n)
        got = ours(x, positions=pos)
        assert torch.isfinite(got).all()
        for row in range(3):
            keep = pos[row] >= 0
            own = got[row, keep] if got.dim() == 3 else got[row]  # some heads give one output a row
            errors.append(close(own, case.want(theirs, x[row : row + 1, keep])[0], case))
    return max(errors)


@torch.no_grad()
def cached(case: Case, folder: Path, theirs: Any) -> float | None:
    if not case.cached:
        return None
    ours, x = zoo.load(folder), ids(2)
    cache = ours.new_cache(2)
    parts = [ours(x[:, :7], cache=cache), ours(x[:, 7:20], cache=cache), *(ours(x[:, i : i + 1], cache=cache) for i in range(20, T))]
    cache.check()
    return close(torch.cat(parts, 1), case.want(theirs, x), case)


@torch.no_grad()
def bfloat16(case: Case, folder: Path, theirs: Any) -> float:
    x = ids(2, 24)
    exact = case.want(theirs, x)
    other = relative_error(case.want(copy.deepcopy(theirs).to(torch.bfloat16), x), exact)
    ours = zoo.load(folder, dtype="bfloat16")(x)
    assert ours.dtype == torch.bfloat16
    error = relative_error(ours, exact)
    assert error <= 2 * other, f"{case.name}: bfloat16 error {error:.2e}, transformers' own {other:.2e}"
    return error / other


@torch.no_grad()
def saved(case: Case, folder: Path, theirs: Any) -> None:
    """Load, save, load in transformers: the same logits to the bit as from the original files; and the same spec."""
    out = folder.parent / f"{folder.name}-saved"
    result = zoo.save(zoo.load(folder), out, shard_bytes=20_000)
    assert result.transformers is None, result.transformers
    kind, x = getattr(transformers, case.model), ids(2)
    back = kind.from_pretrained(out, attn_implementation="eager")
    original = kind.from_pretrained(folder, attn_implementation="eager")
    assert torch.equal(case.want(back, x), case.want(original, x))
    assert torch.equal(zoo.load(out)(x), zoo.load(folder)(x))
    assert zoo.spec(out) == zoo.spec(folder)


def renamed(folder: Path, out: Path, change: Callable[[str], str] = str, more: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """A copy of a checkpoint with other tensor names, more tensors, and other config fields (None removes one)."""
    out.mkdir()
    save_file({change(n): t for n, t in load_file(folder / "model.safetensors").items()} | (more or {}), out / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return out


Check = Callable[[Case, Path, Any], float | None]
CHECKS: dict[str, Check] = {"whole": whole, "padded": padded, "cached": cached, "bfloat16": bfloat16, "saved": saved}
