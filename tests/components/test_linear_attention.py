"""The linear family: chunked forms against token-by-token references, whole layers against transformers, states and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.minimax import modeling_minimax as minimax
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from zoo.components.contracts import NoCache, Step
from zoo.components.ops import delta_rule, linear_attention
from zoo.components.ops.feature_map import l2
from zoo.components.ops.short_convolution import reference as convolution_reference
from zoo.components.ops.short_convolution import short_convolution
from zoo.components.registry import get
from zoo.components.spec import check, load
from zoo.model import Mixer, MixerSpec

M = 32
FAMILY = [("gqa", "linear"), ("lightning", "lightning"), ("gated_linear", "gated_linear"), ("delta", "delta_rule"),
          ("gated_delta", "gated_delta_rule")]  # fmt: skip
family = pytest.mark.parametrize(("projection", "kernel"), FAMILY, ids=lambda name: name)


def operands(t: int, k: int = 6, v: int = 5, strength: float = 1.0, channels: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(t)
    shape = (2, t, 3)
    return {
        "q": torch.randn(*shape, k, dtype=torch.float64),
        "k": l2(torch.randn(*shape, k, dtype=torch.float64)),
        "v": torch.randn(*shape, v, dtype=torch.float64),
        "decay": -strength * torch.rand(*shape, channels, dtype=torch.float64),
        "state": torch.randn(2, 3, k, v, dtype=torch.float64),
    }


def with_beta(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return x | {"beta": 2 * torch.rand_like(x["decay"])}


def compare(fast: Callable, plain: Callable, x: dict[str, Tensor], chunk: int, tolerance: float) -> None:
    """Outputs, last state and the gradients of every operand."""
    results = []
    for run in (lambda **y: fast(**y, chunk=chunk), plain):
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        o, state = run(**leaves)
        (o.sin().sum() + state.cos().sum()).backward()
        results.append((o, state, *(leaf.grad for leaf in leaves.values())))
    for got, want in zip(*results, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("channels", [1, 6], ids=["by_head", "by_channel"])
@pytest.mark.parametrize("length", [1, 7, 8, 21])
@pytest.mark.parametrize("strength", [0.0, 1.0, 100.0, 1000.0])
def test_chunked_linear_attention_equals_recurrent(length: int, strength: float, channels: int) -> None:
    x = operands(length, strength=strength, channels=channels)
    compare(linear_attention.chunked, linear_attention.recurrent, x, 8, 1e-9)


@pytest.mark.parametrize("length", [1, 7, 8, 21])
@pytest.mark.parametrize("strength", [0.0, 1.0, 100.0, 1000.0])
def test_chunked_delta_rule_equals_recurrent(length: int, strength: float) -> None:
    compare(delta_rule.chunked, delta_rule.recurrent, with_beta(operands(length, strength=strength)), 8, 1e-9)


@pytest.mark.parametrize("op", [linear_attention, delta_rule], ids=["linear", "delta"])
@pytest.mark.parametrize("strength", [0.01, 30.0])
def test_fp32_is_near_float64_over_many_chunks(op: Any, strength: float) -> None:
    x = operands(300, strength=strength)
    x = with_beta(x) if op is delta_rule else x
    want, state = op.chunked(**x)
    got, low = op.chunked(**{n: t.float() for n, t in x.items()})
    assert (got - want).norm() / want.norm() < 1e-5
    assert (low - state).norm() / state.norm() < 1e-5


@pytest.mark.parametrize("chunk", [8, 64])
@torch.no_grad()
def test_delta_rule_equals_transformers(chunk: int) -> None:
    x = {n: t.float() for n, t in with_beta(operands(21)).items()}
    got, state = delta_rule.chunked(**(x | {"q": x["q"] * 6**-0.5}), chunk=chunk)
    beta, decay = x["beta"][..., 0], x["decay"][..., 0]
    for theirs in (qwen3_next.torch_recurrent_gated_delta_rule, qwen3_next.torch_chunk_gated_delta_rule):
        want, last = theirs(x["q"], x["k"], x["v"], g=decay, beta=beta, initial_state=x["state"], output_final_state=True)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_gated_linear_attention_equals_flash_linear_attention() -> None:
    naive = pytest.importorskip("fla.ops.gla.naive", reason="needs fla-core and einops", exc_type=ImportError)
    x = {n: t.float() for n, t in operands(21, channels=6).items()}
    want, last = naive.naive_recurrent_gla(x["q"], x["k"], x["v"], x["decay"], x["state"], output_final_state=True)
    got, state = linear_attention.chunked(**(x | {"q": x["q"] * 6**-0.5}))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("taps", [1, 2, 4])
@torch.no_grad()
def test_short_convolution_equals_its_reference(taps: int) -> None:
    x, weight, state = torch.randn(3, 9, 5), torch.randn(5, taps), torch.randn(3, taps - 1, 5)
    valid = torch.rand(3, 9) > 0.4
    valid[2] = False
    for mask in (valid, torch.ones_like(valid)):
        want, last = convolution_reference(x, weight, state, mask)
        for shown in (mask,) if not mask.all() else (mask, None):
            got, tail = short_convolution(x, weight, state, shown)
            torch.testing.assert_close(got[mask], want[mask])
            torch.testing.assert_close(tail, last)


# ---- whole layers


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5 + (p.dim() == 1)


def small(projection: str, kernel: str) -> Mixer:
    torch.manual_seed(0)
    mixer = MixerSpec(projection=get("projection", projection).small(), kernel=get("kernel", kernel).small()).build(M, 0).eval()
    randomise(mixer)
    return mixer


def qwen_pair() -> tuple[Any, Mixer]:
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=M, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=6,
        linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-5)  # fmt: skip
    theirs = qwen3_next.Qwen3NextGatedDeltaNet(config, 0).eval()
    randomise(theirs)
    projection = {"name": "gated_delta", "heads": 4, "key_heads": 2, "key_dim": 8, "value_dim": 6, "out_norm": {"name": "rms", "eps": 1e-5}}
    mixer = load(MixerSpec, {"projection": projection, "kernel": "gated_delta_rule"}).build(M, 0).eval()
    w = theirs.state_dict()
    q, k, v, z = (x.flatten(0, 1) for x in w["in_proj_qkvz.weight"].unflatten(0, (2, -1)).split([8, 8, 12, 12], 1))
    beta, decay = (x.flatten(0, 1) for x in w["in_proj_ba.weight"].unflatten(0, (2, -1)).split([2, 2], 1))
    linears = {"q": q, "k": k, "v": v, "z": z, "beta": beta, "decay": decay, "o": w["out_proj.weight"], "out_norm": w["norm.weight"]}
    own = {"conv": w["conv1d.weight"][:, 0], "a_log": w["A_log"], "dt_bias": w["dt_bias"]}
    mixer.projection.load_state_dict({f"{n}.weight": x for n, x in linears.items()} | own)
    return theirs, mixer


@torch.no_grad()
def test_gated_delta_layer_equals_qwen3_next() -> None:
    theirs, mixer = qwen_pair()
    x = torch.randn(2, 70, M)
    torch.testing.assert_close(mixer(x, Step.plain(0, 2, 70), NoCache()), theirs(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_left_padded_gated_delta_layer_equals_qwen3_next() -> None:
    theirs, mixer = qwen_pair()
    x, valid = torch.randn(2, 9, M), torch.ones(2, 9, dtype=torch.bool)
    valid[0, :4] = False
    pos = (valid.long().cumsum(1) - 1).masked_fill(~valid, -1)
    got, want = mixer(x, Step.of(pos), NoCache()), theirs(x, attention_mask=valid.long())
    torch.testing.assert_close(got[valid], want[valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 2])
@torch.no_grad()
def test_lightning_layer_equals_minimax(layer: int) -> None:
    config = minimax.MiniMaxConfig(
        hidden_size=M, num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_hidden_layers=3, block_size=16, hidden_act="silu",
        layer_types=["linear_attention"] * 3)  # fmt: skip
    theirs = minimax.MiniMaxLightningAttention(config, layer).eval()
    randomise(theirs)
    spec = {"projection": {"name": "lightning", "heads": 4, "head_dim": 8}, "kernel": {"name": "lightning", "depth": 3}}
    mixer, w = load(MixerSpec, spec).build(M, layer).eval(), theirs.state_dict()
    q, k, v = (x.flatten(0, 1) for x in w["qkv_proj.weight"].unflatten(0, (4, -1)).chunk(3, 1))
    names = {"q": q, "k": k, "v": v, "gate": w["output_gate.weight"], "o": w["out_proj.weight"], "out_norm": w["norm.weight"]}
    mixer.projection.load_state_dict({f"{n}.weight": x for n, x in names.items()})
    x = torch.randn(2, 70, M)
    want = theirs(x, position_embeddings=None, attention_mask=None)[0]
    torch.testing.assert_close(mixer(x, Step.plain(0, 2, 70), NoCache()), want, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_linear_attention_is_the_formula_of_the_paper() -> None:
    mixer, x = small("gqa", "linear"), torch.randn(1, 9, M)
    p = mixer.projection
    q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (p.q, p.k, p.v))
    q, k = nn.functional.elu(q) + 1, nn.functional.elu(k.repeat_interleave(2, 1)) + 1
    weights = (q * 8**-0.5 @ k.mT).tril()
    o = weights @ v.repeat_interleave(2, 1) / (weights.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(mixer(x, Step.plain(0, 1, 9), NoCache()), p.o(o.transpose(1, 2).flatten(-2)), rtol=1e-4, atol=1e-5)


# ---- states


def store_for(mixer: Mixer, rows: int) -> Any:
    return get("cache", "dense").small().build([mixer.slots], rows, torch.float32, torch.device("cpu"))


@family
@torch.no_grad()
def test_the_state_is_that_of_each_rows_last_valid_token(projection: str, kernel: str) -> None:
    mixer, x = small(projection, kernel), torch.randn(3, 9, M)
    pos = torch.tensor([[0, 1, 2, 3, 4, -1, -1, -1, -1], [-1, -1, 0, -1, 1, 2, -1, 3, -1], [-1] * 9])
    padded = store_for(mixer, 3)
    mixer(x, Step.of(pos), padded)
    padded.commit()
    for row in range(3):
        alone, keep = store_for(mixer, 1), pos[row] >= 0
        if keep.any():
            mixer(x[row : row + 1, keep], Step.of(pos[row : row + 1, keep]), alone)
            alone.commit()
        for name, state in padded.states[0].items():
            torch.testing.assert_close(state[row], alone.states[0][name][0], rtol=1e-5, atol=1e-5)


@family
@torch.no_grad()
def test_nothing_is_kept_per_token(projection: str, kernel: str) -> None:
    mixer = small(projection, kernel)
    store = store_for(mixer, 1)
    before = store.bytes()
    mixer(torch.randn(1, 40, M), Step.plain(0, 1, 40), store)
    store.commit()
    assert store.bytes() == before > 0


@family
@torch.no_grad()
def test_drafts_are_kept_whole_or_not_at_all(projection: str, kernel: str) -> None:
    mixer, x = small(projection, kernel), torch.randn(2, 8, M)
    store = store_for(mixer, 2)
    mixer(x[:, :3], Step.plain(0, 2, 3), store)
    store.commit()
    mixer(x[:, 3:6], Step.plain(3, 2, 3), store)
    with pytest.raises(ValueError, match="row 1 keeps 2 of 3 tokens"):
        store.commit([3, 2])
    store.commit([3, 0])  # row 0 goes on, row 1 feeds its tokens again
    pos = torch.tensor([[6, 7, -1, -1, -1], [3, 4, 5, 6, 7]])
    again = torch.stack([torch.cat([x[0, 6:], x[0, :3]]), x[1, 3:]])
    got, want = mixer(again, Step.of(pos), store), mixer(x, Step.plain(0, 2, 8), NoCache())
    torch.testing.assert_close(got[0, :2], want[0, 6:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1], want[1, 3:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"projection": "gqa", "kernel": "gated_linear"}, "needs channel_decay"),
        ({"projection": "gated_delta", "kernel": "delta_rule"}, "has no use for decay"),
        ({"projection": "delta", "kernel": "eager"}, "reads past tokens, of which projection delta keeps nothing"),
        ({"projection": "gqa", "kernel": "linear", "pattern": "full"}, "cannot follow the pattern full"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_say_why(spec: dict[str, Any], reason: str) -> None:
    spec = spec | {"projection": {"name": spec["projection"], **get("projection", spec["projection"]).example}}
    assert any(reason in line for line in check(load(MixerSpec, spec), M, 0))
