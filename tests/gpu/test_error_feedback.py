"""GPTQ's inner loop on a GPU against the plain one."""

from __future__ import annotations

import pytest
import torch

from zoo.components.ops.error_feedback import reference, round_run
from zoo.quantize.methods.gptq import GPTQ
from zoo.quantize.stats.hessian import Hessian, relative_output_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "count"), [(128, 128), (128, 64), (100, 100), (7, 3), (33, 32)])
@pytest.mark.parametrize("outputs", [1, 16, 1000])
@pytest.mark.parametrize("shared", [True, False])
def test_one_run(rows: int, count: int, outputs: int, shared: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, outputs, generator=generator)
    whole = torch.randn(rows + 5, rows + 5, generator=generator).triu(1) * 0.05
    whole.diagonal().fill_(0.7)
    factor = whole[2 : rows + 2, 2 : rows + 2]
    scale = torch.rand(1 if shared else count, outputs, generator=generator) * 0.2 + 0.1
    zero = torch.full_like(scale, 8)
    wide, fast = left.double(), left.cuda()
    error = reference.round_run(wide, factor.double(), scale.double(), zero.double(), count, 15)
    got = round_run(fast, factor.cuda(), scale.cuda(), zero.cuda(), count, 15)
    agree = fast[:count].cpu() == wide[:count]
    assert agree.double().mean() > 0.998  # a weight at the border of two codes may fall to either side
    same = agree.all(0)
    assert torch.allclose(got.cpu()[:, same], error[:, same].float(), atol=1e-4)
    assert torch.allclose(fast.cpu()[count:, same], wide[count:, same].float(), atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"group_size": 128},
        {"group_size": 256},
        {"group_size": None},
        {"order": "activation"},
        {"order": "groups"},
        {"symmetric": False},
    ],
    ids=str,
)
def test_a_whole_weight(settings: dict) -> None:
    x = torch.randn(2000, 512) * torch.rand(512)
    weight, method = torch.randn(300, 512), GPTQ(**settings)
    errors = []
    for device in ("cpu", "cuda"):
        hessian = Hessian(512, device=device)
        hessian.update(x.to(device))
        module = method.storage.build(512, 300, False).to(device)
        module.hold(method.quantize(weight.to(device), hessian).tensors)
        errors.append(relative_output_error(weight.to(device), module.dense_weight(torch.float32), hessian))
    assert errors[1] == pytest.approx(errors[0], rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_second_moments_of_16_bits_are_exact_products(dtype: torch.dtype) -> None:
    x = torch.randn(500, 2500).to(dtype)
    hessian = Hessian(2500, device="cuda")
    for part in x.split(200):
        hessian.update(part.cuda())
    wide = x.double()
    expected = wide.t() @ wide / 500
    assert (hessian.matrix.cpu() - expected).norm() / expected.norm() < 1e-6
