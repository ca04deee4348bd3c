"""A weight matrix as sums of learned vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear._held import HeldLinear
from zoo.components.ops.packed_matmul import few
from zoo.components.registry import part
from zoo.components.spec import TensorInfo

MOST_BITS = 16  # of a code
TABLE = 256  # entries of a codebook up to which a table of products pays for a single row


@part(Linear, "additive", source="Egiazarian et al. 2024, arXiv:2401.06118 (AQLM), section 3")
@dataclass(frozen=True, kw_only=True)
class Additive(Linear):
    """A block of weights is the sum of one vector of each codebook, times the scale of its outputs.

    codebooks: how many. bits: of a code; a codebook has 2^bits vectors. group: inputs of a block. outputs_per_group: outputs of a
    block. scale_dtype: of codebooks and scales.
    """

    codebooks: int = 2
    bits: int = 8
    group: int = 8
    outputs_per_group: int = 1
    scale_dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    def problems(self, inputs: int, outputs: int, bias: bool) -> Iterator[tuple[str, str]]:
        if self.codebooks < 1:
            yield "codebooks", f"must be at least 1, got {self.codebooks}"
        if not 1 <= self.bits <= MOST_BITS:
            yield "bits", f"must lie in 1..{MOST_BITS}, got {self.bits}"
        if self.group < 1 or inputs % self.group:
            yield "group", f"{inputs} inputs do not divide into groups of {self.group}"
        if self.outputs_per_group < 1 or outputs % self.outputs_per_group:
            yield "outputs_per_group", f"{outputs} outputs do not divide into groups of {self.outputs_per_group}"

    def own_tensors(self, inputs: int, outputs: int, bias: bool) -> dict[str, TensorInfo]:
        rows, columns = outputs // self.outputs_per_group, inputs // self.group
        held = {
            "codes": TensorInfo((rows, columns, self.codebooks), "int8" if self.bits <= 8 else "int16"),
            "codebooks": TensorInfo((self.codebooks, 1 << self.bits, self.outputs_per_group, self.group), self.scale_dtype),
            "scales": TensorInfo((rows, 1, 1, 1), self.scale_dtype),
        }
        return held | ({"bias": TensorInfo((outputs,))} if bias else {})

    def build(self, inputs: int, outputs: int, bias: bool) -> AdditiveLinear:
        return AdditiveLinear(self, inputs, outputs, bias)

    def stored(self, codes: Tensor) -> Tensor:
        """Codes from 0 as they are stored, in two's complement of ``bits`` bits."""
        wrapped = torch.where(codes >= 1 << (self.bits - 1), codes - (1 << self.bits), codes)
        return wrapped.to(torch.int8 if self.bits <= 8 else torch.int16)


class AdditiveLinear(HeldLinear):
    """[..., inputs] -> [..., outputs].

    Single rows are multiplied with every vector of small codebooks first, [inputs / group, codebooks, 2^bits], and an output is a sum
    over that table: as many additions as there are codes, in float32.
    """

    spec: Additive
    codes: Tensor
    codebooks: Tensor
    scales: Tensor

    def indices(self) -> Tensor:
        """Codes from 0, [outputs / outputs_per_group, inputs / group, codebooks] int32."""
        return self.codes.int() & (1 << self.spec.bits) - 1

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32; rounded once."""
        wide = torch.promote_types(dtype or torch.float32, torch.float32)
        return weight_of(blocks_of(self.indices(), self.codebooks.to(wide)) * self.scales).to(dtype or torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        if few(x) and self.codebooks.shape[1] <= TABLE and self.spec.outputs_per_group == 1:
            return self.biased(self._by_table(x.reshape(-1, self.inputs).float()).to(x.dtype).view(*x.shape[:-1], self.outputs))
        return super().forward(x)

    def _by_table(self, x: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        books, size, _, group = self.codebooks.shape
        vectors = self.codebooks.float().view(books * size, group)
        places = torch.arange(self.inputs // group * books, dtype=torch.int32, device=x.device) * size
        entries = (self.indices().flatten(1) + places).flatten()
        tables = (x.view(-1, group) @ vectors.t()).view(len(x), -1)  # of each row, [inputs / group * codebooks * 2^bits]
        return tables.index_select(1, entries).view(len(x), self.outputs, -1).sum(-1) * self.scales.view(-1).float()


def blocks_of(indices: Tensor, codebooks: Tensor) -> Tensor:
    """Sums of code vectors: [N, J, K] and [K, V, outputs, inputs of a block] -> [N, J, outputs, inputs of a block]. Differentiable."""
    size, vectors = codebooks.shape[1], codebooks.flatten(0, 1).flatten(1)
    places = torch.arange(len(codebooks), device=indices.device) * size
    summed = F.embedding_bag((indices + places).flatten(0, 1), vectors, mode="sum")
    return summed.view(*indices.shape[:2], *codebooks.shape[2:])


def weight_of(blocks: Tensor) -> Tensor:
    """[N, J, outputs, inputs of a block] -> [N * outputs, J * inputs]."""
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)
