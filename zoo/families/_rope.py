"""Rotary settings of config.json, in both spellings, to and from specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.components.contracts import RopeScaling
from zoo.components.position.rope import Rope
from zoo.components.rope_scaling.dynamic_ntk import DynamicNTK
from zoo.components.rope_scaling.linear import Linear
from zoo.components.rope_scaling.llama3 import Llama3
from zoo.components.rope_scaling.none import NoScaling
from zoo.components.rope_scaling.yarn import Yarn


def read_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """``rope_parameters``, or ``rope_theta`` with ``rope_scaling`` (older), -> spec."""
    data = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = data.get("rope_theta", config.get("rope_theta", 10_000.0))
    share = data.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    width = None if share == 1.0 else int(head_dim * share)
    return Rope(theta=float(theta), width=width, scaling=_read_scaling(data, config))


def _read_scaling(data: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    kind = data.get("rope_type", data.get("type", "default"))
    context = int(config.get("max_position_embeddings", 2048))
    original = int(data.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or context)
    if kind == "default":
        return NoScaling()
    if kind == "linear":
        return Linear(factor=float(data["factor"]))
    if kind == "dynamic":
        return DynamicNTK(factor=float(data["factor"]), context=context)
    if kind == "llama3":
        return Llama3(factor=float(data["factor"]), low_freq_factor=float(data["low_freq_factor"]),
                      high_freq_factor=float(data["high_freq_factor"]), context=original)  # fmt: skip
    if kind == "yarn":
        return Yarn(factor=float(data.get("factor") or context / original), context=original,
                    beta_fast=float(data.get("beta_fast") or 32), beta_slow=float(data.get("beta_slow") or 1),
                    truncate=bool(data.get("truncate", True)), mscale=data.get("mscale"), mscale_all_dim=data.get("mscale_all_dim"),
                    attention_scale=data.get("attention_factor"))  # fmt: skip
    raise ValueError(f"rope type {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn")


def write_rope(rope: Rope, config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """spec -> the config fields, in the spelling that ``config`` already uses (the older one where it has neither)."""
    scaling = _write_scaling(rope.scaling)
    if rope.width is not None:
        scaling["partial_rotary_factor"] = rope.width / head_dim
    if "rope_parameters" in config:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta} | scaling}
    return {"rope_theta": rope.theta, "rope_scaling": scaling or None}


def _write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    match scaling:
        case Linear():
            return {"rope_type": "linear", "factor": scaling.factor}
        case DynamicNTK():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case Llama3():
            return {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": scaling.context}  # fmt: skip
        case Yarn():
            given = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim, "attention_factor": scaling.attention_scale}
            return {"rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": scaling.context,
                    "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate,
                    **{k: v for k, v in given.items() if v is not None}}  # fmt: skip
    return {}
