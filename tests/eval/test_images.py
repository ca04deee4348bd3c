"""Accuracy on images: by folder, on digits, of trained vision transformers of several parts, through a recipe."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

import zoo
from tests.zoo.test_classify import SETTINGS, vit
from tests.zoo.test_images import picture
from zoo.classify import classify, label_names, logits
from zoo.components.spec import SpecError
from zoo.eval import image_accuracy
from zoo.eval.harness import Evaluation
from zoo.eval.images import digits, folder, joined, match, result
from zoo.images import ImageError, read_preprocessing
from zoo.model import Model
from zoo.recipes.recipe import read_recipe
from zoo.recipes.runner import Order, key
from zoo.recipes.worker import make, measure

NAMES = {0: "cat", 1: "dog", 2: "fish, tench"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    where = tmp_path_factory.mktemp("model")
    vit(where, SETTINGS, id2label=NAMES)
    return zoo.load(where)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Path:
    """Twelve images in the folders that the model itself would put eight of them into."""
    root = tmp_path_factory.mktemp("pictures")
    for i in range(12):
        path = root / "all" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        picture(20, 20 + 3 * i, seed=i).save(path)
        best = label_names(model).index(classify(model, [path], top=1)[0][0].label)
        deep = root / "sorted" / ["cat", "dog", "tench"][best if i < 8 else (best + 1) % 3] / "deep"
        deep.mkdir(parents=True, exist_ok=True)
        path.rename(deep / f"{i}.PNG")
    for name in ("cat", "dog", "tench"):
        if not (root / "sorted" / name).is_dir():
            (root / "sorted" / name).mkdir()
            picture(16, 16, seed=99).save(root / "sorted" / name / "x.png")
    (root / "sorted/cat/notes.txt").write_text("no image")
    return root / "sorted"


def test_right_ones_are_counted(model: Model, pictures: Path) -> None:
    data = folder(pictures)
    found = image_accuracy(model, pictures, batch_size=5)
    right = [data.targets[i] == int(logits(model, [read_preprocessing(SETTINGS)(data.read(i))]).argmax()) for i in range(len(data))]
    assert found.tasks["images"].n == len(data) >= 12
    assert found.tasks["images"].metrics == {"acc": pytest.approx(sum(right) / len(right))}
    assert found.tasks["images"].items["acc"] == tuple(float(r) for r in right)
    assert 8 <= sum(right) < len(right)


def test_a_limit_draws_the_same_images_of_all_classes(model: Model, pictures: Path) -> None:
    whole, first, again = (image_accuracy(model, pictures, limit=limit) for limit in (None, 6, 6))
    assert first.tasks == again.tasks
    assert first.tasks["images"].n == 6
    assert image_accuracy(model, pictures, limit=10_000).tasks == whole.tasks


def test_the_version_is_that_of_the_files(model: Model, pictures: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i, kind in enumerate(("cat", "dog", "tench")):
            (tmp_path / name / kind).mkdir(parents=True)
            picture(16, 16, seed=i + (name == "b")).save(tmp_path / name / kind / "x.png")
    assert folder(tmp_path / "a").version != folder(tmp_path / "b").version
    assert folder(tmp_path / "a").version == folder(tmp_path / "a").version


def test_first_five_and_their_error() -> None:
    found = result([1, 2, 6, 1], labels=10, version="x")
    assert found.metrics == {"acc": 0.5, "acc5": 0.75}
    assert found.stderr["acc"] == pytest.approx((0.25 / 3) ** 0.5)
    assert set(result([1], labels=5, version="x").metrics) == {"acc"}


@pytest.mark.parametrize(("classes", "labels", "numbers"), [
    (["dog", "cat"], ["cat", "dog", "fish"], [1, 0]),
    (["tench"], ["cat", "tench, Tinca tinca"], [1]),
    (["crane"], ["crane, bird", "crane"], [1]),
    (["0", "2"], ["LABEL_0", "LABEL_1", "LABEL_2"], [0, 2]),
    (["0", "1"], ["1", "0"], [1, 0]),
    (["n01", "n02"], ["cat", "dog"], [0, 1]),
])  # fmt: skip
def test_classes_are_found_among_labels(classes: list[str], labels: list[str], numbers: list[int]) -> None:
    assert match(classes, labels) == numbers


@pytest.mark.parametrize(("classes", "labels"), [(["cat", "bird"], ["cat", "dog"]), (["n01"], ["a", "b"]), (["2"], ["a", "b"]),
                                                 (["crane"], ["crane, bird", "crane, machine"])])  # fmt: skip
def test_classes_that_are_no_labels_are_named(classes: list[str], labels: list[str]) -> None:
    with pytest.raises(ValueError, match="are no labels of the model"):
        match(classes, labels)


def test_folders_that_are_no_good_are_named(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent: no such folder of images \(and not `digits`\)"):
        image_accuracy(model, tmp_path / "absent")
    with pytest.raises(ValueError, match="no folders in it"):
        folder(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="no images in cat; images end in"):
        folder(tmp_path)
    (tmp_path / "cat/x.png").write_bytes(b"cut")
    with pytest.raises(ImageError, match=r"x\.png: is not an image"):
        image_accuracy(model, tmp_path)
    with pytest.raises(ValueError, match="batch_size and limit must be at least 1, got 32 and 0"):
        image_accuracy(model, tmp_path, limit=0)


def test_both_kinds_of_tasks_of_one_model() -> None:
    one, two = (Evaluation(tasks={n: result([1], 3, "v")}, settings={"of": n}, seconds=1.0) for n in ("a", "images"))
    both = joined(one, two)
    assert (list(both.tasks), both.settings, both.seconds) == (["a", "images"], {"of": "a", "images": {"of": "images"}}, 2.0)
    assert joined(None, two) == two


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        digits()


# ---- trained models ----------------------------------------------------------------------------------------------------------

GRAY = {"image_processor_type": "ViTImageProcessor", "do_resize": False, "image_mean": [0.3], "image_std": [0.4]}
HEADS = {"name": "gqa", "heads": 4, "kv_heads": 4, "head_dim": 8, "bias": True, "out_bias": True}
LAYER = {"mixer": {"projection": HEADS, "pattern": "full"}, "mlp": {"name": "plain", "hidden": 64}, "norm": "layer"}
BASE: dict[str, Any] = {
    "width": 32,
    "context": 5,
    "embed": {"name": "patches", "patch": 4, "channels": 1, "position": {"name": "learned_grid", "rows": 2, "columns": 2}},
    "layers": [{"repeat": 2, **LAYER}],
    "norm": "layer",
    "head": {"name": "classification", "labels": 10},
    "checkpoint": "vit",
}
QUANTIZED = [*(f"mixer.projection.{n}" for n in "qkvo"), "mlp.up", "mlp.down"]
PARTS = {
    "as published": (),
    "rope, rms norm, swiglu, registers": ("embed.position=null", "embed.registers=2", "layers.*.mixer.position=rope_axial",
                                          "layers.*.norm=rms", "norm=rms", "layers.*.mlp={name: gated, hidden: 48}"),
    "mixed rope, two key heads, mean of patches": ("embed.position=null", "embed.class_token=false", "layers.*.mixer.position=rope_mixed",
                                                   "layers.*.mixer.projection.kv_heads=2",
                                                   "head={name: classification, labels: 10, pool: mean}"),
}  # fmt: skip


@cache
def trained(edits: tuple[str, ...]) -> Model:
    """A vision transformer of 20,000 parameters after two seconds on scikit-learn's digits."""
    model, data, prepare = zoo.build(BASE, *edits), digits("train"), read_preprocessing(GRAY, channels=1)
    pixels, targets = torch.stack([prepare(data.read(i)) for i in range(len(data))]), torch.tensor(data.targets)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        rows = torch.randint(len(targets), (128,), generator=generator)
        loss = F.cross_entropy(model(pixels[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    where = tmp_path_factory.mktemp("digits") / "vit"
    zoo.save(trained(()), where)
    (where / "preprocessor_config.json").write_text(json.dumps(GRAY))
    return where


@pytest.mark.parametrize("edits", [*list(PARTS.values())[:2], pytest.param(list(PARTS.values())[2], marks=pytest.mark.slow)], ids=PARTS)
def test_parts_of_a_vision_transformer_learn_digits(edits: tuple[str, ...]) -> None:
    pytest.importorskip("sklearn")
    found = image_accuracy(trained(edits), "digits", preprocessing=read_preprocessing(GRAY, channels=1), batch_size=360)
    assert found.tasks["images"].n == 360
    assert found.tasks["images"].metrics["acc"] > 0.85


def test_a_quantized_variant_of_a_recipe(checkpoint: Path, tmp_path: Path) -> None:
    """Made, read back, measured; the patches' linear map, a convolution in transformers, is kept as it is."""
    recipe = {"model": str(checkpoint), "measure": {"images": {"dataset": "digits", "limit": 100}},
              "variants": [{"label": "int8", "quantizer": {"name": "rtn", "bits": 8, "group_size": 32}}]}  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    order = Order(read_recipe(path), 0, tmp_path, tmp_path / "0.json", "make")
    make(order)
    found = measure(order)
    assert found.metrics("images")["acc"] > 0.8
    assert {row["module"] for row in found.modules} == {f"layers.{i}.{m}" for i in (0, 1) for m in QUANTIZED}


def test_a_recipe_measures_images(checkpoint: Path, tmp_path: Path) -> None:
    recipe = {"model": str(checkpoint), "measure": {"images": {"dataset": "digits", "batch_size": 120}},
              "variants": [{"label": "baseline"}, {"label": "no-positions", "override": ["layers.*.mixer.pattern=causal"]}]}  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    wanted = read_recipe(path)
    first, second = (measure(Order(wanted, i, tmp_path, tmp_path / f"{i}.json", "measure")) for i in (0, 1))
    assert first.metrics("images")["acc"] > 0.85
    assert second.metrics("images")["acc"] < first.metrics("images")["acc"]
    assert len(first.measured["tasks"]["items"]["images"]["acc"]) == 360
    assert first.seconds["images"] > 0


def test_a_recipe_knows_the_images_of_its_figures(tmp_path: Path, checkpoint: Path) -> None:
    """A changed image in a class folder makes the variant run again."""
    (tmp_path / "data/0").mkdir(parents=True)
    picture(8, 8).save(tmp_path / "data/0/x.png")
    path = tmp_path / "recipe.yaml"
    recipe = {"model": str(checkpoint), "measure": {"images": {"folder": str(tmp_path / "data")}}, "variants": [{"label": "a"}]}
    path.write_text(yaml.safe_dump(recipe))
    before = key(read_recipe(path), 0)
    picture(9, 9).save(tmp_path / "data/0/x.png")
    assert key(read_recipe(path), 0) != before
    for bad, wrong in (
        ({}, "measure.images.folder: name a folder or a dataset"),
        ({"dataset": "digits", "limit": 0}, "limit: must be at least 1"),
    ):
        path.write_text(yaml.safe_dump(recipe | {"measure": {"images": bad}}))
        with pytest.raises(SpecError, match=wrong):
            read_recipe(path)
