"""``zoo classify``: labels of images, and mistakes as one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zoo
from tests.eval.made import make_tiny
from tests.zoo.families.harness import randomized
from tests.zoo.test_images import picture
from zoo import cli
from zoo.classify import classify, logits
from zoo.images import preprocessing_of

LABELS = {0: "tabby, tabby cat", 1: "[bold]dog", 2: "tench"}
SETTINGS = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, "resample": 2}
Command = Callable[..., tuple[int, str, str]]


def vit(folder: Path, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "patch_size": 4}
    config = transformers.ViTConfig(**{**sizes, "image_size": 16, "id2label": LABELS, **options})
    model = randomized(transformers.ViTForImageClassification(config))
    model.save_pretrained(folder)
    if settings is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vit")
    vit(found, SETTINGS)
    return found


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{i}.png" for i in range(5)]
    for i, path in enumerate(paths):
        picture(20 + i, 33, seed=i).save(path)
    return [str(path) for path in paths]


@pytest.fixture
def zoo_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["zoo", *words])
        status = 0
        try:
            cli.main()
        except SystemExit as e:
            status = int(e.code or 0)
        found = capsys.readouterr()
        return status, found.out, found.err

    return run


def test_equal_to_transformers_pipeline(folder: Path, images: list[str], zoo_command: Command) -> None:
    status, out, _ = zoo_command("classify", str(folder), *images, "--json", "--top", "2", "--batch-size", "2")
    assert status == 0
    pipe = transformers.pipeline("image-classification", str(folder), top_k=2)
    for ours, path in zip(json.loads(out), images, strict=True):
        assert ours["image"] == path
        theirs: Any = pipe(path)
        assert [x["label"] for x in ours["labels"]] == [x["label"] for x in theirs]
        torch.testing.assert_close([x["probability"] for x in ours["labels"]], [x["score"] for x in theirs], rtol=1e-4, atol=1e-5)


def test_table(folder: Path, images: list[str], zoo_command: Command) -> None:
    status, out, _ = zoo_command("classify", str(folder), images[0])
    assert status == 0
    assert all(label in out for label in LABELS.values())
    assert images[0][:20] in out  # a longer path goes on in the cell's next line


@torch.no_grad()
def test_images_of_several_sizes(tmp_path: Path, images: list[str]) -> None:
    """Without a crop the longer edge stays longer; every image gives what it gives alone."""
    theirs = vit(tmp_path, {"image_processor_type": "CLIPImageProcessor", "size": 16, "do_center_crop": False})
    model = zoo.load(tmp_path)
    pixels = [torch.randn(3, 16, 24), torch.randn(3, 16, 16), torch.randn(3, 16, 24)]
    got = logits(model, pixels)
    for row, one in zip(got, pixels, strict=True):
        torch.testing.assert_close(row, theirs(one[None], interpolate_pos_encoding=True).logits[0], rtol=1e-4, atol=1e-5)
    prepared = preprocessing_of(model)(picture(20, 33, seed=0))
    assert prepared.shape == (3, 16, 26)  # the last two columns belong to no patch
    want = theirs(prepared[None], interpolate_pos_encoding=True).logits
    torch.testing.assert_close(logits(model, [prepared]), want, rtol=1e-4, atol=1e-5)
    assert len(classify(model, images[:1])[0]) == len(LABELS)


def test_saved_models_keep_how_images_are_prepared(folder: Path, images: list[str], tmp_path: Path) -> None:
    """In their own format and as a spec of the zoo's."""
    model = zoo.load(folder)
    zoo.save(model, tmp_path / "same")
    assert classify(zoo.load(tmp_path / "same"), images) == classify(model, images)
    swapped = zoo.load(folder, override=["layers.*.mixer.position=rope_axial"])
    assert zoo.save(swapped, tmp_path / "swapped").transformers is not None
    again = zoo.load(tmp_path / "swapped")
    assert again.spec.layers[0].mixer.position.name == "rope_axial"
    assert classify(again, images) == classify(swapped, images) != classify(model, images)
    assert preprocessing_of(again) == preprocessing_of(model)


def test_files_that_are_no_images_are_one_line(folder: Path, images: list[str], tmp_path: Path, zoo_command: Command) -> None:
    (tmp_path / "cut.png").write_bytes(Path(images[0]).read_bytes()[:500])
    (tmp_path / "text.png").write_text("text")
    for name, wrong in (("cut.png", "cut short"), ("text.png", "is not an image"), ("absent.png", "no such image")):
        status, out, err = zoo_command("classify", str(folder), images[0], str(tmp_path / name))
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
        assert name in err
        assert wrong in err


def test_models_that_classify_no_images_say_so(images: list[str], tmp_path: Path, zoo_command: Command) -> None:
    make_tiny(tmp_path / "text")
    vit(tmp_path / "bare")
    vit(tmp_path / "labels", SETTINGS, id2label=LABELS)
    config = json.loads((tmp_path / "labels/config.json").read_text())
    (tmp_path / "labels/preprocessor_config.json").write_text(json.dumps({"image_processor_type": "SomeProcessor"}))
    assert config["id2label"]
    encoder = tmp_path / "encoder"
    transformers.ViTModel(transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(encoder)
    (encoder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    for name, wrong in (("text", "reads text"), ("bare", "has no preprocessor_config.json"), ("labels", "'SomeProcessor' is not supported"),
                        ("encoder", "no classifier: its head is pooling")):  # fmt: skip
        status, out, err = zoo_command("classify", str(tmp_path / name), images[0])
        assert (status, out) == (2, "")
        assert wrong in err


def test_outputs_that_are_no_numbers_are_an_error(folder: Path, images: list[str]) -> None:
    model = zoo.load(folder)
    model.get_submodule("head.out").weight.data.fill_(float("nan"))  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="outputs are not finite"):
        classify(model, images[:1])
    assert classify(model, []) == []
    with pytest.raises(ValueError, match="top and batch_size must be at least 1, got 0 and 16"):
        classify(model, images, top=0)
