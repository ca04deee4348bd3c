"""Checkpoints whose quantized weights are read as plain ones: what some families are published in, for models that compute in floats.

Each method here turns the tensors on disk into those that an unquantized checkpoint of the family holds, exactly, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.components.numerics import e8m0, floats
from zoo.components.spec import TensorInfo
from zoo.wrapped import Wrapped

Infos = Mapping[str, TensorInfo]
INPUT_SCALE = re.compile(r"[._](input|activation)_(global_)?(scale|multiplier|divisor)$")  # in the words of all formats


@dataclass(frozen=True)
class Packed:
    """A weight that is stored in several tensors: their names, what it is once read, and how it is read."""

    parts: tuple[str, ...]
    info: TensorInfo
    decode: Callable[..., Tensor]


class Dequantized(Wrapped):
    """``inner`` with plain weights in place of packed ones, and a config without ``quantization_config``.

    idle: tensors of ``inner`` that are no weights, and are not seen here.
    """

    def __init__(self, inner: Checkpoint, packed: Mapping[str, Packed], idle: Collection[str] = ()):
        super().__init__(inner)
        self._packed, self._idle = packed, idle
        self.config = {k: v for k, v in inner.config.items() if k != "quantization_config"}
        self.dtype = inner.dtype if inner.dtype.itemsize > 1 else torch.bfloat16

    @property
    def parts(self) -> set[str]:
        """Names in ``inner`` of what plain weights are made of, or have no use for."""
        return {name for p in self._packed.values() for name in p.parts}

    def tensors(self) -> Infos:
        used = self.parts.union(self._idle)
        kept = {n: t for n, t in self.inner.tensors().items() if n not in used}
        return kept | {n: p.info for n, p in self._packed.items()}

    def read(self, name: str) -> Tensor:
        if name not in self._packed:
            return self.inner.read(name)
        packed = self._packed[name]
        return packed.decode(*map(self.inner.read, packed.parts))

    def release(self, name: str) -> None:
        for part in self._packed[name].parts if name in self._packed else (name,):
            self.inner.release(part)


def input_scales(checkpoint: Checkpoint) -> list[str]:
    """Names in the files of scales that packed modules round their inputs by, which plain ones take as they are."""
    found: set[str] = set()
    while isinstance(checkpoint, Wrapped):
        if isinstance(checkpoint, Dequantized):
            found |= {name for name in checkpoint.parts if INPUT_SCALE.search(name)}
        checkpoint = checkpoint.inner
    return sorted(found)


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as it would be without its quantization where that is one of METHODS, else the checkpoint itself.

    Raises CheckpointError for a tensor whose scales are missing or do not fit it.
    """
    config = checkpoint.config.get("quantization_config")
    if not isinstance(config, Mapping) or str(config.get("quant_method")) not in METHODS:
        return checkpoint
    try:
        return Dequantized(checkpoint, METHODS[config["quant_method"]](config, checkpoint.tensors()))
    except ValueError as e:
        raise CheckpointError(f"{checkpoint.reference}: {e}") from None


# ---- mxfp4 (gpt-oss) -----------------------------------------------------------------------------------------------------------


def mxfp4(config: Mapping[str, Any], tensors: Infos) -> dict[str, Packed]:
    """``NAME_blocks`` uint8 [E, rows, blocks, 16] and ``NAME_scales`` uint8 [E, rows, blocks] are NAME [E, 32 blocks, rows].

    OCP Microscaling Formats 1.0 (2023), section 5.1: 32 numbers E2M1, the even ones in the low halves of the bytes, share one E8M0.
    """
    found = {}
    for blocks in (n for n in tensors if n.endswith("_blocks")):
        name = blocks.removesuffix("_blocks")
        shape, scales = tensors[blocks].shape, f"{name}_scales"
        if len(shape) != 4 or shape[-1] != 16 or tensors[blocks].dtype != "uint8":
            raise ValueError(f"{blocks} must be uint8 [experts, rows, blocks, 16], it is {tensors[blocks].dtype} {list(shape)}")
        if tensors.get(scales) != TensorInfo(shape[:-1], "uint8"):
            raise ValueError(f"{scales} must be there, uint8 {list(shape[:-1])}, for {blocks}; download the files again")
        found[name] = Packed((blocks, scales), TensorInfo((shape[0], 32 * shape[2], shape[1]), "bfloat16"), from_mxfp4)
    return found


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16, which holds every such number; expert by expert, since the codes as indices take several times their room."""
    experts, rows, count, _ = blocks.shape
    out = torch.empty(experts, rows, count * 32, dtype=torch.bfloat16)
    for expert in range(experts):
        numbers = floats.numbers(blocks[expert], floats.ELEMENTS["e2m1"], 32)
        out[expert] = numbers.mul_(e8m0.decode(scales[expert])[..., None]).flatten(-2)
    return out.transpose(1, 2)


# ---- fp8 in blocks (DeepSeek-V3) -----------------------------------------------------------------------------------------------


def fp8(config: Mapping[str, Any], tensors: Infos) -> dict[str, Packed]:
    """``NAME`` float8 [..., rows, columns] times ``NAME_scale_inv``: one number for each block of ``weight_block_size``, or one for all.

    What inputs are scaled by, ``activation_scale`` beside a module's weight or ``NAME_activation_scale``, is no part of a weight.
    DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2. Blocks at the edges may be cut.
    """
    size = config.get("weight_block_size")
    if size is not None and not (isinstance(size, Sequence) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise ValueError(f"quantization_config.weight_block_size must be [rows, columns] or null, it is {size!r:.60}")
    found = {}
    for name in (n for n, t in tensors.items() if (t.dtype or "").startswith("float8")):
        scales, shape = f"{name}_scale_inv", tensors[name].shape
        if size is not None and len(shape) < 2:
            raise ValueError(
                f"{name} is {list(shape)}, and a tensor of one dimension has no blocks {list(size)}; store it as plain numbers"
            )
        grid = () if size is None else (*shape[:-2], *(-(-n // block) for n, block in zip(shape[-2:], size, strict=True)))
        if scales not in tensors or tensors[scales].shape not in ((grid,) if size else ((), (1,))):
            raise ValueError(f"{scales} must be there, {list(grid)}, for {name} {list(shape)}; download the files again")
        inputs = f"{name}_activation_scale" if f"{name}_activation_scale" in tensors else f"{name.removesuffix('weight')}activation_scale"
        parts = (name, scales, *(n for n in (inputs,) if n in tensors))
        found[name] = Packed(parts, TensorInfo(shape, "float32"), lambda weight, scale, *_: from_fp8(weight, scale, size))
    return found


def from_fp8(weight: Tensor, scale: Tensor, size: Sequence[int] | None) -> Tensor:
    """float32, in which the products are rounded once."""
    if size is not None:
        rows, columns = (min(block, n) for block, n in zip(size, weight.shape[-2:], strict=True))  # a block ends where the weight does
        scale = scale.repeat_interleave(rows, -2)[..., : weight.shape[-2], :]
        scale = scale.repeat_interleave(columns, -1)[..., : weight.shape[-1]]
    return weight.float() * scale.float()


METHODS: dict[str, Callable[[Mapping[str, Any], Infos], dict[str, Packed]]] = {"mxfp4": mxfp4, "fp8": fp8}
