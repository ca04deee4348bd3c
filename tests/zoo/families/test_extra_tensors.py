"""Tensors that older files hold although they follow from the config."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zoo
from tests.zoo.families.harness import Case, ids, renamed
from tests.zoo.families.test_left_out import LEFT, settled
from zoo.checkpoint import CheckpointError
from zoo.components import registry
from zoo.families._decoder import Decoder

DECODERS = [name for name in LEFT if isinstance(registry.get("family", name).spec(), Decoder)]
LAYERS = {"num_hidden_layers": 4, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_layers": 4, "n_layer": 4}


@torch.no_grad()
@pytest.mark.parametrize("model", ["MistralForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM"])
def test_rotary_frequencies(model: str, tmp_path: Path) -> None:
    case = Case(model, model)
    case.write(tmp_path / "now")
    frequencies = {f"model.layers.{l}.self_attn.rotary_emb.inv_freq": torch.ones(4) for l in range(2)}
    older = renamed(tmp_path / "now", tmp_path / "older", more=frequencies)
    assert torch.equal(zoo.load(older)(ids(2)), zoo.load(tmp_path / "now")(ids(2)))
    odd = renamed(tmp_path / "now", tmp_path / "odd", more={"model.layers.0.self_attn.rotary_emb.scale": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.0\.self_attn\.rotary_emb\.scale"):
        zoo.load(odd)


@pytest.mark.parametrize("name", DECODERS)
def test_rotary_frequencies_in_every_family(name: str) -> None:
    family = registry.get("family", name).spec()
    assert isinstance(family, Decoder)
    known = settled(name, {})
    spec = family.read(settled(name, {word: size for word, size in LAYERS.items() if word in known}))
    assert family.ignores("model.layers.0.self_attn.rotary_emb.inv_freq", spec)
    assert not family.ignores("model.layers.0.self_attn.q_proj.bias", spec)
