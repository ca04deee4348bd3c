"""A weight matrix as codes of 4 bits with a scale for each block, as bitsandbytes stores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear._held import NEGATIVE, HeldLinear
from zoo.components.numerics import blockwise
from zoo.components.ops.block_matmul import BlockMatmul, Form, choose
from zoo.components.ops.block_matmul.reference import dense
from zoo.components.registry import part
from zoo.components.spec import TensorInfo

Compute = Literal["float32", "bfloat16", "float16"]
BlockSize = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]


@part(Linear, "bnb_4bit", source="Dettmers et al. 2023, arXiv:2305.14314 (QLoRA), section 3; bitsandbytes 0.50, quantize_4bit")
@dataclass(frozen=True, kw_only=True)
class BnB4Bit(Linear):
    """NF4 or bitsandbytes' FP4 (not OCP's), a scale for each block of weights.

    block_size: weights that share a scale, taken row after row across the whole matrix. nested: scales are stored in 8 bits (double
    quantization). compute: the dtype that inputs are cast to for the product, None for their own. matmul: the product, None is the
    fastest that accepts.
    """

    codebook: blockwise.Codebook = "nf4"
    block_size: BlockSize = 64
    nested: bool = False
    compute: Compute | None = None
    matmul: BlockMatmul | None = None

    def problems(self, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, str]]:
        if inputs % 2:
            yield "codebook", f"{inputs} inputs of 4 bits do not fill whole bytes, which bitsandbytes' products need"

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        blocks = blockwise.blocks(inputs * outputs, self.block_size)
        held = {"packed": TensorInfo((-(-inputs * outputs // 2),), "uint8")}
        if self.nested:
            scales = blockwise.blocks(blocks, blockwise.NESTED)
            held |= {"absmax": TensorInfo((blocks,), "uint8"), "nested_absmax": TensorInfo((scales,), "float32"),
                     "offset": TensorInfo((1,), "float32")}  # fmt: skip
        else:
            held["absmax"] = TensorInfo((blocks,), "float32")
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def faults(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        magnitudes = "nested_absmax" if self.nested else "absmax"
        if bool((tensors[magnitudes] < 0).any()):
            yield magnitudes, NEGATIVE

    def build(self, inputs: int, outputs: int, bias: bool) -> BnB4BitLinear:
        return BnB4BitLinear(self, inputs, outputs, bias)

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """The tensors of a weight [outputs, inputs], rounded to the nearest."""
        packed, absmax = blockwise.encode(weight, self.codebook, self.block_size)
        if not self.nested:
            return {"packed": packed, "absmax": absmax}
        codes, scales, offset = blockwise.encode_scales(absmax)
        return {"packed": packed, "absmax": codes, "nested_absmax": scales, "offset": offset}


class BnB4BitLinear(HeldLinear):
    """[..., inputs] -> [..., outputs] in the dtype of the input."""

    spec: BnB4Bit
    packed: Tensor
    products: dict[torch.dtype, BlockMatmul]  # those that inputs of a dtype were multiplied by, or will be

    def __init__(self, spec: BnB4Bit, inputs: int, outputs: int, bias: bool):
        super().__init__(spec, inputs, outputs, bias)
        self.form = Form(spec.codebook, spec.block_size, inputs, outputs)
        self.prepare()

    def forward(self, x: Tensor) -> Tensor:
        cast = x if self.spec.compute is None else x.to(getattr(torch, self.spec.compute))
        held = dict(self.named_buffers(recurse=False))
        return self.biased(self.product(cast.dtype).product(self.form, held, cast).to(x.dtype))

    def product(self, dtype: torch.dtype) -> BlockMatmul:
        """The implementation for inputs of a dtype. Raises ValueError if one that was named refuses."""
        if dtype not in self.products:
            self.products[dtype] = choose(self.spec.matmul, self.form, self.packed.device, dtype)
        return self.products[dtype]

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32."""
        return dense(self.form, dict(self.named_buffers(recurse=False)), dtype or torch.float32)

    def prepare(self) -> None:
        """Choose the product that suits the device. Raises ValueError if one that was named refuses."""
        self.products = {}
        if not self.packed.is_meta:
            self.product(getattr(torch, self.spec.compute or "float32"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BnB4BitLinear:
        super()._apply(fn, recurse)
        self.prepare()
        return self
