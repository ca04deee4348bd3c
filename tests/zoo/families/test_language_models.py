"""Checkpoints of models that see images, of which the language model is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import zoo
from tests.zoo.families.harness import BASE, TOLERANCE, T, ids, randomized, renamed
from tests.zoo.oracle import relative_error
from zoo.components.position.mrope import MRope

TEXT = {k: v for k, v in BASE.items() if k != "head_dim"}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
TOWER = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    text = {**TEXT, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return _saved(Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=SIGLIP)), tmp_path_factory)


@pytest.fixture(scope="module")
def qwen2_vl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 2, 1]}}
    return _saved(Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=TOWER)), tmp_path_factory)


def _saved(model: Any, made: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = made.mktemp("model")
    randomized(model).save_pretrained(folder)
    return folder, model


@torch.no_grad()
def test_gemma3_without_its_tower(gemma3: tuple[Path, Any], tmp_path: Path) -> None:
    folder, theirs = gemma3
    want, ours = theirs(ids(2)).logits, zoo.load(folder)
    assert relative_error(ours(ids(2)), want) < TOLERANCE
    assert zoo.save(ours, tmp_path / "text").transformers is None
    back = Gemma3ForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager")
    assert relative_error(back(ids(2)).logits, want) < TOLERANCE
    assert zoo.spec(tmp_path / "text") == zoo.spec(folder)


@torch.no_grad()
def test_qwen2_vl_of_text(qwen2_vl: tuple[Path, Any], tmp_path: Path) -> None:
    folder, theirs = qwen2_vl
    ours = zoo.load(folder)
    assert isinstance(ours.spec.layers[0].mixer.position, MRope)
    assert relative_error(ours(ids(2)), theirs(ids(2)).logits) < TOLERANCE
    reason = zoo.save(ours, tmp_path / "text").transformers
    assert reason is not None
    assert "vision tower" in reason
    assert torch.equal(zoo.load(tmp_path / "text")(ids(2)), ours(ids(2)))


@torch.no_grad()
def test_qwen2_vl_with_coordinates(qwen2_vl: tuple[Path, Any]) -> None:
    folder, theirs = qwen2_vl
    ours, axes, x = zoo.load(folder), image_in_text(), ids(2)
    want = theirs(x, position_ids=axes.permute(2, 0, 1)).logits
    assert relative_error(ours(x, axes=axes), want) < TOLERANCE
    assert relative_error(ours(x), want) > 0.01
    cache = ours.new_cache(2)
    parts = [ours(x[:, a:b], axes=axes[:, a:b], cache=cache) for a, b in ((0, 11), (11, 30), (30, T))]
    assert relative_error(torch.cat(parts, 1), want) < TOLERANCE


def image_in_text() -> Tensor:
    """[2, T, 3]: six tokens of text, an image of 4 x 5 patches, text that goes on behind the image's largest coordinate."""
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij")
    image = torch.stack([torch.zeros(20, dtype=torch.long), rows.flatten(), columns.flatten()], -1) + 6
    before = torch.arange(6)[:, None].expand(-1, 3)
    after = torch.arange(11, 11 + T - 26)[:, None].expand(-1, 3)
    return torch.cat([before, image, after]).expand(2, -1, -1)


@torch.no_grad()
def test_files_with_the_names_of_modules(gemma3: tuple[Path, Any], qwen2_vl: tuple[Path, Any], tmp_path: Path) -> None:
    def gemma_name(name: str) -> str:
        return "model." + name.replace("language_model.model.", "language_model.")

    def qwen_name(name: str) -> str:
        inside = "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else f"model.{name}"
        return name if name.startswith("lm_head.") else inside

    for (folder, _), change in ((gemma3, gemma_name), (qwen2_vl, qwen_name)):
        again = renamed(folder, tmp_path / folder.name, change)
        assert torch.equal(zoo.load(again)(ids(2)), zoo.load(folder)(ids(2)))


@pytest.mark.parametrize("flat", [False, True])
def test_qwen2_vl_configs_old_and_new_say_the_same(flat: bool, qwen2_vl: tuple[Path, Any]) -> None:
    folder, _ = qwen2_vl
    rope = {"type": "mrope", "mrope_section": [1, 2, 1]}
    text = {**TEXT, "rope_theta": 500.0, "rope_scaling": rope, "use_sliding_window": False, "rms_norm_eps": 1e-5}
    config = {"model_type": "qwen2_vl", **(text if flat else {"text_config": text})}
    assert zoo.family.family_for(config, "test").read(config) == zoo.spec(folder)
