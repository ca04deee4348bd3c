"""Windows of calibration text."""

from __future__ import annotations

from pathlib import Path

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
    chosen = cut(ids, 7, 100, seed=0)
    assert chosen.shape == (7, 100)
    assert len(set(chosen.flatten().tolist())) == 700
    assert all(row.tolist() == list(range(row[0], row[0] + 100)) for row in chosen)
    assert torch.equal(chosen, cut(ids, 7, 100, seed=0))
    assert not torch.equal(chosen, cut(ids, 7, 100, seed=1))


def test_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="has 950 tokens, 9 windows of 100, but 10 are wanted; give more text"):
        cut(torch.arange(950), 10, 100, seed=0)


def test_ids_as_they_are() -> None:
    given = torch.randint(50, (3, 10))
    assert torch.equal(windows(small(), given, None, None, 0), given)
    with pytest.raises(ValueError, match="used as they are; leave out samples and length"):
        windows(small(), given, 3, None, 0)


def test_a_run_of_ids_is_cut() -> None:
    assert windows(small(), list(range(50)) * 8, 5, 16, 0).shape == (5, 16)
    assert windows(small(), torch.arange(50).repeat(60), None, None, 0).shape == (32, 64)  # the model's context is 64


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
