"""Which format a quantized model is written in where none is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.quantize.models import ids
from tests.zoo.oracle import llama_checkpoint
from zoo.quantize import quantize, verify

SAMPLED = {"calibration": "ids"}
CASES = [
    ("rtn", {}, "compressed-tensors"),
    ("nvfp4", {}, "compressed-tensors"),
    ("nf4", {}, "bitsandbytes"),
    ("hqq", {"group_size": 32}, "modular-zoo"),
    ("quip_sharp", {"sweeps": 0, **SAMPLED}, "modular-zoo"),
    ("aqlm", {"rounds": 1, "bits": 4, "steps": 2, **SAMPLED}, "aqlm"),
    ("nf4", {"rules": ["layers.0.*={name: rtn, group_size: 32}"]}, "modular-zoo"),
]


@pytest.mark.parametrize(("method", "settings", "word"), CASES, ids=str)
def test_the_first_that_holds_every_module(method: str, settings: dict[str, Any], word: str, tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=128, head_dim=16, max_position_embeddings=64)
    model = zoo.load(tmp_path / "model")
    if settings.get("calibration"):
        settings = settings | {"calibration": ids()}
    quantize(model, method, progress=False, **settings)
    zoo.save(model, tmp_path / "out", check=lambda folder: verify(model, folder))
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["quant_method"] == word
    assert torch.equal(zoo.load(tmp_path / "out")(ids(1, 12)), model(ids(1, 12)))
