"""Rotary settings of config.json, in both spellings, to and from specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.components.contracts import RopeScaling
from zoo.components.ops.rotary import Layout
from zoo.components.position.mrope import MRope
from zoo.components.position.rope import Rope
from zoo.components.rope_scaling.dynamic_ntk import DynamicNTK
from zoo.components.rope_scaling.linear import Linear
from zoo.components.rope_scaling.llama3 import Llama3
from zoo.components.rope_scaling.longrope import LongRope
from zoo.components.rope_scaling.none import NoScaling
from zoo.components.rope_scaling.yarn import Yarn

Config = Mapping[str, Any]
SAME_AS = {"su": "longrope", "mrope": "default"}  # what files call them -> what the rope type is
CONTEXT = 2048  # where config.json leaves it out
ANYWHERE = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved",
            "original_max_position_embeddings"}  # fmt: skip
# Rope type -> the keys that it reads beside those; "finetuned" of the first YaRN models asks for what is done for all here.
KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor", "finetuned"},
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor"},
}


def read_rope(config: Config, head_dim: int, kind: str | None = None, layout: Layout = "half") -> Rope:
    """``rope_parameters``, or ``rope_theta`` with ``rope_scaling`` (older), -> spec.

    kind: the layer's type, whose settings are meant where config.json has some for each type. layout: which pairs the family turns.
    """
    data = settings(config, kind)
    theta = float(next((v for v in (data.get("rope_theta"), config.get("rope_theta")) if v is not None), 10_000.0))
    share = data.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    width = None if share == 1.0 else int(head_dim * share)
    scaling, sections = _read_scaling(data, config), data.get("mrope_section")
    if sections is None:
        return Rope(theta=theta, layout=layout, width=width, scaling=scaling)
    order = "interleaved" if data.get("mrope_interleaved") else "sectioned"
    return MRope(theta=theta, layout=layout, width=width, scaling=scaling, sections=tuple(sections), order=order)


def settings(config: Config, kind: str | None = None) -> Config:
    """The rotary settings of a config, or those for one type of layer where it has several.

    Raises ValueError where it has several and no type is asked for.
    """
    data = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if kind in data:
        return data[kind] or {}
    apart = [word for word, value in data.items() if isinstance(value, Mapping)]
    if apart:
        raise ValueError(f"rope settings by type of layer ({', '.join(apart)}) are not supported in this family")
    return data


def _read_scaling(data: Config, config: Config) -> RopeScaling:
    word = data.get("rope_type", data.get("type", "default"))
    kind = SAME_AS.get(word, word)
    _check_keys(str(kind), data)
    context = int(config.get("max_position_embeddings", CONTEXT))
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
        return _read_yarn(data, context, original)
    # for longrope a field beside the settings comes first, as in transformers
    return _read_longrope(data, context, int(config.get("original_max_position_embeddings") or original))


def _check_keys(kind: str, data: Config) -> None:
    """Raise ValueError for a type that is not known, and for settings that the type does not read."""
    if kind not in KEYS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(KEYS)}")
    unread = sorted(word for word, value in data.items() if value is not None and word not in KEYS[kind] | ANYWHERE)
    if unread:
        reads = f"reads {', '.join(sorted(KEYS[kind]))}" if KEYS[kind] else "reads none"
        raise ValueError(f"rope settings have {', '.join(unread)}, of which rope type {kind} {reads}; correct rope_type, or remove them")


def _read_yarn(data: Config, context: int, original: int) -> Yarn:
    return Yarn(
        factor=float(data.get("factor") or context / original),
        context=original,
        beta_fast=float(data.get("beta_fast") or 32),
        beta_slow=float(data.get("beta_slow") or 1),
        truncate=bool(data.get("truncate", True)),
        mscale=data.get("mscale"),
        mscale_all_dim=data.get("mscale_all_dim"),
        attention_scale=data.get("attention_factor"),
    )


def _read_longrope(data: Config, context: int, original: int) -> LongRope:
    return LongRope(
        short=tuple(float(f) for f in data["short_factor"]),
        long=tuple(float(f) for f in data["long_factor"]),
        context=original,
        factor=float(data.get("factor") or context / original),
        attention_scale=data.get("attention_factor"),
    )


def write_rope(rope: Rope, config: Config, head_dim: int, context: int | None = None) -> dict[str, Any]:
    """spec -> the config fields, in the spelling that ``config`` already uses (the older one where it has neither).

    context: the model's, which spares a factor that follows from it. What says the same already stays as it is.
    """
    if _says(config, rope, head_dim, context):
        return {}
    found = _write_settings(rope, context)
    share = 1.0 if rope.width is None else rope.width / head_dim
    partial = {"partial_rotary_factor": share} if share != 1.0 or "partial_rotary_factor" in config else {}
    if "rope_parameters" in config and not config.get("rope_scaling"):
        return {"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta} | found | partial}
    return {"rope_theta": rope.theta, "rope_scaling": found or None} | partial


def _says(config: Config, rope: Rope, head_dim: int, context: int | None, kind: str | None = None) -> bool:
    """Whether a config's own words already mean ``rope``."""
    given = settings(config, kind) or "rope_theta" in config
    same_context = context in (None, config.get("max_position_embeddings", CONTEXT))
    return bool(given) and same_context and read_rope(config, head_dim, kind, rope.layout) == rope


def write_ropes(ropes: Mapping[str, Rope], config: Config, head_dim: int, context: int | None = None) -> dict[str, Any]:
    """Rotary settings by type of layer -> ``rope_parameters`` that has them under the types; others that config.json has are kept."""
    held = config.get("rope_parameters") or {}
    changed = {k: rope for k, rope in ropes.items() if k not in held or not _says(config, rope, head_dim, context, k)}
    return {"rope_parameters": {**held, **{kind: _nested(rope, head_dim, context) for kind, rope in changed.items()}}}


def _nested(rope: Rope, head_dim: int, context: int | None) -> dict[str, Any]:
    return write_rope(rope, {"rope_parameters": None}, head_dim, context)["rope_parameters"]


def _write_settings(rope: Rope, context: int | None) -> dict[str, Any]:
    scaling = _write_scaling(rope.scaling, context)
    if not isinstance(rope, MRope):
        return scaling
    dealt = {"mrope_interleaved": True} if rope.order == "interleaved" else {}
    return {"rope_type": "default"} | scaling | {"mrope_section": list(rope.sections)} | dealt


def _write_scaling(scaling: RopeScaling, context: int | None) -> dict[str, Any]:
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
                    **_set(given)}  # fmt: skip
        case LongRope():
            factor = None if context and scaling.factor == context / scaling.context else scaling.factor
            return {"rope_type": "longrope", "short_factor": list(scaling.short), "long_factor": list(scaling.long),
                    **_set({"factor": factor, "attention_factor": scaling.attention_scale}),
                    "original_max_position_embeddings": scaling.context}  # fmt: skip
    return {}


def _set(fields: Config) -> dict[str, Any]:
    return {word: value for word, value in fields.items() if value is not None}
