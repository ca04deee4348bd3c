"""What may be said of where tokens stand: everything else is refused before the model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from zoo.model import Model

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
PLAIN = [[0, 1, 2], [0, 1, 2]]


@pytest.fixture(scope="module")
def model() -> Model:
    layer = {"mixer": {"projection": {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}, "position": "rope"},
             "mlp": {"name": "gated", "hidden": 24}}  # fmt: skip
    return zoo.build({"width": 16, "context": 32, "embed": {"name": "tokens", "vocab": 11}, "layers": [layer], "head": "lm"})


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor(PLAIN, dtype=torch.float32), r"must be whole numbers \(int64\), got torch\.float32"),
        (torch.tensor(PLAIN, dtype=torch.bool), r"must be whole numbers \(int64\), got torch\.bool"),
        (torch.tensor([[0, 1, 2], [-2, 0, 1]]), "at least 0, or -1 for padding; the lowest is -2"),
        (torch.tensor(PLAIN, device="meta"), r"positions are on meta, the ids on cpu; pass positions\.to\(ids\.device\)"),
        (torch.tensor([0, 1, 2]), r"positions \[3\] must have the shape of the ids \[2, 3\]"),
        (torch.tensor([PLAIN]), r"positions \[1, 2, 3\] must have the shape"),
    ],
)
def test_positions_that_are_none(model: Model, positions: torch.Tensor, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "hidden", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        model(IDS, positions=positions)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_whole_numbers_of_any_width_are_positions(model: Model, dtype: torch.dtype) -> None:
    padded = torch.tensor([[-1, 0, 1], [0, 1, 2]])
    assert torch.equal(model(IDS, positions=padded.to(dtype)), model(IDS, positions=padded))
    torch.testing.assert_close(model(IDS, positions=torch.tensor(PLAIN, dtype=dtype)), model(IDS))


@pytest.mark.parametrize("lengths", [[1.5, 2], [3.0, 3.0], [True, True], [-1, 2], [4, 3], [3], [[3, 3]], torch.tensor([3.0, 2.0])], ids=str)
def test_lengths_that_are_none(model: Model, lengths: Any) -> None:
    with pytest.raises(ValueError, match=r"lengths must be 2 whole numbers in 0\.\.3, got"):
        model(IDS, lengths=lengths)
