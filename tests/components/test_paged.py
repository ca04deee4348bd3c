"""Blocks are shared, copied and given back without a leak, and what lies in unused ones never reaches an output."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from zoo.components.cache._pages import CacheFullError, PagedCache
from zoo.components.cache._prefix import HashIndex, RadixIndex
from zoo.components.contracts import CachePolicy, Slot, Step
from zoo.components.spec import load

SLOTS = {"k": Slot("token", (1,)), "latent": Slot("token", (2,))}
BOTH = pytest.mark.parametrize("name", ["paged", "paged_radix"])


def paged(name: str, rows: int, **options: Any) -> PagedCache:
    spec = load(CachePolicy, {"name": name, **options})
    return spec.build([SLOTS, {}, SLOTS], rows, torch.float32, torch.device("cpu"))


def feed(cache: PagedCache, new: Sequence[Sequence[int]], keep: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
    """One call that appends tokens (what is stored of a token is its id); returns what the last layer sees."""
    width = max(map(len, new))
    pos = torch.full((len(new), width), -1)
    ids = torch.full((len(new), width), float("nan"))  # padding must not be stored
    for row, tokens in enumerate(new):
        pos[row, : len(tokens)] = torch.arange(cache.length[row], cache.length[row] + len(tokens))
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.float32)
    step = Step.of(pos)
    streams = {}
    for layer in (0, 2):
        view = cache.extend(layer, {"k": ids[..., None], "latent": ids[..., None].expand(-1, -1, 2)}, step, SLOTS)
        streams = {**view.streams, "kpos": view.kpos}
    cache.commit(keep)
    return streams


def contents(cache: PagedCache, row: int) -> list[int]:
    store = cache.stores[0]
    flat = store.pool.blocks[2]["latent"][store.tables[row]].flatten(0, 1)[: store.count[row], 1]
    return flat.int().tolist()


class Fuzz:
    """Caches that share one pool, driven at random, beside plain lists of what each row must hold."""

    def __init__(self, name: str, seed: int, **options: Any):
        self.rnd = random.Random(seed)
        self.live = [paged(name, 2, **options)]
        self.pool = self.live[0].stores[0].pool
        self.want = [[[], []]]
        self.done = dict.fromkeys(("append", "full", "fork", "trim", "close", "match", "hit"), 0)

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.step()
            self.check()

    def step(self) -> None:
        at = self.rnd.randrange(len(self.live))
        getattr(self, self.rnd.choice(["append", "append", "append", "append", "fork", "trim", "close", "match"]))(
            self.live[at], self.want[at]
        )

    def append(self, cache: PagedCache, want: list[list[int]]) -> None:
        new = [[self.rnd.randrange(2) for _ in range(self.rnd.randint(0, 5))] for _ in want]
        if not any(new):
            return
        try:
            streams = feed(cache, new, keep := [self.rnd.randint(0, len(x)) for x in new])
        except CacheFullError:
            self.done["full"] += 1
            return
        assert not any(x.isnan().any() for x in streams.values())
        for row, (tokens, kept) in enumerate(zip(new, keep, strict=True)):
            seen = streams["k"][row, : len(want[row]) + len(tokens), 0].int().tolist()
            assert seen == want[row] + tokens
            want[row] += tokens[:kept]
        self.done["append"] += 1

    def fork(self, cache: PagedCache, want: list[list[int]]) -> None:
        if len(self.live) < 6:
            rows = [self.rnd.randrange(len(want)) for _ in range(self.rnd.randint(1, 3))]
            self.live.append(cache.fork(rows))
            self.want.append([list(want[r]) for r in rows])
            self.done["fork"] += 1

    def trim(self, cache: PagedCache, want: list[list[int]]) -> None:
        length = [max(0, len(x) - self.rnd.randint(0, 4)) for x in want]
        cache.trim(length)
        for x, n in zip(want, length, strict=True):
            del x[n:]
        self.done["trim"] += 1

    def close(self, cache: PagedCache, want: list[list[int]]) -> None:
        """Publish what a cache holds and let it go, by ``close`` or by dropping the last reference."""
        for row, tokens in enumerate(want):
            cache.publish(row, tokens)
        if self.rnd.random() < 0.5 or len(self.live) == 1:
            cache.close()
            want[:] = [[] for _ in want]
        else:
            at = self.live.index(cache)
            del self.live[at], self.want[at]
        self.done["close"] += 1

    def match(self, cache: PagedCache, want: list[list[int]]) -> None:
        row = self.rnd.randrange(len(want))
        if want[row]:
            return
        tokens = [self.rnd.randrange(2) for _ in range(20)]
        hit = cache.match(row, tokens)
        want[row] = tokens[:hit]
        self.done["match"] += 1
        self.done["hit"] += hit

    def check(self) -> None:
        self.live[0].check()  # the pool's books, over the tables of all caches
        for cache, want in zip(self.live, self.want, strict=True):
            assert cache.length == cache.stores[0].count == [len(x) for x in want]


def poison(pool: Any) -> None:
    """NaN into every block that nobody holds and nobody can find."""
    free = torch.tensor(sorted(pool.allocator.free), dtype=torch.long)
    for layer in pool.blocks.values():
        for x in layer.values():
            x[free] = float("nan")


@BOTH
@pytest.mark.parametrize("options", [{"size": 4, "blocks": 40}, {"size": 3}, {"size": 1, "blocks": 90}], ids=str)
@pytest.mark.parametrize("turns", [600, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_operations_leave_the_books_balanced(name: str, options: dict[str, int], turns: int) -> None:
    fuzz = Fuzz(name, 0, **options)
    for turn in range(turns):
        fuzz.step()
        fuzz.check()
        if turn % 50 == 0:
            poison(fuzz.pool)
            assert all(contents(c, r) == w for c, want in zip(fuzz.live, fuzz.want, strict=True) for r, w in enumerate(want))
    assert min(fuzz.done[n] for n in ("append", "fork", "trim", "close", "match", "hit")) > 10, fuzz.done
    assert turns < 20_000 or (fuzz.done["full"] > 0) == ("blocks" in options)
    for cache in fuzz.live:
        cache.close()
    fuzz.pool.check()
    assert fuzz.pool.allocator.available == len(fuzz.pool.positions) - 1


def skip_a_release(allocator: Any) -> None:
    real = allocator.release
    allocator.release = lambda blocks: real(blocks[1:])


def release_twice(allocator: Any) -> None:
    real = allocator.release
    allocator.release = lambda blocks: (real(blocks), real([b for b in blocks[:1] if allocator.holders[b]]))


def forget_to_share(allocator: Any) -> None:
    allocator.share = lambda blocks: None


def lose_an_evicted_block(allocator: Any) -> None:
    def unpublish(block: int) -> None:
        for gone in allocator.index.forget(block):
            allocator.known.discard(gone)
            allocator.idle.pop(gone, None)
            if gone % 2:
                allocator.free.append(gone)

    allocator.unpublish = unpublish


@BOTH
@pytest.mark.parametrize("plant", [skip_a_release, release_twice, forget_to_share, lose_an_evicted_block])
def test_planted_leaks_are_caught(name: str, plant: Callable[[Any], None]) -> None:
    for seed in range(5):
        fuzz = Fuzz(name, seed, size=4, blocks=40)
        plant(fuzz.pool.allocator)
        with pytest.raises((AssertionError, IndexError, KeyError)):
            fuzz.run(3000)


@BOTH
def test_writing_into_a_shared_block_is_caught_where_nothing_is_copied(name: str) -> None:
    fuzz = Fuzz(name, 1, size=4, blocks=40)
    fuzz.pool.copy = lambda pairs: None
    with pytest.raises(AssertionError):
        fuzz.run(3000)


@BOTH
def test_a_fork_copies_nothing_until_it_writes(name: str) -> None:
    cache = paged(name, 1, size=4, blocks=10)
    feed(cache, [[1, 2, 3, 4, 5, 6]])
    fork = cache.fork([0, 0, 0])
    assert fork.bytes() == cache.bytes()
    assert cache.stores[0].pool.allocator.available == 8
    feed(fork, [[7], [8], []])
    assert [contents(fork, row) for row in range(3)] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6]]
    assert contents(cache, 0) == [1, 2, 3, 4, 5, 6]
    assert cache.stores[0].pool.allocator.available == 6
    del fork
    gc.collect()
    assert cache.stores[0].pool.allocator.available == 8
    cache.check()


@BOTH
def test_a_full_pool_is_an_error_before_anything_is_written(name: str) -> None:
    cache = paged(name, 2, size=2, blocks=4)
    feed(cache, [[1, 2, 3], [4]])
    assert cache.reserve(4)
    assert not cache.reserve(5)
    with pytest.raises(CacheFullError, match="needs 2 blocks of 2 tokens and 1 are free"):
        feed(cache, [[5, 6, 7], [8, 9]])
    cache.check()
    assert cache.length == [3, 1]
    feed(cache, [[5], [6, 7]])
    assert [contents(cache, row) for row in range(2)] == [[1, 2, 3, 5], [4, 6, 7]]


@BOTH
def test_a_prefix_is_found_after_its_row_is_gone(name: str) -> None:
    cache = paged(name, 2, size=2, blocks=8)
    feed(cache, [[1, 2, 3, 4, 5], []])
    cache.publish(0, [1, 2, 3, 4, 5])
    cache.trim([0, 0])
    assert cache.match(0, [1, 2, 3, 4]) == 2  # a token must be left to compute
    assert cache.match(1, [1, 2, 3, 4, 9]) == 4
    assert contents(cache, 1) == [1, 2, 3, 4]
    streams = feed(cache, [[3, 7], [9]])
    assert streams["k"][:, :5, 0].int().tolist() == [[1, 2, 3, 7, 0], [1, 2, 3, 4, 9]]
    cache.check()


@BOTH
def test_a_published_block_that_was_cut_is_not_found_with_other_tokens(name: str) -> None:
    cache = paged(name, 2, size=2, blocks=8)
    feed(cache, [[1, 2, 3, 4], []])
    cache.publish(0, [1, 2, 3, 4])
    cache.trim([3, 0])
    feed(cache, [[9], []])
    assert cache.match(1, [1, 2, 3, 4, 5]) == 2
    cache.check()


@BOTH
def test_misuse_is_refused(name: str) -> None:
    cache = paged(name, 1, size=2, blocks=8)
    feed(cache, [[1, 2]])
    with pytest.raises(ValueError, match="row 0 already holds 2 tokens"):
        cache.match(0, [1, 2, 3])
    with pytest.raises(ValueError, match="row 0 holds 2 tokens, not 3"):
        cache.publish(0, [1, 2, 3])
    state = load(CachePolicy, name).build([SLOTS | {"s": Slot("state", (1,))}], 1, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="layers with states have no such blocks"):
        state.match(0, [1, 2, 3])


def test_the_radix_tree_finds_what_hashes_find() -> None:
    """Both indexes, the same random insertions and evictions of leaves: the same matches."""
    rnd, chained, tree, block = random.Random(0), HashIndex(2), RadixIndex(2), 0
    known: dict[tuple[int, ...], int] = {}
    for _ in range(500):
        tokens = [rnd.randrange(2) for _ in range(2 * rnd.randint(1, 5))]
        if rnd.random() < 0.6:
            blocks = [known.get(tuple(tokens[: 2 * i + 2])) or (block := block + 1) for i in range(len(tokens) // 2)]
            assert chained.insert(tokens, blocks) == tree.insert(tokens, blocks)
            known |= {tuple(tokens[: 2 * i + 2]): b for i, b in enumerate(blocks)}
        elif known:
            leaf = rnd.choice([p for p in known if not any(q[: len(p)] == p and q != p for q in known)])
            assert chained.forget(known[leaf]) == tree.forget(known.pop(leaf))
        assert chained.match(tokens) == tree.match(tokens) == [known[k] for k in prefixes(tokens) if k in known]


def prefixes(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[:n]) for n in range(2, len(tokens) + 1, 2)]
