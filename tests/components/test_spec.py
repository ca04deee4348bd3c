from __future__ import annotations

import dataclasses

import pytest
import torch
import yaml

import zoo
from zoo import declare
from zoo.components.spec import SpecError, check, compact, diff, dump, indices, load, override
from zoo.model import ModelSpec

TINY = {
    "width": 32,
    "context": 64,
    "embed": {"name": "tokens", "vocab": 50},
    "layers": [{"repeat": 4, "mixer": {"projection": {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8}, "position": "rope"},
                "mlp": {"name": "gated", "hidden": 48}}],
    "head": {"name": "lm", "tied": True},
}  # fmt: skip


@pytest.fixture
def tiny() -> ModelSpec:
    return load(ModelSpec, TINY)


@pytest.mark.parametrize("name", declare.names())
def test_named_models_round_trip_and_count_what_they_build(name: str) -> None:
    spec = zoo.spec(name)
    assert load(ModelSpec, yaml.safe_load(yaml.safe_dump(dump(spec)))) == spec
    small = dataclasses.replace(spec, layers=spec.layers[:2])
    with torch.device("meta"):
        model = small.build()
    built = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert built == {n: t.shape for n, t in small.tensors().items()}


def test_all_errors_come_at_once_with_place_reason_and_nearest_word() -> None:
    data = yaml.safe_load(yaml.safe_dump(TINY)) | {"contxt": 3, "width": "wide", "head": {"name": "lmm"}}
    data["layers"][0]["mixer"] = {"projection": {"name": "gqa", "heads": 4.5}, "kernel": "sdap"}
    with pytest.raises(SpecError) as e:
        load(ModelSpec, data)
    text = str(e.value)
    for line in (
        "contxt: ModelSpec has no such field; did you mean 'context'?",
        "width: input should be a valid integer, got 'wide'",
        "layers.0.mixer.projection.kv_heads: missing; projection gqa needs it",
        "layers.3.mixer.projection.heads: input should be a valid integer, got 4.5",
        "layers.2.mixer.kernel: no kernel named 'sdap'; did you mean 'sdpa'?",
        "head: no head named 'lmm'; did you mean 'lm'?",
    ):
        assert line in text


@pytest.mark.parametrize("word", ["1e6", 1000000, "1000000.0"])
def test_floats_as_yaml_reads_them(word: object, tiny: ModelSpec) -> None:
    assert override(tiny, f"layers.0.mixer.position.theta={word}").layers[0].mixer.position.theta == 1e6


@pytest.mark.parametrize("value", ["true", "'4'", "4.0", "null", "[4]"])
def test_integers_are_strict(value: str, tiny: ModelSpec) -> None:
    with pytest.raises(SpecError, match=r"layers\.0\.mlp\.hidden"):
        override(tiny, f"layers.0.mlp.hidden={value}")


def test_semantic_mistakes_carry_their_place(tiny: ModelSpec) -> None:
    wrong = override(
        tiny, "layers.1.mixer.projection.kv_heads=3", "layers.2.mixer.position.width=9", "layers.3.mixer.pattern={name: window, size: 0}"
    )
    assert check(wrong) == [
        "layers.1.mixer.projection.kv_heads: heads (4) must be a multiple of kv_heads (3)",
        "layers.2.mixer.position.width: rope turns an even number of at most 8 channels, got 9",
        "layers.3.mixer.pattern.size: a window holds at least the token itself, got 0",
    ]
    with pytest.raises(SpecError):
        zoo.build(wrong)


def test_naming_a_part_drops_the_old_fields_and_a_leaf_keeps_the_rest(tiny: ModelSpec) -> None:
    edited = override(tiny, "layers.*.mixer.position.theta=5", "layers.0.mixer.position=rope", "layers.1.mixer.position.width=4")
    assert [layer.mixer.position.theta for layer in edited.layers] == [10_000.0, 5.0, 5.0, 5.0]
    assert edited.layers[1].mixer.position.width == 4


@pytest.mark.parametrize(("path", "hit"), [
    ("layers.*", [0, 1, 2, 3]), ("layers.2", [2]), ("layers.-1", [3]), ("layers.1::2", [1, 3]), ("layers.:2", [0, 1]),
    ("layers.[0,3]", [0, 3]),
    ("layers.::-1", [0, 1, 2, 3]), ("l*.[-1]", [3]),
])  # fmt: skip
def test_paths(path: str, hit: list[int], tiny: ModelSpec) -> None:
    edited = override(tiny, f"{path}.mixer.kernel=eager")
    assert [i for i, layer in enumerate(edited.layers) if layer.mixer.kernel.name == "eager"] == hit


@pytest.mark.parametrize(("edit", "message"), [
    ("layers.9.mixer.kernel=eager", r"layers\.9: matches none of the 4 entries of layers"),
    ("layer.0.mixer.kernel=eager", r"layer: ModelSpec has no such field; did you mean 'layers'"),
    ("layers.*.mixer.kernel.size=3", r"layers\.0\.mixer\.kernel\.size: kernel sdpa has no such field"),
    ("width.x=3", r"width\.x: width is 32 and holds no fields"),
    ("width", r"width: an override is written path=value"),
    ("layers.*.mixer.kernel={", r"not YAML"),
    ("layers.*.mlp=gated", r"layers\.0\.mlp\.hidden: missing; mlp gated needs it"),
])  # fmt: skip
def test_override_errors(edit: str, message: str, tiny: ModelSpec) -> None:
    with pytest.raises(SpecError, match=message):
        override(tiny, edit)


def test_dump_leaves_out_defaults_and_folds_runs(tiny: ModelSpec) -> None:
    edited = override(tiny, "layers.1::2.mixer.pattern={name: window, size: 4}")
    layers = dump(edited)["layers"]
    assert (layers[0]["repeat"], len(layers[0]["of"])) == (2, 2)
    assert "kernel" not in layers[0]["of"][0]["mixer"]
    assert load(ModelSpec, dump(edited)) == edited


def test_diff_shows_leaves_and_compact_folds_layers(tiny: ModelSpec) -> None:
    edited = override(tiny, "layers.*.mixer.pattern={name: window, size: 4}", "layers.3.mlp.hidden=64")
    assert set(compact(diff(tiny, edited))) == {
        ("layers.0:4.mixer.pattern", "causal", "window"),
        ("layers.0:4.mixer.pattern.size", None, 4),
        ("layers.3.mlp.hidden", 48, 64),
    }
    assert diff(tiny, tiny) == []


@pytest.mark.parametrize(("where", "text"), [([3], "3"), ([0, 1, 2], "0:3"), ([1, 3, 5], "1:6:2"), ([0, 1, 4], "[0,1,4]")])
def test_indices_are_written_as_override_reads_them(where: list[int], text: str, tiny: ModelSpec) -> None:
    assert indices(where) == text


def test_cache_bytes_per_token_count_every_layers_slots(tiny: ModelSpec) -> None:
    assert tiny.cache_bytes_per_token(2) == 4 * 2 * 2 * 8 * 2
