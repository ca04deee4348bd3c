"""The families of the feed-forward part: MLPs, and the routers and experts of a mixture."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from zoo.components.contracts._declare import declare
from zoo.components.cost import Call
from zoo.components.spec import Spec


@dataclass(frozen=True, kw_only=True)
class MLP(Spec):
    """The feed-forward part. Built with (model width); the module maps [..., M] to [..., M].

    sees_padding: the module is called with (x [B, T, M], valid [B, T] bool, or None where nothing is padding), because its tokens
    share something, as the capacity of experts.
    """

    family: ClassVar[str] = declare("mlp", "the feed-forward part of a layer")
    sees_padding: ClassVar[bool] = False

    @property
    def causal(self) -> bool:
        """No token's output depends on a later token of its row."""
        return True

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...


class Chained(nn.Module):
    """A feed-forward part that is told, once the model is built, of the next such part."""

    def chain(self, following: Chained) -> None:
        raise NotImplementedError


class Routing(NamedTuple):
    """Which experts each token goes to. N tokens, K choices a token, E experts.

    weights: [N, K] float32, 0 where there is no choice. experts: [N, K] int64, -1 where there is no choice. logits: [N, E] float32.
    valid: [N] bool, None where no token is padding. whole: there is a choice everywhere.
    on_input: a weight multiplies its expert's input instead of its output.
    """

    weights: Tensor
    experts: Tensor
    logits: Tensor
    valid: Tensor | None = None
    whole: bool = True
    on_input: bool = False

    @property
    def count(self) -> int:
        """E."""
        return self.logits.shape[-1]


@dataclass(frozen=True, kw_only=True)
class Router(Spec):
    """How tokens choose experts. Built with (model width, experts); see RouterModule.

    causal: a token's choice does not depend on later tokens.
    """

    family: ClassVar[str] = declare("router", "how tokens and experts choose each other")
    causal: ClassVar[bool] = True

    def choices(self, experts: int) -> float:
        """Experts that a token runs through, on average; all of them unless the kind says fewer."""
        return experts

    def flops(self, call: Call, width: int, experts: int) -> float:
        return 2 * width * experts * call.new

    @abstractmethod
    def build(self, width: int, experts: int) -> RouterModule: ...


class Precise(nn.Module):
    """A module whose own tensors stay float32 or more, whatever the model is cast to. Its spec says so of each (``TensorInfo.dtype``)."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Precise:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype in (torch.float32, torch.float64) else tensor.to(moved.device, torch.float32)

        super()._apply(move, recurse)
        return self


class RouterModule(Precise):
    """x [B, T, M] or [T, M], valid [B, T] or [T] bool (None: nothing is padding) -> Routing of the N = B T tokens.

    Logits are computed in float32: rounded ones choose other experts.
    """

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Experts(Spec):
    """How the chosen experts are run. Built with (experts, model width); see ExpertsModule.

    exact: every choice is run and counts with its weight, so any other such kind may stand in for it.
    """

    family: ClassVar[str] = declare("experts", "how the chosen experts are run")
    exact: ClassVar[bool] = False

    def rows(self, tokens: float, choices: float, experts: int) -> float:
        """Vectors that all experts together are run on; those that were chosen unless the kind pads or drops."""
        return tokens * choices

    @abstractmethod
    def build(self, experts: tuple[MLP, ...], width: int) -> ExpertsModule: ...


class ExpertsModule(nn.Module):
    """(x [N, M], routing, the E expert modules) -> [N, M], the weighted sum of what each token's experts say."""

    def prepare(self, experts: nn.ModuleList) -> None:
        """Arrange the experts' weights as suits the device; called once they are in place."""

    def precede(self, router: RouterModule, dispatch: ExpertsModule, experts: nn.ModuleList) -> None:
        """Told, once the model is built, of the next layer's mixture, to get ready what that will need."""

    def forward(self, x: Tensor, routing: Routing, experts: nn.ModuleList) -> Tensor:
        raise NotImplementedError
