"""LLaMA checkpoints that transformers wrote give transformers' logits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.zoo.oracle import llama_checkpoint, relative_error
from zoo.components.contracts import Step

TOLERANCE = 1e-5
T = 40  # beyond the trained context of 24

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 24},
    "narrow heads": {"head_dim": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "eps": {"rms_norm_eps": 0.1},
    "gelu": {"hidden_act": "gelu"},
    "gelu tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 16, "rope_theta": 1e4}, "head_dim": 16},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4},
             "head_dim": 16},
    "yarn, all options": {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4,
                                              "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False},
                          "head_dim": 32, "max_position_embeddings": 512},
    "yarn, attention factor": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                                                   "rope_theta": 1e4, "attention_factor": 1.7}, "head_dim": 16},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    out = {}
    for name, options in OPTIONS.items():
        folder = tmp_path_factory.mktemp("llama")
        out[name] = (folder, llama_checkpoint(folder, **options))
    return out


@pytest.fixture(params=OPTIONS)
def pair(request: pytest.FixtureRequest, checkpoints: dict[str, tuple[Path, Any]]) -> tuple[Path, Any]:
    return checkpoints[request.param]


def logits(theirs: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """transformers' logits. Its dynamic NTK keeps the base of the longest input so far until a short one comes: give it one first."""
    theirs(x[:1, :1])
    return theirs(x, **options).logits


def ids(rows: int, length: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@torch.no_grad()
def test_logits_equal_transformers(pair: tuple[Path, Any], kernel: str) -> None:
    folder, theirs = pair
    ours = zoo.load(folder, override=[f"layers.*.mixer.kernel={kernel}"])
    x = ids(2)
    assert relative_error(ours(x), logits(theirs, x)) < TOLERANCE


@torch.no_grad()
def test_positions_with_an_offset(pair: tuple[Path, Any]) -> None:
    folder, theirs = pair
    x, pos = ids(1), torch.arange(T)[None] + 50
    assert relative_error(zoo.load(folder)(x, positions=pos), logits(theirs, x, position_ids=pos)) < TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_equal_each_row_alone(pair: tuple[Path, Any], side: str) -> None:
    folder, theirs = pair
    ours, lengths = zoo.load(folder), [T, T - 13, 1]
    x, pos = ids(3), torch.full((3, T), -1)
    for row, n in enumerate(lengths):
        at = slice(T - n, T) if side == "left" else slice(0, n)
        pos[row, at] = torch.arange(n)
    got = ours(x, positions=pos)
    assert torch.isfinite(got).all()
    for row, n in enumerate(lengths):
        keep = pos[row] >= 0
        assert relative_error(got[row, keep], logits(theirs, x[row : row + 1, keep])[0]) < TOLERANCE, f"row of {n}"


@torch.no_grad()
def test_cached_equals_uncached(pair: tuple[Path, Any]) -> None:
    folder, theirs = pair
    if theirs.config.rope_parameters["rope_type"] == "dynamic":
        pytest.skip("dynamic NTK turns a key by the length at which it was written, so caching changes it by definition")
    ours, x = zoo.load(folder), ids(2)
    want = logits(theirs, x)
    cache = ours.new_cache(2)
    parts = [ours(x[:, :7], cache=cache), ours(x[:, 7:20], cache=cache), *(ours(x[:, i : i + 1], cache=cache) for i in range(20, T))]
    cache.check()
    assert relative_error(torch.cat(parts, 1), want) < TOLERANCE


@torch.no_grad()
def test_dynamic_ntk_with_a_cache_equals_transformers(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    folder, theirs = checkpoints["dynamic"]
    ours, x = zoo.load(folder), ids(1)
    cache, past, got, want = ours.new_cache(1), None, [], []
    theirs(x[:, :1])
    for piece in x.split([30, 1, 1, 1, 7], 1):
        got.append(ours(piece, cache=cache))
        out = theirs(piece, past_key_values=past, use_cache=True)
        past = out.past_key_values
        want.append(out.logits)
    assert relative_error(torch.cat(got, 1), torch.cat(want, 1)) < TOLERANCE


@torch.no_grad()
def test_bfloat16_is_as_near_to_fp32_as_transformers(pair: tuple[Path, Any]) -> None:
    folder, theirs = pair
    x = ids(2, 24)
    exact = logits(theirs, x)
    theirs_error = relative_error(logits(copy.deepcopy(theirs).to(torch.bfloat16), x), exact)
    ours = zoo.load(folder, dtype="bfloat16")(x)
    assert ours.dtype == torch.bfloat16
    assert relative_error(ours, exact) <= 2 * theirs_error


@torch.no_grad()
def test_save_and_load_in_transformers(pair: tuple[Path, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, _ = pair
    saved = zoo.save(zoo.load(folder), tmp_path / "out", shard_bytes=20_000)
    assert saved.transformers is None
    assert any("-of-" in f for f in saved.files)
    back, x = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), ids(2)
    assert torch.equal(back(x).logits, AutoModelForCausalLM.from_pretrained(folder)(x).logits)
    assert torch.equal(zoo.load(tmp_path / "out")(x), zoo.load(folder)(x))
    assert zoo.spec(tmp_path / "out") == zoo.spec(folder)


@torch.no_grad()
def test_both_spellings_of_the_config(checkpoints: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, theirs = checkpoints["llama3"]
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {("type" if k == "rope_type" else k): v for k, v in rope.items()}
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    x = ids(1)
    assert relative_error(zoo.load(tmp_path)(x), logits(theirs, x)) < TOLERANCE
    assert zoo.spec(tmp_path) == zoo.spec(folder)


@torch.no_grad()
def test_a_window_sees_itself_and_the_tokens_before(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """Against transformers' Mistral, whose window counts the query's own position."""
    from transformers import MistralConfig, MistralForCausalLM

    folder, theirs = checkpoints["plain"]
    keep = {k: v for k, v in theirs.config.to_dict().items() if k not in ("model_type", "architectures")}
    config = MistralConfig.from_dict(keep | {"sliding_window": 4})
    config._attn_implementation = "eager"
    mistral = MistralForCausalLM(config).eval()
    mistral.load_state_dict(theirs.state_dict())
    ours = zoo.load(folder, override=["layers.*.mixer.pattern={name: window, size: 4}"])
    x = ids(2)
    assert relative_error(ours(x), mistral(x).logits) < TOLERANCE
    cache = ours.new_cache(2)
    steps = torch.cat([ours(x[:, i : i + 1], cache=cache) for i in range(T)], 1)
    assert relative_error(steps, mistral(x).logits) < TOLERANCE


def test_rope_tables_stay_fp32_when_the_model_is_cast(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    model = zoo.load(checkpoints["plain"][0]).to(torch.bfloat16)
    position = model.layers[0].mixer.position
    cos, _ = position.tables(Step(torch.tensor([[32_000]]), 32_000), torch.float32)
    frequency = 1e4 ** -(torch.arange(0, 8, 2).double() / 8)
    assert torch.allclose(cos[0, 0, 0, :4].double(), (32_000 * frequency).cos(), atol=5e-3)
    assert not list(position.buffers())
