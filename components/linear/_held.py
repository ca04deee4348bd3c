"""What linear modules share that hold their tensors as they are saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.components.contracts import Linear, StoredLinear

NOT_POSITIVE = "must hold positive, finite numbers"
NEGATIVE = "holds negative numbers, which no largest magnitude is"


def positive(tensor: Tensor) -> bool:
    """Whether all numbers are above 0 and finite, as those must be that divide or that inputs are divided by."""
    return bool((tensor.isfinite() & (tensor > 0)).all())


class HeldLinear(StoredLinear):
    """[..., inputs] -> [..., outputs] by the dense weight, in the dtype of the input.

    Its buffers are the spec's own tensors, in dtypes that a cast of the module leaves as they are; only the bias is cast. ``forward``
    is the plain reference.
    """

    bias: nn.Parameter | None

    def __init__(self, spec: Linear, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.spec, self.inputs, self.outputs = spec, inputs, outputs
        for name, info in spec.own_tensors(inputs, outputs, False).items():
            assert info.dtype
            self.register_buffer(name, torch.zeros(info.shape, dtype=getattr(torch, info.dtype)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs), requires_grad=False) if bias else None)

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[outputs, inputs], by default in float32."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.biased(F.linear(x, self.dense_weight(x.dtype)))

    def biased(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias

    def canonical(self) -> dict[str, Tensor]:
        return dict(self.named_buffers(recurse=False)) | dict(self.named_parameters(recurse=False))

    def hold(self, canonical: dict[str, Tensor]) -> None:
        for name, tensor in canonical.items():
            self._buffers[name] = tensor
        self.prepare()

    def prepare(self) -> None:
        """Nothing: the tensors are multiplied as they lie."""

    def rearranges(self, tensor: Tensor) -> bool:
        return False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeldLinear:
        held = {id(t) for t in self._buffers.values()}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in held and moved.dtype != tensor.dtype else moved

        super()._apply(move, recurse)
        return self

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}"
