"""One contract for every attention part that the registry knows: a new part is tested as soon as it is registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from zoo.components.contracts import NoCache, Step
from zoo.components.registry import Part
from zoo.model import Mixer, MixerSpec

M, T = 32, 12


def axis(family: str) -> list[Any]:
    return [pytest.param(p, id=p.name) for p in zoo.parts(family)]


def mixer(projection: Part, position: Part, pattern: Part, kernel: Part, dtype: torch.dtype = torch.float32) -> Mixer:
    spec = MixerSpec(projection=projection.small(), position=position.small(), pattern=pattern.small(), kernel=kernel.small())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return spec.build(M, 0).to(dtype).eval()


def inputs(rows: int = 3, length: int = T) -> Tensor:
    return torch.randn(rows, length, M, generator=torch.Generator().manual_seed(1))


def alone(mix: Mixer, x: Tensor) -> Tensor:
    return mix(x, Step.plain(0, x.shape[0], x.shape[1]), NoCache())


@pytest.fixture(params=axis("projection"))
def projection(request: pytest.FixtureRequest) -> Part:
    return request.param


@pytest.fixture(params=axis("position"))
def position(request: pytest.FixtureRequest) -> Part:
    return request.param


@pytest.fixture(params=axis("pattern"))
def pattern(request: pytest.FixtureRequest) -> Part:
    return request.param


@pytest.fixture(params=axis("kernel"))
def kernel(request: pytest.FixtureRequest) -> Part:
    return request.param


@pytest.fixture(params=axis("cache"))
def cache(request: pytest.FixtureRequest) -> Part:
    return request.param


@pytest.fixture
def mix(projection: Part, position: Part, pattern: Part, kernel: Part) -> Mixer:
    return mixer(projection, position, pattern, kernel)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", ["left", "right", "interior"])
@torch.no_grad()
def test_padded_rows_equal_each_row_alone(mix: Mixer, padding: str) -> None:
    lengths, x = [T, 7, 1], inputs()
    pos = torch.full((3, T), -1)
    for row, n in enumerate(lengths):
        at = {"left": range(T - n, T), "right": range(n), "interior": [*range(n // 2), *range(T - n + n // 2, T)]}[padding]
        pos[row, list(at)] = torch.arange(n)
    x[pos < 0] = float("inf")  # what stands at padding must not matter...
    x = torch.where(pos[..., None] >= 0, x, torch.full_like(x, 1e4))  # ...as long as it is finite
    got = mix(x, Step.of(pos), NoCache())
    assert torch.isfinite(got).all()
    for row in range(3):
        keep = pos[row] >= 0
        close(got[row, keep], alone(mix, x[row : row + 1, keep])[0])


@pytest.mark.parametrize("chunks", [[T], [5, 7], [1] * T, [4, 1, 1, 6]])
@torch.no_grad()
def test_cached_equals_uncached(mix: Mixer, cache: Part, chunks: list[int]) -> None:
    if not mix.pattern.causal:
        pytest.skip("a pattern that sees later tokens cannot be cached")
    x = inputs()
    store = cache.small().build([mix.slots], 3, torch.float32, torch.device("cpu"))
    got, start = [], 0
    for n in chunks:
        got.append(mix(x[:, start : start + n], Step.plain(start, 3, n), store))
        store.commit()
        store.check()
        start += n
    close(torch.cat(got, 1), alone(mix, x))


@torch.no_grad()
def test_unequal_rows_prefill_then_decode(mix: Mixer, cache: Part) -> None:
    if not mix.pattern.causal:
        pytest.skip("a pattern that sees later tokens cannot be cached")
    x, lengths = inputs(), torch.tensor([8, 3, 5])
    store = cache.small().build([mix.slots], 3, torch.float32, torch.device("cpu"))
    column = torch.arange(8)[None]
    mix(x[:, :8], Step.of(torch.where(column < lengths[:, None], column, -1)), store)
    store.commit()
    for i in range(3):
        at = lengths + i
        got = mix(x[torch.arange(3), at][:, None], Step.of(at[:, None]), store)
        store.commit()
        store.check()
        for row in range(3):
            close(got[row, 0], alone(mix, x[row : row + 1, : at[row] + 1])[0, -1])


@torch.no_grad()
def test_rolled_back_tokens_leave_no_trace(mix: Mixer, cache: Part) -> None:
    if not mix.pattern.causal:
        pytest.skip("a pattern that sees later tokens cannot be cached")
    x = inputs()
    store = cache.small().build([mix.slots], 3, torch.float32, torch.device("cpu"))
    mix(x[:, :6], Step.plain(0, 3, 6), store)
    store.commit()
    mix(torch.full_like(x[:, :4], 7.0), Step.plain(6, 3, 4), store)
    store.commit([0, 0, 0])
    got = mix(x[:, 6:], Step.plain(6, 3, T - 6), store)
    store.commit()
    store.check()
    close(got, alone(mix, x)[:, 6:])


def test_gradients_equal_float64(mix: Mixer, projection: Part, position: Part, pattern: Part, kernel: Part) -> None:
    exact = mixer(projection, position, pattern, kernel, torch.float64)
    exact.load_state_dict(mix.state_dict())
    grads = []
    for m, dtype in ((mix, torch.float32), (exact, torch.float64)):
        x = inputs().to(dtype).requires_grad_()
        alone(m, x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in m.parameters())])
    for got, want in zip(*grads, strict=True):
        assert want.abs().max() > 0
        assert float((got.double() - want).abs().max() / want.abs().max()) < 1e-4


@torch.no_grad()
def test_low_precision_is_near_float64(projection: Part, position: Part, pattern: Part, kernel: Part) -> None:
    eager = next(p for p in zoo.parts("kernel") if p.name == "eager")
    x = inputs()
    exact = alone(mixer(projection, position, pattern, kernel, torch.float64), x.double())
    got = alone(mixer(projection, position, pattern, kernel, torch.bfloat16), x.bfloat16()).double()
    plain = alone(mixer(projection, position, pattern, eager, torch.bfloat16), x.bfloat16()).double()
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-3


@torch.no_grad()
def test_a_query_that_sees_nothing_gives_zero(kernel: Part) -> None:
    parts = {
        f: next(p for p in zoo.parts(f) if p.name == n) for f, n in (("projection", "gqa"), ("position", "rope"), ("pattern", "causal"))
    }
    mix = mixer(parts["projection"], parts["position"], parts["pattern"], kernel)
    got = mix(inputs(2), Step.of(torch.full((2, T), -1)), NoCache())
    assert (got == 0).all()


@pytest.mark.slow
def test_compiles_without_graph_breaks(projection: Part, position: Part, kernel: Part) -> None:
    causal = next(p for p in zoo.parts("pattern") if p.name == "causal")
    mix, x = mixer(projection, position, causal, kernel), inputs()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: alone(mix, x), fullgraph=True, backend="aot_eager")
    close(compiled(x), alone(mix, x))
