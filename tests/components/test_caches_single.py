"""What single cache policies say they keep, and the number formats that they keep it in."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.components.caches import CPU, PLAIN, call, open_cache, policy, text, token_by_token
from tests.components.mixes import Mix
from zoo.components.contracts import NoCache, Pattern, Step
from zoo.components.numerics.kv import Codec, Float8, Int8, Spread, stored_bytes
from zoo.components.spec import load
from zoo.model import Mixer

# ---- number formats ----------------------------------------------------------------------------------------------------------

CODECS: list[Codec] = [Int8(), Float8(), Spread(4), Spread(2), Spread(4, 8), Spread(2, 5)]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_stored_vectors_are_as_near_as_their_format_allows(codec: Codec) -> None:
    x = torch.randn(3, 5, 2, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 5)[None, :, None, None]
    x[0, 0] = 0.0
    parts = codec.encode(x)
    for name, (shape, dtype) in codec.layout((2, 24), torch.float32).items():
        assert parts[name].shape == (3, 5, *shape), name
        assert parts[name].dtype == dtype, name
    assert sum(p[0, 0].numel() * p.element_size() for p in parts.values()) == stored_bytes(codec.layout((2, 24), torch.float32))
    error = (codec.decode(parts, 24, torch.float32) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    if isinstance(codec, Int8):
        assert (error <= largest / 254 * 1.001).all()
    elif isinstance(codec, Float8):
        assert (error <= torch.maximum(x.abs() / 16, largest / 448 * 2**-9) * 1.001).all()
    elif isinstance(codec, Spread):
        spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
        assert (error <= (spread / (2**codec.bits - 1) / 2) * 1.01 + largest * 2e-3 + 1e-4).all()


@pytest.mark.parametrize("kind", [Int8, Float8])
def test_a_scale_that_is_known_before_takes_no_room_and_saturates(kind: type[Int8 | Float8]) -> None:
    codec, x = kind(0.5), torch.tensor([[0.5, -1.0, 0.0, 1e6, -1e6]])
    top = kind.top * 0.5
    assert codec.layout((5,), torch.float32) == {"code": ((5,), kind.kept)}
    assert codec.decode(codec.encode(x), 5, torch.float32).tolist() == [[0.5, -1.0, 0.0, top, -top]]


def test_spread_codes_are_kivi_s_formula() -> None:
    """Liu et al. 2024, section 3.1: z = min X, s = (max X - min X) / (2^B - 1), Q(X) = round((X - z) / s)."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / 3
    want = ((x - low) / scale).round() * scale + low
    got = Spread(2).decode(Spread(2).encode(x), 32, torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=4e-3)


# ---- single policies ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_sliding_forgets_what_no_window_sees_and_no_more() -> None:
    mix, spec, x = Mix("gqa", "rope", "window", "eager").build(torch.float64), policy("sliding", room=3), text(1, 60)
    got = token_by_token(mix, spec, x, 30)
    torch.testing.assert_close(got, mix(x, Step.plain(0, 1, 60), NoCache())[0])
    cache = open_cache(spec, mix, 1)
    call(mix, cache, x, [0], [30])
    cache.commit()
    held = cache.bytes()
    for at in range(30, 60):
        call(mix, cache, x, [at], [1])
        cache.commit()
        assert cache.bytes() == held
        assert cache.stores[0].count[0] <= 3 + 2 * 3
    cache.trim([57])
    torch.testing.assert_close(call(mix, cache, x, [57], [3])[0], got[57:])
    cache.commit()
    with pytest.raises(ValueError, match="needs tokens that are gone"):
        cache.trim([40])


@torch.no_grad()
def test_sinks_recent_is_the_pattern_of_its_paper() -> None:
    mix, spec, x = PLAIN.build(torch.float64), policy("sinks_recent", sinks=2, window=4, room=2), text(1, 40)
    got = token_by_token(mix, spec, x, 17)
    mix.pattern = load(Pattern, {"name": "sinks", "count": 2, "size": 4})
    torch.testing.assert_close(got, mix(x, Step.plain(0, 1, 40), NoCache())[0])


@torch.no_grad()
def test_kivi_never_codes_a_token_twice() -> None:
    mix, x = PLAIN.build(torch.float64), text(1, 80)
    cache = open_cache(policy("kivi", bits=2, group=4, residual=8), mix, 1)
    call(mix, cache, x, [0], [21])
    cache.commit()
    k, v = (cache.stores[0].buffers[0][n] for n in "kv")
    assert (k.coded, v.coded) == ([16], [8])
    old = {n: p[:, : p.shape[1]].clone() for n, p in k.parts.items()}, {n: p.clone() for n, p in v.parts.items()}
    exact = v.tail[0, :13].clone()
    for at in range(21, 80):
        call(mix, cache, x, [at], [1])
        cache.commit()
        cache.check()
    assert (k.coded, v.coded) == ([80], [72])
    for buffer, before in zip((k, v), old, strict=True):
        assert all(torch.equal(buffer.parts[n][:, : p.shape[1]], p) for n, p in before.items())
    again = Spread(2, 4).encode(exact)  # tokens 8 .. 20, coded later, from their exact values
    assert all(torch.equal(v.parts[n][0, 8:21], p) for n, p in again.items())


@torch.no_grad()
def test_kivi_s_bytes_per_token_are_those_of_its_codes() -> None:
    mix, spec = PLAIN.build(torch.float32), policy("kivi", bits=2, group=32, residual=32)
    cache = spec.build([mix.slots], 1, torch.float32, CPU)
    call(mix, cache, text(1, 256).float(), [0], [256])
    cache.commit()
    k, v = (cache.stores[0].buffers[0][n] for n in "kv")
    tokens = {k: 256, v: 224}
    want = sum(p.numel() * p.element_size() / tokens[b] for b in (k, v) for p in b.parts.values())
    assert spec.bytes_per_token(mix.slots, 4) == pytest.approx(want, abs=1)


def weights(mix: Mixer, x: Tensor) -> Tensor:
    """[H, T, T] causal attention weights of one row, from the layer's own queries and keys."""
    step = Step.plain(0, 1, x.shape[1])
    q, new = mix.projection.write(x, step, mix.position)
    a = mix.projection.read(q, new)
    scores = torch.einsum("thd,shd->hts", a.q[0], a.k[0].repeat_interleave(a.q.shape[2] // a.k.shape[2], 1)) * a.scale
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)


@torch.no_grad()
def test_snapkv_keeps_what_the_published_steps_keep() -> None:
    mix, x, length, window, tokens = PLAIN.build(torch.float64), text(1, 30), 30, 4, 12
    cache = open_cache(policy("snapkv", tokens=tokens, window=window, pool=3), mix, 1)
    _, new = mix.projection.write(x, Step.plain(0, 1, length), mix.position)
    call(mix, cache, x, [0], [length])
    cache.commit()
    kept = cache.stores[0].buffers[0]["k"].parts["value"][0, :tokens]
    votes = weights(mix, x)[:, -window:, : length - window].sum(1).unflatten(0, (2, 2)).sum(1)
    pooled = torch.nn.functional.avg_pool1d(votes, 3, 1, 1)
    for head in range(2):
        chosen = pooled[head].topk(tokens - window).indices.sort().values.tolist() + list(range(length - window, length))
        assert torch.equal(kept[:, head], new["k"][0, chosen, head])


@torch.no_grad()
def test_h2o_keeps_recent_tokens_and_heavy_hitters() -> None:
    """One layer sees the prompt whole, so the sums of weights are known; the first eviction must follow them."""
    mix, x = PLAIN.build(torch.float64), text(1, 32)
    cache = open_cache(policy("h2o", heavy=5, recent=6, interval=1), mix, 1)
    _, new = mix.projection.write(x, Step.plain(0, 1, 32), mix.position)
    call(mix, cache, x, [0], [32])
    cache.commit()
    kept = cache.stores[0].buffers[0]["k"].parts["value"][0, :11]
    votes = weights(mix, x).sum(1).unflatten(0, (2, 2)).sum(1)
    for head in range(2):
        chosen = votes[head, :26].topk(5).indices.sort().values.tolist() + list(range(26, 32))
        assert torch.equal(kept[:, head], new["k"][0, chosen, head])
    held = cache.bytes()
    call(mix, cache, x, [32], [0])
    cache.commit()
    assert cache.bytes() == held


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_caches_that_vote_refuse_layers_whose_heads_must_agree(name: str) -> None:
    window = Mix("gqa", "rope", "window", "eager").spec.ask
    assert any("plain causal pattern" in reason for reason in policy(name).refuses(window))
    assert not policy(name).refuses(PLAIN.spec.ask)


# ---- static ------------------------------------------------------------------------------------------------------------------


def test_static_says_where_it_ends() -> None:
    mix, x = PLAIN.build(torch.float64), text(1, 40)
    cache = open_cache(policy("static", tokens=32), mix, 1)
    with pytest.raises(ValueError, match="position 32 is beyond the static cache's 32 tokens"):
        mix(x[:, :33], Step.plain(0, 1, 33), cache)
    assert cache.reserve(32)
    assert not cache.reserve(33)


@torch.no_grad()
def test_static_decodes_with_one_compiled_graph() -> None:
    """The same graph serves every position: no break, no second compilation, no question to the device."""
    mix, x = PLAIN.build(torch.float64), text(2, 20)
    want = mix(x, Step.plain(0, 2, 20), NoCache())
    cache = open_cache(policy("static", tokens=20), mix, 2)
    call(mix, cache, x, [0, 0], [12, 12])
    cache.commit()
    frames = torch._dynamo.testing.CompileCounter()

    def decode(new: Tensor, step: Step) -> Tensor:
        return mix(new, step, cache)

    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, backend=frames)
    for at in range(12, 20):
        got = compiled(x[:, at : at + 1], Step(torch.full((2, 1), at)))
        cache.commit()
        torch.testing.assert_close(got[:, 0], want[:, at])
    cache.check()
    assert frames.frame_count == 1


@pytest.mark.gpu
@torch.no_grad()
def test_static_decodes_in_a_captured_graph() -> None:
    mix, x = PLAIN.with_(position="none").build(torch.float32).cuda(), text(2, 24).float().cuda()
    want = mix(x, Step.plain(0, 2, 24, "cuda"), NoCache())
    cache = policy("static", tokens=24).build([mix.slots], 2, torch.float32, torch.device("cuda"))
    mix(x[:, :8], Step.plain(0, 2, 8, "cuda"), cache)
    cache.commit()
    new, step = x[:, :1].clone(), Step(torch.full((2, 1), 23, device="cuda"))
    for _ in range(2):  # once outside, as capture wants every kernel loaded
        mix(new, step, cache)
        cache.commit([0, 0])
        step = Step(step.pos)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mix(new, step, cache)
    cache.commit([0, 0])
    for at in range(8, 24):
        new.copy_(x[:, at : at + 1])
        step.pos.fill_(at)
        graph.replay()
        cache.replayed(step)
        cache.commit()
        torch.testing.assert_close(out[:, 0], want[:, at], rtol=1e-4, atol=1e-5)
    cache.check()
    assert cache.length == [24, 24]
