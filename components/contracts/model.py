"""The families of a whole model: how layers are wired, what goes in and what comes out."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.components.contracts._declare import declare
from zoo.components.contracts.cache import Cache
from zoo.components.contracts.position import bytes_of_rows
from zoo.components.contracts.step import Step
from zoo.components.cost import Call
from zoo.components.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Wiring(Spec):
    """How mixer, MLP and norms are joined by residuals. The Layer owns the parts; a wiring says which norms it wants and
    how to run them.

    norms: names of the norms that the layer builds. children(model width): other modules that the layer is to hold for the
    wiring, by name. run(layer, x, step, cache) -> x.
    """

    family: ClassVar[str] = declare("wiring", "how mixer, MLP and norms are joined by residuals")
    norms: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def run(self, layer: Any, x: Tensor, step: Step, cache: Cache) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Embed(Spec):
    """Inputs to [B, T, M]. Built with (model width); the module maps (inputs, step) to [B, T, M].

    ``vocab`` is the number of token ids, absent where inputs are not tokens.
    """

    family: ClassVar[str] = declare("embed", "how inputs become vectors")

    def size(self, inputs: Tensor) -> tuple[int, int]:
        """(rows, tokens a row) that inputs become; ids [B, T] unless the kind says otherwise. Raises ValueError for other inputs."""
        if inputs.dim() != 2 or inputs.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"input ids must be [batch, tokens] int64, got {list(inputs.shape)} {inputs.dtype}")
        self.check_ids(inputs)
        return inputs.shape[0], inputs.shape[1]

    def check_ids(self, ids: Tensor) -> None:
        """Raises ValueError for ids outside the vocabulary, where reading them costs no wait for a device."""
        vocab = getattr(self, "vocab", None)
        if torch.compiler.is_compiling():
            return  # reading values would end the graph
        if vocab and ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(f"input ids must lie in 0..{vocab - 1}, got {int(ids.min())}..{int(ids.max())}")

    def bytes_read(self, call: Call, element_bytes: int, width: int) -> float:
        return bytes_of_rows(self.own_tensors(width), call, element_bytes) + sum(
            c.spec.bytes_read(call, element_bytes, *c.at) for c in self.children(width).values()
        )

    def draw(self, tokens: int, generator: torch.Generator) -> Tensor:
        """Random inputs of one row that become so many tokens (and those that the kind puts before them): for checks and timing."""
        return torch.randint(getattr(self, "vocab"), (1, tokens), generator=generator)  # noqa: B009 (kinds without one override this)

    def axes(self, inputs: Tensor) -> Tensor | None:
        """``Step.axes`` of the tokens that inputs become, [B, T, A]; None where they have no coordinates but their position."""
        return None

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class Head(Spec):
    """[B, T, M] to outputs. Built with (model width, embed spec); see HeadModule.

    tie() names the parameter that is an alias of another one, as (own name, name in the embedding), or None. says_next: the outputs
    are logits of the token that comes next.
    """

    family: ClassVar[str] = declare("head", "how vectors become outputs")
    says_next: ClassVar[bool] = False

    def tie(self) -> tuple[str, str] | None:
        return None

    @abstractmethod
    def build(self, width: int, embed: Embed) -> HeadModule: ...


class HeadModule(nn.Module):
    """forward maps [..., M] to outputs, token by token or row by row; ``pool`` comes first."""

    def pool(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, M] -> the same for heads that look at single tokens, [B, M] for those that look at whole rows."""
        return x
