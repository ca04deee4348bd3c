"""A trained model: what rounding with feedback, rotation, lattices and learned codebooks are worth, on text like the model's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from zoo.model import Model
from zoo.quantize import quantize

LENGTH = 192
CALIBRATION, TEST = 32, 24  # texts


@pytest.fixture(scope="module")
def texts(shared_data: Path) -> Tensor:
    """What the model writes, [texts, LENGTH]: on other text its losses say little."""
    model = zoo.load(shared_data / "weights/babyllama", dtype="float32")
    start = torch.full((CALIBRATION + TEST, 1), model.tokenizer.bos_token_id)
    new = model.generate(start, max_new_tokens=LENGTH - 1, temperature=1.0, seed=list(range(len(start))), eos=False)
    return torch.cat((start, torch.as_tensor(new)), 1)


@torch.no_grad()
def perplexity(model: Model, ids: Tensor) -> float:
    return math.exp(float(F.cross_entropy(model(ids)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3])
def test_each_method_beats_the_one_before(bits: int, shared_data: Path, texts: Tensor) -> None:
    """Round to nearest, GPTQ and QuIP# at the same bits; AQLM's codebooks come on top, and are most of such small matrices."""
    methods: dict[str, dict[str, Any]] = {
        "rtn": {"bits": bits, "group_size": None},
        "gptq": {"bits": bits, "group_size": None},
        "quip_sharp": {"bits": bits, "sweeps": 3},
        "aqlm": {"codebooks": bits, "rounds": 1, "steps": 20, "beam": 2},
    }
    losses = {}
    for name, settings in methods.items():
        model = zoo.load(shared_data / "weights/babyllama", dtype="float32")
        quantize(model, name, progress=False, calibration=texts[:CALIBRATION], **settings)
        losses[name] = math.log(perplexity(model, texts[CALIBRATION:]))
    plain = math.log(perplexity(zoo.load(shared_data / "weights/babyllama", dtype="float32"), texts[CALIBRATION:]))
    added = {name: loss - plain for name, loss in losses.items()}
    assert added["gptq"] < 0.7 * added["rtn"]
    assert added["quip_sharp"] < 0.9 * added["gptq"]
    assert added["aqlm"] < 0.6 * added["gptq"]


@pytest.mark.slow
def test_tuning_is_worth_something_at_two_bits(shared_data: Path, texts: Tensor) -> None:
    found = {}
    for name in ("quip_sharp", "quip_sharp_tuned"):
        model = zoo.load(shared_data / "weights/babyllama", dtype="float32")
        quantize(model, name, progress=False, calibration=texts[:CALIBRATION], bits=2, sweeps=1)
        found[name] = perplexity(model, texts[CALIBRATION:])
    assert found["quip_sharp_tuned"] < 0.97 * found["quip_sharp"]
