"""The experts' weights as one block a projection, and one expert's formula run over all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zoo.components.contracts import MLP, Linear
from zoo.components.ops.moe.grouped_matmul import accepts, grouped_matmul
from zoo.components.ops.moe.sorting import Sorted
from zoo.components.spec import transform


@dataclass(frozen=True, kw_only=True)
class GroupedLinear(Linear):
    """Stands in an expert's place for the linear parts of all experts."""

    def build(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        return GroupedProduct()


class GroupedProduct(nn.Module):
    """[R, inputs] sorted by expert -> [R, outputs]. The tensors are put in for each call.

    weight: [E, outputs, inputs]. bias: [E + 1, outputs], the last for rows of no expert, or empty. ends: [E] int32. expert: [R].
    """

    weight: Tensor
    bias: Tensor
    ends: Tensor
    expert: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "ends", "expert"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = grouped_matmul(x, self.weight, self.ends)
        return y + self.bias[self.expert] if self.bias.numel() else y


class Block(NamedTuple):
    """Weights of all experts as views of ``data`` [E, outputs, inputs]."""

    weights: list[Tensor]
    data: Tensor

    @classmethod
    def of(cls, weights: list[Tensor]) -> Block:
        """Move the weights into one block; afterwards they are views of it."""
        data = torch.stack([w.data for w in weights])
        for weight, view in zip(weights, data, strict=True):
            weight.data = view
        return cls(weights, data)

    def holds(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are still its weights: a loader may have replaced them, a cast or a copy may have moved them."""
        same = all(a is b for a, b in zip(self.weights, weights, strict=True))
        return same and (torch.compiler.is_compiling() or weights[0].data_ptr() == self.data.data_ptr())


class Stack:
    """What runs experts of one formula at once. Not a module: the weights belong to the experts."""

    def __init__(self, expert: MLP, width: int):
        plain = neutral(expert)
        self.formula = plain.build(width)
        self.names = [n for n, c in plain.children(width).items() if isinstance(c.spec, Linear)]
        self.blocks: dict[str, Block] = {}

    @classmethod
    def fitting(cls, experts: Sequence[MLP], width: int) -> Stack | None:
        """None for experts that differ, or that hold tensors outside their linear parts."""
        first = neutral(experts[0])
        alike = all(e is experts[0] or neutral(e) == first for e in experts)
        return cls(experts[0], width) if alike and not first.tensors(width) else None

    def arrange(self, experts: nn.ModuleList) -> None:
        """Lay the weights into blocks where the grouped product would use them."""
        self.blocks = {}
        linears = self.linears(experts)
        if linears and pays(linears[0][0].weight):
            self.blocks = {n: Block.of([linear.weight for linear in row]) for n, row in zip(self.names, linears, strict=True)}

    def linears(self, experts: nn.ModuleList) -> list[list[nn.Linear]]:
        """The linear modules of each name; empty where one is stored otherwise, or watched by a hook, which must see its input."""
        found: list[list[nn.Linear]] = []
        for name in self.names:
            row = [expert._modules[name] for expert in experts]
            plain = [m for m in row if isinstance(m, nn.Linear) and not (m._forward_pre_hooks or m._forward_hooks)]
            if len(plain) < len(row):
                return []
            found.append(plain)
        return found

    def tensors(self, x: Tensor, experts: nn.ModuleList) -> dict[str, Tensor]:
        """Stacked weights and biases by name; empty where the experts must be called one by one."""
        found: dict[str, Tensor] = {}
        for name, row in zip(self.names, self.linears(experts), strict=False):
            weights = [linear.weight for linear in row]
            stacked = self.weight(name, weights) if weights[0].dtype == x.dtype and pays(weights[0]) else None
            if stacked is None:
                return {}
            found[f"{name}.weight"] = stacked
            biases = [linear.bias for linear in row if linear.bias is not None]
            if biases:
                found[f"{name}.bias"] = torch.stack([*biases, torch.zeros_like(biases[0])])
        return found

    def weight(self, name: str, weights: list[Tensor]) -> Tensor | None:
        if torch.is_grad_enabled() and any(w.requires_grad for w in weights):
            return torch.stack(weights)  # gradients reach a weight through its own tensor, not through the block
        block = self.blocks.get(name)
        return block.data if block and block.holds(weights) else None

    def run(self, rows: Tensor, tensors: dict[str, Tensor], s: Sorted) -> Tensor:
        """rows [R, M], sorted -> [R, M]; 0 for rows of no expert."""
        some = (s.expert < len(s.counts))[:, None]
        ends = s.counts.cumsum(0).int()
        held = tensors | {f"{n}.ends": ends for n in self.names} | {f"{n}.expert": s.expert for n in self.names}
        # The product leaves rows of no expert undefined, going forward and back.
        return torch.where(some, functional_call(self.formula, held, (torch.where(some, rows, 0),)), 0)


def neutral(expert: MLP) -> MLP:
    """The expert's formula without its storages."""
    return transform(expert, lambda spec: GroupedLinear() if isinstance(spec, Linear) else spec)


def pays(weight: Tensor) -> bool:
    """Whether the grouped product can run and is not slower than runs of tokens (a CPU's is, in float32)."""
    fast = weight.is_cuda or (weight.device.type == "cpu" and weight.dtype == torch.bfloat16)
    return fast and accepts(weight.dtype, weight.shape[1], weight.shape[0])
