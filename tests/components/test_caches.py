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
from tests.components.caches import CPU, EXACT, NAMES, PLAIN, call, open_cache, policy, text, token_by_token
from tests.components.mixes import M, Mix, singles
from zoo.components.cache.shared import cross_layer, decoder_decoder
from zoo.components.contracts import CachePolicy, NoCache, Slot, Step
from zoo.components.spec import check, load
from zoo.model import Model, ModelSpec


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
