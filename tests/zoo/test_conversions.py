"""Conversions: exact ones give the same logits, others the error that they report, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.zoo.oracle import randomize, relative_error
from zoo.components import registry
from zoo.components.contracts import Norm
from zoo.components.spec import SpecError, TensorInfo, load, override, read_value
from zoo.conversion import ConversionError, Report, Row, convert, plan, read
from zoo.conversions.gqa_to_gqa import check_norm
from zoo.conversions.gqa_to_latent import BY_FREQUENCY, factor
from zoo.conversions.rope_to_rope import RopeLayout
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


NORMS = ["rms", "layer", "dynamic_tanh", "batch", "identity", "{name: group, size: 8}"]
SPLIT = ["{name: group, size: 4}"]
INTERLEAVED = {"name": "rope", "layout": "interleaved"}


def normed(norm: str, at: str, kv_heads: int = 2) -> Any:
    model = build(GQA | {"kv_heads": kv_heads}, f"layers.*.mixer.projection.qk_norm={norm}", f"layers.*.mixer.projection.qk_norm_at={at}")
    for name, buffer in model.named_buffers():
        buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5)
    return model


@pytest.mark.parametrize("to", [INTERLEAVED, "gqa"], ids=str)
@pytest.mark.parametrize("at", ["head", "flat", "rotated"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_queries_and_keys_go_along(norm: str, at: str, to: Any) -> None:
    error, report, _ = changed(normed(norm, at), to)
    assert report.exact
    assert error < EXACT


def test_every_norm_is_among_them() -> None:
    assert {load(Norm, read_value(norm)).name for norm in NORMS} == set(registry.names("norm"))


@pytest.mark.parametrize("at", ["head", "flat", "rotated"])
@pytest.mark.parametrize("norm", SPLIT)
def test_norms_that_would_take_statistics_of_other_channels_are_refused(norm: str, at: str) -> None:
    with pytest.raises(ConversionError, match=r"layers\.0: the q/k norm group takes statistics of \d channels each"):
        plan(normed(norm, at).spec, INTERLEAVED)
    error, report, _ = changed(normed(norm, at), "gqa")  # heads are repeated whole, so runs within a head stay as they are
    assert report.exact
    assert error < EXACT
    error, report, _ = changed(normed(norm, at), {"name": "rope", "layout": "half"})  # nothing moves
    assert (error, report.exact) == (0, True)


@pytest.mark.parametrize(("norm", "kv_heads", "to"), [
    ("{name: group, groups: 4}", 2, 4),  # half a head each before, a whole one then
    ("{name: group, size: 16}", 2, 4),  # both heads before, copies of one then
    ("{name: group, size: 16}", 4, 2),
])  # fmt: skip
def test_norms_that_would_take_statistics_of_other_heads_are_refused(norm: str, kv_heads: int, to: int) -> None:
    with pytest.raises(ConversionError, match=f"kv_heads: with {to} the q/k norm group would take the statistics of other"):
        plan(normed(norm, "flat", kv_heads).spec, {"name": "gqa", "kv_heads": to})


def test_norms_with_tensors_that_cannot_be_regrouped_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Whitening(Norm):
        name = "whitening"

        def own_tensors(self, width: int) -> dict[str, TensorInfo]:
            return {"matrix": TensorInfo((width, width))}

    mixer: Any = normed("rms", "flat").spec.layers[0].mixer
    projection = replace(mixer.projection, qk_norm=Whitening())
    with pytest.raises(ConversionError, match="kv_heads: matrix of the q/k norm whitening goes with the width"):
        check_norm(projection, 4)
    with pytest.raises(ConversionError, match="matrix of the q/k norm whitening has more than one entry"):
        RopeLayout(layout="interleaved").check_norms(projection, mixer.position)


def test_a_norm_of_runs_that_grow_with_the_heads_is_exact() -> None:
    error, report, _ = changed(normed("{name: group, groups: 2}", "flat"), "gqa")
    assert report.exact
    assert error < EXACT


@torch.no_grad()
@pytest.mark.parametrize("norm", [*NORMS, *SPLIT, "{name: group, groups: 1}"])
def test_norms_say_which_channels_share_statistics(norm: str) -> None:
    """Channels of a run change places with their entries, and the outputs do with them."""
    module, spec = load(Norm, read_value(norm)).build(8).eval(), load(Norm, read_value(norm))
    tensors = {n: torch.rand(t.shape) + 0.5 for n, t in module.state_dict().items()}
    place = torch.arange(8).unflatten(0, (-1, spec.together(8))).flip(1).flatten()
    x = torch.randn(5, 8)
    module.load_state_dict(tensors)
    want = module(x)[:, place]
    module.load_state_dict({n: t[place] if len(t) == 8 else t for n, t in tensors.items()})
    torch.testing.assert_close(module(x[:, place]), want)


@pytest.mark.parametrize("name", BY_FREQUENCY)
def test_frequencies_of_fewer_channels_are_the_leading_ones(name: str) -> None:
    scaling: Any = registry.get("rope_scaling", name).small()
    torch.testing.assert_close(scaling.frequencies(1e4**0.5, 32, None), scaling.frequencies(1e4, 64, None)[:16])


def test_biases_of_nothing_have_no_error() -> None:
    model = build(GQA | {"bias": True})
    for layer in model.layers:
        layer.mixer.projection.k.bias.data.zero_()
    _, report, _ = changed(model, "mqa")
    assert 0 < report.weight_error < 1


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
        (
            GQA,
            [],
            {"name": "learned", "count": 9},
            "converts to 'learned'; the model has gated, gqa, rope.*: gated to moe, gqa to gqa, gqa to",
        ),
        (GQA, [], "layers.2.mixer.projection=mha", r"nothing at layers\.2\.mixer\.projection converts to 'gqa'"),
        (GQA, ["layers.1.mixer.projection.bias=true"], "mla", r"^layers\.1: latent has no bias on queries"),
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
        (
            GQA,
            ["layers.*.mixer.position.scaling={name: yarn, factor: 4, context: 16}"],
            {"name": "latent", "rope": 4},
            "scaling yarn change with their number; keep all",
        ),
        (GQA, [], {"name": "latent", "rope": 3}, "must be even"),
        (MLA | {"latent_norm": "rms"}, [], "gqa", "the latent norm rms acts on activations"),
        (GQA, [], {"name": "moe", "experts": 2, "k": 3}, r"k: must lie in 1..2"),
    ],
)
def test_refusals(projection: Any, edits: list[str], to: Any, reason: str) -> None:
    with pytest.raises(ConversionError, match=reason):
        convert(build(projection, *edits), to)


@pytest.mark.parametrize(("to", "message"), [
    ({"name": "latent", "ranks": 3}, r"to\.ranks: conversion gqa_to_latent has no such field; did you mean 'rank'"),
    ("latant", "nothing converts to 'latant'; did you mean 'latent'.*there are .*mha, mla, moe, mqa"),
    ("{name: mqa, kv_heads: 2}", r"to\.kv_heads: mqa says it already; write 'gqa' to choose it"),
    ("{name: mla", "not YAML"),
    ("64", "expected a name"),
    ("layers.*.mlp={experts: 2}", "nothing converts to ''"),
    ("{name: mla, rank: many}", r"to\.rank: .*many"),
])  # fmt: skip
def test_what_is_no_conversion_is_said_before_any_work(to: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read(to)


def test_short_names_say_what_people_call_it() -> None:
    model = build()
    for short, long in (("mha", "gqa"), ("mqa", {"name": "gqa", "kv_heads": 1}), ("{name: mla, rank: 8}", {"name": "latent", "rank": 8})):
        assert plan(model.spec, short) == plan(model.spec, long)
    assert plan(model.spec, "interleaved").spec.layers[0].mixer.position.layout == "interleaved"


@pytest.mark.parametrize(("where", "layers"), [("layers.1", [1]), ("layers.-1", [1]), ("layers.0:1", [0]), ("layers.*", [0, 1]),
                                               ("layers.[0,1]", [0, 1])])  # fmt: skip
def test_an_edit_says_where(where: str, layers: list[int]) -> None:
    error, report, new = changed(build(), f"{where}.mixer.projection={{name: gqa, kv_heads: 1}}")
    assert [row.where for row in report.rows] == [f"layers.{i}" for i in layers]
    assert [i for i, layer in enumerate(new.spec.layers) if layer.mixer.projection.kv_heads == 1] == layers
    assert error > EXACT


def test_the_report_has_a_row_for_each_kind() -> None:
    rows = [Row(f"layers.{i}", "gqa_to_gqa", False, 0.1 * i, "") for i in range(3)]
    kinds = Report([*rows, Row("layers.3", "gqa_to_gqa", True, 0.0, "")]).kinds()
    assert [(k.where, k.exact, k.weight_error) for k in kinds] == [("layers.0:3", False, 0.2), ("layers.3", True, 0.0)]


def test_every_conversion_says_where_it_leads() -> None:
    for part in registry.parts("conversion"):
        start, _, end = part.name.partition("_to_")
        assert part.source
        for word in (start, end):
            assert any(word in registry.names(family) for family in ("projection", "position", "mlp", "position_embedding")), part.name


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


@torch.no_grad()
@pytest.mark.parametrize("to", ["mha", "{name: mla, rank: 8}", "interleaved", "moe"])
def test_packed_models_are_converted(to: str) -> None:
    """Parts that stay keep their storage; those that change become dense. Both models go on working."""
    model = build(GQA)
    quantize(model, "rtn", bits=8, group_size=16, progress=False)
    error, report, new = changed(model, to)
    assert new.spec.layers[0].mixer.projection.o.name == "packed_int"
    assert (error < EXACT) == report.exact


@pytest.mark.slow
def test_what_conversions_cost_on_real_weights(shared_data: Path) -> None:
    """Perplexity stays where a conversion is exact, rises as rank falls, and calibration saves some of it."""
    from zoo.eval import perplexity

    model = zoo.load(shared_data / "weights/stories260K", dtype="float32")
    text = (shared_data / "text/wikitext-2-raw-test.txt").read_text()[:12_000]
    x = torch.tensor(model.tokenizer.encode(text[6000:]))[:1024].view(4, 256)

    def figure(to: Any, calibration: Tensor | None = None) -> float:
        return perplexity(convert(model, to, ids=calibration)[0], text[:4000], context=256, limit=4).value

    before = perplexity(model, text[:4000], context=256, limit=4).value
    for to in ("mha", "mla", "moe", "interleaved"):
        assert figure(to) == pytest.approx(before, rel=1e-4)
    ranks = [figure({"name": "mla", "rank": rank}) for rank in (24, 16, 8)]
    assert before < ranks[0] < ranks[1] < ranks[2]
    assert figure({"name": "mla", "rank": 16}, x) < ranks[1]
    assert figure("mqa") > before


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
