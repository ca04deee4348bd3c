"""The named models of dense families have as many parameters as the published checkpoints."""

from __future__ import annotations

import math

import pytest

import zoo

PARAMETERS = {
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2b": 2_506_172_416,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "phi3-mini-4k": 3_821_079_552,
    "phi4": 14_659_507_200,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "granite3-2b": 2_533_531_648,
    "smollm3-3b": 3_075_098_624,
    "command-r7b": 8_028_033_024,
    "qwen2-vl-2b": 1_543_714_304,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    assert sum(math.prod(t.shape) for t in zoo.spec(name).parameters().values()) == PARAMETERS[name]
