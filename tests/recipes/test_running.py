"""How a model is run is not in its checkpoint, so what measures a saved variant says it again."""

from __future__ import annotations

import pytest

from zoo.components.spec import load, override
from zoo.family import architecture
from zoo.model import ModelSpec
from zoo.recipes.worker import running

PROJECTION = {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}
MOE = {"name": "moe", "router": "top_k", "experts": [{"repeat": 4, "name": "gated", "hidden": 8}]}
LAYERS = [{"mixer": {"projection": PROJECTION}, "mlp": mlp} for mlp in (MOE, {"name": "gated", "hidden": 8}, MOE)]


@pytest.mark.parametrize("edit", [
    "layers.*.mixer.kernel=eager",
    "layers.0.mlp.dispatch=loop",
    "layers.2.mlp.dispatch={name: offload, resident: 3, prefetch: 0}",
    "cache={name: paged, size: 4}",
])  # fmt: skip
def test_what_a_checkpoint_leaves_out_comes_back(edit: str) -> None:
    plain = load(ModelSpec, {"width": 16, "context": 64, "embed": {"name": "tokens", "vocab": 50}, "layers": LAYERS, "head": "lm"})
    spec = override(plain, edit)
    assert architecture(spec) == plain != spec
    assert override(architecture(spec), *running(spec)) == spec
