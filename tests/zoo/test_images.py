"""Images are prepared as transformers prepares them, and files that are no good are named."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from zoo.images import ImageError, Preprocessing, open_image, read_preprocessing

MEAN, STD = [0.2, 0.4, 0.6], [0.3, 0.5, 0.1]
SETTINGS: dict[str, dict[str, Any]] = {
    "ViT, size as one number": {"image_processor_type": "ViTImageProcessor", "size": 24},
    "ViT, all said": {"image_processor_type": "ViTImageProcessorFast", "size": {"height": 20, "width": 28}, "resample": 3,
                      "image_mean": MEAN, "image_std": STD, "rescale_factor": 0.01},
    "ViT, nearest": {"image_processor_type": "ViTImageProcessor", "size": 24, "resample": 0},
    "DeiT, defaults": {"image_processor_type": "DeiTImageProcessor"},
    "DeiT": {"image_processor_type": "DeiTImageProcessor", "size": 32, "crop_size": {"height": 24, "width": 27}},
    "CLIP, size as one number": {"image_processor_type": "CLIPImageProcessor", "size": 23, "crop_size": 20},
    "CLIP, crop beyond the image": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 27},
    "CLIP, no crop": {"image_processor_type": "CLIPImageProcessor", "size": 23, "do_center_crop": False},
    "Bit": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 33}, "crop_size": 28, "image_mean": MEAN},
    "Siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 24, "width": 24}},
    "Siglip, not normalised": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 24, "width": 24}, "do_normalize": False},
    "not resized, not rescaled": {"image_processor_type": "ViTImageProcessor", "do_resize": False, "do_rescale": False},
}  # fmt: skip


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth shapes with noise: bright edges show a filter that is not the same."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    waves = np.stack([np.sin(rows / 5 + c) + np.cos(columns / (3 + c)) for c in range(3)], -1)
    values = (waves * 50 + 128 + rng.normal(0, 20, waves.shape)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(values).convert(mode)


def theirs(settings: dict[str, Any], image: Image.Image, folder: Path) -> Tensor:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return transformers.AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt").pixel_values[0]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_equal_to_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    prepare = read_preprocessing(settings)
    for height, width in ((30, 47), (61, 40), (24, 24), (9, 14)):
        image = picture(height, width)
        got, want = prepare(image), theirs(settings, image, tmp_path)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_every_kind_of_channels_becomes_rgb_as_in_transformers(mode: str, tmp_path: Path) -> None:
    settings = {"image_processor_type": "CLIPImageProcessor", "size": 16, "crop_size": 16}
    image = picture(20, 31, mode)
    if "A" in mode:
        image.putalpha(Image.fromarray(np.arange(20 * 31, dtype=np.uint8).reshape(20, 31)))
    torch.testing.assert_close(read_preprocessing(settings)(image), theirs(settings, image, tmp_path), rtol=1e-6, atol=1e-6)


def test_models_of_gray_images_get_one_channel() -> None:
    gray = picture(16, 16, "L")
    settings = {"image_processor_type": "ViTImageProcessor", "size": 16, "image_mean": [0.1307], "image_std": 0.3081}
    got = read_preprocessing(settings, channels=1)(gray)
    torch.testing.assert_close(got, (torch.tensor(np.array(gray))[None] / 255 - 0.1307) / 0.3081)


@pytest.mark.parametrize("kind", ["ViTFeatureExtractor", "CLIPFeatureExtractor"])
def test_names_of_older_files(kind: str) -> None:
    """openai/clip-vit-base-patch32 and google/vit-base-patch16-224: one number is the shorter edge in one, both sides in the other."""
    got = read_preprocessing({"feature_extractor_type": kind, "size": 224, "crop_size": 224, "do_center_crop": kind[0] == "C"})
    assert (got.size, got.crop) == ((224, (224, 224)) if kind[0] == "C" else ((224, 224), None))


@pytest.mark.parametrize(("settings", "wrong"), [
    ({}, "image_processor_type '' is not supported; supported: ViTImageProcessor"),
    ({"image_processor_type": "Kosmos2Processor"}, "'Kosmos2Processor' is not supported"),
    ({"image_processor_type": "ViTImageProcessor", "size": {"longest_edge": 5}}, "size {'longest_edge': 5} is not supported"),
    ({"image_processor_type": "DeiTImageProcessor", "crop_size": {"shortest_edge": 5}}, "size {'shortest_edge': 5} is not supported"),
    ({"image_processor_type": "ViTImageProcessor", "image_mean": [0.1, 0.2]}, "2 values for 3 channels"),
    ({"image_processor_type": "ViTImageProcessor", "do_pad": True}, "do_pad is not supported"),
    ({"image_processor_type": "ViTImageProcessor", "do_center_crop": True}, "size None is not supported"),
    ({"image_processor_type": "ViTImageProcessor", "size": 0}, r"a side must be a whole number in 1\.\.4096, got 0"),
    ({"image_processor_type": "ViTImageProcessor", "size": 9459}, r"a side must be a whole number in 1\.\.4096, got 9459"),
    ({"image_processor_type": "ViTImageProcessor", "image_std": [0.5, 0, 0.5]}, r"image_std must not contain 0, .*\[0\.5, 0\.0, 0\.5\]"),
    ({"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 10**9, "width": 1}}, "a side must be .* got 1000000000"),
    ({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": "x"}}, "a side must be .* got 'x'"),
])  # fmt: skip
def test_settings_that_are_not_understood_are_named(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        read_preprocessing(settings)


# ---- files -------------------------------------------------------------------------------------------------------------------


def test_pictures_are_upright(tmp_path: Path) -> None:
    """A camera writes its rotation beside the pixels (EXIF orientation 6: turn by 90 degrees)."""
    exif, image = Image.Exif(), picture(10, 20)
    exif[0x0112] = 6
    image.save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.array(open_image(tmp_path / "x.png")), np.rot90(np.array(image), -1))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of odd tags
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_a_file_cut_short_is_one_clear_error(kind: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    picture(40, 40).save(whole, kind)
    open_image(whole)
    data = whole.read_bytes()
    for kept in (0, 1, 7, 20, len(data) // 2, len(data) * 9 // 10):
        cut.write_bytes(data[:kept])
        with pytest.raises(ImageError, match="cut"):
            open_image(cut)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of odd tags
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_damaged_files_raise_nothing_else(kind: str, tmp_path: Path) -> None:
    path, rng = tmp_path / "x", np.random.default_rng(5)
    picture(24, 24).save(path, kind)
    data = path.read_bytes()
    for _ in range(60):
        bad = bytearray(data)
        for at in rng.integers(0, min(len(bad), 300), 4):
            bad[at] = rng.integers(256)
        path.write_bytes(bad)
        with contextlib.suppress(ImageError):
            open_image(path)


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """A PNG of a few bytes that says it is 60,000 x 60,000 (over the hard limit), and one between the two limits of Pillow."""
    for side in (60_000, 10_000):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
        data = b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
        (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)
        with pytest.raises(ImageError, match=r"bomb\.png: has more than 89,478,485 pixels"):
            open_image(tmp_path / "bomb.png")


def test_a_thin_image_does_not_become_a_bomb() -> None:
    prepare = read_preprocessing({"image_processor_type": "CLIPImageProcessor"})
    with pytest.raises(ImageError, match="an image of 1 x 2000000 would become 224 x 448000000, too much"):
        prepare(Image.new("L", (2_000_000, 1)))


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_text("no image")
    (tmp_path / "x.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    Image.fromarray(np.full((4, 4), 300, np.uint16)).save(tmp_path / "deep.png")
    for name, wrong in (("x.jpg", "is not an image that can be read; supported: PNG"), ("x.eps", "is not an image"), ("y", "no such image"),
                        (".", "is a folder, not an image")):  # fmt: skip
        with pytest.raises(ImageError, match=wrong):
            open_image(tmp_path / name)
    with pytest.raises(ImageError, match="mode I;16 is not supported; convert it to RGB or gray with 8 bits"):
        Preprocessing()(open_image(tmp_path / "deep.png"))
