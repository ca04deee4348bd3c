"""Conversions: exact ones give the same logits, others the error that they report, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.zoo.oracle import randomize, relative_error
from zoo.components import registry
from zoo.components.spec import SpecError, load, override
from zoo.conversion import ConversionError, Report, convert
from zoo.conversions.gqa_to_latent import factor
from zoo.model import ModelSpec
from zoo.quantize import quantize
from zoo.saving import save

EXACT = 1e-5
GQA = {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8}
MLA = {"name": "latent", "heads": 4, "nope": 6, "rope": 4, "value": 12, "rank": 16, "latent_norm": "identity"}


def build(projection: Any = GQA, *edits: str) -> Any:
    layer = {"mixer": {"projection": projection, "position": "rope"}, "mlp": {"name": "gated", "hidden": 48}}
    spec = load(ModelSpec, {"width": 32, "context": 64, "embed": {"name": "tokens", "vocab": 50}, "layers": [layer] * 2, "head": "lm"})
    return randomize(override(spec, *edits).build())


def ids(seed: int = 1) -> Tensor:
    return torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def changed(model: Any, to: Any, **options: Any) -> tuple[float, Report, Any]:
    """Relative change of the logits, with a cache too, and that the old model stays as it is."""
    before = model(ids())
    new, report = convert(model, to, **options)
    assert torch.equal(model(ids()), before)
    after, cache = new(ids()), new.new_cache(2)
    cached = torch.cat([new(ids()[:, :30], cache=cache), *(new(ids()[:, i : i + 1], cache=cache) for i in range(30, 40))], 1)
    assert relative_error(cached, after) < EXACT
    return relative_error(after, before), report, new


FLAT = "layers.*.mixer.projection={name: gqa, heads: 4, kv_heads: 2, head_dim: 8, bias: true, qk_norm: rms, qk_norm_at: flat}"
NORMED = FLAT.replace("flat", "head")
PARTIAL = "layers.*.mixer.position.width=4"
PAIRED = "layers.*.mixer.position.layout=interleaved"
LLAMA3 = "layers.*.mixer.position.scaling={name: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, context: 16}"


@pytest.mark.parametrize(
    ("edits", "to"),
    [
        ([], "gqa"),
        ([FLAT], "gqa"),
        ([NORMED], {"name": "gqa", "kv_heads": 4}),
        ([], "latent"),
        ([PARTIAL], "latent"),
        ([PAIRED], "latent"),
        ([LLAMA3], "latent"),
        (["layers.*.mixer.position=none"], "latent"),
        (["layers.*.mixer.projection.kv_heads=1"], "latent"),
        (["layers.*.mixer.projection.kv_heads=4", "layers.*.mixer.projection.out_bias=true"], "latent"),
        ([], {"name": "rope", "layout": "interleaved"}),
        ([PAIRED, PARTIAL], {"name": "rope", "layout": "half"}),
        ([NORMED], {"name": "rope", "layout": "interleaved"}),
        ([FLAT], {"name": "rope", "layout": "interleaved"}),
        ([], "moe"),
        (["layers.*.mlp.bias=true"], {"name": "moe", "experts": 5, "k": 3}),
    ],
    ids=str,
)
def test_exact_conversions(edits: list[str], to: Any) -> None:
    error, report, _ = changed(build(GQA, *edits), to)
    assert report.exact
    assert report.weight_error == 0
    assert "exact" in str(report)
    assert error < EXACT


@pytest.mark.parametrize(
    ("projection", "edits"), [(MLA, []), (MLA | {"q_rank": 20}, []), (MLA | {"value": 8}, []), (MLA, ["layers.*.mixer.position.width=2"])]
)
def test_latent_without_a_norm_multiplies_out(projection: Any, edits: list[str]) -> None:
    for to in ("gqa", {"name": "rope", "layout": "interleaved"}):
        error, report, _ = changed(build(projection, *edits), to)
        assert report.exact
        assert error < EXACT


def test_there_and_back() -> None:
    """MQA to latent attention and back to heads of their own; repeating heads and taking means of the copies."""
    mqa = build(GQA | {"kv_heads": 1})
    latent, _ = convert(mqa, "latent")
    error, report, heads = changed(latent, "gqa")
    assert report.exact
    assert error < EXACT
    assert relative_error(heads(ids()), mqa(ids())) < EXACT
    grouped = build()
    many, _ = convert(grouped, "gqa")
    few, report = convert(many, {"name": "gqa", "kv_heads": 2})
    assert report.weight_error < 1e-6
    assert not report.exact
    for name, tensor in grouped.state_dict().items():
        torch.testing.assert_close(few.state_dict()[name], tensor)


def test_means_report_their_error() -> None:
    error, report, new = changed(build(), {"name": "gqa", "kv_heads": 1})
    assert not report.exact
    assert 0.3 < report.weight_error < 1
    assert error > EXACT
    assert new.spec.layers[0].mixer.projection.groups == 1
    assert new.spec.cache_bytes_per_token(4) == 2 * 2 * 8 * 4


def test_a_smaller_rank_loses_more_and_calibration_loses_less() -> None:
    """On inputs that lie near a subspace, weighing by the second moment spares what is used."""
    model = build()
    model.embed.weight.data *= torch.linspace(0.02, 3, 32).square()
    plain, told = [], []
    for rank in (16, 8, 4):
        plain.append(changed(model, {"name": "latent", "rank": rank}))
        told.append(changed(model, {"name": "latent", "rank": rank}, ids=ids(2)))
    assert plain[0][1].exact
    assert [r.weight_error for _, r, _ in plain] == sorted(r.weight_error for _, r, _ in plain)
    for (error, report, _), (informed, weighed, new) in zip(plain[1:], told[1:], strict=True):
        assert not report.exact
        assert report.weight_error <= weighed.weight_error
        assert informed < error
        assert new.spec.cache_bytes_per_token(4) < model.spec.cache_bytes_per_token(4)


def test_channels_that_stop_turning_are_said() -> None:
    """Those of the lowest frequencies barely turn within a short text, so little is lost; position 0 loses nothing."""
    model = build()
    error, report, new = changed(model, {"name": "latent", "rope": 4})
    assert not report.exact
    assert report.weight_error == 0
    assert report.lost == ["4 of 8 rotated channels of a key head no longer turn"]
    assert EXACT < error < 0.6
    with torch.no_grad():
        assert relative_error(new(ids()[:, :1]), model(ids()[:, :1])) < EXACT


def test_factors_are_the_best_for_the_inputs() -> None:
    weight, root = torch.randn(12, 10, dtype=torch.float64), torch.randn(10, 10, dtype=torch.float64)
    moment = root @ root.T
    down, up = factor(weight.float(), 5, moment)
    best = torch.linalg.svdvals(weight @ root)[5:].norm()
    assert float(((up.double() @ down.double() - weight) @ root).norm() / best) == pytest.approx(1, abs=1e-4)


def test_upcycled_experts_are_copies_that_can_part() -> None:
    _, _, new = changed(build(), {"name": "moe", "experts": 3, "k": 2})
    experts = [new.get_submodule(f"layers.0.mlp.experts.{i}.up").weight for i in range(3)]
    assert torch.equal(experts[0], experts[1])
    assert len({e.data_ptr() for e in experts}) == 3
    routers = [layer.mlp.router.weight for layer in new.layers]
    assert not torch.equal(routers[0], routers[1])


@torch.no_grad()
def test_bfloat16_stays_and_the_router_does_not() -> None:
    new, _ = convert(build().bfloat16(), "moe")
    kinds = {n: t.dtype for n, t in new.state_dict().items()}
    assert {n.split(".", 2)[2] for n, kind in kinds.items() if kind == torch.float32} == {"mlp.router.weight"}
    assert torch.isfinite(new(ids())).all()


@pytest.mark.parametrize(
    ("projection", "edits", "to", "reason"),
    [
        (GQA, [], "sage", "nothing in this model converts to 'sage'.*Reachable: gated to moe, gqa to gqa, gqa to latent, rope to rope"),
        (GQA, [], {"name": "gqa", "kv_heads": 3}, "3 is neither a multiple nor a divisor of the model's 2"),
        (GQA | {"kv_heads": 4}, [], {"name": "gqa", "kv_heads": 3}, "3 is neither"),
        (GQA | {"bias": True}, [], "latent", "latent has no bias on queries"),
        (GQA | {"qk_norm": "rms"}, [], "latent", "latent has no q/k norm"),
        (GQA, ["layers.*.mixer.position={name: alibi}"], "latent", "position alibi cannot be moved"),
        (
            GQA,
            ["layers.*.mixer.position.scaling={name: dynamic_ntk, factor: 2, context: 16}"],
            {"name": "latent", "rope": 4},
            "keep all",
        ),
        (GQA, [], {"name": "latent", "rope": 3}, "must be even"),
        (MLA | {"latent_norm": "rms"}, [], "gqa", "the latent norm rms acts on activations"),
        (GQA, [], {"name": "moe", "experts": 2, "k": 3}, r"k: must lie in 1..2"),
    ],
)
def test_refusals(projection: Any, edits: list[str], to: Any, reason: str) -> None:
    with pytest.raises(ConversionError, match=reason):
        convert(build(projection, *edits), to)


def test_mistaken_fields_are_named() -> None:
    with pytest.raises(SpecError, match=r"to\.ranks: conversion gqa_to_latent has no such field; did you mean 'rank'"):
        convert(build(), {"name": "latent", "ranks": 3})


def test_every_conversion_says_where_it_leads() -> None:
    for part in registry.parts("conversion"):
        start, _, end = part.name.partition("_to_")
        assert part.source
        for word in (start, end):
            assert any(word in registry.names(family) for family in ("projection", "position", "mlp")), part.name


@pytest.mark.slow
@torch.no_grad()
def test_real_weights(shared_data: Path) -> None:
    model = zoo.load(shared_data / "weights/stories260K", dtype="float32")
    x = torch.randint(3, 500, (1, 64), generator=torch.Generator().manual_seed(0))
    want = model(x)
    for to in ("gqa", "latent", {"name": "rope", "layout": "interleaved"}, "moe"):
        new, report = convert(model, to)
        assert report.exact
        assert relative_error(new(x), want) < 1e-4


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("to", ["gqa", "latent", "moe"])
def test_converted_models_are_quantized_saved_and_loaded(shared_data: Path, tmp_path: Path, to: str) -> None:
    """Parts that the checkpoint's family does not know keep their names on disk; routers stay float32 through all of it."""
    x = torch.randint(3, 500, (4, 64), generator=torch.Generator().manual_seed(0))
    new, _ = convert(zoo.load(shared_data / "weights/stories260K", dtype="bfloat16"), to)
    quantize(new, "gptq", calibration=x, bits=8, group_size=None, progress=False)
    save(new, tmp_path / "model")
    back = zoo.load(tmp_path / "model")
    assert torch.equal(back(x), new(x))
    routers = {t.dtype for n, t in back.state_dict().items() if n.endswith("router.weight")}
    assert routers == ({torch.float32} if to == "moe" else set())
