"""Ring attention on several processes against the same attention on one."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from zoo.components.contracts import NoCache, Step
from zoo.components.ops.ring import striped, zigzag
from zoo.components.registry import get
from zoo.components.spec import check, load
from zoo.model import Mixer, MixerSpec

M, T = 16, 22  # 22 tokens: no order shares them out evenly on four processes
GQA = {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8}
CASES: list[dict[str, Any]] = [
    {"kernel": "ring", "order": "zigzag"},
    {"kernel": "ring", "order": "striped", "pattern": {"name": "window", "size": 5}},
    {"kernel": "ring", "order": "runs", "pattern": "full"},
    {"kernel": {"name": "ring", "inner": "online"}, "order": "zigzag", "padded": True},
    {"kernel": "ring_flash", "order": "zigzag"},
    {"kernel": "ring_flash", "order": "striped", "padded": True},
    {"kernel": "ring_flash", "order": "runs"},
    {"kernel": "ring_flash", "order": "zigzag", "projection": {"name": "latent", "heads": 4, "nope": 8, "rope": 4, "value": 6, "rank": 10}},
]


def build(case: dict[str, Any], kernel: Any) -> Mixer:
    torch.manual_seed(0)
    spec = {"projection": case.get("projection", GQA), "position": "rope", "pattern": case.get("pattern", "causal"), "kernel": kernel}
    return load(MixerSpec, spec).build(M, 0).double()


def batch(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Inputs and positions of the whole sequence; ``padded`` leaves holes and one row nearly empty."""
    x = torch.randn(2, T, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pos = torch.arange(T).repeat(2, 1)
    if case.get("padded"):
        pos[0, 3:6], pos[1, 2:] = -1, -1
    return x, pos


def held(order: str, rank: int, size: int) -> Tensor:
    return {"zigzag": zigzag, "striped": striped, "runs": lambda n, r, s: torch.arange(n).tensor_split(s)[r]}[order](T, rank, size)


def run(mixer: Mixer, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = mixer(x, Step.of(pos), NoCache())
    (y.sin() * (pos >= 0)[..., None]).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def compare(case: dict[str, Any], group: dist.ProcessGroup | None, rank: int, size: int) -> None:
    """This process's share of outputs, input gradients and, summed over the processes, weight gradients."""
    alone, spread = build(case, "sdpa"), build(case, case["kernel"])
    if group is not None:
        spread.kernel.join(group)  # pyright: ignore[reportCallIssue]
    x, pos = batch(case)
    mine = held(case["order"], rank, size)
    (want, want_grad), (got, grad) = run(alone, x, pos), run(spread, x[:, mine], pos[:, mine])
    torch.testing.assert_close(got, want[:, mine], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grad, want_grad[:, mine], rtol=1e-9, atol=1e-9)
    for p, q in zip(spread.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        if group is not None:
            dist.all_reduce(p.grad, group=group)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def decode(group: dist.ProcessGroup, rank: int, size: int) -> None:
    """Each process caches its share; every new token is given to one process, to the others as padding."""
    alone, spread, (x, pos) = build(CASES[0], "sdpa"), build(CASES[0], "ring"), batch(CASES[0])
    spread.kernel.join(group)  # pyright: ignore[reportCallIssue]
    store = get("cache", "dense").small().build([spread.slots], 2, torch.float64, torch.device("cpu"))
    want, mine = alone(x, Step.of(pos), NoCache()), zigzag(T - 3, rank, size)
    spread(x[:, mine], Step.of(pos[:, mine]), store)
    store.commit()
    for t in range(T - 3, T):
        here = t % size == rank
        got = spread(x[:, t : t + 1], Step.of(pos[:, t : t + 1] if here else torch.full((2, 1), -1)), store)
        store.commit()
        torch.testing.assert_close(got, want[:, t : t + 1] * here, rtol=1e-9, atol=1e-9)


def worker(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=dt.timedelta(seconds=60))
    try:
        group = dist.group.WORLD
        assert group is not None
        for case in CASES:
            compare(case, group, rank, size)
        decode(group, rank, size)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ring_equals_one_process(size: int, tmp_path: Path) -> None:
    mp.spawn(worker, args=(size, str(tmp_path / "store")), nprocs=size)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kernel']}-{c['order']}")
def test_a_ring_of_one_is_plain_attention(case: dict[str, Any]) -> None:
    compare(case, None, 0, 1)


@pytest.mark.parametrize("share", [zigzag, striped])
@pytest.mark.parametrize("length", [22, 4096])
def test_orders_share_out_every_token_once_and_causal_work_evenly(share: Callable[[int, int, int], Tensor], length: int) -> None:
    shares = [share(length, r, 4) for r in range(4)]
    assert torch.equal(torch.cat(shares).sort().values, torch.arange(length))
    work = [int((s + 1).sum()) for s in shares]  # keys that the share's queries see; runs of neighbours give 7 to 1
    assert max(work) / min(work) < (1.6 if length < 100 else 1.01)


def test_an_inner_kernel_without_log_sum_exp_is_refused() -> None:
    spec = load(MixerSpec, {"projection": GQA, "kernel": {"name": "ring", "inner": "eager"}})
    assert check(spec, M, 0) == ["kernel.inner: eager does not return the log-sum-exp that blocks are merged by; use flash_v2 or online"]
