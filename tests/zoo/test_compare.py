"""The module that differs first is the one that was changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import zoo
from tests.zoo.families.harness import BASE, Case, ids, randomized
from zoo.checkpoint import CheckpointError
from zoo.cli import app
from zoo.compare import against_transformers, differences, first_difference, recorded, relative_error
from zoo.model import Model


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", "Phi3ForCausalLM", "Gemma2ForCausalLM"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    folder: Path = tmp_path_factory.mktemp("compare")
    theirs = Case(request.param, request.param, {"head_dim": None if "Phi3" in request.param else 8}).write(folder)
    return zoo.load(folder), theirs


def test_nothing_differs(models: tuple[Model, Any]) -> None:
    ours, theirs = models
    rows = differences(ours, theirs, ids(2))
    assert first_difference(ours, theirs, ids(2)) is None
    seen = {row.ours for row in rows}
    assert {"embed", "layers.0.mixer_norm", "layers.0.mixer.projection.o", "layers.1.mixer", "layers.1.mlp", "layers.1", "norm"} <= seen
    assert [row.ours for row in rows if row.ours in ("layers.0", "layers.1", "norm")] == ["layers.0", "layers.1", "norm"]


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("layers.0.mixer_norm", "layers.0.mixer_norm"),
        ("layers.0.mixer.projection.o", "layers.0.mixer.projection.o"),
        ("layers.1.mlp.down", "layers.1.mlp.down"),
        ("norm", "norm"),
    ],
)
def test_the_changed_module_is_named(models: tuple[Model, Any], path: str, first: str) -> None:
    ours, theirs = models
    weight = ours.get_parameter(f"{path}.weight").data
    right = weight.clone()
    weight.add_(0.01)
    found = first_difference(ours, theirs, ids(2))
    weight.copy_(right)
    assert found is not None
    assert found.ours == first


def test_a_wrong_reading_is_found_where_it_acts(tmp_path: Path) -> None:
    """Rope holds no tensors: its error shows in the attention's output projection, the first module behind it."""
    theirs = Case("qwen2", "Qwen2ForCausalLM").write(tmp_path)
    found = first_difference(zoo.load(tmp_path, override=["layers.1.mixer.position.theta=77.0"]), theirs, ids(2))
    assert found is not None
    assert found.ours == "layers.1.mixer.projection.o"
    assert str(found).startswith("layers.1.mixer.projection.o (model.layers.1.self_attn.o_proj): relative error ")


def test_the_command_line(tmp_path: Path) -> None:
    Case("qwen2", "Qwen2ForCausalLM").write(tmp_path)
    same = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert same.exit_code == 0, same.output
    assert "layers.1.mlp (model.layers.1.mlp): relative error" in same.output
    changed = CliRunner().invoke(app, ["compare", str(tmp_path), "--set", "layers.1.norm.eps=0.1"])
    assert changed.exit_code == 1
    first = next(line for line in changed.output.splitlines() if "first that differs" in line)
    assert first.startswith("layers.1.mixer_norm (model.layers.1.input_layernorm)")


TEXT = {k: v for k, v in BASE.items() if k != "head_dim"}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 8}
CLASSES = {
    "BertForMaskedLM": ({**TEXT, "num_key_value_heads": None}, "layers.1.mlp.down", "bert.encoder.layer.1.output.dense"),
    "BertModel": ({**TEXT, "num_key_value_heads": None}, "layers.1.mlp.down", "encoder.layer.1.output.dense"),
    "RobertaForSequenceClassification": (
        {**TEXT, "pad_token_id": 1, "num_labels": 3}, "layers.0.mlp.up", "roberta.encoder.layer.0.intermediate.dense"),
    "Gemma3ForConditionalGeneration": (
        {"text_config": {**TEXT, "head_dim": 8, "sliding_window": 8}, "vision_config": SIGLIP},
        "layers.1.mlp", "model.language_model.layers.1.mlp"),
    "Llama4ForCausalLM": ({**TEXT, **LLAMA4}, "layers.1.mixer", "model.layers.1.self_attn"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_other_classes_and_names(name: str, tmp_path: Path) -> None:
    """Each file is loaded by the class that it names; modules are found under the names that they have there."""
    options, ours, theirs = CLASSES[name]
    kind = getattr(transformers, name)
    randomized(kind(kind.config_class(**options))).save_pretrained(tmp_path)
    rows = against_transformers(tmp_path, tokens=16)
    assert [(row.theirs, row.error < 1e-5) for row in rows if row.ours == ours] == [(theirs, True)]
    wrong = against_transformers(tmp_path, tokens=16, edits=["layers.*.norm.eps=0.5"])
    assert [row.error < 1e-5 for row in wrong if row.ours == ours] == [False]


def test_models_of_images_are_refused(tmp_path: Path) -> None:
    transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIGLIP)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="siglip_vision_model models have an embedding patches; only models of token ids"):
        against_transformers(tmp_path)


def test_the_first_call_of_a_module_counts() -> None:
    layer = nn.Linear(2, 2)
    with recorded(nn.ModuleDict({"layer": layer}), ["layer"]) as found:
        first = layer(torch.ones(2))
        layer(torch.zeros(2))
    assert torch.equal(found["layer"], first)


def test_errors_of_nothing() -> None:
    zeros = torch.zeros(3)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(torch.empty(0, 4), torch.empty(0, 4)) == 0.0
    assert relative_error(zeros + 1, zeros) == float("inf")
    assert relative_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0])) == 0.5


def test_another_model_is_refused(models: tuple[Model, Any]) -> None:
    with pytest.raises(ValueError, match="none of the modules"):
        differences(models[0], nn.Sequential(nn.Linear(2, 2)), ids(1))
