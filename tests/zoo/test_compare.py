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
from tests.zoo.families.test_classic import CASES as CLASSIC
from tests.zoo.families.test_dense import CASES as DENSE
from tests.zoo.families.test_encoders import CASES as ENCODERS
from tests.zoo.families.test_hybrid import CASES as HYBRID
from tests.zoo.families.test_moe import CASES as MOE
from zoo.checkpoint import CheckpointError
from zoo.cli import app
from zoo.compare import against_transformers, differences, first_difference, recorded, relative_error
from zoo.model import Model
from zoo.quantize import quantize


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
    assert rows[-1].ours == "output"


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
    head, *rows, last = same.stdout.splitlines()
    assert head.split() == ["error", "module", "in", "transformers"]
    assert [row.split()[1:] for row in rows if "layers.1.mlp " in row] == [["layers.1.mlp", "model.layers.1.mlp"]]
    assert last == f"0 of {len(rows)} modules differ by more than 1e-05 of their largest value"
    changed = CliRunner().invoke(app, ["compare", str(tmp_path), "--set", "layers.1.norm.eps=0.1"])
    assert changed.exit_code == 1
    (first,) = [line for line in changed.stdout.splitlines() if line.endswith("<- the first that differs")]
    assert first.split()[1:3] == ["layers.1.mixer_norm", "model.layers.1.input_layernorm"]


def test_the_command_line_on_two_models(packed: Path) -> None:
    plain = CliRunner().invoke(app, ["compare", str(packed.parent / "plain"), str(packed), "--tokens", "16"])
    assert plain.exit_code == 1, plain.output
    assert plain.stdout.splitlines()[0].split() == ["error", "module", "in", "the", "other", "model"]
    assert "layers.0.mixer.projection.k  <- the first that differs" in plain.output
    same = CliRunner().invoke(app, ["compare", str(packed), str(packed), "--other-quantized", "dequantize", "--tokens", "16"])
    assert same.exit_code == 0, same.output
    alone = CliRunner().invoke(app, ["compare", str(packed), "--other-quantized", "dequantize"])
    assert "name it after the first one" in str(alone.exception)


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


# ---- two models of the zoo -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized checkpoint beside the plain one that it was made of."""
    root = tmp_path_factory.mktemp("packed")
    Case("qwen3", "Qwen3ForCausalLM", {"head_dim": 8}).write(root / "plain")
    model = zoo.load(root / "plain")
    quantize(model, "rtn", bits=4, group_size=16)
    zoo.save(model, root / "packed")
    return root / "packed"


def test_a_model_and_the_same_model_quantized(packed: Path) -> None:
    plain, quantized = (zoo.load(packed.parent / name, dtype="float32") for name in ("plain", "packed"))
    rows = {row.ours: row.error for row in differences(plain, quantized, ids(1))}
    assert rows["embed"] == rows["layers.0.mixer_norm"] == 0.0
    assert all(0.001 < rows[f"layers.1.mlp.{name}"] < 1 for name in ("gate", "up", "down"))
    found = first_difference(plain, quantized, ids(1))
    assert found is not None
    assert found.ours == found.theirs == "layers.0.mixer.projection.k"


def test_a_quantized_checkpoint_and_its_plain_form(packed: Path) -> None:
    kept, plain = (zoo.load(packed, dtype="float32", quantized=how) for how in ("keep", "dequantize"))
    rows = differences(kept, plain, ids(1))
    assert {"layers.0.mixer.projection.q", "layers.1.mlp", "output"} <= {row.ours for row in rows}
    assert max(row.error for row in rows) < 1e-5


def test_models_of_other_vocabularies_are_refused(packed: Path, tmp_path: Path) -> None:
    Case("qwen2", "Qwen2ForCausalLM", {"vocab_size": 98}).write(tmp_path)
    with pytest.raises(ValueError, match="vocabularies of 97 and 98 tokens"):
        differences(zoo.load(packed), zoo.load(tmp_path), ids(1))


# ---- families whose modules are not one to one ---------------------------------------------------------------------------------

QKV = ", ".join(f"layers.0.mixer.projection.{name}" for name in "qkv")
SEVERAL = {
    "GPT2LMHeadModel": (QKV, "transformer.h.0.attn.c_attn"),
    "GPTNeoXForCausalLM": (QKV, "gpt_neox.layers.0.attention.query_key_value"),
    "Phi3ForCausalLM": ("layers.1.mlp.gate, layers.1.mlp.up", "model.layers.1.mlp.gate_up_proj"),
    "ModernBertModel": ("layers.0.mlp.gate, layers.0.mlp.up", "layers.0.mlp.Wi"),
    "Qwen3NextForCausalLM": ("layers.0.mixer.projection.beta, layers.0.mixer.projection.decay", "model.layers.0.linear_attn.in_proj_ba"),
}
OTHERWISE = {  # what our module does in one, theirs does beside it
    "BloomForCausalLM": "layers.0.mlp",
    "MptForCausalLM": "layers.1.mlp",
    "BertModel": "embed",
    "GraniteForCausalLM": "layers.1",
    "GptOssForCausalLM": "layers.1.mlp",
    "Gemma3ForCausalLM": "layers.0.mixer.projection.q_norm",
}


def case(model: str) -> Case:
    known = (getattr(c, "values", [c])[0] for c in (*CLASSIC, *DENSE, *ENCODERS, *MOE, *HYBRID))
    return next(c for c in known if c.model == model)


@pytest.mark.parametrize("model", SEVERAL)
def test_several_modules_that_are_one_elsewhere(model: str, tmp_path: Path) -> None:
    theirs, (mine, other) = case(model).write(tmp_path), SEVERAL[model]
    ours = zoo.load(tmp_path)
    assert first_difference(ours, theirs, ids(1)) is None
    assert [row.theirs for row in differences(ours, theirs, ids(1)) if row.ours == mine] == [other]
    last = ours.get_submodule(mine.split(", ")[-1]).weight.data
    assert isinstance(last, torch.Tensor)
    last.add_(0.05)
    found = next(row for row in differences(ours, theirs, ids(1)) if row.ours == mine)
    assert found.error > 1e-3


def test_one_module_that_is_several_elsewhere(tmp_path: Path) -> None:
    """StableLM has a norm for each head, ours is one over all."""
    theirs = Case("stablelm", "StableLmForCausalLM", {"qk_layernorm": True, "head_dim": None, "partial_rotary_factor": 0.5}).write(tmp_path)
    ours = zoo.load(tmp_path)
    assert first_difference(ours, theirs, ids(1)) is None
    row = next(row for row in differences(ours, theirs, ids(1)) if row.ours == "layers.1.mixer.projection.k_norm")
    assert row.theirs == ", ".join(f"model.layers.1.self_attn.k_layernorm.norms.{head}" for head in range(2))
    ours.get_parameter("layers.1.mixer.projection.k_norm.weight").data.view(-1)[-1] += 1
    found = first_difference(ours, theirs, ids(1))
    assert found is not None
    assert found.ours == "layers.1.mixer.projection.k_norm"


@pytest.mark.parametrize("model", OTHERWISE)
def test_what_is_done_elsewhere_is_no_difference(model: str, tmp_path: Path) -> None:
    theirs = case(model).write(tmp_path)
    rows = differences(zoo.load(tmp_path), theirs, ids(1))
    assert {OTHERWISE[model], "output"} <= {row.ours for row in rows}
    assert max(row.error for row in rows) < 1e-5


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
