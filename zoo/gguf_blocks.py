"""Which blocks of a GGUF file a weight is written in: packed weights in those that hold them exactly, plain ones rounded as asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_float import PackedFloat
from zoo.components.linear.packed_int import PackedInt
from zoo.components.numerics import floats, ggml, integer

MXFP4 = PackedFloat(element="e2m1", group_size=ggml.BLOCK, scale="e8m0")
WORDS = {word.lower(): kind for word, kind in Kind.__members__.items()}
BLOCKS = ("f32", "bf16", "f16", "q8_0", "q6_k", "q5_0", "q5_1", "q4_k", "q4_1", "q4_0", "mxfp4")  # that plain weights can be rounded to
DTYPES = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16, torch.float16: Kind.F16, torch.float64: Kind.F32}
NARROWER = {Kind.Q4_K: Kind.Q5_0, Kind.Q6_K: Kind.Q8_0}  # for rows that are no multiple of 256, as llama.cpp has it
OURS = {Kind.Q4_K: ggml.q4_k, Kind.Q6_K: ggml.q6_k}  # which the library decodes only
Tensors = Mapping[str, Tensor]


def plain_kind(shape: tuple[int, ...], wanted: Kind, outer: bool) -> Kind:
    """The blocks of a plain tensor: vectors are float32, rows that do not divide into blocks get narrower ones, or float16.

    outer: it is an embedding or a head, which are kept in at least 6 bits, as llama.cpp keeps them.
    """
    if len(shape) < 2:
        return Kind.F32
    if outer and bits(wanted) < bits(Kind.Q6_K):
        wanted = Kind.Q6_K
    for kind in (wanted, NARROWER.get(wanted, wanted)):
        if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0:
            return kind
    return Kind.F16


def bits(kind: Kind) -> float:
    """Per weight."""
    elements, size = GGML_QUANT_SIZES[kind]
    return 8 * size / elements


def plain_bytes(tensor: Tensor, kind: Kind) -> np.ndarray:
    """A tensor [..., K] as blocks, uint8 [..., bytes of a row]."""
    if kind in OURS:
        return OURS[kind](tensor).cpu().numpy()
    return np.ascontiguousarray(quantize(tensor.float().cpu().numpy(), kind)).view(np.uint8)


def packed_kind(storage: Linear, tensors: Tensors, inputs: int) -> Kind:
    """The smallest blocks that hold a packed weight exactly. Raises ValueError with the reason where there are none.

    tensors: of the storage, in its canonical layout; scales and zero points are looked at, since float16 must hold them.
    """
    if inputs % ggml.BLOCK:
        raise ValueError(f"rows of {inputs} do not divide into blocks of {ggml.BLOCK}")
    if isinstance(storage, PackedFloat):
        if replace(storage, matmul=None) == MXFP4:
            return Kind.MXFP4
        raise ValueError("of packed floats only MXFP4 is held, whose inputs are not rounded (e2m1 with e8m0 scales for 32 inputs)")
    if not isinstance(storage, PackedInt):
        raise ValueError(f"no blocks hold {storage.name}")
    if storage.scattered or (storage.group_size or inputs) % ggml.BLOCK:
        raise ValueError(f"only groups of neighbours, {ggml.BLOCK} or a multiple of it, are held")
    if not scales_fit(storage, tensors, inputs):
        raise ValueError("float16, which is all that blocks have, does not hold its scales")
    if storage.symmetric:
        return next(kind for top, kind in ((4, Kind.Q4_0), (5, Kind.Q5_0), (8, Kind.Q8_0)) if storage.bits <= top)
    if storage.bits > 7:
        raise ValueError("no blocks hold 8 bits with zero points")
    if storage.bits > 4:
        return Kind.Q8_0
    zero = integer.unpack_rows(tensors["zero"], storage.bits, len(tensors["scale"]))
    return Kind.Q4_1 if exact(zero * tensors["scale"].double()) else Kind.Q5_0  # the latter has no offset, only whole steps


def packed_bytes(storage: Linear, tensors: Tensors, kind: Kind, inputs: int) -> np.ndarray:
    """A packed weight as the blocks that ``packed_kind`` found, uint8 [outputs, bytes of a row]."""
    if isinstance(storage, PackedFloat):
        return ggml.mxfp4(floats.unpack(tensors["packed"], storage.grid.element, inputs), tensors["scale"]).cpu().numpy()
    assert isinstance(storage, PackedInt)
    codes, zero = integer.unpack(tensors["packed"], storage.bits, inputs), zero_points(storage, tensors)
    scale = per_block(tensors["scale"].to(torch.float16), inputs)
    if kind == Kind.Q4_1:
        low = per_block((-zero * tensors["scale"].double()).to(torch.float16), inputs)
        return ggml.q4_1(codes, scale, low).cpu().numpy()
    write = {Kind.Q4_0: ggml.q4_0, Kind.Q5_0: ggml.q5_0, Kind.Q8_0: ggml.q8_0}[kind]
    return write(levels(codes, zero), scale).cpu().numpy()


def zero_points(storage: PackedInt, tensors: Tensors) -> Tensor:
    """[N, G] int16."""
    if storage.symmetric:
        return torch.full_like(tensors["scale"], storage.grid.middle, dtype=torch.int16)
    return integer.unpack_rows(tensors["zero"], storage.bits, len(tensors["scale"])).to(torch.int16)


def levels(codes: Tensor, zero: Tensor) -> Tensor:
    """code - zero: codes [N, K], zero [N, G] int16 -> int16 [N, K]."""
    return (codes.to(torch.int16).unflatten(-1, (zero.shape[-1], -1)) - zero[..., None]).flatten(-2)


def per_block(scale: Tensor, inputs: int) -> Tensor:
    """[N, G] -> [N, B]."""
    return scale.repeat_interleave(inputs // ggml.BLOCK // scale.shape[-1], -1)


def exact(values: Tensor) -> bool:
    return torch.equal(values.to(torch.float16).to(values.dtype), values)


def scales_fit(storage: PackedInt, tensors: Tensors, inputs: int) -> bool:
    """Whether float16 holds the scales; those of groups of zeros may be anything."""
    scale = tensors["scale"]
    lost = scale.to(torch.float16).to(scale.dtype) != scale
    if not lost.any():
        return True
    codes = integer.unpack(tensors["packed"], storage.bits, inputs)
    used = levels(codes, zero_points(storage, tensors)).unflatten(-1, (scale.shape[-1], -1)).any(-1)
    return not (lost & used).any()
