"""What runs on the CPU gives the same on a CUDA device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zoo
from zoo.components.spec import check, override
from zoo.model import Model

pytestmark = pytest.mark.gpu

TINY = {
    "width": 64,
    "context": 256,
    "embed": {"name": "tokens", "vocab": 101},
    "layers": [{"repeat": 2, "mixer": {"projection": {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 16}, "position": "rope"},
                "mlp": {"name": "gated", "hidden": 96}}],
    "head": {"name": "lm", "tied": True},
}  # fmt: skip


def names(family: str) -> list[str]:
    return [p.name for p in zoo.parts(family)]


def tiny(**swap: Any) -> Model:
    """The tiny model with parts swapped, on the CPU; skips where they do not go together."""
    spec = zoo.spec(TINY)
    for path, part in swap.items():
        where = "cache" if path == "cache" else f"layers.*.mixer.{path}"
        values = dict(next(p for p in zoo.parts(path) if p.name == part).example)
        values |= {"reads": [0, 0]} if "reads" in values else {}  # one entry for each layer
        spec = override(spec, f"{where}={ {'name': part, **values} }".replace("'", '"'))
    problems = check(spec)
    if problems:
        pytest.skip(problems[0])
    return zoo.build(spec)


def on_gpu(model: Model) -> Model:
    torch.backends.cuda.matmul.allow_tf32 = False
    return copy.deepcopy(model).to("cuda")


def ids(length: int = 48) -> torch.Tensor:
    return torch.randint(0, 101, (2, length), generator=torch.Generator().manual_seed(0))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.cpu(), want, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kernel", names("kernel"))
@torch.no_grad()
def test_kernels(kernel: str) -> None:
    model, x = tiny(kernel=kernel), ids()
    rounding = model.spec.layers[0].mixer.kernel.rounding  # of the kernel's own number formats, where a tie may fall either way
    got, want = on_gpu(model)(x.cuda()).cpu(), model(x)
    assert float((got - want).norm() / want.norm()) <= 1e-4 + rounding / 4


@pytest.mark.parametrize("pattern", names("pattern"))
@torch.no_grad()
def test_patterns(pattern: str) -> None:
    model, x = tiny(pattern=pattern), ids()
    close(on_gpu(model)(x.cuda()), model(x))


@pytest.mark.parametrize("position", names("position"))
@torch.no_grad()
def test_positions(position: str) -> None:
    model, x = tiny(position=position), ids()
    close(on_gpu(model)(x.cuda()), model(x))


@pytest.mark.parametrize("cache", names("cache"))
@torch.no_grad()
def test_caches(cache: str) -> None:
    model, x = tiny(cache=cache), ids()
    gpu = on_gpu(model)
    outputs = []
    for m, device in ((model, "cpu"), (gpu, "cuda")):
        store = m.new_cache(2)
        parts = [m(x[:, :20].to(device), lengths=[20, 13], cache=store)]
        parts += [m(x[:, i : i + 1].to(device), cache=store) for i in range(20, 30)]
        store.check()
        outputs.append(torch.cat([p[:, -1:] for p in parts], 1)[:1])
    close(outputs[1], outputs[0])


@torch.no_grad()
def test_generation_draws_the_same_tokens() -> None:
    model = tiny()
    prompts = [[5, 6, 7, 8], [9, 10]]
    for options in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}):
        want = model.generate(prompts, max_new_tokens=16, eos=False, **options)
        got = on_gpu(model).generate(prompts, max_new_tokens=16, eos=False, **options)
        assert [list(g) for g in got] == [list(w) for w in want]


@pytest.mark.parametrize(
    "settings", [{"bits": 4, "group_size": 32}, {"bits": 3, "group_size": 32, "symmetric": False}, {"bits": 8, "group_size": None}]
)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
@torch.no_grad()
def test_quantized_on_either_device(method: str, settings: dict[str, Any]) -> None:
    from zoo.quantize import quantize

    model = tiny()
    gpu = on_gpu(model)
    calibration = torch.randint(0, 101, (4, 64), generator=torch.Generator().manual_seed(1))
    for m in (model, gpu):
        report = quantize(m, method, calibration=calibration, progress=False, **settings)
        assert report.totals["fallbacks"] == 0
    moved = copy.deepcopy(gpu).to("cpu")
    x = ids()
    close(gpu(x.cuda()), moved(x))
    assert float((gpu(x.cuda()).cpu() - model(x)).norm() / model(x).norm()) < 0.2
    assert all(p.device.type == "cuda" for p in gpu.parameters())


@torch.no_grad()
def test_low_precision_is_as_near_as_eager() -> None:
    model, x = tiny(), ids()
    exact = model.double()(x)
    errors = {}
    for kernel in ("eager", "sdpa"):
        m = on_gpu(tiny(kernel=kernel)).to(torch.bfloat16)
        errors[kernel] = float((m(x.cuda()).double().cpu() - exact).abs().max())
    assert errors["sdpa"] <= 2 * errors["eager"] + 1e-3
