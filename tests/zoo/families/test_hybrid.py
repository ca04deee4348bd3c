"""Families in which layers without a growing cache stand between those of attention, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.zoo.families.harness import CHECKS, Case, ids, slow
from tests.zoo.families.test_moe import CASES as MIXTURES

# A small eps would let the norm of outputs near 0 magnify what fp32 rounds: transformers' own cached run then differs from its whole
# run by 1.2e-5.
NEXT = {"rms_norm_eps": 1e-2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4}  # fmt: skip
TABLES = r"slope_rate|_decay$"
MINIMAX = {"num_local_experts": 4, "block_size": 8}
FACTORS = {f"{kind}_{factor}_factor": 0.5 + 0.3 * i for i, (kind, factor) in enumerate(
    (k, f) for k in ("full_attn", "linear_attn", "mlp") for f in ("alpha", "beta"))}  # fmt: skip

CASES = [
    Case("qwen3_next", "Qwen3NextForCausalLM", NEXT),
    slow(Case("qwen3_next, options", "Qwen3NextForCausalLM", NEXT | {"num_hidden_layers": 3, "attention_bias": True, "mlp_only_layers": [1],
         "layer_types": ["full_attention", "linear_attention", "full_attention"], "norm_topk_prob": False, "head_dim": 24,
         "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3})),
    Case("minimax", "MiniMaxForCausalLM", MINIMAX | FACTORS, tables=TABLES),
    slow(Case("minimax, options", "MiniMaxForCausalLM", MINIMAX | {"num_hidden_layers": 3, "sliding_window": 8, "head_dim": 24,
         "layer_types": ["linear_attention", "linear_attention", "full_attention"]}, tables=TABLES)),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, check: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    CHECKS[check](case, *written(case))


FAMILIES = [c for c in (*MIXTURES, *CASES) if isinstance(c, Case)]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
@torch.no_grad()
def test_another_mixer_and_mlp_in_one_layer_are_saved(case: Case, written: Callable[[Case], tuple[Path, Any]], tmp_path: Path) -> None:
    """What the family has no names for keeps ours, and the result says that transformers cannot run it."""
    edits = ("layers.1.mixer={projection: {name: gqa, heads: 2, kv_heads: 1, head_dim: 6}}", "layers.1.mlp={name: plain, hidden: 7}")
    model = zoo.build(zoo.spec(written(case)[0]), *edits)
    result = zoo.save(model, tmp_path / "saved")
    assert result.transformers
    assert torch.equal(zoo.load(tmp_path / "saved")(ids(2)), model(ids(2)))
