"""The parts of a model that are quantized in one go: its layers, and the head with the final norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from zoo.components.contracts import NoCache, Prepared, Step
from zoo.model import Model
from zoo.quantize.contracts import Quantizer
from zoo.weights import materialize


@dataclass(frozen=True)
class Stage:
    """A part of the model that is quantized in one go.

    parts: of the model, loaded together; the first gives the stage its name. module: what runs, called with (activations, step,
    *rest). prefix: what stands before its modules' paths in the model. modules: the linear modules to quantize, by path.
    """

    parts: tuple[str, ...]
    module: nn.Module
    prefix: str
    rest: tuple[Any, ...]
    modules: dict[str, Quantizer]

    @property
    def name(self) -> str:
        return self.parts[0]

    def run(self, x: Tensor, step: Step) -> Tensor:
        return self.module(x, step, *self.rest)

    def run_with(self, x: Tensor, step: Step, weights: Mapping[str, Tensor]) -> Tensor:
        """Run it with other weights in dense linear modules, by path; gradients reach them."""
        named = {f"{path.removeprefix(self.prefix)}.weight": weight.to(x.dtype) for path, weight in weights.items()}
        return functional_call(self.module, named, (x, step, *self.rest))


class Tail(nn.Module):
    """What follows the layers: the final norm and the head."""

    def __init__(self, model: Model):
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.head(self.norm(x))


def stages(model: Model, chosen: Mapping[str, Quantizer]) -> list[Stage]:
    """The layers and the head, up to the last with a module to quantize."""
    names = [f"layers.{i}" for i in range(len(model.layers))]
    found = [Stage((n,), model.get_submodule(n), f"{n}.", (NoCache(),), _below(n, chosen)) for n in names]
    found.append(Stage(("head", "norm"), Tail(model), "", (), _below("head", chosen)))
    last = max(i for i, stage in enumerate(found) if stage.modules)
    return found[: last + 1]


def _below(prefix: str, chosen: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    return {path: method for path, method in chosen.items() if path.startswith(f"{prefix}.")}


def load(model: Model, *parts: str) -> None:
    """Load those parts of the model that are still on the meta device."""
    for part in parts:
        module = model.get_submodule(part)
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            materialize(model, part)


def arrange(model: Model, stage: Stage) -> None:
    """Let the stage's modules arrange themselves anew: experts' weights that lay together may have been replaced."""
    for part in stage.parts:
        for module in model.get_submodule(part).modules():
            if isinstance(module, Prepared):
                module.prepare()
