"""What quantizers and transforms say to the runner. A method is pure mathematics: a weight and what is known of its inputs go in,
the tensors of a storage part come out. It knows nothing of models, files or devices' memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from zoo.components.contracts import Linear, unfilled
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

    calibrated: it needs the inputs' second moments, and says in ``facts["fallback"]`` what it did for a module without. transforms:
    those that belong to the method, by name, made before it. rules: those that it comes with, as ``zoo.quantize.rules`` reads them;
    a user's own come after.
    """

    family: ClassVar[str] = "quantizer"
    calibrated: ClassVar[bool] = False
    transforms: ClassVar[tuple[str, ...]] = ()
    rules: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def storage(self) -> Linear:
        """The linear part that holds the result."""

    def for_siblings(self, weights: Sequence[Tensor]) -> Quantizer:
        """The quantizer for modules that engines fuse into one (q, k, v; gate, up), given their weights [outputs, inputs], in order.

        Formats with a scale per tensor need the same scale in all of them: such a method returns itself with that scale fixed.
        """
        del weights
        return self

    @abstractmethod
    def quantize(self, weight: Tensor, hessian: Hessian | None) -> Quantized:
        """weight [outputs, inputs] float. hessian: of the calibration inputs, None where there are none."""

    def rounded(self, weight: Tensor) -> Tensor:
        """The weight [outputs, inputs], in its own dtype, as plain rounding without data would leave it: what searches look at."""
        outputs, inputs = weight.shape
        with unfilled():
            module: Any = self.storage.build(inputs, outputs, False)
        module.hold(self.quantize(weight, None).tensors)
        return module.dense_weight(weight.dtype)


@dataclass(frozen=True)
class Block:
    """What a blockwise quantizer sees: a stage of the model (a layer) and its calibration data.

    weights: of the modules to quantize, by path, [outputs, inputs]. methods: the quantizer of each. inputs: [samples, length, width]
    as the quantized stages before leave them, targets: what the stage puts out, as it was, for the inputs as they were; both may lie
    on another device than the weights. run: (inputs [rows, length, width], weights by path) -> outputs; gradients reach the weights.
    hessians: of the modules that saw tokens.
    """

    weights: Mapping[str, Tensor]
    methods: Mapping[str, Quantizer]
    inputs: Tensor
    targets: Tensor
    run: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    hessians: Mapping[str, Hessian] = field(default_factory=dict)


class BlockwiseQuantizer(Quantizer):
    """A quantizer that rounds the modules of a stage together."""

    calibrated = True

    @abstractmethod
    def quantize_block(self, block: Block) -> dict[str, Quantized]:
        """The result for every module of the block; it draws nothing from torch's global generator.

        ``self`` is the quantizer of the first module; what concerns one module is taken from ``block.methods``.
        """

    @abstractmethod
    def passes(self, samples: int) -> float:
        """Forward passes of all samples through a stage that its work amounts to, for estimates."""


@dataclass(frozen=True, kw_only=True)
class Transform(Spec):
    """A change of weights after which the model computes the same function, but rounds better.

    Folded into the weights that are there, so the architecture and the checkpoint's format stay. calibrated: it needs data.
    """

    family: ClassVar[str] = "transform"
    calibrated: ClassVar[bool] = False


@dataclass(frozen=True)
class Channels:
    """Activations between two parts of a layer, whose channels a scale may be moved across: the source is divided, readers multiplied.

    weights: of the linear modules that are quantized and read them, [outputs, channels], float32. group_size: inputs that share a
    scale, None: all. largest, mean: of the absolute activations, [channels] float32. error: mean squared error of what the readers
    lead to, if they were multiplied by a scale [channels], rounded, and divided by it.
    """

    weights: Sequence[Tensor]
    group_size: int | None
    largest: Tensor
    mean: Tensor
    error: Callable[[Tensor], float]


@dataclass(frozen=True, kw_only=True)
class ChannelScaling(Transform):
    """A transform that scales channels. sources: the kinds of folds that it makes. measured: it asks for errors."""

    calibrated = True
    sources: ClassVar[tuple[str, ...]] = ("norm", "value", "up")
    measured: ClassVar[bool] = False

    @abstractmethod
    def scale(self, channels: Channels) -> tuple[Tensor, dict[str, Any]] | None:
        """The scale [channels], positive and finite, and what the report says of it; None to leave the channels as they are."""


@dataclass(frozen=True, kw_only=True)
class Turning(Transform):
    """A transform that rotates the residual stream, the channels of each value head, or both."""

    @abstractmethod
    def stream(self, width: int) -> Tensor | None:
        """An orthonormal [width, width] float64 that the residual stream, as rows, is multiplied by; None: it stays as it is."""

    @abstractmethod
    def head(self, width: int) -> Tensor | None:
        """An orthonormal [width, width] float64 that each head's value is multiplied by; None: it stays as it is."""


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

    def rounded(self, weight: Tensor) -> Tensor:
        scale, zero = self.fit(weight, self.storage.grid)
        return integer.dequantize(integer.quantize(weight, scale, zero, self.bits), scale, zero, weight.dtype)
