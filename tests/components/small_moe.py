"""Mixtures to test: small ones, every way to dispatch, and what the tests put in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.components.moe_blocks import M
from zoo.components import registry
from zoo.components.mlp.moe import MoE
from zoo.components.spec import dump, load

every_router = pytest.mark.parametrize("router", registry.names("router"))
DROPLESS = {
    "loop": "loop",
    "grouped": "grouped",
    "capacity": {"name": "capacity", "factor": None},
    "offload": "offload",
    "offload, all resident": {"name": "offload", "resident": 4, "prefetch": 0},
    "by weight": {"name": "capacity", "factor": None, "priority": "weight"},
}


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (3, 7)), M, generator=torch.Generator().manual_seed(seed))


def small(**fields: Any) -> MoE:
    part = registry.get("mlp", "moe")
    return load(MoE, {**part.example, **fields})


def build(spec: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        block = spec.build(M)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.5)
    return block.eval()


def close(got: Tensor, want: Tensor, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * float(want.abs().max()))


SOFT = {"name": "soft_moe", **registry.get("mlp", "soft_moe").example}
MIXTURES = [dump(small(router=router, dispatch=way)) for router in registry.names("router") for way in DROPLESS.values()] + [SOFT]
