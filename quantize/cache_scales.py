"""Scales of an 8-bit cache, found once from calibration data, as serving engines want them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from zoo.components import registry
from zoo.components.cache._coded import Eight, coded
from zoo.components.cache.shared import Shared
from zoo.components.contracts import Cache, Slot, Step, View
from zoo.model import Model, ModelSpec
from zoo.quantize.calibration import Calibration, windows
from zoo.saving import check_loaded

LEAST = 1e-30  # a slot that was 0 throughout


def calibratable() -> list[str]:
    """Names of the caches whose scales can be calibrated."""
    return [name for name in registry.names("cache") if issubclass(registry.get("cache", name).spec, Eight)]


def check_calibratable(spec: ModelSpec, cache: str) -> Eight:
    """The cache's policy, without scales yet. Raises ValueError for caches that have none, and where the model's parts refuse it."""
    if cache not in calibratable():
        raise ValueError(f"cache {cache!r} has no scales to calibrate; those that have: {', '.join(calibratable())}")
    policy = registry.get("cache", cache).spec()
    assert isinstance(policy, Eight)
    refused = [f"layer {i}: {reason}" for i, layer in enumerate(spec.layers) for reason in policy.refuses(layer.mixer.ask)]
    if refused:
        raise ValueError(f"cache {cache} cannot serve {refused[0]}")
    return policy


@torch.no_grad()
def calibrate_cache(model: Model, cache: str = "fp8", *, calibration: Calibration | None = None, samples: int | None = None,
                    length: int | None = None, seed: int = 0, progress: bool = True) -> None:  # fmt: skip
    """Give the model an 8-bit cache with one scale for each layer's keys and one for its values (for a latent, one).

    cache: fp8 or int8. The scales span what the calibration data writes, one window after the other; see ``quantize`` for the data.
    They are part of ``model.spec`` and are saved with it. Raises ValueError for other caches, where the model's parts refuse it, for a
    model whose weights are not loaded, and where NaN or infinite values are written.
    """
    policy = check_calibratable(model.spec, cache)
    check_loaded(model)
    spec = model.spec
    ids, largest = windows(model, calibration, samples, length, seed), Largest(spec.cache.without())
    for row in track(ids.to(model.device).split(1), "cache scales", console=Console(stderr=True), disable=not progress):
        model.hidden(row, model.step(row), largest)
    shared = spec.cache if isinstance(spec.cache, Shared) else None
    kept = shared.written(spec.slots()) if shared else spec.slots()
    top = policy.codes.top
    found = replace(policy, scales=tuple(tuple(largest.scale(i, n, top) for n in coded(slots)) for i, slots in enumerate(kept)))
    model.spec = replace(spec, cache=replace(shared, inner=found) if shared else found)


class Largest:
    """Passes everything on and remembers the largest size of what each layer wrote into each slot."""

    def __init__(self, inner: Cache):
        self.inner = inner
        self.seen: dict[tuple[int, str], Tensor] = {}

    def extend(self, layer: int, new: Mapping[str, Tensor], step: Step, slots: Mapping[str, Slot]) -> View:
        for name in coded(slots):
            size = new[name].abs().amax().float()
            at = layer, name
            self.seen[at] = torch.maximum(self.seen[at], size) if at in self.seen else size
        return self.inner.extend(layer, new, step, slots)

    def scale(self, layer: int, name: str, top: float) -> float:
        """That whose ``top``-fold is the largest size, a float32 number. Raises ValueError where that is not finite."""
        size = self.seen[layer, name]
        if not bool(size.isfinite()):
            raise ValueError(f"layer {layer} writes NaN or infinite values into its slot {name}, which no scale spans; look at its weights")
        return float((size / top).clamp(min=LEAST))
