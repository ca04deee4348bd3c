"""The module that differs first is the one that was changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import zoo
from tests.zoo.families.harness import Case, ids
from zoo.cli import app
from zoo.compare import differences, first_difference
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


def test_another_model_is_refused(models: tuple[Model, Any]) -> None:
    with pytest.raises(ValueError, match="none of the modules"):
        differences(models[0], nn.Sequential(nn.Linear(2, 2)), ids(1))
