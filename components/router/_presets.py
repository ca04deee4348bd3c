"""The routers of published models, as their checkpoints and transformers 5 define them.

k, groups and scale are those of the named release; families replace what a config.json says otherwise.
"""

from __future__ import annotations

from zoo.components.router.top_k import TopK

PRESETS: dict[str, TopK] = {
    "mixtral": TopK(k=2),
    "qwen2_moe": TopK(k=4, weigh="keep"),
    "qwen3_moe": TopK(k=8),
    "qwen3_next": TopK(k=10),
    "minimax": TopK(k=2),
    "olmoe": TopK(k=8, weigh="keep"),
    "deepseek_v2_lite": TopK(k=6, weigh="keep"),
    "deepseek_v2": TopK(k=6, groups=8, kept_groups=3, weigh="keep", scale=16.0),
    "deepseek_v3": TopK(k=8, score="sigmoid", correction=True, groups=8, kept_groups=4, group_top=2, scale=2.5),
    "gpt_oss": TopK(k=4, score="linear", bias=True, weigh="softmax"),
    "llama4_text": TopK(k=1, score="linear", weigh="sigmoid", on_input=True),
}
