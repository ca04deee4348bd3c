"""A trained vision transformer with names of its own, put together from parts: handwritten digits, over 99 % right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from zoo.checkpoint import SafetensorsFolder
from zoo.eval.images import LabelledImages, image_accuracy
from zoo.families._tower import prefix_tokens
from zoo.images import Preprocessing
from zoo.layouts import split_evenly, viewed
from zoo.loading import finish
from zoo.model import Model
from zoo.weights import Rule, check_names, entries, fill

HEADS = {"name": "gqa", "heads": 8, "kv_heads": 8, "head_dim": 8, "out_bias": True, "logit_scale": 64**-0.5}  # of the width, not the head
LAYER = {"mixer": {"projection": HEADS, "pattern": "full"}, "mlp": {"name": "plain", "hidden": 128}, "norm": "layer"}
SPEC: dict[str, Any] = {
    "width": 64,
    "context": 17,
    "embed": {"name": "patches", "patch": 7, "channels": 1, "position": {"name": "learned_grid", "rows": 4, "columns": 4}},
    "layers": [{"repeat": 6, **LAYER}],
    "norm": "identity",
    "head": {"name": "classification", "labels": 10, "dense": "gelu", "dense_width": 128},
}
MODULES = {
    "embed.linear": "patch_to_embedding",
    "layers.{l}.mixer_norm": "transformer.layers.{l}.0.fn.norm",
    "layers.{l}.mixer.projection.o": "transformer.layers.{l}.0.fn.fn.to_out",
    "layers.{l}.mlp_norm": "transformer.layers.{l}.1.fn.norm",
    "layers.{l}.mlp.up": "transformer.layers.{l}.1.fn.fn.net.0",
    "layers.{l}.mlp.down": "transformer.layers.{l}.1.fn.fn.net.2",
    "head.hidden": "mlp_head.0",
    "head.out": "mlp_head.2",
}
QKV = tuple(f"layers.{{l}}.mixer.projection.{n}.weight" for n in "qkv")
RULES = [
    Rule(("cls_token",), ("embed.prefix",), prefix_tokens(1)),
    Rule(("pos_embedding",), ("embed.position.weight",), viewed((1, 17, 64), (17, 64))),
    Rule(("transformer.layers.{l}.0.fn.fn.to_qkv.weight",), QKV, split_evenly(3)),
    *(Rule.same(f"{theirs}.{leaf}", f"{ours}.{leaf}") for ours, theirs in MODULES.items() for leaf in ("weight", "bias")),
]
PREPARE = Preprocessing(channels=1, mean=(0.1307,), std=(0.3081,))


@pytest.fixture(scope="module")
def digits(shared_data: Path) -> LabelledImages:
    path = shared_data / "images/mnist_2000.npz"
    if not path.is_file():
        pytest.skip(f"needs the digits, which are not at {path}")
    data = np.load(path)
    images, labels = data["images"], data["labels"].tolist()
    return LabelledImages("mnist_2000", [str(i) for i in range(10)], labels, lambda i: Image.fromarray(images[i]), "1")


@pytest.fixture(scope="module")
def folder(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = shared_data / "weights/vit_mnist.safetensors"
    if not weights.is_file():
        pytest.skip(f"needs the trained model, which is not at {weights}")
    found = tmp_path_factory.mktemp("vit_mnist")
    (found / "model.safetensors").symlink_to(weights)
    (found / "config.json").write_text(json.dumps({"model_type": "no family of ours"}))
    return found


def read(folder: Path, *edits: str) -> Model:
    spec, checkpoint = zoo.spec(SPEC, *edits), SafetensorsFolder(folder, "vit_mnist")
    table = entries(spec, RULES)
    check_names(spec, table, checkpoint, lambda name: False)
    with torch.device("meta"):
        model = spec.build()
    fill(model, table, checkpoint, torch.float32, torch.device("cpu"))
    finish(model, "")
    return model.eval()


def accuracy(model: Model, digits: LabelledImages, limit: int | None = None) -> float:
    return image_accuracy(model, digits, preprocessing=PREPARE, batch_size=200, limit=limit).tasks["images"].metrics["acc"]


def test_over_99_percent_of_2000_digits(folder: Path, digits: LabelledImages, tmp_path: Path) -> None:
    model = read(folder)
    assert accuracy(model, digits) > 0.99
    zoo.save(model, tmp_path / "saved")
    assert accuracy(zoo.load(tmp_path / "saved"), digits, limit=200) == accuracy(model, digits, limit=200)


@pytest.mark.parametrize("edit", ["layers.*.mixer.projection.logit_scale=null", "layers.*.mixer.pattern=causal", "embed.position=null",
                                  "layers.*.mlp.activation=relu"])  # fmt: skip
def test_a_wrong_part_shows(folder: Path, digits: LabelledImages, edit: str) -> None:
    """That of the scale is small here, so the outputs are compared, not the accuracy."""
    pixels = torch.stack([PREPARE(digits.read(i)) for i in range(0, 2000, 100)])
    right, wrong = read(folder), zoo.spec(SPEC, edit).build()
    wrong.load_state_dict({n: t for n, t in right.state_dict().items() if n in wrong.state_dict()})
    with torch.no_grad():
        assert (right(pixels) - wrong.eval()(pixels)).abs().max() > 0.05
