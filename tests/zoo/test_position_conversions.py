"""Models with learned positions: positions and grids resized, and a plain MLP upcycled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.zoo.oracle import randomize, relative_error
from tests.zoo.test_conversions import EXACT, GQA, ids
from zoo.components.position_embedding.learned_grid import resample
from zoo.components.spec import load
from zoo.conversion import ConversionError, convert
from zoo.model import ModelSpec


def positioned(count: int = 12, offset: int = 2) -> Any:
    embed = {"name": "tokens", "vocab": 50, "position": {"name": "learned", "count": count, "offset": offset}}
    layer = {"mixer": {"projection": GQA}, "mlp": {"name": "plain", "hidden": 48}}
    data = {"width": 32, "context": count, "embed": embed, "layers": [layer] * 2, "head": "lm"}
    return randomize(load(ModelSpec, data).build())


@torch.no_grad()
def test_positions_are_interpolated_between_the_first_and_the_last() -> None:
    model = positioned()
    old = model.embed.position.weight
    new, report = convert(model, "embed.position={name: learned, count: 23}")
    table = new.embed.position.weight
    torch.testing.assert_close(table[2::2], old[2:])
    torch.testing.assert_close(table[3::2], (old[2:-1] + old[3:]) / 2)
    assert torch.equal(table[:2], old[:2])
    assert (new.spec.context, new(ids()[:, :23]).shape[1]) == (23, 23)
    [row] = report.rows
    want = float((table[2:14] - old[2:]).norm() / old[2:].norm())
    assert (row.where, row.exact, row.weight_error) == ("embed", False, pytest.approx(want))
    assert row.lost == "positions from 0 on are 0.5 trained steps apart"


@torch.no_grad()
def test_kept_positions_change_nothing_until_they_end() -> None:
    model = positioned()
    new, report = convert(model, {"name": "learned", "count": 20, "keep": 6})
    assert torch.equal(new(ids()[:, :6]), model(ids()[:, :6]))
    assert not torch.equal(new(ids()[:, :8]), model(ids()[:, :8]))
    assert not report.exact
    cut, report = convert(model, {"name": "learned", "count": 8, "keep": 8})
    assert torch.equal(cut(ids()[:, :8]), model(ids()[:, :8]))
    assert report.exact
    assert report.lost == ["texts of more than 8 tokens no longer fit"]
    same, report = convert(model, {"name": "learned", "count": 12})
    assert torch.equal(same(ids()[:, :12]), model(ids()[:, :12]))
    assert report.exact


@pytest.mark.parametrize(("fields", "message"), [
    ({"count": 0}, "embed: count: must be at least 1"),
    ({"count": 20, "keep": 12}, r"embed: keep: must lie in 0..11 for 20 positions out of 12"),
    ({"count": 8, "keep": 9}, r"keep: must lie in 0..8"),
])  # fmt: skip
def test_positions_that_cannot_be(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        convert(positioned(), {"name": "learned", **fields})


@torch.no_grad()
@pytest.mark.parametrize("antialias", [False, True])
def test_a_resampled_grid_is_exact_for_images_of_its_size(antialias: bool) -> None:
    grid = {"name": "learned_grid", "rows": 4, "columns": 4, "prefix": 1, "antialias": antialias}
    layer = {"mixer": {"projection": GQA, "pattern": "full"}, "mlp": {"name": "plain", "hidden": 48}}
    data = {"width": 32, "context": 17, "embed": {"name": "patches", "patch": 2, "channels": 1, "position": grid}, "layers": [layer],
            "head": {"name": "classification", "labels": 5}}  # fmt: skip
    model = randomize(load(ModelSpec, data).build())
    new, report = convert(model, {"name": "learned_grid", "rows": 3, "columns": 6})
    images = {size: torch.randn(2, 1, *size, generator=torch.Generator().manual_seed(0)) for size in ((6, 12), (8, 8))}
    assert torch.equal(new(images[6, 12]), model(images[6, 12]))
    assert relative_error(new(images[8, 8]), model(images[8, 8])) > EXACT
    assert not report.exact
    assert 0 < report.weight_error < 1
    assert report.lost == ["images of other than 3 x 6 patches see positions that were resampled twice"]
    same, report = convert(model, {"name": "learned_grid", "rows": 4, "columns": 4})
    assert report.exact
    assert torch.equal(same(images[8, 8]), model(images[8, 8]))


@torch.no_grad()
def test_a_resampled_grid_is_that_of_timm_and_transformers() -> None:
    """transformers' ViT interpolates a [1, M, rows, columns] view bicubically without aligned corners; timm smooths as well."""
    table = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    view = table.reshape(1, 3, 4, 5).permute(0, 3, 1, 2)
    for antialias in (False, True):
        want = F.interpolate(view, (2, 6), mode="bicubic", align_corners=False, antialias=antialias).permute(0, 2, 3, 1).reshape(12, 5)
        torch.testing.assert_close(resample(table, (3, 4), (2, 6), antialias), want)


@torch.no_grad()
def test_a_part_without_a_gate_is_upcycled() -> None:
    model = positioned()
    new, report = convert(model, "moe")
    assert report.exact
    assert relative_error(new(ids()[:, :12]), model(ids()[:, :12])) < EXACT
