"""The check of a saved folder notices every kind of damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from tests.zoo.oracle import llama_checkpoint
from zoo.model import Model
from zoo.quantize import quantize, verify
from zoo.quantize.verification import VerificationError

Q = "model.layers.0.self_attn.q_proj."
Damage = Callable[[dict[str, Tensor]], Any]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    llama_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=64)
    model = zoo.load(tmp_path / "model")
    quantize(model, "rtn", group_size=32, progress=False)
    zoo.save(model, tmp_path / "saved")
    return model


def damage(folder: Path, change: Damage) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_an_intact_folder_passes(model: Model, tmp_path: Path) -> None:
    found = verify(model, tmp_path / "saved")
    assert found.logit_difference == 0
    assert found.expected_bytes < found.bytes < 2 * found.expected_bytes
    assert found.tensors == len(model.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[Q + "weight_packed"].fill_(-2004318072), r"layers\.0\.mixer\.projection\.q\.packed: every element is -2004318072"),
        (lambda t: t[Q + "weight_packed"][3, 3].add_(1), r"q\.packed: the values differ"),
        (lambda t: t[Q + "weight_scale"][0].fill_(torch.nan), r"q\.scale: holds NaN"),
        (lambda t: t["model.norm.weight"][0].mul_(2), r"norm\.weight: the values differ"),
        (lambda t: t["model.norm.weight"].mul_(2), "the logits differ by"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()}), r"norm\.weight: the values differ"),
    ],
)
def test_damage_is_named(change: Damage, message: str, model: Model, tmp_path: Path) -> None:
    damage(tmp_path / "saved", change)
    with pytest.raises(VerificationError, match=message):
        verify(model, tmp_path / "saved")


def test_a_missing_tensor_does_not_load(model: Model, tmp_path: Path) -> None:
    damage(tmp_path / "saved", lambda t: t.pop(Q + "weight_scale"))
    with pytest.raises(ValueError, match=r"q_proj\.weight_scale"):
        verify(model, tmp_path / "saved")


def test_another_scheme_is_named(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "saved/config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weight_scale is"):
        verify(model, tmp_path / "saved")


def test_files_that_are_too_large(model: Model, tmp_path: Path) -> None:
    (tmp_path / "saved/extra.safetensors").write_bytes(bytes(1 << 20))
    with pytest.raises(VerificationError, match="the weight files take"):
        verify(model, tmp_path / "saved")
