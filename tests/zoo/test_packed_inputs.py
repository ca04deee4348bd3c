"""Packed documents and coordinates as arguments of a call: results, and mistakes before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.components.spec import load, override
from zoo.inputs import restarting
from zoo.model import Model, ModelSpec

GQA = {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8}
PACKED = {"name": "all_of", "patterns": ["causal", "document"]}
MROPE = {"name": "mrope", "sections": [2, 1, 1]}


def spec(position: Any = "rope", pattern: Any = PACKED, kernel: str = "sdpa", embed: Any = None) -> ModelSpec:
    mixer = {"projection": GQA, "position": position, "pattern": pattern, "kernel": kernel}
    layer = {"mixer": mixer, "mlp": {"name": "gated", "hidden": 24}}
    embed = embed or {"name": "tokens", "vocab": 50}
    return load(ModelSpec, {"width": 32, "context": 64, "embed": embed, "layers": [layer] * 2, "head": "lm"})


def build(wanted: ModelSpec) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return wanted.build().double().eval()


def ids(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(1))


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [7] * 2 + [3] * 8 + [-1] * 2])


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flash_v2"])
@pytest.mark.parametrize("position", ["rope", "alibi"])
@torch.no_grad()
def test_packed_documents_equal_each_document_alone(kernel: str, position: str) -> None:
    model, x = build(spec(position, kernel=kernel)), ids()
    got = model(x, documents=DOCUMENTS)
    for row in range(2):
        for document in DOCUMENTS[row].unique():
            here = DOCUMENTS[row] == document
            if document >= 0:
                torch.testing.assert_close(got[row, here], model(x[row, here][None])[0])
    assert torch.isfinite(got).all()


@torch.no_grad()
def test_learned_positions_start_anew_in_each_document() -> None:
    model = build(spec("none", embed={"name": "tokens", "vocab": 50, "position": {"name": "learned", "count": 12}}))
    got = model(ids(), documents=DOCUMENTS)
    torch.testing.assert_close(got[0, 5:9], model(ids()[:1, 5:9])[0])


@torch.no_grad()
def test_positions_that_are_given_are_kept() -> None:
    """rope sees distances only, so documents may as well run on; a learned table tells the difference."""
    model, running = build(spec()), torch.arange(12).expand(2, -1)
    torch.testing.assert_close(model(ids(), documents=DOCUMENTS, positions=running)[0], model(ids(), documents=DOCUMENTS)[0])
    assert torch.equal(model.step(ids(), positions=running, documents=DOCUMENTS).pos, running)


def test_positions_count_each_document_s_tokens_wherever_they_stand() -> None:
    documents = torch.tensor([[4, 4, 0, 0, 0, 4, -1, 9], [-1, -1, 0, 0, 0, 0, 0, 0]])
    assert restarting(documents).tolist() == [[0, 1, 0, 1, 2, 2, -1, 0], [-1, -1, 0, 1, 2, 3, 4, 5]]
    assert restarting(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)


@torch.no_grad()
def test_one_document_is_a_row_as_it_is() -> None:
    model = build(spec())
    torch.testing.assert_close(model(ids(), documents=torch.zeros(2, 12, dtype=torch.int32)), model(ids()))


@torch.no_grad()
def test_gradients_do_not_cross_documents() -> None:
    model = build(spec()).requires_grad_(True)
    with torch.enable_grad():
        model(ids(), documents=DOCUMENTS)[0, 5:9].sum().backward()
    weight: Any = model.embed.weight
    touched = set(weight.grad.abs().sum(1).nonzero().flatten().tolist())
    assert touched == set(ids()[0, 5:9].tolist())


@torch.no_grad()
def test_axes_turn_each_pair_by_its_coordinate() -> None:
    model, x = build(spec(MROPE, "causal")), ids(1)
    place = torch.arange(12)
    same = place.expand(3, -1).T[None]
    torch.testing.assert_close(model(x, axes=same), model(x))  # text: every coordinate is the position
    image = torch.stack([torch.full((12,), 4), 4 + place // 4, 4 + place % 4], -1)[None]
    got = model(x, axes=image)
    assert not torch.allclose(got, model(x))
    torch.testing.assert_close(model(x, axes=image + 7), got)  # only differences count, in each coordinate
    assert not torch.allclose(model(x, axes=image + torch.tensor([0, 0, 1]) * place[:, None]), got)


@torch.no_grad()
def test_axes_are_read_by_wrapped_and_axial_positions() -> None:
    image = torch.stack([torch.arange(12) // 4, torch.arange(12) % 4], -1).expand(2, -1, -1)
    for position in ("rope_axial", {"name": "temperature", "floor": 4, "inner": "rope_axial"}):
        model = build(spec(position, "full"))
        assert not torch.allclose(model(ids(), axes=image), model(ids()))


@torch.no_grad()
def test_axes_with_a_cache_and_with_documents() -> None:
    model, x = build(spec(MROPE, "causal")), ids(1)
    image = torch.stack([torch.arange(12) // 6, torch.arange(12) % 5, torch.arange(12) % 3], -1)[None]
    cache = model.new_cache(1)
    parts = [model(x[:, a:b], axes=image[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), model(x, axes=image))
    packed = build(spec(MROPE))
    got = packed(x, axes=image, documents=DOCUMENTS[:1])
    torch.testing.assert_close(got[:, 5:9], packed(x[:, 5:9], axes=image[:, 5:9]))


CAUSAL = spec(pattern="causal")
PREFIXED = spec(pattern={"name": "any_of", "patterns": ["causal", "document"]})
PATCHES = override(spec("rope_axial", "full"), "embed={name: patches, patch: 4}", "head={name: classification, labels: 2}")


@pytest.mark.parametrize(
    ("wanted", "given", "message"),
    [
        (spec(), {"documents": DOCUMENTS[:1]}, r"documents \[1, 12\] must be \[2, 12\]"),
        (spec(), {"documents": DOCUMENTS.float()}, "documents must be whole numbers"),
        (spec(), {"documents": DOCUMENTS - 1}, "documents are numbered from 0, -1 is padding; the lowest is -2"),
        (spec(), {"documents": DOCUMENTS.to("meta")}, "documents are on meta, the ids on cpu"),
        (spec(), {"documents": DOCUMENTS, "lengths": [12, 10]}, "give lengths or documents, not both"),
        (CAUSAL, {"documents": DOCUMENTS}, r"mixed by layer 0, whose pattern causal .* use layers.0.mixer.pattern=\{name: all_of"),
        (PREFIXED, {"documents": DOCUMENTS}, "mixed by layer 0, whose pattern any_of does not keep them apart"),
        (spec(), {"axes": torch.zeros(2, 12, 3).long()}, "position rope turns by the position alone"),
        (spec(MROPE), {"axes": torch.zeros(2, 12, 2).long()}, r"axes must be \[batch, tokens, 3\], .* got \[2, 12, 2\]"),
        (spec(MROPE), {"axes": torch.zeros(2, 11, 3).long()}, r"axes \[2, 11, 3\] must be \[2, 12, 3\]"),
        (spec(MROPE), {"axes": torch.zeros(2, 12, 3)}, "axes must be whole numbers"),
    ],
)
def test_mistakes_are_named_before_any_work(wanted: ModelSpec, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(wanted).step(ids(), **given)
    with pytest.raises(ValueError, match=message):
        build(wanted)(ids(), **given)


@pytest.mark.parametrize("pattern", [{"name": "window", "size": 3}, {"name": "any_of", "patterns": ["causal", "document"]}])
def test_the_way_out_leads_out(pattern: Any) -> None:
    """What the error names can be pasted, and then documents are apart."""
    wanted = spec(pattern=pattern)
    with pytest.raises(ValueError, match="documents would be mixed") as e:
        build(wanted)(ids(), documents=DOCUMENTS)
    edit = str(e.value).partition("use layers.0")[2]
    model, x = build(override(wanted, f"layers.*{edit}")), ids()
    torch.testing.assert_close(model(x, documents=DOCUMENTS)[0, 5:9], model(x[:1, 5:9])[0])


def test_caches_keep_one_document_a_row() -> None:
    model = build(spec())
    cache = model.new_cache(2)
    with pytest.raises(ValueError, match="a cache keeps one document a row"):
        model(ids(), documents=DOCUMENTS, cache=cache)
    assert cache.length == [0, 0]


def test_images_know_their_coordinates() -> None:
    with pytest.raises(ValueError, match="embed patches knows the coordinates of its tokens"):
        build(PATCHES)(torch.zeros(1, 3, 8, 8).double(), axes=torch.zeros(1, 5, 2).long())
