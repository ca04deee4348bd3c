"""Windows of calibration text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.quantize.models import small
from zoo.model import Model
from zoo.quantize.calibration import cut, windows


@pytest.fixture(scope="module")
def real(shared_data: Path) -> Model:
    return zoo.load(shared_data / "weights/stories260K")


def test_windows_do_not_overlap_and_follow_the_seed() -> None:
    ids = torch.arange(1000)
    chosen = cut([ids], 7, 100, seed=0)
    assert chosen.shape == (7, 100)
    assert len(set(chosen.flatten().tolist())) == 700
    assert all(row.tolist() == list(range(row[0], row[0] + 100)) for row in chosen)
    assert torch.equal(chosen, cut([ids], 7, 100, seed=0))
    assert not torch.equal(chosen, cut([ids], 7, 100, seed=1))


def test_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="has 950 tokens, 9 windows of 100, but 10 are wanted; give more text"):
        cut([torch.arange(950)], 10, 100, seed=0)


def test_ids_as_they_are() -> None:
    given = torch.randint(50, (3, 10))
    assert torch.equal(windows(small(), given, None, None, 0), given)
    with pytest.raises(ValueError, match="used as they are; leave out samples and length"):
        windows(small(), given, 3, None, 0)


def test_a_run_of_ids_is_cut() -> None:
    assert windows(small(), list(range(50)) * 8, 5, 16, 0).shape == (5, 16)
    assert windows(small(), torch.arange(50).repeat(60), None, None, 0).shape == (32, 64)  # the model's context is 64


@pytest.mark.parametrize("runs", [
    [[7] * 40, [8] * 17, [9] * 15, []],
    [torch.full((40,), 7), torch.full((17,), 8), torch.full((15,), 9)],
    ((7,) * 40, (8,) * 17),
])  # fmt: skip
def test_runs_of_ids_are_cut_each_for_itself(runs: Any) -> None:
    found = windows(small(), runs, 3, 16, 0)
    assert sorted(map(tuple, found.tolist())) == [(7,) * 16, (7,) * 16, (8,) * 16]
    with pytest.raises(ValueError, match="3 windows of 16, but 4 are wanted"):
        windows(small(), runs, 4, 16, 0)


@pytest.mark.parametrize("given", [
    5, b"text", [b"text"], [1.0, 2.0], [True, False], [None], [1, None], ["text", 5], [[1, 2], "text"], [[1.5]], [[True]], [[[1]]],
    {"a": 1},
])  # fmt: skip
def test_what_is_neither_text_nor_ids_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"calibration must be str \| Path \| Sequence\[int\] .*\| Tensor \| None, got "):
        windows(small(), given, 1, 2, 0)


@pytest.mark.parametrize("given", [
    torch.zeros(2, 2, 2, dtype=torch.int64), torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.bool), torch.tensor(5),
    [torch.zeros(4)], [torch.zeros(2, 2, dtype=torch.int64)], torch.zeros(4, dtype=torch.complex64),
])  # fmt: skip
def test_tensors_of_other_kinds_are_refused(given: Any) -> None:
    samples, length = (None, None) if isinstance(given, torch.Tensor) and given.dim() == 2 else (1, 2)
    with pytest.raises(ValueError, match=r"calibration(\[0\])?: token ids are integers"):
        windows(small(), given, samples, length, 0)


@pytest.mark.parametrize("settings", [{"samples": 1.5}, {"length": True}, {"seed": 1.5}])
def test_counts_are_whole_numbers(settings: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(settings))} must be int"):
        windows(small(), list(range(50)), **({"samples": 1, "length": 8, "seed": 0} | settings))


def test_an_empty_list_is_no_data() -> None:
    with pytest.raises(ValueError, match="calibration is empty; give text or token ids"):
        windows(small(), [], 1, 2, 0)


def test_bad_ids_and_lengths() -> None:
    with pytest.raises(ValueError, match=r"ids must lie in 0\.\.49"):
        windows(small(), torch.full((2, 4), 50), None, None, 0)
    with pytest.raises(ValueError, match="exceed the model's context of 64"):
        windows(small(), torch.zeros(2, 65, dtype=torch.int64), None, None, 0)
    with pytest.raises(ValueError, match="no tokenizer"):
        windows(small(), "some text", None, None, 0)


def test_text_texts_and_files_are_the_same(real: Model, tmp_path: Path) -> None:
    parts = ["Once upon a time there was a fox. " * 40, "The fox was red. " * 40]
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(parts), encoding="utf-8")
    by_text, by_file, by_parts = (windows(real, c, 4, 32, 0) for c in ("\n\n".join(parts), file, parts))
    assert torch.equal(by_text, by_file)
    assert torch.equal(by_text, by_parts)
    assert "fox" in real.tokenizer.decode(by_text[0])


def test_the_text_that_ships_is_the_default(real: Model) -> None:
    found = windows(real, None, 4, 128, 0)
    assert found.shape == (4, 128)
    assert real.tokenizer.decode(found[0])[20:60] in zoo.corpus.text("calibration")
