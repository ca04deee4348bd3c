"""Experts on the host: the numbers of ``loop`` to the bit, what is kept on the device, and counters that add up."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.components.contracts import Routing
from zoo.components.experts.offload import Offload, OffloadModule, Traffic, traffic
from zoo.components.ops.moe.balance import routings
from zoo.components.spec import check, load, override
from zoo.model import Model, ModelSpec

M, E, LAYERS = 16, 6, 3
BYTES = 3 * M * 8 * 4  # of an expert in float32


def spec(dispatch: Any) -> ModelSpec:
    mixer = {"projection": {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}, "position": "rope"}
    moe = {"name": "moe", "router": "top_k", "experts": [{"repeat": E, "name": "gated", "hidden": 8}], "dispatch": dispatch}
    data = {"width": M, "context": 64, "embed": {"name": "tokens", "vocab": 50}, "layers": [{"mixer": mixer, "mlp": moe}] * LAYERS}
    return load(ModelSpec, {**data, "head": "lm"})


def build(dispatch: Any) -> Model:
    model = spec(dispatch).build().eval().requires_grad_(False)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    return model


def decoded(model: Model, ids: Tensor, prompt: int = 5) -> Tensor:
    cache = model.new_cache(len(ids))
    chunks = [ids[:, :prompt], *ids[:, prompt:].split(1, 1)]
    return torch.cat([model(chunk, cache=cache) for chunk in chunks], 1)


def total(model: nn.Module) -> Traffic:
    return sum(traffic(model).values(), Traffic())


def ids(rows: int = 1, length: int = 13) -> Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("resident", [1, 2, E])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@torch.no_grad()
def test_outputs_equal_the_loop_to_the_bit_and_counters_add_up(resident: int, prefetch: int) -> None:
    model = build({"name": "offload", "resident": resident, "prefetch": prefetch})
    assert torch.equal(decoded(model, ids(2)), decoded(build("loop"), ids(2)))
    found = total(model)
    assert found.bytes_moved == BYTES * (found.misses + found.sent_ahead)
    assert found.prefetch_hits <= found.sent_ahead
    assert (found.sent_ahead > 0) == (prefetch > 0)
    if resident == E and prefetch == 0:
        assert found.misses <= E * LAYERS
    for layer in model.layers:
        assert len(layer.mlp.dispatch.resident) <= resident
        assert len(layer.mlp.dispatch.ahead) == 0, "what nobody used is gone"


@torch.no_grad()
def test_every_use_of_an_expert_is_counted_once() -> None:
    model = build("offload")
    with routings(model) as found:
        model(ids(2))
    used = sum(len(r.experts.unique()) for r in found.values())
    assert total(model).uses == used


def call(module: OffloadModule, experts: nn.ModuleList, chosen: Sequence[int]) -> None:
    x = torch.ones(1, M)
    module(x, Routing(torch.ones(1, len(chosen)), torch.tensor([chosen]), torch.zeros(1, len(experts))), experts)


@torch.no_grad()
def test_the_least_recently_used_goes_first() -> None:
    experts: Any = build("loop").layers[0].mlp.experts  # pyright: ignore[reportAttributeAccessIssue]
    module: Any = Offload(resident=2, prefetch=0).build((), M)
    for chosen, hits, misses, left in (
        ([0, 1], 0, 2, [0, 1]),
        ([0], 1, 2, [1, 0]),
        ([2], 1, 3, [0, 2]),
        ([0, 1], 2, 4, [0, 1]),  # 0 is run first, before 1 pushes it out
        ([-1], 2, 4, [0, 1]),
    ):
        call(module, experts, chosen)
        assert (module.traffic.hits, module.traffic.misses, list(module.resident)) == (hits, misses, left)
    assert module.traffic.bytes_moved == 4 * BYTES
    module.traffic.clear()
    assert module.traffic == Traffic()


@torch.no_grad()
def test_a_right_guess_is_there_when_it_is_wanted() -> None:
    """Two layers with one router and one input: every expert of the second has been sent ahead, and none takes a place unused."""
    model = build({"name": "offload", "resident": 2, "prefetch": 2})
    first, second = model.layers[0].mlp, model.layers[1].mlp
    second.router.load_state_dict(first.router.state_dict())  # pyright: ignore[reportCallIssue, reportArgumentType]
    for seed in range(8):
        x = torch.randn(1, 1, M, generator=torch.Generator().manual_seed(seed))
        first(x)
        assert len(second.dispatch.resident) <= 2
        second(x)
    found = second.dispatch.traffic
    assert found.misses == 0
    assert found.prefetch_hits == found.sent_ahead > 0
    assert found.uses == 16


@torch.no_grad()
def test_weights_that_change_are_sent_again() -> None:
    model, other = build({"name": "offload", "resident": E}), build("loop")
    decoded(model, ids())
    state = {n: p * 1.5 for n, p in other.state_dict().items()}
    for m in (model, other):
        m.load_state_dict(state)
    assert torch.equal(decoded(model, ids()), decoded(other, ids()))
    model.layers[0].mlp.experts[0].up.weight.data = torch.zeros(8, M)
    other.layers[0].mlp.experts[0].up.weight.data = torch.zeros(8, M)
    assert torch.equal(decoded(model, ids()), decoded(other, ids()))


@torch.no_grad()
def test_a_copy_of_a_model_keeps_its_own_experts_and_counters() -> None:
    model = build("offload")
    want = decoded(model, ids())
    twin = copy.deepcopy(model)
    assert total(twin) == Traffic()
    following: Any = twin.layers[0].mlp.dispatch.following
    assert following.router is twin.layers[1].mlp.router
    assert torch.equal(decoded(twin, ids()), want)
    assert total(twin).sent_ahead > 0
    assert set(twin.state_dict()) == set(build("loop").state_dict())


@torch.no_grad()
def test_a_copied_layer_takes_no_others_along() -> None:
    model = build("offload")
    alone: Any = copy.deepcopy(model.layers[0])
    assert alone.mlp.dispatch.following is None
    x = torch.randn(1, 4, M)
    assert torch.equal(alone.mlp(x), model.layers[0].mlp(x))
    assert alone.mlp.dispatch.traffic.sent_ahead == 0
    memo: dict[int, Any] = {}
    copy.deepcopy(model.layers[0], memo)
    assert id(model.layers[1].mlp.router) not in memo
    pair: Any = copy.deepcopy(nn.ModuleList([model.layers[1], model.layers[0]]))  # in whatever order
    assert pair[1].mlp.dispatch.following.dispatch is pair[0].mlp.dispatch
    assert pair[1].mlp.dispatch.following.experts is pair[0].mlp.experts
    assert pair[0].mlp.dispatch.following is None
    twin: Any = copy.deepcopy(copy.deepcopy(model))
    for layer, after in zip(twin.layers, twin.layers[1:], strict=False):
        assert layer.mlp.dispatch.following == (after.mlp.router, after.mlp.dispatch, after.mlp.experts)


@torch.no_grad()
def test_no_router_is_run_where_nothing_is_sent_ahead() -> None:
    model = build({"name": "offload", "prefetch": 0})
    runs: list[int] = []
    for number, layer in enumerate(model.layers):
        router, forward = layer.mlp.router, layer.mlp.router.forward
        router.forward = lambda *args, number=number, forward=forward: (runs.append(number), forward(*args))[1]
    model(ids())
    assert runs == [0, 1, 2]


@torch.no_grad()
def test_a_guess_leaves_no_trace() -> None:
    """Neither in the noise of a router that is trained, nor in its mode, nor with who counts what is routed."""
    outputs = []
    for dispatch in ("loop", "offload"):
        model = override(spec(dispatch), "layers.*.mlp.router=noisy_top_k").build().train()
        for p in model.parameters():
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(p.numel()))
        calls: list[nn.Module] = []
        for layer in model.layers:
            layer.mlp.router.register_forward_hook(lambda module, _args, _out, calls=calls: calls.append(module))
        torch.manual_seed(3)
        outputs.append(model(ids(2)))
        assert calls == [layer.mlp.router for layer in model.layers]
        assert all(m.training for m in model.modules())
    assert total(model).sent_ahead > 0
    assert torch.equal(*outputs)


def test_copies_made_in_inference_mode_serve_gradients_of_inputs() -> None:
    model = build({"name": "offload", "resident": E})
    mlp = model.layers[0].mlp
    x = torch.randn(1, 4, M)
    with torch.inference_mode():
        mlp(x)
    mlp(x.requires_grad_()).sum().backward()
    want = x.grad
    x.grad = None
    build("loop").layers[0].mlp(x).sum().backward()
    assert want is not None
    assert torch.equal(want, x.grad)  # pyright: ignore[reportArgumentType]
    assert mlp.dispatch.traffic.hits > 0


def test_the_last_layer_has_nothing_to_send_ahead_for() -> None:
    model = build("offload")
    assert model.layers[-1].mlp.dispatch.following is None
    mixed = override(spec("offload"), "layers.1.mlp.dispatch=loop").build()
    assert mixed.layers[0].mlp.dispatch.following is None


@pytest.mark.parametrize(("field", "value"), [("resident", 0), ("resident", E + 1), ("prefetch", -1)])
def test_mistakes_are_named(field: str, value: int) -> None:
    wanted = override(spec("loop"), f"layers.*.mlp.dispatch={{name: offload, {field}: {value}}}")
    assert f"dispatch.{field}: must lie in" in check(wanted)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 2])
@torch.no_grad()
def test_weights_stay_on_the_host_of_a_gpu(prefetch: int) -> None:
    model = build({"name": "offload", "resident": 2, "prefetch": prefetch}).cuda()
    for layer in model.layers:
        assert all(p.device.type == "cpu" and p.is_pinned() for p in layer.mlp.experts.parameters())
        assert layer.mlp.router.weight.is_cuda
    assert torch.equal(decoded(model, ids(2).cuda()), decoded(build("loop").cuda(), ids(2).cuda()))
    assert (total(model).prefetch_hits > 0) == (prefetch > 0)
