"""transformers' mixture blocks with random parameters, and ours with the same ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.components.contracts import MLP, Router
from zoo.components.mlp.clamped import Clamped
from zoo.components.mlp.gated import Gated
from zoo.components.mlp.moe import MoE
from zoo.components.router._presets import PRESETS

M, HIDDEN, E = 16, 12, 8
COMMON: dict[str, Any] = {
    "hidden_size": M, "moe_intermediate_size": HIDDEN, "intermediate_size": HIDDEN, "num_local_experts": E, "num_experts": E,
    "n_routed_experts": E, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """folder, kind: where transformers has the class. options: its config. router: ours. shared: (their name, hidden)."""

    folder: str
    kind: str
    options: dict[str, Any]
    router: Router
    shared: tuple[str, int] | None = None
    shared_gate: bool = False
    expert: MLP = Gated(hidden=HIDDEN)
    gate: str = "gate"

    @property
    def spec(self) -> MoE:
        shared = Gated(hidden=self.shared[1]) if self.shared else None
        return MoE(router=self.router, experts=(self.expert,) * E, shared=shared, shared_gate=self.shared_gate)

    def theirs(self, seed: int = 0) -> nn.Module:
        """Their block, every parameter and buffer random."""
        modeling = importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")
        config = getattr(modeling, CONFIG[self.folder])(**COMMON | self.options)
        config._experts_implementation = "eager"
        block = getattr(modeling, self.kind)(config).eval()
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.data = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.5
        return block

    def ours(self, theirs: nn.Module) -> Any:
        block = self.spec.build(M).eval()
        block.load_state_dict(dict(self.tensors(theirs.state_dict())))
        return block

    def tensors(self, state: dict[str, Tensor]) -> Any:
        for leaf in ("weight", "bias"):
            if f"{self.gate}.{leaf}" in state:
                yield f"router.{leaf}", state[f"{self.gate}.{leaf}"]
        if f"{self.gate}.e_score_correction_bias" in state:
            yield "router.correction", state[f"{self.gate}.e_score_correction_bias"]
        if self.shared_gate:
            yield "shared_gate", state["shared_expert_gate.weight"]
        if self.shared:
            for name in ("gate", "up", "down"):
                yield f"shared.{name}.weight", state[f"{self.shared[0]}.{name}_proj.weight"]
        for number in range(E):
            for name, tensor in SPLIT.get(self.folder, halves)(state, number).items():
                yield f"experts.{number}.{name}", tensor


CONFIG = {
    "mixtral": "MixtralConfig", "qwen2_moe": "Qwen2MoeConfig", "qwen3_moe": "Qwen3MoeConfig", "olmoe": "OlmoeConfig",
    "deepseek_v2": "DeepseekV2Config", "deepseek_v3": "DeepseekV3Config", "gpt_oss": "GptOssConfig", "llama4": "Llama4TextConfig",
}  # fmt: skip


def halves(state: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """[E, 2 hidden, M]: the gate above the up-projection."""
    gate, up = state["experts.gate_up_proj"][number].chunk(2)
    return {"gate.weight": gate, "up.weight": up, "down.weight": state["experts.down_proj"][number]}


def transposed(state: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Llama-4: [E, M, 2 hidden], the gate's columns before the up-projection's."""
    gate, up = state["experts.gate_up_proj"][number].T.chunk(2)
    return {"gate.weight": gate, "up.weight": up, "down.weight": state["experts.down_proj"][number].T}


def interleaved(state: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """gpt-oss: [E, M, 2 hidden], gate in the even columns and up-projection in the odd ones, with biases."""
    both, bias = state["experts.gate_up_proj"][number].T, state["experts.gate_up_proj_bias"][number]
    down = {"down.weight": state["experts.down_proj"][number].T, "down.bias": state["experts.down_proj_bias"][number]}
    return down | {"gate.weight": both[::2], "up.weight": both[1::2], "gate.bias": bias[::2], "up.bias": bias[1::2]}


SPLIT: dict[str, Callable[[dict[str, Tensor], int], dict[str, Tensor]]] = {"llama4": transposed, "gpt_oss": interleaved}


def preset(name: str, **fields: Any) -> Router:
    return replace(PRESETS[name], **fields)


BLOCKS = {
    "mixtral": Block("mixtral", "MixtralSparseMoeBlock", {}, preset("mixtral", k=3)),
    "qwen2_moe": Block("qwen2_moe", "Qwen2MoeSparseMoeBlock", {"shared_expert_intermediate_size": 20}, preset("qwen2_moe", k=3),
                       ("shared_expert", 20), shared_gate=True),
    "qwen2_moe, norm": Block("qwen2_moe", "Qwen2MoeSparseMoeBlock", {"shared_expert_intermediate_size": 20, "norm_topk_prob": True},
                             preset("qwen2_moe", k=3, weigh="renormalize"), ("shared_expert", 20), shared_gate=True),
    "qwen3_moe": Block("qwen3_moe", "Qwen3MoeSparseMoeBlock", {"norm_topk_prob": True}, preset("qwen3_moe", k=3)),
    "qwen3_moe, no norm": Block("qwen3_moe", "Qwen3MoeSparseMoeBlock", {"norm_topk_prob": False},
                                preset("qwen3_moe", k=3, weigh="keep")),
    "olmoe": Block("olmoe", "OlmoeSparseMoeBlock", {}, preset("olmoe", k=3)),
    "deepseek_v2_lite": Block("deepseek_v2", "DeepseekV2Moe",
                              {"topk_method": "greedy", "routed_scaling_factor": 1.0, "n_shared_experts": 2},
                              preset("deepseek_v2_lite", k=3), ("shared_experts", 2 * HIDDEN)),
    "deepseek_v2": Block("deepseek_v2", "DeepseekV2Moe",
                         {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "n_shared_experts": 2},
                         preset("deepseek_v2", k=3, groups=4, kept_groups=2), ("shared_experts", 2 * HIDDEN)),
    "deepseek_v3": Block("deepseek_v3", "DeepseekV3MoE", {"n_shared_experts": 1, "routed_scaling_factor": 2.5},
                         preset("deepseek_v3", k=3, groups=4, kept_groups=2), ("shared_experts", HIDDEN)),
    "gpt_oss": Block("gpt_oss", "GptOssMLP", {}, preset("gpt_oss", k=3), expert=Clamped(hidden=HIDDEN), gate="router"),
    "llama4": Block("llama4", "Llama4TextMoe", {}, preset("llama4_text", k=2), ("shared_expert", HIDDEN), gate="router"),
}  # fmt: skip
BLOCKS["llama4"].options["num_experts_per_tok"] = 2
