"""Copied and pickled modules are what they were copied from, and nothing of theirs is shared."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import zoo
from tests.components.mixes import M, Mix, completed, names
from tests.zoo.oracle import llama_checkpoint
from zoo.components.contracts import NoCache, Step
from zoo.components.spec import load
from zoo.model import Mixer, MixerSpec

MIXES = [completed(**{axis: name}) for axis in ("projection", "position", "kernel") for name in names(axis)]
NORMED = [
    load(MixerSpec, {"projection": {"name": name, "heads": 4, "kv_heads": 2, "head_dim": 8, "qk_norm": "rms", "qk_norm_at": at}})
    for name in ("gqa", "gqa_output_gated")
    for at in ("head", "flat", "rotated")
]


def answer(mixer: Mixer) -> torch.Tensor:
    x = torch.randn(1, 5, M, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return mixer(x, Step.plain(0, 1, 5), NoCache())


def check_copies(mixer: Mixer) -> None:
    before = answer(mixer)
    for twin in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
        assert torch.equal(answer(twin), before)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(3).add_(1)
        assert torch.equal(answer(mixer), before), "changing the copy changes the original"
        if list(twin.parameters()):
            assert not torch.equal(answer(twin), before), "the copy computes with the original's parameters"


@pytest.mark.parametrize("mix", [m for m in dict.fromkeys(MIXES) if m and "ring" not in m.kernel], ids=str)
def test_mixers(mix: Mix) -> None:
    check_copies(mix.build())


@pytest.mark.parametrize("spec", NORMED, ids=lambda spec: f"{spec.projection.name}-{spec.projection.qk_norm_at}")
def test_query_and_key_norms(spec: MixerSpec) -> None:
    check_copies(spec.build(M, 0).eval())


@torch.no_grad()
def test_a_loaded_model(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path)
    model, ids = zoo.load(tmp_path), torch.arange(3, 9)[None]
    want = model(ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids), want)
        twin.embed.weight.zero_()
        assert torch.equal(model(ids), want)


@pytest.mark.slow
def test_a_whole_model_compiles_without_a_break(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path)
    model, ids = zoo.load(tmp_path), torch.arange(3, 9)[None]
    compiled = torch.compile(lambda ids: model(ids), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-5, atol=1e-5)
