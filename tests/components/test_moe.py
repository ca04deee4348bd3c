"""Mixtures of experts: blocks of transformers, dispatches against the loop, padding, specs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.components.moe_blocks import BLOCKS, Block, M
from tests.components.small_moe import DROPLESS, MIXTURES, SOFT, build, close, every_router, inputs, small
from zoo.components import registry
from zoo.components.contracts import MLP, Experts, NoCache, Routing, Step
from zoo.components.experts.capacity import Capacity
from zoo.components.ops.moe.grouped_matmul import grouped_matmul, reference
from zoo.components.ops.moe.sorting import by_expert
from zoo.components.spec import check, dump, load, override

every_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


# ---- transformers ------------------------------------------------------------------------------------------------------------


@every_block
@torch.no_grad()
def test_blocks_equal_transformers(block: Block) -> None:
    theirs: Any = block.theirs()
    ours, x = block.ours(theirs), inputs(2, 40)
    close(ours(x).flatten(0, 1), first(theirs(x.clone())).flatten(0, -2))


@torch.no_grad()
def test_large_negative_corrections_keep_to_the_groups_and_out_of_the_weights() -> None:
    """Scores below 0 must lose to none: a mask of 0 would choose the masked groups. Weights come from the uncorrected scores."""
    block = BLOCKS["deepseek_v3"]
    theirs: Any = block.theirs()
    for shift in (-1.5, -12.0, 12.0):
        theirs.gate.e_score_correction_bias.data += shift
        ours, x = block.ours(theirs), inputs(2, 40)
        close(ours(x), theirs(x))


# ---- dispatch ----------------------------------------------------------------------------------------------------------------


def test_every_dispatch_is_compared() -> None:
    assert {load(Experts, word).name for word in DROPLESS.values()} == set(registry.names("experts"))


@every_router
@pytest.mark.parametrize("dispatch", DROPLESS)
@pytest.mark.parametrize("on_input", [False, True])
def test_dispatches_equal_the_loop(router: str, dispatch: str, on_input: bool) -> None:
    """With padding and without, outputs and gradients."""
    loop = build(small(router=router, dispatch="loop"))
    other: Any = small(router=router, dispatch=DROPLESS[dispatch]).build(M).eval()
    other.load_state_dict(loop.state_dict())
    for valid in (None, torch.rand(3, 7, generator=torch.Generator().manual_seed(0)) > 0.3):
        found = []
        for block in (loop, other):
            x = inputs().requires_grad_()
            routing = block.router(x, valid)._replace(on_input=on_input)
            y = block.dispatch(x.flatten(0, 1), routing, block.experts)
            grads = torch.autograd.grad(y.square().sum(), [x, *block.parameters()], allow_unused=True)
            found.append([y, *(torch.zeros(()) if g is None else g for g in grads)])
        for got, want in zip(*found, strict=True):
            close(got + torch.zeros_like(want), want)


@pytest.mark.parametrize("expert", ["gated", {"name": "clamped", "hidden": 8}])
@pytest.mark.parametrize("valid", [None, [True] * 5 + [False] * 2])
def test_the_grouped_product_equals_the_loop_in_bfloat16(expert: Any, valid: Any) -> None:
    """bfloat16 takes the grouped product on a CPU too; float32 does not."""
    expert = {"name": "gated", "hidden": 8} if expert == "gated" else expert
    spec = small(experts=[{"repeat": 6, **expert}])
    grouped = build(spec).to(torch.bfloat16)
    loop = override(spec, "dispatch=loop").build(M).to(torch.bfloat16).eval()
    loop.load_state_dict(grouped.state_dict())
    mask = None if valid is None else torch.tensor([valid] * 3)
    for grad in (False, True):
        found = []
        for block in (loop, grouped):
            x = inputs().bfloat16().requires_grad_()
            with torch.set_grad_enabled(grad):
                y = block(x, mask)
            found.append([y])
            if grad:
                grads = torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()], allow_unused=True)
                found[-1] += [torch.zeros(()) if g is None else g for g in grads]
        for got, want in zip(*found, strict=True):
            close((got + torch.zeros_like(want)).float(), want.float(), rtol=0.05)
    assert grouped.dispatch.stack.tensors(x, grouped.experts)


def test_the_grouped_product_gives_way_where_it_would_be_wrong() -> None:
    grouped = build(small()).to(torch.bfloat16)
    x, stack = inputs().bfloat16(), grouped.dispatch.stack
    with torch.no_grad():
        want = grouped(x)
        assert stack.tensors(x, grouped.experts)
        twin = copy.deepcopy(grouped)
        assert not twin.dispatch.stack.tensors(x, twin.experts)  # the copy's block is not where its weights are
        assert torch.equal(twin(x), want)
        seen = []
        watch = grouped.experts[2].up.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        close(grouped(x), want, rtol=0.02)
        assert len(seen) == 1, "a watched expert is called, so that calibration sees its input"
        watch.remove()
        grouped.experts[1].gate.weight = nn.Parameter(torch.zeros_like(grouped.experts[1].gate.weight))
        assert not torch.equal(grouped(x), want), "a weight that was replaced is used"
        grouped.prepare()
        assert stack.tensors(x, grouped.experts)
        assert stack.blocks["gate"].data.data_ptr() == grouped.experts[0].gate.weight.data_ptr()


def test_grouped_matmul_equals_the_reference() -> None:
    rows, weight = torch.randn(11, 8), torch.randn(4, 12, 8)
    ends = torch.tensor([3, 3, 4, 9], dtype=torch.int32)
    close(grouped_matmul(rows, weight, ends)[:9], reference(rows, weight, ends)[:9])


@torch.no_grad()
def test_capacity_drops_the_last_or_the_lightest() -> None:
    x, block = inputs(1, 8), build(small(router={"name": "top_k", "k": 1}))
    routing = Routing(torch.linspace(0.1, 0.8, 8)[:, None], torch.tensor([[0], [0], [0], [1], [0], [0], [0], [-1]]), torch.zeros(8, 4),
                      valid=torch.arange(8) < 7, whole=False)  # fmt: skip
    full = load(Experts, "loop").build((), M)(x[0], routing, block.experts)
    for priority, kept in (("order", [0, 1, 2, 3]), ("weight", [3, 4, 5, 6])):
        spec = load(Capacity, {"factor": 1.7, "priority": priority})  # ceil(7 * 1.7 / 4) = 3 of the 7 valid tokens
        got = spec.build((), M)(x[0], routing, block.experts)
        lost = [i for i in range(8) if i not in kept]
        assert (got[lost] == 0).all()
        close(got[kept], full[kept])


@torch.no_grad()
def test_second_choices_are_dropped_before_first_ones() -> None:
    block = build(small())
    routing = Routing(torch.ones(4, 2), torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]), torch.zeros(4, 2))
    x = inputs(4)
    got = Capacity(factor=0.5).build((), M)(x, routing, block.experts[:2])  # two tokens an expert
    want = torch.cat([block.experts[1](x[:2]), block.experts[0](x[2:])])
    close(got, want)


def test_sorting_keeps_tokens_of_an_expert_in_order() -> None:
    experts = torch.tensor([[2, 0], [-1, -1], [0, 2], [2, 1]])
    s = by_expert(Routing(torch.ones(4, 2), experts, torch.zeros(4, 4), whole=False))
    assert s.counts.tolist() == [2, 1, 3, 0]
    assert s.token.tolist()[:6] == [0, 2, 3, 0, 2, 3]
    assert s.expert.tolist() == [0, 0, 1, 2, 2, 2, 4, 4]


# ---- padding -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", MIXTURES, ids=str)
@torch.no_grad()
def test_padded_rows_equal_each_row_alone(data: Any) -> None:
    block, x, lengths = build(load(MLP, data)), inputs(), [7, 4, 1]
    valid = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    valid[1] = valid[1].flip(0)
    got = block(torch.where(valid[..., None], x, 1e4), valid)
    for row in range(3):
        close(got[row, valid[row]], block(x[row : row + 1, valid[row]])[0])
    assert torch.isfinite(block(x, torch.zeros_like(valid))).all()


@torch.no_grad()
def test_padding_takes_no_capacity() -> None:
    """Left padding comes first in every order; if it took room, the tokens after it would be dropped."""
    block = build(small(dispatch={"name": "capacity", "factor": 1.0}))
    x, valid = inputs(1, 12), torch.arange(12)[None] >= 6
    close(block(x, valid)[0, 6:], block(x[:, 6:])[0])


@torch.no_grad()
def test_the_model_tells_mixtures_of_padding() -> None:
    from zoo.model import LayerSpec

    data = {"mixer": {"projection": {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}}}
    moe = dump(small(dispatch={"name": "capacity", "factor": 1.0}))
    layer = load(LayerSpec, {**data, "mlp": moe}).build(M, 0).eval()
    x, pos = inputs(1, 12), torch.where(torch.arange(12)[None] >= 6, torch.arange(12)[None] - 6, -1)
    close(layer(x, Step.of(pos), NoCache())[0, 6:], layer(x[:, 6:], Step.plain(0, 1, 6), NoCache())[0])


@pytest.mark.parametrize("mlp", [dump(small(router="expert_choice")), SOFT])
def test_mixtures_that_see_the_future_are_refused_in_causal_models(mlp: Any) -> None:
    from zoo.model import LayerSpec

    data = {"mixer": {"projection": {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}}, "mlp": mlp}
    assert "lets a token see later ones" in check(load(LayerSpec, data), M, 0)[0]
    assert not check(override(load(LayerSpec, data), "mixer.pattern=full"), M, 0)


# ---- mixtures of their own ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_soft_moe_equals_its_formula() -> None:
    block = build(load(MLP, {"name": "soft_moe", "slots": 2, "experts": [{"repeat": 3, "name": "gated", "hidden": 8}]}))
    x = inputs(5)
    norm = lambda t: t / t.square().sum(-1, keepdim=True).sqrt()  # noqa: E731
    logits = block.router.scale * norm(x) @ norm(block.router.weight).T
    dispatch, combine = logits.exp() / logits.exp().sum(0), logits.exp() / logits.exp().sum(1, keepdim=True)
    slots = dispatch.T @ x
    done = torch.stack([block.experts[i // 2](slots[i]) for i in range(6)])
    close(block(x), combine @ done)


# ---- specs and errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", MIXTURES, ids=str)
def test_specs_say_what_modules_hold(data: Any) -> None:
    spec: Any = load(MLP, data)
    assert load(MLP, dump(spec)) == spec
    block, tensors = spec.build(M).bfloat16(), spec.tensors(M)
    held = {n: (tuple(t.shape), t.dtype) for n, t in block.state_dict().items()}
    assert held == {n: (t.shape, getattr(torch, t.dtype) if t.dtype else torch.bfloat16) for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ("router.k=5", "router.k: must lie in 1..4"),
        ("router.groups=3", "router.groups: 4 experts do not divide into 3 equal groups"),
        ("router={name: top_k, groups: 2, kept_groups: 3}", "router.kept_groups: must lie in 1..2"),
        ("router={name: top_k, groups: 2, group_top: 3}", "router.group_top: must lie in 1..2"),
        ("router={name: expert_choice, capacity: 0}", "router.capacity: must be positive"),
        ("dispatch={name: capacity, factor: 0}", "dispatch.factor: must be positive"),
        ("shared_gate=true", "shared_gate: there is no shared expert to gate"),
        ("experts=[]", "experts: a mixture has at least one expert"),
    ],
)
def test_mistakes_are_named(edit: str, reason: str) -> None:
    assert check(override(small(), edit), M)[0].startswith(reason)


@pytest.mark.slow
@torch.no_grad()
def test_compiles_without_graph_breaks() -> None:
    for spec, dtype in ((small(), torch.bfloat16), (small(dispatch="capacity"), torch.float32)):
        block, x = build(spec).to(dtype), inputs().to(dtype)
        torch._dynamo.reset()
        close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x), rtol=0.02)
