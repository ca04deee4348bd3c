"""One contract for every attention part that the registry knows: a new part is tested as soon as it is registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.components.mixes import M, Mix, completed, names, pairs, singles
from zoo.components import registry
from zoo.components.contracts import NoCache, Step
from zoo.model import Mixer

T = 12
AXES = ("projection", "position", "pattern", "kernel")
EXACT = [name for name in registry.names("cache") if registry.get("cache", name).spec.exact]  # pyright: ignore[reportAttributeAccessIssue]


def inputs(rows: int = 3, length: int = T) -> Tensor:
    return torch.randn(rows, length, M, generator=torch.Generator().manual_seed(1))


def alone(mix: Mixer, x: Tensor) -> Tensor:
    return mix(x, Step.plain(0, x.shape[0], x.shape[1]), NoCache())


def store_for(mix: Mixer, cache: str) -> Any:
    return registry.get("cache", cache).small().build([mix.slots], 3, torch.float32, torch.device("cpu"))


def case(mix: Mix, *values: str) -> Any:
    """Every part by itself runs always, the pairs only where there is time."""
    name = "-".join((str(mix), *values))
    return pytest.param(mix, *values, id=name, marks=() if mix in singles() else pytest.mark.slow)


def cached(mixes: list[Mix], caches: list[str]) -> list[Any]:
    return [case(mix, cache) for mix in mixes for cache in caches if mix.spec.pattern.causal]


every_mix = pytest.mark.parametrize("choice", [case(m) for m in pairs()])
every_cached_mix = pytest.mark.parametrize(
    ("choice", "cache"), cached([m for m in pairs() if m not in singles()], ["dense"]) + cached(singles(), EXACT)
)


@pytest.mark.parametrize("axis", AXES)
def test_every_part_is_in_some_mix(axis: str) -> None:
    """A part that every other one refuses could not be used, and nothing below would test it."""
    assert {getattr(m, axis) for m in singles()} == set(names(axis))


def close(got: Tensor, want: Tensor, choice: Mix) -> None:
    """Equal but for fp32 rounding and for what the kernel's own number formats may move."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 + choice.spec.kernel.rounding * float(want.abs().max()))


@pytest.mark.parametrize(
    ("choice", "padding"), [case(m, "interior") for m in pairs()] + [case(m, p) for m in singles() for p in ("left", "right")]
)
@torch.no_grad()
def test_padded_rows_equal_each_row_alone(choice: Mix, padding: str) -> None:
    mix, lengths, x = choice.build(), [T, 7, 1], inputs()
    pos = torch.full((3, T), -1)
    for row, n in enumerate(lengths):
        at = {"left": range(T - n, T), "right": range(n), "interior": [*range(n // 2), *range(T - n + n // 2, T)]}[padding]
        pos[row, list(at)] = torch.arange(n)
    x = torch.where(pos[..., None] >= 0, x, torch.full_like(x, 1e4))  # what stands at padding must not matter while it is finite
    got = mix(x, Step.of(pos), NoCache())
    assert torch.isfinite(got).all()
    for row in range(3):
        keep = pos[row] >= 0
        close(got[row, keep], alone(mix, x[row : row + 1, keep])[0], choice)


@every_cached_mix
@pytest.mark.parametrize("chunks", [[1] * T, [4, 1, 1, 6]], ids=str)
@torch.no_grad()
def test_cached_equals_uncached(choice: Mix, cache: str, chunks: list[int]) -> None:
    mix, x = choice.build(), inputs()
    store = store_for(mix, cache)
    got, start = [], 0
    for n in chunks:
        got.append(mix(x[:, start : start + n], Step.plain(start, 3, n), store))
        store.commit()
        store.check()
        start += n
    close(torch.cat(got, 1), alone(mix, x), choice)


@every_cached_mix
@torch.no_grad()
def test_unequal_rows_prefill_then_decode(choice: Mix, cache: str) -> None:
    mix, x, lengths = choice.build(), inputs(), torch.tensor([8, 3, 5])
    store = store_for(mix, cache)
    column = torch.arange(8)[None]
    mix(x[:, :8], Step.of(torch.where(column < lengths[:, None], column, -1)), store)
    store.commit()
    for i in range(3):
        at = lengths + i
        got = mix(x[torch.arange(3), at][:, None], Step.of(at[:, None]), store)
        store.commit()
        store.check()
        for row in range(3):
            close(got[row, 0], alone(mix, x[row : row + 1, : at[row] + 1])[0, -1], choice)


@every_cached_mix
@torch.no_grad()
def test_rolled_back_tokens_leave_no_trace(choice: Mix, cache: str) -> None:
    mix, x = choice.build(), inputs()
    store = store_for(mix, cache)
    mix(x[:, :6], Step.plain(0, 3, 6), store)
    store.commit()
    mix(torch.full_like(x[:, :4], 7.0), Step.plain(6, 3, 4), store)
    store.commit([0, 0, 0])
    got = mix(x[:, 6:], Step.plain(6, 3, T - 6), store)
    store.commit()
    store.check()
    close(got, alone(mix, x)[:, 6:], choice)


@pytest.mark.parametrize("choice", [case(m) for m in pairs() if "cpu" in m.spec.kernel.trains_on])
def test_gradients_equal_float64(choice: Mix) -> None:
    mix, exact = choice.build(), choice.build(torch.float64)
    exact.load_state_dict(mix.state_dict())
    grads = []
    for m, dtype in ((mix, torch.float32), (exact, torch.float64)):
        x = inputs().to(dtype).requires_grad_()
        alone(m, x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in m.parameters())])
    for got, want in zip(*grads, strict=True):
        assert want.abs().max() > 0
        assert float((got.double() - want).abs().max() / want.abs().max()) < 5e-4 + choice.spec.kernel.rounding


@every_mix
@torch.no_grad()
def test_low_precision_is_near_float64(choice: Mix) -> None:
    """At most twice the error, relative to the largest output, of eager attention on the same operands; 3 % in norm without such."""
    x, plain = inputs(), choice.with_(kernel="eager")
    exact = alone(choice.build(torch.float64), x.double())
    error = alone(choice.build(torch.bfloat16), x.bfloat16()) - exact
    if registry.get("kernel", choice.kernel).spec.history and plain.accepted:  # pyright: ignore[reportAttributeAccessIssue]
        want = alone(plain.build(torch.float64), x.double())
        allowed = 2 * (alone(plain.build(torch.bfloat16), x.bfloat16()) - want).abs().max() / want.abs().max() + 2e-3
        assert error.abs().max() / exact.abs().max() <= allowed + choice.spec.kernel.rounding
    else:
        assert error.norm() / exact.norm() <= 0.03


@pytest.mark.parametrize("kernel", names("kernel"))
@torch.no_grad()
def test_a_query_that_sees_nothing_gives_zero(kernel: str) -> None:
    choice = completed(kernel=kernel)
    assert choice
    got = choice.build()(inputs(2), Step.of(torch.full((2, T), -1)), NoCache())
    assert (got == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("choice", [m for m in singles() if m.spec.kernel.graph_safe], ids=str)
def test_compiles_without_graph_breaks(choice: Mix) -> None:
    mix, x = choice.build(), inputs()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: alone(mix, x), fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled("cpu" in choice.spec.kernel.trains_on):
        close(compiled(x), alone(mix, x), choice)


SCALED = [mix for kernel in names("kernel") if (mix := completed(kernel=kernel)) and mix.projection.startswith("gqa")]


@pytest.mark.parametrize("choice", SCALED, ids=lambda c: c.kernel)
@torch.no_grad()
def test_factors_of_projections_and_positions_count(choice: Mix) -> None:
    """A kernel multiplies its logits by both; one that it ignored would leave every bit as it is."""
    mixer: Any = choice.build(torch.float64)
    x, step = torch.randn(1, 12, M, dtype=torch.float64), Step.plain(0, 1, 12)
    before = mixer(x, step, NoCache())
    mixer.position.logit_scale = 3.0
    after = mixer(x, step, NoCache())
    mixer.position.logit_scale, mixer.projection.scale = 1.0, 3 * mixer.projection.scale
    torch.testing.assert_close(mixer(x, step, NoCache()), after)
    assert not torch.equal(after, before)
