"""Where two implementations of a model part: their activations, module by module, on the same ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.model import Model


@dataclass(frozen=True)
class Difference:
    """Output of one module here and there. largest: absolute difference over the largest absolute value there (0 is equal)."""

    module: str
    theirs: str
    largest: float


def activation_differences(model: Model, other: nn.Module, ids: Tensor, names: Mapping[str, str]) -> list[Difference]:
    """Run both models on ids [B, T] and compare the modules that ``names`` maps (ours to theirs), in the order they finish here.

    Raises AttributeError for a name that is no module and ValueError for outputs of different shapes.
    """
    with torch.inference_mode():
        with outputs(model, names) as ours:
            model(ids)
        with outputs(other, names.values()) as theirs:
            other(ids)
    return [_difference(name, names[name], value, theirs[names[name]]) for name, value in ours.items()]


def first_difference(model: Model, other: nn.Module, ids: Tensor, names: Mapping[str, str], tolerance: float = 1e-4) -> Difference | None:
    """The first module whose outputs differ by more than ``tolerance``; None if there is none."""
    return next((d for d in activation_differences(model, other, ids, names) if not d.largest <= tolerance), None)


def llama_names(layers: int) -> dict[str, str]:
    """The modules of our models and of transformers' LlamaForCausalLM (Mistral's and Qwen's too) that have the same outputs."""
    inner = {"mixer": "self_attn", "mlp": "mlp", "": ""}
    found = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for i in range(layers):
        found |= {f"layers.{i}.{here}".rstrip("."): f"model.layers.{i}.{there}".rstrip(".") for here, there in inner.items()}
    return found


@contextmanager
def outputs(model: nn.Module, names: Any) -> Iterator[dict[str, Tensor]]:
    """Within the block, what the named modules return is kept, in the order they finish."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, result: Any) -> None:
            found[name] = (result[0] if isinstance(result, tuple) else result).detach()

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(model.get_submodule(name).register_forward_hook(keep(name)))
        yield found


def _difference(ours: str, theirs: str, a: Tensor, b: Tensor) -> Difference:
    if a.shape != b.shape:
        raise ValueError(f"{ours} returns {list(a.shape)}, {theirs} {list(b.shape)}")
    a, b = a.double(), b.to(a.device).double()
    return Difference(ours, theirs, float((a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(torch.float64).tiny)))
