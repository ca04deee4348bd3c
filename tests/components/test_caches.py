"""What every cache promises, over every part of the mixer that may stand before it, and what each policy says it keeps."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import zoo
from tests.components.mixes import M, Mix, singles
from zoo.components import registry
from zoo.components.cache.shared import cross_layer, decoder_decoder
from zoo.components.contracts import CachePolicy, NoCache, Pattern, Slot, Step
from zoo.components.numerics.kv import Codec, Float8, Int8, Spread, stored_bytes
from zoo.components.spec import check, load
from zoo.model import Mixer, Model, ModelSpec

CPU = torch.device("cpu")
PLAIN = Mix("gqa", "rope", "causal", "eager")
NAMES = registry.names("cache")


def policy(name: str, **options: Any) -> CachePolicy:
    return load(CachePolicy, {"name": name, **registry.get("cache", name).example, **options})


def open_cache(spec: CachePolicy, mix: Mixer, rows: int, dtype: torch.dtype = torch.float64) -> Any:
    return spec.build([mix.slots], rows, dtype, CPU)


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, length, M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXACT = [n for n in NAMES if policy(n).exact]


def served() -> Iterator[Any]:
    """The pairs that may be used together: the pattern can be cached and the policy does not refuse the layer.

    Every policy serves the plainest mixer and each other mixer meets one policy; the rest of the product is slow. Exact policies
    meet every mixer in test_mixer.py.
    """
    for i, mix in enumerate(m for m in singles() if m.spec.pattern.causal):
        fit = [c for c in NAMES if not policy(c).refuses(mix.spec.ask)]
        lossy = [c for c in fit if c not in EXACT]
        quick = fit if mix == PLAIN else [lossy[i % len(lossy)]]
        yield from (pytest.param(mix, c, id=f"{mix}-{c}", marks=[] if c in quick else [pytest.mark.slow]) for c in fit)


# ---- the contract ------------------------------------------------------------------------------------------------------------


def call(mix: Mixer, cache: Any, x: Tensor, start: list[int], count: list[int]) -> Tensor:
    """Run count[b] tokens of each row of x [B, T, M] from start[b] on, padded on the right; returns the padded outputs."""
    width = max(count)
    column = torch.arange(width)[None]
    pos = torch.where(column < torch.tensor(count)[:, None], column + torch.tensor(start)[:, None], -1)
    new = torch.stack([x[row, pos[row].clamp(min=0)] for row in range(len(count))])
    return mix(new, Step.of(pos), cache)


def token_by_token(mix: Mixer, spec: CachePolicy, x: Tensor, prompt: int) -> Tensor:
    """One row: its prompt in one call, then each token in a call of its own: what the policy means."""
    cache = open_cache(spec, mix, 1)
    out = [call(mix, cache, x, [0], [prompt])]
    cache.commit()
    for at in range(prompt, x.shape[1]):
        out.append(call(mix, cache, x, [at], [1]))
        cache.commit()
    return torch.cat(out, 1)[0]


@pytest.mark.parametrize(("choice", "name"), list(served()))
@torch.no_grad()
def test_rows_drafts_and_forks_change_nothing(choice: Mix, name: str) -> None:
    """Three rows of unequal prompts grow by unequal chunks within the budget, with rejected drafts, and are shuffled midway."""
    rnd, mix, spec, x = random.Random(0), choice.build(torch.float64), policy(name), text(3, 20)
    prompts = [5, 3, 8]
    want = [token_by_token(mix, spec, x[row : row + 1], prompts[row]) for row in range(3)]
    rows, cache, start, count = [0, 1, 2], open_cache(spec, mix, 3), [0, 0, 0], prompts
    out = call(mix, cache, x, start, count)
    cache.commit()
    for turn in range(6):
        compare(choice, out, want, rows, start, count)
        cache.check()
        if turn == 3:
            rows, cache = [rows[2], rows[0], rows[1]], cache.fork([2, 0, 1])
        start, budget = list(cache.length), cache.budget()
        count = [min(rnd.randint(0, 3), b, 20 - n) for b, n in zip(budget, start, strict=True)]
        draft = call(mix, cache, 7 - x[rows], start, [min(3, b, 20 - n) for b, n in zip(budget, start, strict=True)])
        assert torch.isfinite(draft).all()
        cache.commit([0, 0, 0])
        count[0] = min(1, 20 - start[0])  # something happens in each turn
        out = call(mix, cache, x[rows], start, count)
        cache.commit(count)
    assert cache.length == [s + c for s, c in zip(start, count, strict=True)]


def compare(choice: Mix, out: Tensor, want: list[Tensor], rows: list[int], start: list[int], count: list[int]) -> None:
    for at, row in enumerate(rows):
        expect = want[row][start[at] : start[at] + count[at]]
        slack = 1e-6 + choice.spec.kernel.rounding * float(want[row].abs().max())
        torch.testing.assert_close(out[at, : count[at]], expect, rtol=1e-5, atol=slack)


@pytest.mark.parametrize("name", EXACT)
@torch.no_grad()
def test_an_exact_policy_equals_no_cache(name: str) -> None:
    mix, x = PLAIN.build(torch.float64), text(1, 30)
    got = token_by_token(mix, policy(name), x, 9)
    torch.testing.assert_close(got, mix(x, Step.plain(0, 1, 30), NoCache())[0])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_bytes_are_those_of_every_tensor_that_the_cache_holds(name: str) -> None:
    mix, x = PLAIN.build(torch.float64), text(2, 20)
    cache = open_cache(policy(name), mix, 2)
    for start, count in (([0, 0], [9, 4]), ([9, 4], [1, 2]), ([10, 6], [2, 2])):
        call(mix, cache, x, start, count)
        cache.commit()
        assert cache.bytes() == sum({s.data_ptr(): s.nbytes() for s in storages(cache, set())}.values())


def storages(thing: Any, seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors that can be reached from an object."""
    if id(thing) in seen or isinstance(thing, (type, str, CachePolicy)):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing.untyped_storage()
    elif isinstance(thing, dict):
        for x in thing.values():
            yield from storages(x, seen)
    elif isinstance(thing, (list, tuple, set)):
        for x in thing:
            yield from storages(x, seen)
    elif type(thing).__module__.startswith("zoo."):
        yield from storages(vars(thing), seen)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "kivi"])
@torch.no_grad()
def test_bytes_per_token_are_those_of_a_column(name: str) -> None:
    mix, spec = PLAIN.build(torch.float32), policy(name)
    cache = spec.build([mix.slots], 1, torch.float32, CPU)
    call(mix, cache, text(1, 8).float(), [0], [8])
    cache.commit()
    (store,) = cache.stores
    buffers = [x for x in store.tensors() if x.dtype != torch.int64]
    assert spec.bytes_per_token(mix.slots, 4) == sum(x[0, 0].numel() * x.element_size() for x in buffers)


def test_bytes_per_token_follow_the_slots_dtype() -> None:
    slots = {"k": Slot("token", (2, 8)), "kind": Slot("token", (3,), torch.int8), "s": Slot("state", (4, 4))}
    assert policy("dense").bytes_per_token(slots, 2) == 2 * 16 + 3
    assert policy("int8").bytes_per_token(slots, 2) == 16 + 2 * 4 + 3


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_row_cut_to_nothing_begins_anew(name: str) -> None:
    mix, x, spec = PLAIN.build(torch.float64), text(2, 20), policy(name)
    cache = open_cache(spec, mix, 2)
    call(mix, cache, 9 - x, [0, 0], [13, 6])
    cache.commit()
    cache.trim([0, 6])
    call(mix, cache, x, [0, 6], [5, 0])
    cache.commit()
    cache.check()
    got = call(mix, cache, x, [5, 6], [1, 0])
    torch.testing.assert_close(got[0, 0], token_by_token(mix, spec, x[:1, :6], 5)[5])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_misuse_is_refused(name: str) -> None:
    mix, x = PLAIN.build(torch.float64), text(2, 8)
    cache = open_cache(policy(name), mix, 2)
    call(mix, cache, x, [0, 0], [4, 4])
    with pytest.raises(RuntimeError, match="not committed"):
        call(mix, cache, x, [4, 4], [1, 1])
    with pytest.raises(RuntimeError, match="not committed"):
        cache.fork([0])
    with pytest.raises(ValueError, match=r"commit\(keep=\[5, 0\]\)"):
        cache.commit([5, 0])
    cache.commit()
    with pytest.raises(ValueError, match="the rows hold"):
        cache.trim([5, 4])
    with pytest.raises(ValueError, match="2 rows, the call 1"):
        call(mix, cache, x[:1], [4], [1])
    with pytest.raises(ValueError, match="one document a row"):
        mix(x[:, :1], Step(torch.full((2, 1), 4), None, torch.zeros(2, 1, dtype=torch.long)), cache)


# ---- states ------------------------------------------------------------------------------------------------------------------


def stateful(name: str) -> tuple[Any, Any]:
    slots = {"s": Slot("state", (2,))}
    cache = policy(name).build([slots], 2, torch.float32, CPU)

    def step(start: int, width: int, value: float) -> Tensor:
        view = cache.extend(0, {"x": torch.zeros(2, width, 1)}, Step.plain(start, 2, width), slots)
        before = view.state["s"].clone()
        view.put("s", torch.full((2, 2), value))
        return before

    return cache, step


@pytest.mark.parametrize("name", NAMES)
def test_states_are_adopted_or_restored_whole(name: str) -> None:
    cache, step = stateful(name)
    step(0, 2, 1.0)
    cache.commit()
    step(2, 3, 2.0)
    cache.commit([0, 3])
    assert step(5, 2, 3.0).tolist() == [[1.0, 1.0], [2.0, 2.0]]
    with pytest.raises(ValueError, match="row 1 keeps 1 of 2 tokens, but a state cannot be cut"):
        cache.commit([2, 1])
    cache.commit([0, 0])
    with pytest.raises(ValueError, match="it has states, which cannot be cut"):
        cache.trim([2, 1])
    cache.trim([0, cache.length[1]])
    assert step(5, 1, 4.0).tolist() == [[0.0, 0.0], [2.0, 2.0]]


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


# ---- several layers ----------------------------------------------------------------------------------------------------------

ALL_LAYERS = {"kivi": {"residual": 32}, "h2o": {"heavy": 8, "recent": 8}, "snapkv": {"tokens": 8, "window": 4}, "static": {"tokens": 64}}


def small_model(cache: dict[str, Any], layers: int = 4, device: str = "cpu") -> Model:
    layer = {
        "mixer": {"projection": {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8}, "position": "rope"},
        "mlp": {"name": "gated", "hidden": 48},
    }
    data = {"width": M, "context": 64, "embed": {"name": "tokens", "vocab": 50}, "layers": [layer] * layers, "head": "lm", "cache": cache}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return load(ModelSpec, data).build().double().eval().to(device)


def decoded(model: Model, ids: Tensor, prompt: int) -> Tensor:
    cache = model.new_cache(len(ids))
    out = [model(ids[:, :prompt], cache=cache)]
    out += [model(ids[:, at : at + 1], cache=cache) for at in range(prompt, ids.shape[1])]
    cache.check()
    return torch.cat(out, 1)


def some_ids() -> Tensor:
    return torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("inner", ["dense", "paged", "sliding", "offload", "static"])
@pytest.mark.parametrize("reads", [cross_layer(4), decoder_decoder(4)], ids=str)
@torch.no_grad()
def test_shared_layers_read_another_s_tokens(inner: str, reads: tuple[int, ...]) -> None:
    model, ids = small_model({"name": "shared", "reads": list(reads), "inner": inner}), some_ids()
    got = decoded(model, ids, 11)
    torch.testing.assert_close(got, model(ids))  # a call without a cache shares in the same way
    for layer, source in enumerate(reads):  # keys and values of a reader's own are never looked at
        if layer != source:
            model.layers[layer].mixer.projection.k.weight.mul_(-3)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    assert torch.equal(decoded(model, ids, 11), got)
    assert model.spec.cache_bytes_per_token(4) == len(set(reads)) * 2 * 16 * 4
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, small_model({"name": "dense"})(ids))


def test_shared_refuses_lists_that_make_no_sense() -> None:
    spec = small_model({"name": "dense"}).spec
    with pytest.raises(ValueError, match="names 2 layers, the model has 4"):
        small_model({"name": "shared", "reads": [0, 0]}).new_cache(1)
    assert check(replace(spec, cache=policy("shared", reads=[0, 1, 3, 3]))) == [
        "cache.reads: layer 2 cannot read layer 3: it must be itself or an earlier layer that reads itself"
    ]


@pytest.mark.parametrize("name", EXACT)
@torch.no_grad()
def test_layers_do_not_mix_up_their_tokens(name: str) -> None:
    options = {"reads": [0, 1, 2, 3]} if name == "shared" else ALL_LAYERS.get(name, {})
    model, ids = small_model({"name": name, **options}), some_ids()
    torch.testing.assert_close(decoded(model, ids, 11), model(ids))


@pytest.mark.gpu
@torch.no_grad()
def test_offload_sends_layers_ahead_on_a_gpu() -> None:
    model, ids = small_model({"name": "offload"}, device="cuda"), some_ids().cuda()
    cache = model.new_cache(2)
    assert not any(x.is_cuda for layer in cache.stores[0].buffers.values() for b in layer.values() for x in b.tensors())
    torch.testing.assert_close(decoded(model, ids, 11), model(ids))


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_model_generates_with_every_policy(shared_data: Path, name: str) -> None:
    folder = shared_data / "weights/stories260K"
    options = {"name": name, **ALL_LAYERS.get(name, {}), **({"reads": [0, 1, 2, 3, 4]} if name == "shared" else {})}
    model = zoo.load(folder, override=[f"cache={json.dumps(options)}"])
    ids = [[1, 403, 407, 261, 378], [1, 410]]
    got = model.generate(ids, max_new_tokens=40)
    assert all(got)
    if name in EXACT:
        assert got == zoo.load(folder).generate(ids, max_new_tokens=40)
