"""Transforms in whole runs: what they do to models, what they are refused for, and what the report says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.quantize.families import family_model, tokens
from tests.quantize.models import MOE, ids, same_bits, small
from tests.zoo.oracle import llama_checkpoint
from zoo.components.linear.dense import DenseLinear
from zoo.components.spec import SpecError
from zoo.model import Model
from zoo.quantize import Report, quantize
from zoo.quantize.contracts import Channels
from zoo.quantize.transforms.awq import AWQScaling, candidate, relative
from zoo.quantize.transforms.rotation import Rotation
from zoo.quantize.transforms.smoothquant import SmoothQuant

EVERYWHERE = {"name": "smoothquant", "sources": ["norm", "value", "up"]}
TRANSFORMS: list[list[Any]] = [["smoothquant"], [EVERYWHERE], ["awq"], ["rotation"], [{"name": "rotation", "block": 32}, "awq"]]


def with_outliers(**options: Any) -> Model:
    """A model some of whose channels are 10 times as large after each norm."""
    model = small(**options)
    with torch.no_grad():
        for layer in model.layers:
            layer.mixer_norm.weight[[3, 17]] = 10
            layer.mlp_norm.weight[[5, 40]] = 10
    return model


@torch.no_grad()
def run(model: Model, method: str = "rtn", **settings: Any) -> tuple[Model, Report]:
    options: dict[str, Any] = {"group_size": 32, "calibration": ids(8, 24), "progress": False} | settings
    return model, quantize(model, method, **options)


@torch.no_grad()
def error(model: Model, reference: Model) -> float:
    x = ids(6, 24, seed=7)
    return float((model(x) - reference(x)).norm() / reference(x).norm())


@pytest.mark.parametrize("transforms", TRANSFORMS, ids=str)
def test_what_is_not_quantized_computes_the_same(transforms: list[Any]) -> None:
    """With eight bits what differs is a small rounding error, not a wrong fold."""
    before = small(bias=True, tied=False)
    model, report = run(copy.deepcopy(before), bits=8, group_size=None, transforms=transforms, rules=["layers.1.*.v=keep"])
    assert error(model, before) < 0.01
    assert report.settings["transforms"] == transforms
    assert {change.transform for change in report.changes} <= {t if isinstance(t, str) else t["name"] for t in transforms}
    assert isinstance(model.layers[1].mixer.projection.v, DenseLinear)
    model.spec.build().load_state_dict(model.state_dict())


@torch.no_grad()
def test_smoothquant_is_its_formula() -> None:
    before = with_outliers()
    seen: list[torch.Tensor] = []
    handle = before.layers[0].mixer_norm.register_forward_hook(lambda _, args, y: seen.append(y))
    before(ids(8, 24))
    handle.remove()
    projection = before.layers[0].mixer.projection
    weight = torch.cat([m.weight for m in (projection.q, projection.k, projection.v)]).abs().amax(0)
    scale = seen[0].flatten(0, 1).abs().amax(0) ** 0.7 / weight**0.3
    model, _ = run(copy.deepcopy(before), transforms=[{"name": "smoothquant", "alpha": 0.7}])
    assert torch.allclose(model.layers[0].mixer_norm.weight * scale, before.layers[0].mixer_norm.weight, rtol=1e-4)


def test_smoothquant_makes_activations_fit_eight_bits() -> None:
    before = with_outliers()
    errors = []
    for transforms in ([], ["smoothquant"]):
        model = copy.deepcopy(before)
        quantize(model, "w8a8", transforms=transforms, calibration=ids(8, 24), progress=False)
        errors.append(error(model, before))
    assert errors[1] < 0.8 * errors[0]


def test_smoothquant_goes_where_it_is_told() -> None:
    for transform, further in (("smoothquant", set()), (EVERYWHERE, {"layers.1.mixer.projection.v", "layers.1.mlp.up"})):
        _, report = run(small(), transforms=[transform])
        assert {c.place for c in report.changes if c.place.startswith("layers.1") and "norm" not in c.place} == further


@torch.no_grad()
def test_smoothquant_counts_only_what_is_quantized() -> None:
    """Readers that are kept are scaled with the others but do not shape the scale."""
    model = with_outliers()
    model.layers[0].mixer.projection.q.weight.mul_(100)
    other, _ = run(copy.deepcopy(model), transforms=["smoothquant"], rules=["*.q=keep"])
    model.layers[0].mixer.projection.q.weight.mul_(0.01)
    plain, _ = run(model, transforms=["smoothquant"], rules=["*.q=keep"])
    assert torch.equal(plain.layers[0].mixer_norm.weight, other.layers[0].mixer_norm.weight)


def test_channels_without_signal_are_left() -> None:
    weight, quiet = torch.ones(4, 3), torch.tensor([0.0, 2.0, 8.0])
    scale, _ = SmoothQuant().scale(Channels([weight], None, quiet, quiet, lambda _: 0.0))
    assert scale.tolist() == pytest.approx([1.0, 2**0.5, 8**0.5])


@pytest.mark.parametrize(("method", "share"), [("rtn", 0.8), ("gptq", 1.05)])
def test_awq_helps_where_channels_stand_out(method: str, share: float) -> None:
    before = with_outliers()
    plain = error(run(copy.deepcopy(before), method, bits=3, symmetric=False)[0], before)
    scaled, report = run(copy.deepcopy(before), method, bits=3, symmetric=False, transforms=["awq"])
    assert error(scaled, before) < share * plain
    done = [c.facts for c in report.changes if "exponent" in c.facts]
    assert done
    assert all(facts["error"] < facts["error_before"] for facts in done)


def test_awq_takes_the_best_exponent() -> None:
    """The error says how far a scale is from that of the exponent 0.35."""
    mean, weight = torch.rand(8) + 0.1, torch.rand(6, 8)
    goal = candidate(mean, relative(weight, 4).mean(0), 0.35)
    found = AWQScaling().scale(Channels([weight], 4, mean, mean, lambda s: float((s - goal).norm())))
    assert found is not None
    assert found[1]["exponent"] == 0.35
    assert AWQScaling().scale(Channels([weight], 4, mean, mean, lambda s: float((s - 1).norm()))) is None
    assert AWQScaling().scale(Channels([weight], 4, mean, mean, lambda s: float("nan"))) is None


@torch.no_grad()
def test_rotation_helps_where_weights_stand_out() -> None:
    before = small()
    for layer in before.layers:
        for name in ("q", "k", "v"):
            layer.mixer.projection.get_submodule(name).weight[:, 7] *= 20
    plain = error(run(copy.deepcopy(before), bits=3)[0], before)
    rotated, report = run(copy.deepcopy(before), bits=3, transforms=["rotation"])
    assert error(rotated, before) < 0.9 * plain
    assert not rotated.spec.head.tie()
    assert report.changes[0].place == "head.out"


def test_a_head_that_a_rotation_frees_can_be_quantized(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"bits": 8, "transforms": ["rotation"], "rules": ["head.out={bits: 8}"]}
    before = small()
    model, report = run(copy.deepcopy(before), work_dir=tmp_path, **settings)
    assert report.rows[-1].module == "head.out"
    assert error(model, before) < 0.02
    assert same_bits(run(copy.deepcopy(before), work_dir=tmp_path, **settings)[0], model)
    with pytest.raises(ValueError, match="the head is tied to the embedding"):
        run(copy.deepcopy(before), rules=["head.out={bits: 8}"])


def test_rotation_is_orthonormal_at_any_width() -> None:
    for width in (12, 22, 64, 45):
        q = Rotation().stream(width)
        assert q is not None
        assert torch.allclose(q @ q.t(), torch.eye(width, dtype=torch.float64), atol=1e-12)
    blocks = Rotation(block=16).stream(64)
    assert blocks is not None
    assert torch.count_nonzero(blocks) == 64 * 16


def test_awq_in_one_word_is_the_transform_and_a_clipped_range() -> None:
    before = with_outliers()
    word, report = run(copy.deepcopy(before), "awq", bits=3)
    assert report.settings["transforms"] == ["awq"]
    assert report.settings["method"] == {"name": "awq", "bits": 3, "group_size": 32}
    by_hand, _ = run(copy.deepcopy(before), "rtn", bits=3, symmetric=False, transforms=["awq"])
    assert error(word, before) < error(by_hand, before)
    rows = {r.module: r for r in report.rows}
    assert 0 < rows["layers.0.mlp.up"].facts["clipped"] < 1
    assert "clipped" not in rows["layers.0.mixer.projection.q"].facts
    unclipped, _ = run(copy.deepcopy(before), "awq", bits=3, rules=["layers.*={clip: false}"])
    assert same_bits(unclipped, by_hand)


def test_experts_are_scaled_together_and_their_routers_with_them() -> None:
    before = small(MOE)
    model, report = run(copy.deepcopy(before), bits=8, group_size=None, transforms=["awq"], calibration=ids(8, 60))
    assert error(model, before) < 0.02
    places = {c.place for c in report.changes if "exponent" in c.facts}
    assert any(place.endswith(".up") for place in places)
    skipped, report = run(copy.deepcopy(before), bits=8, group_size=None, transforms=["awq"], calibration=ids(1, 2))
    assert any(c.facts == {"skipped": "no tokens"} for c in report.changes)
    assert error(skipped, before) < 0.02


@pytest.mark.parametrize("transforms", [["smoothquant"], ["rotation", "awq"]], ids=str)
@pytest.mark.parametrize("name", ["gemma", "phi3", "deepseek_v3"])
@torch.no_grad()
def test_families_go_through_whole(name: str, transforms: list[str]) -> None:
    before, x = family_model(name), tokens()
    model, _ = run(
        copy.deepcopy(before), bits=8, group_size=8, transforms=transforms, rules=["*.kv_up={bits: 8}"] if "deep" in name else []
    )
    assert (model(x) - before(x)).norm() < 0.05 * before(x).norm()


def test_a_model_that_is_loaded_layer_by_layer(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16, num_hidden_layers=3, max_position_embeddings=64,
                     tie_word_embeddings=True)  # fmt: skip
    settings: dict[str, Any] = {"transforms": ["rotation", "awq"], "rules": ["layers.2.*=keep"], "bits": 8}
    eager, _ = run(zoo.load(tmp_path / "model"), **settings)
    lazy, _ = run(zoo.load(tmp_path / "model", lazy=True), **settings)
    assert same_bits(eager, lazy)
    zoo.save(lazy, tmp_path / "saved")
    saved = zoo.load(tmp_path / "saved")
    x = ids(2, 20)
    assert torch.equal(saved(x), lazy(x))
    assert not saved.spec.head.tie()
    assert error(lazy, zoo.load(tmp_path / "model")) < 0.05


@pytest.mark.parametrize(
    ("model", "settings", "kind", "message"),
    [
        ("llama", {"transforms": ["smothquant"]}, SpecError, "did you mean 'smoothquant'"),
        ("llama", {"transforms": [{"name": "smoothquant", "sources": []}]}, SpecError, r"transforms\.0\.sources: name at least one"),
        ("llama", {"transforms": [{"name": "smoothquant", "alpha": 2}]}, SpecError, r"transforms\.0\.alpha: must lie in 0\.\.1"),
        ("llama", {"transforms": ["awq", "rotation"]}, ValueError, "rotation moves the gains of norms into weights, which undoes awq"),
        ("llama", {"transforms": [{"name": "rotation", "block": 5}]}, ValueError, "32 channels do not divide into blocks of 5"),
        ("gpt2", {"transforms": ["rotation"]}, ValueError, "rotation cannot be folded into this model's weights:\n.*adds positions"),
        ("olmo2", {"transforms": ["smoothquant"]}, ValueError, r"smoothquant cannot .*\n.*output_norm .*layers\.\{0,1\}"),
        ("llama", {"transforms": ["smoothquant"], "rules": ["*.q=keep", "*.k=keep", "*.v=keep", "*.mlp.*=keep"]}, ValueError,
         "no module that a scale reaches is quantized"),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_raised_before_work(model: str, settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    before = family_model(model)
    after = copy.deepcopy(before)
    with pytest.raises(kind, match=message):
        run(after, group_size=8, **settings)
    assert same_bits(after, before)


def test_layers_without_a_fold_are_named() -> None:
    _, report = run(family_model("gpt2"), group_size=8, transforms=["awq"])
    skipped = {c.place: c.facts["skipped"] for c in report.changes if "commute" in str(c.facts.get("skipped"))}
    assert skipped == {"layers.{0,1}": "up: mlp plain has an activation between up and down that does not commute with a scale"}


@pytest.mark.slow
@torch.no_grad()
def test_transformers_reads_what_was_transformed(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    llama_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16, tie_word_embeddings=True)
    model, _ = run(zoo.load(tmp_path / "model"), "gptq", bits=4, transforms=["rotation", "awq"])
    zoo.save(model, tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    x = ids(2, 20)
    assert torch.allclose(theirs(x).logits, model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "settings", [{"method": "gptq", "transforms": ["rotation", "awq"]}, {"method": "auto_round", "iterations": 4}], ids=str
)
def test_half_precision(settings: dict[str, Any], dtype: torch.dtype) -> None:
    before = small().to(dtype)
    model, _ = run(copy.deepcopy(before), bits=8, **settings)
    assert model.dtype == dtype
    assert error(model.float(), before.float()) < 0.03
