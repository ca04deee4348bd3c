"""Calibrated scales of 8-bit caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from tests.quantize.models import ids, small
from zoo.checkpoint import CheckpointError
from zoo.components.spec import override
from zoo.quantize import calibrate_cache, quantize


def through_cache(model: zoo.Model, tokens: torch.Tensor) -> torch.Tensor:
    cache = model.new_cache(len(tokens))
    return torch.cat([model(part, cache=cache) for part in tokens.split(1, 1)], 1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_scales_span_what_is_written(name: str) -> None:
    model, tokens = small(), ids(4, 24)
    plain = model(tokens)
    calibrate_cache(model, name, calibration=tokens, progress=False)
    cache: Any = model.spec.cache
    written = model.new_cache(4)
    model(tokens, cache=written)
    layer = written.stores[0].buffers[0]
    exact = small().new_cache(4)
    small()(tokens, cache=exact)
    largest = exact.stores[0].buffers[0]["k"].parts["value"].abs().max()
    assert cache.scales[0][0] == pytest.approx(float(largest) / cache.codes.top)
    assert set(layer["k"].parts) == {"code"}
    assert (through_cache(model, tokens) - plain).abs().max() < 0.05 * plain.abs().max()


def test_bytes_are_those_of_the_codes() -> None:
    model = small()
    dynamic = override(model.spec, "cache=fp8").cache_bytes_per_token(4)
    calibrate_cache(model, "fp8", calibration=ids(2, 16), progress=False)
    exact = small().spec.cache_bytes_per_token(4)
    assert model.spec.cache_bytes_per_token(4) == exact // 4 < dynamic


def test_scales_are_saved_and_loaded(tmp_path: Path) -> None:
    model = small()
    calibrate_cache(model, "int8", calibration=ids(2, 16), progress=False)
    zoo.save(model, tmp_path / "model")
    assert zoo.load(tmp_path / "model").spec.cache == model.spec.cache


def test_compressed_tensors_hold_the_scales(tmp_path: Path) -> None:
    """As ``kv_cache_scheme`` and two tensors a layer, which leaves the model one that transformers and vLLM know."""
    model = small()
    quantize(model, "rtn", bits=8, group_size=None, progress=False)
    calibrate_cache(model, "fp8", calibration=ids(2, 16), progress=False)
    saved = zoo.save(model, tmp_path / "model")
    assert saved.transformers is None
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "zoo_spec" not in config
    assert config["quantization_config"]["kv_cache_scheme"]["type"] == "float"
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert float(stored["model.layers.1.self_attn.v_scale"]) == pytest.approx(model.spec.cache.scales[1][1])  # type: ignore[attr-defined]
    again = zoo.load(tmp_path / "model")
    assert again.spec.cache.name == "fp8"
    assert again.spec.cache == model.spec.cache
    assert zoo.load(tmp_path / "model", override=["cache=dense"]).spec.cache.name == "dense"
    own: Any = zoo.load(tmp_path / "model", override=["cache={name: fp8, scales: [[2.0, 3.0], [2.0, 3.0]]}"]).spec.cache
    assert own.scales[1] == (2.0, 3.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 4}, "kv_cache_scheme: num_bits 4 is not supported; what is: 8 bits"),
        ({"strategy": "attn_head"}, "strategy 'attn_head' is not supported"),
        ({"dynamic": True}, "dynamic True is not supported"),
        ("all absent", "kv_cache_scheme is set, 4 scales are missing"),
        ("absent", "kv_cache_scheme is set, 1 scales are missing: layers.1.v_scale"),
        ("negative", "model.layers.1.self_attn.v_scale must be one positive number"),
    ],
)
def test_scales_that_cannot_be_read(change: Any, message: str, tmp_path: Path) -> None:
    model = small()
    quantize(model, "rtn", bits=8, group_size=None, progress=False)
    calibrate_cache(model, "fp8", calibration=ids(2, 16), progress=False)
    zoo.save(model, tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.v_scale"
    config, stored = json.loads((tmp_path / "config.json").read_text()), load_file(file)
    if isinstance(change, dict):
        config["quantization_config"]["kv_cache_scheme"] |= change
    elif change == "absent":
        del stored[name]
    elif change == "all absent":
        stored = {n: t for n, t in stored.items() if not n.endswith(("k_scale", "v_scale"))}
    else:
        stored[name] = -stored[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=message):
        zoo.load(tmp_path)


def test_the_layers_that_write_a_shared_cache_are_scaled() -> None:
    model = override(small().spec, "cache={name: shared, reads: [0, 0]}").build().eval()
    calibrate_cache(model, "fp8", calibration=ids(2, 16), progress=False)
    through_cache(model, ids(1, 5))


def test_what_cannot_be_calibrated_is_said() -> None:
    with pytest.raises(ValueError, match="'kivi' has no scales to calibrate; those that have: fp8, int8"):
        calibrate_cache(small(), "kivi", calibration=ids(2, 16))
    damaged = small()
    with torch.no_grad():
        damaged.layers[1].mixer.projection.v.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match="layer 1 writes NaN or infinite values into its slot v"):
        calibrate_cache(damaged, calibration=ids(2, 16), progress=False)
    assert damaged.spec.cache.name == "dense"
    with pytest.raises(ValueError, match="the model is not loaded"):
        calibrate_cache(small().to("meta"), calibration=ids(2, 16), progress=False)
    model = override(small().spec, "cache={name: fp8, scales: [[1.0, 1.0]]}").build()
    with pytest.raises(ValueError, match=r"cache.scales has \[2\] scales for the layers, their slots are \[2, 2\]"):
        model.new_cache(1)
