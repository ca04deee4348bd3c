"""Speed is measured as it says: what is slower shows, and ratios are taken round by round."""

from __future__ import annotations

import time
from typing import Any

import pytest

import zoo
from tests.eval.made import Pair
from zoo.eval import compare_speed, speed
from zoo.model import Model

PAUSE = 0.02  # seconds, far above what the model itself takes


def slowed(model: Model) -> Model:
    """The same model again, with a pause in each call."""
    slow = zoo.load(model.source.reference)
    slow.norm.register_forward_hook(lambda *_: time.sleep(PAUSE))
    return slow


def test_figures_agree_with_each_other(tiny: Pair) -> None:
    one, four = speed(tiny.ours, prompt_tokens=16, new_tokens=5, batch_sizes=(1, 4), repeats=3)
    assert (one.batch_size, four.batch_size) == (1, 4)
    for found in (one, four):
        first = found.time_to_first_token_s
        assert 0 < first.low <= first.median <= first.high
        assert found.prefill_tokens_per_s.median == pytest.approx(found.batch_size * 16 / first.median)
        assert found.decode_tokens_per_s.low <= found.decode_tokens_per_s.high
    assert (one.device, one.dtype, one.threads, one.repeats) == ("cpu", "float32", 1, 3)


def test_a_pause_in_each_call_is_seen(tiny: Pair) -> None:
    found = speed(slowed(tiny.ours), prompt_tokens=8, new_tokens=4, repeats=2)[0]
    assert found.time_to_first_token_s.low >= PAUSE
    assert found.decode_tokens_per_s.high <= 1 / PAUSE


def test_ratios_are_to_the_first_model(tiny: Pair) -> None:
    found = compare_speed({"plain": tiny.ours, "slow": slowed(tiny.ours)}, prompt_tokens=8, new_tokens=4, repeats=2)
    (ratio,) = found.ratios
    assert (ratio.name, ratio.baseline, set(found.speeds)) == ("slow", "plain", {"plain", "slow"})
    assert ratio.decode.high < 1
    assert ratio.prefill.high < 1


def test_models_take_turns(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.eval import timing

    calls: list[Model] = []

    def count(model: Model, *_: Any) -> Any:
        calls.append(model)
        return timing._Run(1.0, 1.0)

    monkeypatch.setattr(timing, "_run", count)
    other = zoo.load(tiny.ours.source.reference)
    compare_speed({"a": tiny.ours, "b": other}, repeats=3, warmup=1)
    assert ["ab"[m is other] for m in calls] == list("abbaabba")


@pytest.mark.parametrize("options", [{"repeats": 0}, {"new_tokens": 1}, {"prompt_tokens": 0}, {"batch_sizes": (1, 0)}, {"warmup": -1}])
def test_sizes_that_leave_nothing_to_measure_are_errors(tiny: Pair, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="speed needs"):
        speed(tiny.ours, **options)


@pytest.mark.gpu
def test_on_a_gpu_the_clock_waits_for_it(tiny: Pair) -> None:
    found = speed(zoo.load(tiny.ours.source.reference, device="cuda"), prompt_tokens=16, new_tokens=4, repeats=2)[0]
    assert found.device.startswith("cuda")
    assert found.time_to_first_token_s.low > 0
