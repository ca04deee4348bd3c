"""Images as models see them: opened with care, and prepared as the checkpoint's own processor settings say.

Shapes: C channels, H height, W width of the prepared image.
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zoo.components.embed.patches import Patches
from zoo.model import Model

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # those that Pillow reads without the help of other programs
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)  # what Pillow's readers raise for damaged files
PIXELS = 89_478_485  # Pillow's own limit: 256 MiB of memory at three bytes a pixel
MOST_SIDE = 4_096  # of what a model is shown, several times what any takes; larger pictures take seconds each
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
HALF = ((0.5,) * 3,) * 2  # mean and std
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers, which the settings use
DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"size": 224, "square": True, "crop": None, "resample": BILINEAR, "norm": HALF},
    "DeiT": {"size": 256, "square": True, "crop": 224, "resample": BICUBIC, "norm": HALF},
    "CLIP": {"size": 224, "square": False, "crop": 224, "resample": BICUBIC, "norm": OPENAI},
    "Bit": {"size": 224, "square": False, "crop": 224, "resample": BICUBIC, "norm": OPENAI},
    "Siglip": {"size": {"height": 224, "width": 224}, "square": False, "crop": None, "resample": BICUBIC, "norm": HALF},
}
KIND_ENDS = ("Pil", "Fast", "ImageProcessor", "FeatureExtractor")


class ImageError(ValueError):
    """An image that cannot be used; says which one, why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What happens to an image of 8-bit channels, in this order; None leaves a step out.

    size: (H, W), or one number that the shorter edge becomes. resample: Pillow's number of the filter. crop: (H, W) from the centre,
    with black around images that are smaller. scale: factor of the values. mean, std: of each channel, after scaling.
    """

    channels: int = 3
    size: tuple[int, int] | int | None = None
    resample: int = BICUBIC
    crop: tuple[int, int] | None = None
    scale: float | None = 1 / 255
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __call__(self, image: Image) -> Tensor:
        """An image of any size -> [C, H, W] float32."""
        image = with_channels(image, self.channels)
        if self.size is not None:
            height, width = self.resized(image.height, image.width)
            image = image.resize((width, height), self.resample)  # pyright: ignore[reportArgumentType]
        if self.crop is not None:
            image = cropped(image, *self.crop)
        values = np.asarray(image).reshape(image.height, image.width, self.channels)
        scaled = values.astype(np.float32) if self.scale is None else (values.astype(np.float64) * self.scale).astype(np.float32)
        if self.mean is not None and self.std is not None:
            scaled = (scaled - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size after resizing; the longer edge keeps the proportion, rounded down."""
        if isinstance(self.size, tuple):
            return self.size
        assert self.size is not None
        short, long = sorted((height, width))
        longer = int(self.size * long / short)
        if self.size * longer > PIXELS:
            raise ImageError(f"an image of {height} x {width} would become {self.size} x {longer}, too much; crop it first")
        return (longer, self.size) if width <= height else (self.size, longer)


def preprocessing_of(model: Model) -> Preprocessing:
    """The preparation that a model's checkpoint asks for.

    Raises ValueError for models that do not look at images, for checkpoints without processor settings and for those not supported.
    """
    embed = model.spec.embed
    if not isinstance(embed, Patches):
        raise ValueError(f"{named(model)} reads text (its embedding is {embed.name}), not images; give a model of images")
    settings = model.source.preprocessing if model.source else {}
    if not settings:
        raise ValueError(f"{named(model)} has no preprocessor_config.json beside its config.json, so how images are to be resized and "
                         "normalised is not known; put one there, or pass a zoo.images.Preprocessing")  # fmt: skip
    try:
        return read_preprocessing(settings, embed.channels)
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{named(model)}: its image processor's settings cannot be used: {e}") from None


def named(model: Model) -> str:
    return "the model" if model.source is None else model.source.reference


def read_preprocessing(settings: Mapping[str, Any], channels: int = 3) -> Preprocessing:
    """preprocessor_config.json -> what it does. Raises ValueError for kinds and sizes that are not supported.

    What a file leaves out is as in transformers' class of that name: ViT, DeiT, CLIP, Bit (DINOv2) and Siglip.
    """
    usual = DEFAULTS[processor_kind(settings)]

    def value(word: str, default: Any) -> Any:
        return default if settings.get(word) is None else settings[word]

    def does(step: str, default: bool = True) -> bool:
        answer = value(f"do_{step}", default)
        if not isinstance(answer, (bool, int)):
            raise ValueError(f"do_{step} must be true or false, it is {answer!r:.60}")
        return bool(answer)

    if does("pad", False):
        raise ValueError("do_pad is not supported")
    mean, std = (per_channel(value(f"image_{word}", usual["norm"][i]), channels) for i, word in enumerate(("mean", "std")))
    if does("normalize") and not all(std):
        raise ValueError(f"image_std must not contain 0, by which pixels are divided, it is {list(std)}")
    return Preprocessing(
        channels=channels,
        size=size_of(value("size", usual["size"]), usual["square"]) if does("resize") else None,
        resample=filter_of(value("resample", usual["resample"])),
        crop=sides_of(value("crop_size", usual["crop"])) if does("center_crop", usual["crop"] is not None) else None,
        scale=float(value("rescale_factor", 1 / 255)) if does("rescale") else None,
        mean=mean if does("normalize") else None,
        std=std if does("normalize") else None,
    )


def processor_kind(settings: Mapping[str, Any]) -> str:
    """``ViT`` of ViTImageProcessor, ViTImageProcessorFast, ViTFeatureExtractor. Raises ValueError for others than we know."""
    given = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "")
    kind = given
    for end in KIND_ENDS:
        kind = kind.removesuffix(end)
    if kind not in DEFAULTS:
        raise ValueError(f"image_processor_type {given!r} is not supported; supported: {', '.join(f'{k}ImageProcessor' for k in DEFAULTS)}")
    return kind


def size_of(given: Any, square: bool) -> tuple[int, int] | int:
    """What ``size`` says; one number is both sides where ``square``, else the shorter edge."""
    if isinstance(given, int) and not square:
        return side(given)
    if isinstance(given, Mapping) and said(given) == {"shortest_edge"}:
        return side(given["shortest_edge"])
    return sides_of(given)


def sides_of(given: Any) -> tuple[int, int]:
    """Height and width; one number is both. Raises ValueError for anything else."""
    if isinstance(given, int):
        return side(given), side(given)
    if isinstance(given, Mapping) and said(given) == {"height", "width"}:
        return side(given["height"]), side(given["width"])
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2:
        return side(given[0]), side(given[1])
    raise ValueError(f"the size {given!r} is not supported; supported: height and width, or shortest_edge for resizing")


def side(given: Any) -> int:
    if not isinstance(given, int) or not 0 < given <= MOST_SIDE:
        raise ValueError(f"a side must be a whole number in 1..{MOST_SIDE}, got {given!r}")
    return given


def filter_of(given: Any) -> int:
    """Pillow's number of a resampling filter. Raises ValueError for one that there is not."""
    if isinstance(given, bool) or given not in range(6):
        raise ValueError(f"resample must be the number of one of Pillow's filters, 0 to 5, it is {given!r:.60}")
    return int(given)


def said(given: Mapping[str, Any]) -> set[str]:
    return {word for word, value in given.items() if value is not None}


def per_channel(given: Any, channels: int) -> tuple[float, ...]:
    """A number for each channel; one number, or three equal ones for a gray image, stand for all."""
    values = tuple(float(v) for v in given) if isinstance(given, Sequence) else (float(given),)
    if len(set(values)) == 1:
        return values[:1] * channels
    if len(values) != channels:
        raise ValueError(f"image_mean and image_std have {len(values)} values for {channels} channels")
    return values


# ---- opening -----------------------------------------------------------------------------------------------------------------


def open_image(path: str | Path) -> Image:
    """The first picture of a file, upright and decoded. Raises ImageError for what is not there, no image, damaged or huge."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    path = Path(path).expanduser()
    if not os.path.isfile(path):  # noqa: PTH113 (says no, and does not raise, where a name is too long)
        raise ImageError(f"{path!s:.200}: {'is a folder, not an image' if os.path.isdir(path) else 'no such image'}")  # noqa: PTH112
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                image.load()
                return ImageOps.exif_transpose(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"{path}: has more than {PIXELS:,} pixels, which may be an attack; make it smaller first") from None
    except UnidentifiedImageError:
        raise ImageError(f"{path}: is not an image that can be read; supported: {', '.join(FORMATS)}") from None
    except UNREADABLE as e:
        raise ImageError(f"{path}: the image is damaged or cut short ({e}); save it again") from None


def prepared(prepare: Preprocessing, path: str | Path) -> Tensor:
    """An image file as the model sees it, [C, H, W]. Raises ImageError that names the file."""
    image = open_image(path)
    try:
        return prepare(image)
    except ImageError as e:
        raise ImageError(f"{path}: {e}") from None


def with_channels(image: Image, channels: int) -> Image:
    """The image as RGB (3) or gray (1), transparent parts over white. Raises ImageError for other kinds of channels."""
    from PIL import Image as images

    if image.mode not in EIGHT_BITS:
        raise ImageError(f"an image of mode {image.mode} is not supported; convert it to RGB or gray with 8 bits a channel")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = images.alpha_composite(images.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert({1: "L", 3: "RGB"}[channels])


def cropped(image: Image, height: int, width: int) -> Image:
    """The centre; what lies outside a smaller image is black. An odd margin has its smaller half in front, negative ones the larger."""
    top, left = (image.height - height) // 2, (image.width - width) // 2
    return image.crop((left, top, left + width, top + height))
