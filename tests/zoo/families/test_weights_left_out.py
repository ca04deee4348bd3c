"""Weights that files hold beside the model are named when it is loaded and when it is saved, and change nothing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo
from tests.zoo.families.harness import ids, renamed
from tests.zoo.families.test_hybrid import CASES
from zoo.checkpoint import CheckpointError

NAME = "Qwen3NextForCausalLM"
MTP = {
    "mtp.fc.weight": (32, 64),
    "mtp.pre_fc_norm_embedding.weight": (32,),
    "mtp.pre_fc_norm_hidden.weight": (32,),
    "mtp.layers.0.input_layernorm.weight": (32,),
    "mtp.layers.0.mlp.experts.0.up_proj.weight": (8, 32),
    "mtp.layers.0.mlp.experts.1.up_proj.weight": (8, 32),
    "mtp.norm.weight": (32,),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    next(case for case in CASES if getattr(case, "model", "") == NAME).write(folder)
    return folder


@pytest.fixture(scope="module")
def longer(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {name: torch.full(shape, 7.0) for name, shape in MTP.items()}
    return renamed(plain, tmp_path_factory.mktemp("longer") / "model", more=more)


@torch.no_grad()
def test_loading_names_them_once_and_changes_nothing(plain: Path, longer: Path) -> None:
    with pytest.warns(UserWarning, match="not loaded") as said:
        model = zoo.load(longer)
    (message,) = [str(w.message) for w in said]
    assert message.startswith(f"{longer}: 7 tensors are no part of the model and are not loaded: mtp.fc.weight")
    assert "mtp.layers.0.mlp.experts.{0,1}.up_proj.weight" in message
    assert torch.equal(model(ids(2)), zoo.load(plain)(ids(2)))


def test_saving_says_that_they_are_not_written(longer: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not loaded"):
        model = zoo.load(longer)
    with pytest.warns(UserWarning, match=r"7 tensors of .* are no part of the model and were not written: mtp\.fc\.weight"):
        zoo.save(model, tmp_path / "saved")
    assert not [name for name in load_file(tmp_path / "saved/model.safetensors") if name.startswith("mtp.")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.load(tmp_path / "saved")


def test_a_checkpoint_without_them_says_nothing(plain: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.save(zoo.load(plain), tmp_path / "saved")


def test_other_names_are_still_refused(plain: Path, tmp_path: Path) -> None:
    odd = renamed(plain, tmp_path / "odd", more={"mtq.norm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"unexpected: mtq\.norm\.weight"):
        zoo.load(odd)
