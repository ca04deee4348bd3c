"""Costs computed from specs against the operations that PyTorch counts while built models run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.components.mixes import M, Mix, completed, names
from zoo.components import registry
from zoo.components.contracts import MLP, Call, NoCache, Step
from zoo.components.spec import load, override
from zoo.costs import costs, decode, in_words, prefill
from zoo.describe import summarize
from zoo.model import Mixer, Model, ModelSpec

GQA = {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8}
LATENT = {"name": "latent", "heads": 4, "nope": 6, "rope": 4, "value": 8, "rank": 12, "q_rank": 10}
GATED = {"name": "gated", "hidden": 48}
EXPERTS = [{"repeat": 4, "name": "gated", "hidden": 8}]


def spec(projection: Any = GQA, mlp: Any = GATED, kernel: Any = "eager", pattern: Any = "causal", **model: Any) -> ModelSpec:
    layer = {"mixer": {"projection": projection, "position": "rope", "kernel": kernel, "pattern": pattern}, "mlp": mlp}
    data = {"width": M, "context": 64, "embed": {"name": "tokens", "vocab": 50}, "layers": [layer] * 2, "head": "lm"}
    return load(ModelSpec, {**data, **model})


def fused(q: Any, k: Any, v: Any, *others: Any, out_shape: Any, **options: Any) -> int:
    """From shapes [B, H, T, D]; PyTorch's counter knows the operator of GPUs only."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


def counted(model: Any, *args: Any, **options: Any) -> int:
    own: Any = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=own) as counter:
        model(*args, **options)
    return counter.get_total_flops()


def filled(model: Model, past: int) -> Any:
    cache = model.new_cache(1)
    with torch.no_grad():
        model(torch.zeros(1, past, dtype=torch.long), cache=cache)
    return cache


MOE = {"name": "moe", "router": {"name": "top_k", "k": 2}, "experts": EXPERTS, "dispatch": "loop"}
SPECS = {
    "dense": spec(),
    "mha": spec({**GQA, "kv_heads": 4}),
    "mqa": spec({**GQA, "kv_heads": 1}),
    "grouped latent": spec({"name": "grouped_latent", "heads": 4, "latents": 2, "nope": 6, "rope": 4, "value": 8, "rank": 8}),
    "latent": spec(LATENT),
    "latent, no query latent": spec({**LATENT, "q_rank": None}),
    "tied latent": spec({"name": "grouped_tied", "heads": 4, "kv_heads": 2, "head_dim": 8, "rope": 4}),
    "window": spec(pattern={"name": "window", "size": 5}),
    "softcap, plain": spec(kernel={"name": "softcap", "cap": 5.0}, mlp={"name": "plain", "hidden": 20}),
    "moe": spec(mlp=MOE),
    "moe, shared and gated": spec(mlp={**MOE, "shared": GATED, "shared_gate": True, "dispatch": "grouped"}),
    "tied head": spec(head={"name": "lm", "tied": True}),
}


@pytest.mark.parametrize("wanted", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("new", "past"), [(12, 0), (1, 20), (3, 20), (17, 20)])
def test_operations_are_those_that_are_counted(wanted: ModelSpec, new: int, past: int) -> None:
    model = wanted.build().eval()
    options = {"cache": filled(model, past)} if past else {}
    found = costs(wanted, Call(new, past))
    assert found.flops == counted(model, torch.zeros(1, new, dtype=torch.long), **options)
    assert found.flops == wanted.flops(Call(new, past)), "the components make up the whole"


@pytest.mark.parametrize("new", [1, 30])
def test_latent_operands_are_absorbed_where_that_is_cheaper(new: int) -> None:
    projection: Any = SPECS["latent"].layers[0].mixer.projection
    absorbed = new == 1
    assert projection.absorbs(new, 40) == absorbed
    assert projection.widths_in(Call(new, 40 - new)) == ((12 + 4, 12) if absorbed else (6 + 4, 8))


# Not countable: flex runs under no dispatch mode. What the others do beyond their formula has tests of its own below.
OTHERWISE = {"flex", "native_sparse", "sage2", "sage2pp", "sage3", "split_unified"}
SAME_PRODUCTS = [n for n in names("kernel") if n not in OTHERWISE and completed(kernel=n, pattern="full")]


def with_full_pattern(kernel: str) -> Mix:
    found = completed(kernel=kernel, pattern="full")
    assert found
    return found


@pytest.mark.parametrize("kernel", SAME_PRODUCTS)
def test_every_kernel_that_sees_all_pairs_computes_them_once(kernel: str) -> None:
    choice = with_full_pattern(kernel)
    mixer: Mixer = choice.build()
    x, step = torch.randn(1, 12, M), Step.plain(0, 1, 12)
    want = choice.spec.flops(Call(12), M, 0)
    assert counted(mixer, x, step, NoCache()) == want


def beyond(kernel: str, tokens: int = 64) -> tuple[Any, float, float]:
    """The mix, its declared operations with every pair shown, and those counted beyond them."""
    choice: Any = completed(kernel=kernel)
    spec = choice.spec
    declared = spec.kernel.flops(Call(tokens), spec.projection)
    rest = spec.flops(Call(tokens), M, 0) - spec.kernel.flops(at(choice, tokens), spec.projection)
    return choice, declared, counted(choice.build(), torch.randn(1, tokens, M), Step.plain(0, 1, tokens), NoCache()) - rest - declared


def at(choice: Mix, tokens: int) -> Call:
    """The call as its pattern shows it."""
    return Call(tokens, shown=choice.spec.pattern.pairs(Call(tokens)))


def product_flops(choice: Mix, keys: float, *widths: int, tokens: int = 64, heads: int | None = None) -> float:
    projection: Any = choice.spec.projection
    return 2 * (heads or projection.heads) * tokens * keys * sum(widths)


@pytest.mark.parametrize("kernel", ["sage2", "sage2pp", "sage3"])
def test_emulations_that_smooth_queries_multiply_their_means_apart(kernel: str) -> None:
    choice, _, more = beyond(kernel)
    assert more == product_flops(choice, 64, choice.spec.projection.widths[0])


def test_a_unified_maximum_takes_rows_out_of_reach_again() -> None:
    choice, declared, more = beyond("split_unified")
    joined = product_flops(choice, 1, *choice.spec.projection.widths)
    assert more in (0, joined, declared, declared + joined)


def test_native_sparse_by_masks_meets_every_block_and_twice_every_token() -> None:
    """Declared are the blocks that are picked and the window; the plain form squeezes as declared and masks the rest."""
    choice, declared, more = beyond("native_sparse")
    spec, projection, tokens = choice.spec.kernel, choice.spec.projection, 64
    blocks = (tokens - spec.block) // spec.stride + 1
    squeezed = Call(projection.groups * blocks)
    made = sum(c.spec.flops(squeezed, *c.at) for c in spec.children(projection).values())
    picking = product_flops(choice, blocks, tokens // spec.select_block, heads=projection.groups)
    assert declared + more == made + picking + product_flops(choice, blocks + 2 * tokens, *projection.widths)
    assert made == pytest.approx(declared - product_flops(choice, met(spec, tokens), *projection.widths), rel=0.2)


def met(spec: Any, tokens: int) -> float:
    """Keys that a query meets: blocks, the picked ones' tokens, the window."""
    return tokens / spec.stride + min(tokens, spec.select * spec.select_block) + min(tokens, spec.window)


def test_flex_declares_what_its_pattern_shows() -> None:
    flex, sdpa = completed(kernel="flex"), completed(kernel="sdpa")
    assert flex
    assert sdpa
    assert flex.with_(kernel="sdpa") == sdpa
    assert flex.spec.flops(Call(64), M, 0) == sdpa.spec.flops(Call(64), M, 0)


@pytest.mark.parametrize(("new", "past"), [(1, 100), (40, 60), (600, 40)])
@pytest.mark.parametrize("pattern", names("pattern"))
def test_pairs_are_those_of_the_mask(pattern: str, new: int, past: int) -> None:
    choice = completed(pattern=pattern)
    assert choice
    qpos, kpos = torch.arange(past, past + new)[:, None], torch.arange(past + new)
    want = int(choice.spec.pattern.see(qpos, kpos).sum())
    assert choice.spec.pattern.pairs(Call(new, past)) == pytest.approx(want, rel=0 if new <= 512 else 0.01)


@pytest.mark.parametrize(("name", "slots"), [("soft_moe", 2), ("soft_moe", 1)])
def test_soft_mixtures(name: str, slots: int) -> None:
    mlp = load(MLP, {"name": name, "slots": slots, "experts": EXPERTS})
    assert mlp.flops(Call(9), M) == counted(mlp.build(M), torch.randn(1, 9, M))


def test_dispatch_by_capacity_pads() -> None:
    mlp = load(MLP, {**MOE, "dispatch": {"name": "capacity", "factor": 2.0}})
    assert mlp.flops(Call(9), M) == counted(mlp.build(M), torch.randn(9, M))


def test_a_fused_kernel_pays_for_what_the_pattern_shows() -> None:
    whole, window = spec(kernel="sdpa"), spec(kernel="sdpa", pattern={"name": "window", "size": 4})
    kernel = {c.path: c.flops for c in decode(whole, 32).components}["layers.0:2.mixer.kernel"]
    assert kernel == 2 * 2 * 4 * (8 + 8) * 32
    assert {c.path: c.flops for c in decode(window, 32).components}["layers.0:2.mixer.kernel"] == kernel / 8
    assert {c.path: c.flops for c in prefill(whole, 32).components}["layers.0:2.mixer.kernel"] == kernel * 33 / 2


def test_states_cost_the_same_at_any_length() -> None:
    linear = spec(kernel="linear")
    assert decode(linear, 10).flops == decode(linear, 10_000).flops
    assert decode(linear, 10).bytes_kept == 0
    state = 2 * 4 * 8 * (8 + 1)  # layers, heads, key width, value width and normaliser
    assert {c.path: c.bytes_read for c in decode(linear, 10).components}["cache"] == state * 4


def test_bytes_of_one_decoded_token() -> None:
    dense, row = spec(), M * 2
    total, found = summarize(dense), decode(dense, 33)
    table = 50 * M * 2
    cached = 2 * 2 * 16 * 2  # layers, keys and values, width, bytes
    assert found.bytes_read == total.bytes - table + row + 32 * cached
    assert found.bytes_kept == cached == dense.cache_bytes_per_token(2)
    tied = override(dense, "head.tied=true")
    assert decode(tied, 33).bytes_read == found.bytes_read, "a tied head reads the table whole"
    window = spec(pattern={"name": "window", "size": 5})
    assert decode(window, 33).bytes_read == total.bytes - table + row + 4 * cached


FORGETFUL: dict[str, tuple[Any, Any]] = {
    "h2o": ("causal", {"name": "h2o", "heavy": 5, "recent": 4, "interval": 3}),
    "sinks_recent": ("causal", {"name": "sinks_recent", "sinks": 2, "window": 6, "room": 3}),
    "sliding": ({"name": "window", "size": 7}, {"name": "sliding", "room": 2}),
    "shared": ("causal", {"name": "shared", "reads": [0, 0], "inner": {"name": "sinks_recent", "sinks": 1, "window": 4, "room": 2}}),
}


def reached(wanted: ModelSpec) -> tuple[Model, Any]:
    """A model and its cache after 20 tokens and as many more as it takes until the cache holds the most that its policy says."""
    model = wanted.build().eval()
    cache = filled(model, 20)
    most = wanted.cache.kept(10_000, wanted.slots()[0])
    for _ in range(20):
        if cache.stores[0].count == [most]:
            return model, cache
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
        assert cache.stores[0].count[0] <= most
    raise AssertionError(f"the cache holds {cache.stores[0].count}, never {most}")


@pytest.mark.parametrize(("pattern", "policy"), FORGETFUL.values(), ids=FORGETFUL)
def test_what_a_cache_forgets_is_neither_kept_nor_read(pattern: Any, policy: Any) -> None:
    wanted, dense = (spec(pattern=pattern, cache=cache) for cache in (policy, "dense"))
    _, cache = reached(wanted)
    [length], [count] = cache.length, cache.stores[0].count
    kept = sum(x[0, :count].nbytes for store in cache.stores for x in store.tensors() if x.dtype == torch.float32)
    assert wanted.cache.total_bytes(wanted.slots(), length, 4) == kept < cache.bytes()
    assert summarize(override(wanted, f"context={length}"), torch.float32).cache_bytes == kept
    assert summarize(override(wanted, "context=5000"), torch.float32).cache_bytes == kept
    assert cache.bytes() - kept < 2 * 64 * (8 + 8 + 2 * 16 * 4) * len(cache.stores), "room, positions and votes are the rest"
    found, plain = ({c.path: c for c in decode(s, length + 1, torch.float32).components}["cache"] for s in (wanted, dense))
    written = kept / count
    assert found.bytes_kept == 0
    assert plain.bytes_kept >= written
    seen = min(count, wanted.slots()[0]["k"].window or count + 1) - (wanted.slots()[0]["k"].window is not None)
    assert found.bytes_read == seen * plain.bytes_kept
    assert decode(wanted, 50).bytes_read == decode(wanted, 5000).bytes_read


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(("pattern", "policy"), FORGETFUL.values(), ids=FORGETFUL)
def test_kernels_compute_the_pairs_that_a_cache_shows(pattern: Any, policy: Any, kernel: str) -> None:
    """``eager`` computes all pairs of what is there and masks, the others are taken to compute those that are shown."""
    wanted = spec(pattern=pattern, cache=policy, kernel=kernel)
    model, cache = reached(wanted)
    pairs = []

    def note(_module: Any, args: tuple[Any, ...]) -> None:
        _, view, step, narrowed, _ = args
        pairs.append(view.kpos.shape[1] if kernel == "eager" else int(narrowed.mask(step, view).sum()))

    for layer in model.layers:
        layer.mixer.kernel.register_forward_pre_hook(note)
    call = Call(1, cache.length[0])
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    found = costs(wanted, call)
    assert {c.path: c.flops for c in found.components}["layers.0:2.mixer.kernel"] == sum(pairs) * 2 * 4 * (8 + 8)
    assert wanted.flops(call) == found.flops


def test_a_thinned_prompt_is_what_a_decoded_token_reads() -> None:
    wanted = spec(cache={"name": "snapkv", "tokens": 9, "window": 3})
    model = wanted.build().eval()
    cache = filled(model, 30)
    assert cache.stores[0].count == [wanted.cache.kept(30, wanted.slots()[0])] == [9]
    assert {c.path: c.bytes_read for c in decode(wanted, 31).components}["cache"] == 9 * wanted.cache_bytes_per_token(2)


@pytest.mark.parametrize("name", registry.names("cache"))
def test_caches_hold_as_many_tokens_as_their_policies_say(name: str) -> None:
    """Of a prompt, whatever its length: never more, and all where nothing is forgotten."""
    part = registry.get("cache", name)
    policy = {"name": name, **part.example} | ({"reads": [0, 0]} if name == "shared" else {})
    wanted = spec(cache=policy)
    model, slots = wanted.build().eval(), wanted.slots()[0]
    for length in (1, 5, 11, 24):
        held = filled(model, length).stores[0].count[0]
        kept = wanted.cache.kept(length, slots)
        assert held <= kept <= length
        assert wanted.cache.forgets or held == kept == length


def test_layers_that_read_others_are_counted_by_what_the_inner_cache_stores() -> None:
    plain, coded = (spec(cache={"name": "shared", "reads": [0, 0], "inner": inner}) for inner in ("dense", "int8"))
    assert plain.cache_bytes_per_token(2) * 2 == spec().cache_bytes_per_token(2)
    read = {c.path: c.bytes_read for c in decode(coded, 11).components}["cache"]
    assert read == 2 * 10 * coded.cache_bytes_per_token(2) < 2 * 10 * plain.cache_bytes_per_token(2)


def test_a_mixture_reads_the_experts_that_are_chosen() -> None:
    mlp = load(MLP, MOE)
    one, all_of_it = 3 * M * 8 * 2, 4 * M * 4
    assert mlp.bytes_read(Call(1), 2, M) == all_of_it + 2 * one
    assert mlp.bytes_read(Call(200), 2, M) == pytest.approx(all_of_it + 4 * one)


def test_quantized_weights_are_fewer_bytes_and_the_same_operations() -> None:
    packed = override(spec(), *(f"layers.*.mlp.{n}={{name: packed_int, bits: 4, group_size: 16}}" for n in ("gate", "up", "down")))
    a, b = decode(spec(), 8), decode(packed, 8)
    assert a.flops == b.flops
    assert a.bytes_read - b.bytes_read == summarize(spec()).bytes - summarize(packed).bytes > 0


def test_a_call_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 new token"):
        costs(spec(), Call(0))


def test_totals_in_words() -> None:
    text = in_words(spec(), 33)
    one = decode(spec(), 33)
    assert f"{one.flops:,.0f} FLOP, {one.bytes_read:,.0f} bytes read, {one.bytes_kept:,.0f} kept" in text
    assert f"a prompt of 33: {prefill(spec(), 33).flops / 33:,.0f} FLOP" in text
