"""Fields that published files leave out are read as transformers' own defaults."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from zoo.components import registry
from zoo.components.projection.gqa import GroupedQuery
from zoo.components.rope_scaling.linear import Linear
from zoo.family import expect, family_for
from zoo.model import ModelSpec

# Sizes in no family's usual proportions, under the words of all of them.
SIZES = {"hidden_size": 1536, "num_attention_heads": 64, "num_hidden_layers": 6, "intermediate_size": 160,
         "moe_intermediate_size": 48, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
         "n_embd": 1536, "n_head": 64, "n_layer": 6, "d_model": 1536, "n_heads": 64, "n_layers": 6, "mlp_ratio": 2}  # fmt: skip
FREE = {"deepseek_v2": "num_key_value_heads", "deepseek_v3": "num_key_value_heads"}  # says nothing: it can only be the other heads
INSIDE = {"gemma3": "text_config", "llama4": "text_config", "qwen2_vl": "text_config"}  # files leave out what is a default there
LEFT = [name for name in registry.names("family") if name not in ("zoo", "clip", "siglip")]  # these read the configs of their towers
# What a file must say: without it KeyError names the field.
NEEDED = {"vocab_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts_per_tok", "rms_norm_eps",
          "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
          "shared_expert_intermediate_size", *SIZES}  # fmt: skip


def read(config: dict[str, Any]) -> ModelSpec:
    return family_for(config, "test").read(config)


def settled(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config."""
    return AutoConfig.for_model(model_type, **config).to_dict()


def without(config: dict[str, Any], word: str) -> dict[str, Any]:
    """A config without a field; without the number of layers there are no lists of theirs either."""
    of_layers = ("layer_types", "no_rope_layers", "moe_layers") if word == "num_hidden_layers" else ()
    return {k: v for k, v in config.items() if k not in (word, *of_layers)}


@pytest.mark.parametrize("name", LEFT)
def test_every_field_that_a_file_may_leave_out(name: str) -> None:
    place = INSIDE.get(name)
    known = settled(name, {})[place] if place else settled(name, {})
    sizes = {word: size for word, size in SIZES.items() if word in known}
    usual = settled(name, {place: sizes} if place else sizes)
    whole = {word: value for word, value in (usual[place] if place else usual).items() if word not in ("model_type", FREE.get(name))}
    for word in whole:
        alone = without(whole, word)
        left = {place: alone} if place else alone
        try:
            ours = read({"model_type": name, **left})
        except KeyError as e:
            if place or e.args[0] not in NEEDED:
                pytest.fail(f"{word} is left out: {e!r}")
            continue
        theirs = {k: v for k, v in settled(name, left).items() if k != FREE.get(name)}
        assert ours == read(theirs), f"{word} is left out"


def test_gemma_3_as_published() -> None:
    """The 4b model: config.json has the vocabulary, the heads and their width nowhere."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    spec = read({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
                 "image_token_index": 262144, "text_config": text})  # fmt: skip
    p = expect(spec.layers[0].mixer.projection, GroupedQuery)
    assert (p.heads, p.kv_heads, p.head_dim, spec.width, len(spec.layers)) == (8, 4, 256, 2560, 34)
    assert getattr(spec.embed, "vocab", None) == 262208
    assert getattr(spec.layers[5].mixer.position, "scaling", None) == Linear(factor=8.0)
    assert spec == read(settled("gemma3", {"text_config": text}))
