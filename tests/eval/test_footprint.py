"""Bytes are counted to the byte, tied weights once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.eval.made import Pair
from zoo.components import spec as specs
from zoo.eval import disk_bytes, memory, peak_memory
from zoo.eval.footprint import RESET, bits_per_weight
from zoo.eval.results import variant

LINEAR = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)  # q and o, k and v, three of the MLP, in two layers
NORMS = 5 * 32
EMBED = 300 * 32


def test_every_tensor_counts_once(tiny: Pair) -> None:
    found = memory(tiny.ours)
    assert found.bytes == 4 * (LINEAR + NORMS + EMBED) == sum(p.nbytes for p in tiny.theirs.parameters())
    assert found.components == {
        "embed": 4 * EMBED,
        "layers.mixer": 8 * (32 * 32 * 2 + 32 * 16 * 2),
        "layers.mlp": 8 * 3 * 32 * 48,
        "layers.mixer_norm": 8 * 32,
        "layers.mlp_norm": 8 * 32,
        "norm": 4 * 32,
    }
    assert (found.linear_bits, found.all_bits) == (32, 32)
    assert found.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4


def test_an_untied_head_counts_too(tiny: Pair) -> None:
    untied = zoo.build(specs.override(tiny.ours.spec, "head.tied=false"))
    assert memory(untied).bytes == memory(tiny.ours).bytes + 4 * EMBED


def test_a_model_without_storage_counts_as_it_would_be(tiny: Pair) -> None:
    with torch.device("meta"):
        model = tiny.ours.spec.build()
    assert memory(model) == memory(tiny.ours)


@pytest.mark.parametrize(("bits", "group", "scale"), [(4, 16, 16), (8, 16, 16), (3, None, 32), (2, 16, 16)])
def test_packed_weights_count_with_their_scales(tiny: Pair, bits: int, group: int | None, scale: int) -> None:
    edit = f"layers.*.mlp.down={{name: packed_int, bits: {bits}, group_size: {group or 'null'}}}"
    model = zoo.build(specs.override(tiny.ours.spec, edit))
    packed = 2 * 32 * (-(-48 * bits // 32) * 32 + (48 // group if group else 1) * scale)
    dense = LINEAR - 2 * 32 * 48
    assert bits_per_weight(model) == pytest.approx((packed + 32 * dense) / LINEAR)
    held = sum(t.nbytes for t in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values())
    assert memory(model).bytes == held
    assert memory(model).all_bits == pytest.approx(8 * held / (LINEAR + NORMS + EMBED))


def test_a_folder_is_the_sum_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "inside/b").write_bytes(b"12345")
    assert disk_bytes(tmp_path) == 9
    assert disk_bytes(tmp_path / "a") == 4
    with pytest.raises(FileNotFoundError, match="there is no"):
        disk_bytes(tmp_path / "c")


@pytest.mark.skipif(not RESET.exists(), reason="needs the kernel's record of the peak, which Linux keeps")
def test_a_peak_that_is_gone_again_is_seen() -> None:
    size = 200_000_000
    with peak_memory() as big:
        torch.ones(size // 4)
    with peak_memory() as small:
        torch.ones(10)
    assert big.start is not None
    assert big.peak is not None
    assert 0.9 * size < big.peak - big.start < 1.3 * size
    assert small.peak is not None
    assert small.peak < big.peak - 0.5 * size


def test_what_cannot_be_measured_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("zoo.eval.footprint.RESET", tmp_path / "no/such/file")
    with peak_memory() as found:
        pass
    assert (found.start, found.peak) == (None, None)
    assert found.what.startswith("not measured")


def test_the_peak_of_a_gpu_is_that_of_its_own_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by number, before anything else has set CUDA up: its allocator knows no device until then."""
    calls: list[Any] = []
    monkeypatch.setattr("torch.cuda.init", lambda: calls.append("init"))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: calls.append(("reset", device)))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: calls.append(("start", device)) or 100)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: calls.append(("peak", device)) or 700)
    with peak_memory("cuda:1") as found:
        calls.append("block")
    gpu = torch.device("cuda:1")
    assert calls == ["init", ("reset", gpu), ("start", gpu), "block", ("peak", gpu)]
    assert (found.start, found.peak) == (100, 700)
    assert variant("a", peak=found).peak_bytes == 700


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_torchs() -> None:
    with peak_memory("cuda") as found:
        torch.ones(25_000_000, device="cuda")
    assert found.start is not None
    assert found.peak is not None
    assert found.peak - found.start >= 100_000_000
