"""A kernel that nobody knew, written from docs/adding_a_part.md: registering it is all that the contract suite needs.

The suite runs in a process of its own, with this file as the plugin that registers the kernel, and the page's own one beside it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.components import registry
from zoo.components.contracts import Call, Kernel, NoCache, Operands, Pattern, PositionModule, Projection, Step, View
from zoo.components.registry import part
from zoo.components.spec import load
from zoo.model import MixerSpec

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/adding_a_part.md"
SUITE = ["tests/components/test_mixer.py", "tests/zoo/test_costs.py"]


def register() -> None:
    @part(Kernel, "sigmoid", source="Ramapuram et al. 2024, arXiv:2409.04431, equation 3")
    @dataclass(frozen=True, kw_only=True)
    class Sigmoid(Kernel):
        """sigmoid(q k^T * scale + bias - log(length)) v: keys do not compete."""

        length: float = 64.0
        masks = True

        def build(self, projection: Projection) -> nn.Module:
            return SigmoidKernel(self.length)

    class SigmoidKernel(nn.Module):
        def __init__(self, length: float):
            super().__init__()
            self.shift = torch.tensor(length).log().item()

        def forward(self, a: Operands, view: View, step: Step, pattern: Pattern, position: PositionModule) -> Tensor:
            repeats = a.q.shape[2] // a.k.shape[2]
            k, v = (x.repeat_interleave(repeats, 2).transpose(1, 2) for x in (a.k, a.v))
            scores = (a.q.transpose(1, 2) @ k.mT).float() * (a.scale * position.logit_scale) - self.shift
            bias = position.bias(step.pos, view.kpos)
            weights = (scores if bias is None else scores + bias).sigmoid() * pattern.mask(step, view)
            return (weights.to(v.dtype) @ v).transpose(1, 2)


def pytest_configure(config: pytest.Config) -> None:
    """Called where this file is a plugin (``-p``), never where it is a test file."""
    register()
    page = types.ModuleType("page")
    sys.modules["page"] = page
    code = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    exec(compile(code, str(PAGE), "exec"), vars(page))


@pytest.fixture
def newcomer() -> Iterator[None]:
    register()
    yield
    registry._parts.pop(("kernel", "sigmoid"))


def test_the_contract_suite_takes_them_as_they_are() -> None:
    """Every test of the suite that is made of the registry, for the mixers that have a new kernel."""
    options = ["-q", "-rA", "-p", "tests.components.test_newcomer_kernel", "-m", "not slow", "-k", "sigmoid or relu"]
    run = [sys.executable, "-m", "pytest", *options, *SUITE]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for kernel in ("sigmoid", "relu"):
        assert len(re.findall(rf"^PASSED .*{kernel}", done.stdout, re.MULTILINE)) >= 20


def test_it_is_named_swapped_in_and_counted(newcomer: None) -> None:
    assert "sigmoid" in registry.names("kernel")
    edited = zoo.spec("smollm2-135m", "layers.*.mixer.kernel={name: sigmoid, length: 128}")
    assert {layer.mixer.kernel.name for layer in edited.layers} == {"sigmoid"}
    assert edited.flops(Call(8)) == zoo.spec("smollm2-135m", "layers.*.mixer.kernel=eager").flops(Call(8))


@torch.no_grad()
def test_it_computes_its_formula(newcomer: None) -> None:
    mixer = load(MixerSpec, {"projection": {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 4}, "kernel": "sigmoid"}).build(8, 0)
    x = torch.randn(1, 5, 8)
    q, k, v = (f(x)[0].unflatten(-1, (-1, 4)) for f in (mixer.projection.q, mixer.projection.k, mixer.projection.v))
    heads = []
    for h in range(2):
        weights = torch.sigmoid(q[:, h] @ k[:, 0].T / 2 - torch.tensor(64.0).log()).tril()
        heads.append(weights @ v[:, 0])
    torch.testing.assert_close(mixer(x, Step.plain(0, 1, 5), NoCache())[0], mixer.projection.o(torch.cat(heads, -1)))
