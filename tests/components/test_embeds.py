"""Embeddings equal their formulas and those of transformers, alone and through a whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersEmbeddings
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.vit.modeling_vit import ViTEmbeddings
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding
from transformers.models.whisper.modeling_whisper import sinusoids

from tests.components.draw import draw, randomise
from zoo.components import registry
from zoo.components.contracts import Embed, PositionEmbedding, Step
from zoo.components.spec import check, load
from zoo.model import ModelSpec

hf: Any = transformers  # its configs take fields that their signatures do not name
M = 32


def embedding(name: str, **options: Any) -> Any:
    return randomise(load(Embed, {"name": name, **options}).build(M)).eval()


def added(name: str, width: int = M, **options: Any) -> Any:
    return load(PositionEmbedding, {"name": name, **options}).build(width)


def ids(rows: int = 2, length: int = 7, vocab: int = 50) -> Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def embed_image(module: Any, pixels: Tensor) -> Tensor:
    spec = module.spec
    rows, tokens = spec.size(pixels)
    step = Step.plain(0, rows, tokens)
    step.axes = spec.axes(pixels)
    return module(pixels, step)


@pytest.mark.parametrize(("family", "name"), [(f, n) for f in ("embed", "position_embedding") for n in registry.names(f)])
def test_tensors_are_those_the_spec_names(family: str, name: str) -> None:
    spec = registry.get(family, name).small()
    assert not check(spec, M)
    assert {n: t.shape for n, t in spec.tensors(M).items()} == {n: t.shape for n, t in spec.build(M).state_dict().items()}


# ---- positions ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
@torch.no_grad()
def test_positions_follow_the_step_and_not_the_column(name: str) -> None:
    module, x = registry.get("position_embedding", name).small().build(M), draw(1, 5, M)
    got = module(x, Step.of(torch.tensor([[-1, -1, 3, 4, 9]])))
    for column, at in ((2, 3), (3, 4), (4, 9)):
        torch.testing.assert_close(got[:, column : column + 1], module(x[:, column : column + 1], Step.plain(at, 1, 1)))
    assert torch.isfinite(got).all()


@torch.no_grad()
def test_learned_equals_opt() -> None:
    theirs, ours, x = randomise(OPTLearnedPositionalEmbedding(12, M)), added("learned", count=12, offset=2), draw(2, 7, M)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x, Step.plain(4, 2, 7)), x + theirs(torch.ones(2, 7), position_ids=torch.arange(4, 11)[None]))


@pytest.mark.parametrize("step", [Step.plain(6, 2, 7), Step.of(torch.tensor([[-1] * 6 + [12]] * 2))], ids=["plain", "padded"])
def test_positions_that_were_not_learned_are_an_error(step: Step) -> None:
    with pytest.raises(ValueError, match=r"learned positions 0\.\.11, the call reaches 12"):
        added("learned", count=12)(draw(2, 7, M), step)


def test_sinusoidal_equals_the_paper() -> None:
    table = added("sinusoidal").table(torch.arange(50))
    for at in (0, 1, 49):
        for i in range(M // 2):
            angle = torch.tensor(at / 10_000 ** (2 * i / M), dtype=torch.float64)
            torch.testing.assert_close(table[at, 2 * i : 2 * i + 2].double(), torch.stack([angle.sin(), angle.cos()]), atol=1e-5, rtol=0)


def test_sinusoidal_equals_marian_and_whisper() -> None:
    marian = MarianSinusoidalPositionalEmbedding(20, M)
    marian.weight.data.copy_(marian.create_weight())
    at = torch.arange(20)
    torch.testing.assert_close(added("sinusoidal", layout="half").table(at), marian.weight.data, atol=1e-5, rtol=0)
    torch.testing.assert_close(added("sinusoidal", layout="half", closed=True).table(at), sinusoids(20, M), atol=1e-5, rtol=0)


def test_sinusoidal_grid_equals_transformers_and_mae() -> None:
    """transformers has the row first; the authors' code, the default here, the column: the same with rows and columns exchanged."""
    places, module = torch.cartesian_prod(torch.arange(3), torch.arange(5)), added("sinusoidal_grid")
    want = build_2d_sinusoidal_position_embedding(3, 5, M)
    torch.testing.assert_close(added("sinusoidal_grid", axes=[0, 1]).table(places), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(module.table(places.flip(-1)), want, atol=1e-5, rtol=0)


def test_tokens_without_a_place_are_left_as_they_are() -> None:
    module = added("sinusoidal_grid")
    step = Step.of(torch.arange(2)[None], axes=torch.tensor([[[-1, -1], [2, 4]]]))
    x = draw(1, 2, M)
    torch.testing.assert_close(module(x, step) - x, torch.stack([torch.zeros(M), module.table(torch.tensor([2, 4]))])[None])


# ---- tokens and segments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_scale_is_rounded_to_the_weights_type_as_in_gemma(dtype: torch.dtype) -> None:
    """sqrt(1152) is 33.94; in bf16 it is 34 (transformers 29402)."""
    theirs = GemmaTextScaledWordEmbedding(50, M, None, embed_scale=1152**0.5).to(dtype)
    ours = embedding("tokens", vocab=50, scale=1152**0.5).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(ids(), Step.plain(0, 2, 7)), theirs(ids()))


@torch.no_grad()
def test_segments_equal_bert() -> None:
    config = hf.BertConfig(vocab_size=50, hidden_size=M, max_position_embeddings=12, type_vocab_size=3, layer_norm_eps=1e-5)
    theirs, x = randomise(BertEmbeddings(config)).eval(), ids()
    ours = embedding("segments", vocab=50, segments=3, position={"name": "learned", "count": 12})
    names = {"word_embeddings.weight": "weight", "token_type_embeddings.weight": "segment", "position_embeddings.weight": "position.weight",
             "LayerNorm.weight": "norm.weight", "LayerNorm.bias": "norm.bias"}  # fmt: skip
    ours.load_state_dict({names[n]: t for n, t in theirs.state_dict().items() if n in names})
    kinds = torch.tensor([0, 0, 1, 1, 2, 2, 0]).expand(2, 7)
    torch.testing.assert_close(ours(x, Step.plain(0, 2, 7)), theirs(x))
    torch.testing.assert_close(ours(torch.stack([x, kinds], -1), Step.plain(0, 2, 7)), theirs(x, token_type_ids=kinds))


@pytest.mark.parametrize(("inputs", "wrong"), [
    (torch.zeros(2, 7), r"\[batch, tokens\] int64, got \[2, 7\] torch.float32"),
    (torch.full((2, 7), 50), r"ids must lie in 0\.\.49"),
    (torch.full((2, 7, 2), 3), r"segments must lie in 0\.\.1, got 3"),
    (torch.zeros(2, 7, 3, dtype=torch.long), r"\[batch, tokens, 2\]"),
])  # fmt: skip
def test_wrong_ids_are_named(inputs: Tensor, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        registry.get("embed", "segments").small().size(inputs)  # pyright: ignore[reportAttributeAccessIssue]


# ---- patches -----------------------------------------------------------------------------------------------------------------

IMAGE = {"image_size": 16, "patch_size": 4, "hidden_size": M}
GRID = {"name": "learned_grid", "rows": 4, "columns": 4}


def copy_patches(ours: Any, theirs: nn.Module, *prefix: str) -> None:
    given = theirs.state_dict()
    ours.load_state_dict({
        "prefix": torch.cat([given[n][0] for n in prefix]),
        "linear.weight": given["patch_embeddings.projection.weight"].flatten(1),
        "linear.bias": given["patch_embeddings.projection.bias"],
        "position.weight": given["position_embeddings"][0],
    })  # fmt: skip


@pytest.mark.parametrize("size", [(16, 16), (24, 12), (8, 32), (8, 8)], ids=str)
@torch.no_grad()
def test_patches_equal_vit_at_any_size(size: tuple[int, int]) -> None:
    """(8, 32) has as many patches as the grid that was learned, in another shape."""
    theirs, pixels = randomise(ViTEmbeddings(hf.ViTConfig(**IMAGE))).eval(), draw(2, 3, *size)
    ours = embedding("patches", patch=4, position=GRID)
    copy_patches(ours, theirs, "cls_token")
    torch.testing.assert_close(embed_image(ours, pixels), theirs(pixels, interpolate_pos_encoding=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(16, 16), (24, 12), (8, 8)], ids=str)
@torch.no_grad()
def test_patches_equal_dinov2_with_registers(size: tuple[int, int]) -> None:
    config = hf.Dinov2WithRegistersConfig(**IMAGE, num_register_tokens=3)
    theirs, pixels = randomise(Dinov2WithRegistersEmbeddings(config)).eval(), draw(2, 3, *size)
    ours = embedding("patches", patch=4, registers=3, position={**GRID, "antialias": True})
    copy_patches(ours, theirs, "cls_token", "register_tokens")
    torch.testing.assert_close(embed_image(ours, pixels), theirs(pixels), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("options", "before"), [({"class_token": False}, 0), ({}, 1), ({"registers": 1}, 2)], ids=str)
@torch.no_grad()
def test_only_the_grid_is_resampled(options: dict[str, Any], before: int) -> None:
    """With 0, 1 and 2 tokens before it, of which those with a learned vector keep it (pytorch-image-models 1365)."""
    ours = embedding("patches", patch=4, position={**GRID, "prefix": before}, **options)
    ours.linear.weight.zero_()
    small, large = embed_image(ours, draw(1, 3, 16, 16)), embed_image(ours, draw(1, 3, 32, 32))
    assert torch.equal(small[:, :before], large[:, :before])
    assert large.shape == (1, before + 64, M)
    assert (small[0, before] - large[0, before]).abs().max() > 1e-3


@torch.no_grad()
def test_what_is_left_after_the_last_patch_is_not_seen() -> None:
    module = embedding("patches", patch=4, class_token=False)
    pixels = draw(2, 3, 11, 14)
    weight = module.linear.weight.view(M, 3, 4, 4)
    want = nn.functional.conv2d(pixels, weight, module.linear.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embed_image(module, pixels), want)


def test_coordinates_of_patches() -> None:
    spec: Any = load(Embed, {"name": "patches", "patch": 4, "registers": 1})
    assert spec.axes(draw(2, 3, 8, 12))[1].tolist() == [[-1, -1], [-1, -1], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


@pytest.mark.parametrize(("pixels", "wrong"), [
    (torch.zeros(2, 3, 16, 3), "at least the patch size 4, got 16 x 3"),
    (torch.zeros(2, 1, 16, 16), r"pixels \[batch, 3, height, width\], got \[2, 1, 16, 16\]"),
    (torch.zeros(2, 7, dtype=torch.long), r"pixels \[batch, 3, height, width\], got \[2, 7\] torch.int64"),
])  # fmt: skip
def test_wrong_pixels_are_named(pixels: Tensor, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        registry.get("embed", "patches").small().size(pixels)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("position", [{"name": "rope_axial"}, {"name": "rope_mixed"}], ids=str)
@torch.no_grad()
def test_a_model_of_images_turns_by_row_and_column(position: dict[str, Any]) -> None:
    """Patches of one content everywhere: without coordinates all of them would come out alike."""
    mixer = {"projection": {"name": "gqa", "heads": 4, "kv_heads": 4, "head_dim": 8}, "position": position, "pattern": "full"}
    layers = [{"repeat": 2, "mixer": mixer, "mlp": {"name": "plain", "hidden": 24}}]
    data = {
        "width": M,
        "context": 64,
        "embed": {"name": "patches", "patch": 4},
        "layers": layers,
        "head": {"name": "classification", "labels": 3},
    }
    model = randomise(load(ModelSpec, data).build()).eval()
    assert model(draw(2, 3, 8, 12)).shape == (2, 3)
    pixels = draw(1, 3, 4, 4).repeat(1, 1, 2, 3)
    hidden = model.hidden(pixels, model.step(pixels), model.spec.cache.without())
    assert torch.pdist(hidden[0, 1:]).min() > 1e-4
