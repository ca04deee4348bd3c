"""Encoders of images, and of texts beside images, against transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import zoo
from tests.zoo.families.harness import randomized
from tests.zoo.oracle import relative_error

TOLERANCE = 1e-5
BASE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE: dict[str, Any] = {**BASE, "image_size": 16, "patch_size": 4}
GRAY = {**IMAGE, "num_channels": 1}
END = 96
TEXT: dict[str, Any] = {**BASE, "vocab_size": 97, "max_position_embeddings": 20, "eos_token_id": END, "bos_token_id": 1}
SMALL, LARGE = (16, 16), (24, 32)


def logits(model: Any, **inputs: Tensor) -> Tensor:
    return model(**inputs).logits


def pooled(model: Any, **inputs: Tensor) -> Tensor:
    return model(**inputs).pooler_output


def hidden(model: Any, **inputs: Tensor) -> Tensor:
    return model(**inputs).last_hidden_state


def image_embeds(model: Any, **inputs: Tensor) -> Tensor:
    return model(**inputs).image_embeds


def text_embeds(model: Any, **inputs: Tensor) -> Tensor:
    return model(**inputs).text_embeds


def image_features(model: Any, **inputs: Tensor) -> Tensor:
    return model.get_image_features(**inputs).pooler_output


def text_features(model: Any, **inputs: Tensor) -> Tensor:
    return model.get_text_features(**inputs).pooler_output


@dataclass(frozen=True)
class Case:
    """model: transformers' class. options: of its config. output: what of its results ours gives. tower: of several in a file.

    saved: the class that loads what we save, where it is another. sizes: of images; a text where there are none.
    """

    name: str
    model: str
    options: dict[str, Any]
    output: Callable[..., Tensor] = logits
    tower: str = ""
    saved: str = ""
    saved_output: Callable[..., Tensor] | None = None
    sizes: tuple[tuple[int, int], ...] = (SMALL, LARGE)
    extra: dict[str, Any] = field(default_factory=lambda: {"interpolate_pos_encoding": True})

    def inputs(self, rows: int = 3) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        if self.sizes:
            return [torch.randn(rows, self.options.get("num_channels", 3), *size, generator=generator) for size in self.sizes]
        ids = torch.randint(3, END, (rows, 18), generator=generator)
        ids[:, 17], ids[1, 5], ids[2, 9:] = END, END, END  # the first one counts
        return [ids]

    def theirs(self, model: Any, x: Tensor, output: Callable[..., Tensor] | None = None) -> Tensor:
        output = output or self.output
        return output(model, pixel_values=x, **self.extra) if self.sizes else output(model, input_ids=x)


@cache
def config_of(model: str) -> Any:
    return getattr(transformers, model).config_class


def both(**options: Any) -> dict[str, Any]:
    return {"text_config": TEXT, "vision_config": IMAGE, **options}


def dino(**options: Any) -> dict[str, Any]:
    return {**{k: v for k, v in IMAGE.items() if k != "intermediate_size"}, "mlp_ratio": 2, "layerscale_value": 0.5, **options}


VIT, DEIT, DINO = "ViTForImageClassification", "DeiTForImageClassification", "Dinov2ForImageClassification"
REGISTERS = "Dinov2WithRegistersForImageClassification"
CASES = [
    Case("vit", VIT, {**IMAGE, "num_labels": 15}),
    Case("vit, no qkv bias, gray, relu", VIT, {**GRAY, "qkv_bias": False, "hidden_act": "relu", "layer_norm_eps": 1e-3}),
    Case("vit, wide heads", VIT, {**IMAGE, "head_dim": 12}),
    Case("vit, encoder", "ViTModel", {**IMAGE, "pooler_output_size": 24, "pooler_act": "gelu"}, pooled),
    Case("deit", DEIT, {**IMAGE, "num_labels": 13}),
    Case("deit, teacher", f"{DEIT}WithTeacher", {**IMAGE, "num_labels": 13}),
    Case("deit, encoder", "DeiTModel", IMAGE, pooled),
    Case("dinov2", DINO, dino(num_labels=14), extra={}),
    Case("dinov2, swiglu", DINO, dino(use_swiglu_ffn=True, mlp_ratio=4, qkv_bias=False), extra={}),
    Case("dinov2, encoder", "Dinov2Model", dino(use_mask_token=False), pooled, extra={}),
    Case("dinov2, registers", REGISTERS, dino(num_register_tokens=3), sizes=(SMALL, LARGE, (8, 8)), extra={}),
    Case("dinov2, registers, encoder", "Dinov2WithRegistersModel", dino(), pooled, extra={}),
    Case("clip, image encoder", "CLIPVisionModel", IMAGE, pooled),
    Case("clip, image encoder, projected", "CLIPVisionModelWithProjection", {**IMAGE, "projection_dim": 24}, image_embeds),
    Case("clip, text encoder", "CLIPTextModel", TEXT, pooled, sizes=()),
    Case("clip, text encoder, projected", "CLIPTextModelWithProjection", {**TEXT, "projection_dim": 24}, text_embeds, sizes=()),
    Case("clip, text encoder, old end", "CLIPTextModel", {**TEXT, "eos_token_id": 2, "hidden_act": "gelu"}, pooled, sizes=()),
    Case("clip#vision", "CLIPModel", both(projection_dim=24), image_features, "vision", "CLIPVisionModelWithProjection", image_embeds),
    Case("clip#text", "CLIPModel", both(projection_dim=24), text_features, "text", "CLIPTextModelWithProjection", text_embeds, sizes=()),
    Case("clip, classifier", "CLIPForImageClassification", both(num_labels=13), sizes=(SMALL,), extra={}),
    Case("siglip, image encoder", "SiglipVisionModel", IMAGE, pooled),
    Case("siglip, image encoder, no head", "SiglipVisionModel", {**IMAGE, "vision_use_head": False}, hidden),
    Case("siglip, text encoder", "SiglipTextModel", {**TEXT, "projection_size": 24}, pooled, sizes=()),
    Case("siglip#vision", "SiglipModel", both(), image_features, "vision", "SiglipVisionModel", pooled),
    Case("siglip#text", "SiglipModel", both(), text_features, "text", "SiglipTextModel", pooled, sizes=()),
    Case("siglip, classifier", "SiglipForImageClassification", both(num_labels=13)),
]  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Path, Any]]:
    @cache
    def write(name: str) -> tuple[Path, Any]:
        case, folder = next(c for c in CASES if c.name == name), tmp_path_factory.mktemp("vision")
        config = config_of(case.model)(**case.options)
        config._attn_implementation = "eager"
        model = randomized(getattr(transformers, case.model)(config))
        model.save_pretrained(folder)
        return folder, model

    return lambda case: write(case.name)


def reference(case: Case, folder: Path) -> str:
    return f"{folder}#{case.tower}" if case.tower else str(folder)


@torch.no_grad()
def whole(case: Case, folder: Path, theirs: Any) -> float:
    errors = []
    for kernel in ("sdpa", "eager"):
        ours = zoo.load(reference(case, folder), override=[f"layers.*.mixer.kernel={kernel}"])
        for x in case.inputs():
            errors.append(relative_error(ours(x), case.theirs(theirs, x)))
            assert errors[-1] < TOLERANCE, f"{case.name}, {list(x.shape)}: relative error {errors[-1]:.2e}"
    return max(errors)


@torch.no_grad()
def bfloat16(case: Case, folder: Path, theirs: Any) -> float:
    """Over many rows: the largest error of few numbers is chance."""
    ours, other = zoo.load(reference(case, folder), dtype="bfloat16"), copy.deepcopy(theirs).to(torch.bfloat16)
    x = case.inputs(rows=24)[0]
    exact = case.theirs(theirs, x)
    got = ours(x)  # pixels are cast to the weights' type
    assert got.dtype == torch.bfloat16
    error, own = relative_error(got, exact), relative_error(case.theirs(other, x.to(torch.bfloat16) if case.sizes else x), exact)
    assert error <= 2 * own, f"{case.name}: bfloat16 error {error:.2e}, transformers' own is {own:.2e}"
    return error / own


@torch.no_grad()
def saved(case: Case, folder: Path, theirs: Any) -> None:
    """Load, save, load in transformers: what the original files give, to the bit; nothing but what is ignored is lost."""
    name, out = reference(case, folder), folder.parent / f"{folder.name}-saved"
    result = zoo.save(zoo.load(name), out, shard_bytes=20_000, overwrite=True)
    assert result.transformers is None, result.transformers
    kind = getattr(transformers, case.saved or case.model)
    back = kind.from_pretrained(out, attn_implementation="eager")
    original = getattr(transformers, case.model).from_pretrained(folder, attn_implementation="eager")
    for x in case.inputs():
        assert torch.equal(case.theirs(back, x, case.saved_output), case.theirs(original, x))
        assert torch.equal(zoo.load(out)(x), zoo.load(name)(x))
    assert zoo.spec(out) == zoo.spec(name)


CHECKS = {"whole": whole, "bfloat16": bfloat16, "saved": saved}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, check: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    CHECKS[check](case, *written(case))
