"""What quantizers say to the runner. A method is pure mathematics: a weight and what is known of its inputs go in, the tensors of a
storage part come out. It knows nothing of models, files or devices' memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from zoo.components.contracts import Linear
from zoo.components.linear.packed_int import PackedInt
from zoo.components.numerics import integer
from zoo.components.spec import Spec
from zoo.quantize.stats.hessian import Hessian


@dataclass(frozen=True)
class Quantized:
    """tensors: those of the storage part, by their saved names, without the bias. facts: what the report's row says of the run."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Quantizer(Spec):
    """How one weight matrix is rounded.

    calibrated: it needs the inputs' second moments.
    """

    family: ClassVar[str] = "quantizer"
    calibrated: ClassVar[bool] = False

    @property
    @abstractmethod
    def storage(self) -> Linear:
        """The linear part that holds the result."""

    @abstractmethod
    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        """weight [outputs, inputs] float. hessian: of the calibration inputs, None where there are none."""


@dataclass(frozen=True, kw_only=True)
class IntegerQuantizer(Quantizer):
    """What all methods on integer grids share.

    group_size: inputs that share a scale, None: one scale per output. symmetric: no zero points. scale_search: a group's scale spans
    its range (minmax) or makes its rounding error least (mse).
    """

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | None = 64
    symmetric: bool = True
    scale_search: Literal["minmax", "mse"] = "minmax"

    @property
    def storage(self) -> PackedInt:
        return PackedInt(bits=self.bits, group_size=self.group_size, symmetric=self.symmetric)

    @property
    def fit(self) -> Callable[[Tensor, integer.Grid], tuple[Tensor, Tensor]]:
        return {"minmax": integer.fit, "mse": integer.fit_error}[self.scale_search]
