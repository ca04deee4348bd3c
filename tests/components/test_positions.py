"""Position encodings equal their formulas and those of transformers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from tests.components.draw import draw, randomise
from zoo.components import registry
from zoo.components.contracts import Position, RopeScaling, Step
from zoo.components.ops import rotary
from zoo.components.spec import SpecError, check, load

D, THETA = 16, 1e4


def position(name: str, width: int = D, heads: int = 4, **options: Any) -> Any:
    return load(Position, {"name": name, **options}).build(width, heads)


def scaling(name: str, **options: Any) -> Any:
    return load(RopeScaling, {"name": name, **options})


def relation(module: Any, x: Tensor, step: Step) -> Tensor:
    """q k^T of one vector placed at every position: what attention can know of positions. [T, T] for one row and head."""
    turned = module.rotate(x.expand(1, step.pos.shape[1], 1, -1), step)[0, :, 0]
    return turned @ turned.mT


# ---- rotations ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("width", [D, 8])
def test_turning_equals_complex_multiplication(layout: rotary.Layout, width: int) -> None:
    x, angle = draw(2, 5, 3, D), draw(2, 5, 1, width // 2) * 10
    got = rotary.turn(x, *rotary.tables(angle, layout), layout)
    torch.testing.assert_close(got[..., :width], rotary.reference(x[..., :width], angle, layout), rtol=1e-5, atol=1e-5)
    assert torch.equal(got[..., width:], x[..., width:])


@pytest.mark.parametrize("name", [n for n in registry.names("position") if n.startswith(("rope", "mrope"))])
def test_rotations_know_distances_only_and_keep_lengths(name: str) -> None:
    spec = registry.get("position", name).small()
    module, x = randomise(spec.build(8, 4)), draw(1, 1, 1, 8)
    near, far = (relation(module, x, Step.plain(start, 1, 6)) for start in (0, 1000))
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(near.diag(), x.square().sum().expand(6))
    assert (near[0, 1:] - near[0, 0]).abs().min() > 1e-3


def test_tables_are_fp32_in_a_bf16_model() -> None:
    """A phase computed in bf16 is off by whole turns at 32k (transformers 29285, gpt-neox 1003)."""
    module = position("rope").to(torch.bfloat16)
    cos, _ = module.tables(Step.of(torch.tensor([[32_767]])), torch.float32)
    want = torch.cos(32_767 * THETA ** (-torch.arange(0, D, 2).double() / D)).float()
    torch.testing.assert_close(cos[0, 0, 0, : D // 2], want, rtol=0, atol=3e-3)


AXES = torch.tensor([[[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [2, 3, 2], [2, 3, 3], [4, 4, 4]]])


@pytest.mark.parametrize(("order", "theirs"), [("sectioned", Qwen2VLRotaryEmbedding), ("interleaved", Qwen3VLTextRotaryEmbedding)])
@pytest.mark.parametrize("sections", [[2, 3, 3], [4, 2, 2]])
def test_mrope_equals_qwen(order: str, theirs: Any, sections: list[int]) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": sections}
    config = LlamaConfig(hidden_size=4 * D, num_attention_heads=4, head_dim=D, rope_parameters=rope)
    q = draw(1, 7, 4, D)
    cos, sin = theirs(config)(q, AXES.permute(2, 0, 1))
    want = apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)[0]
    ours = position("mrope", theta=500.0, sections=sections, order=order)
    torch.testing.assert_close(ours.rotate(q, Step.of(torch.arange(7)[None], axes=AXES)), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["sectioned", "interleaved"])
def test_mrope_of_text_is_rope(order: str) -> None:
    x, step = draw(2, 5, 4, D), Step.plain(3, 2, 5)
    ours = position("mrope", sections=[2, 3, 3], order=order)
    torch.testing.assert_close(ours.rotate(x, step), position("rope").rotate(x, step))


def grid(rows: int, columns: int) -> Step:
    """A class token without a place, then the grid row by row."""
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    axes = torch.cat([torch.full((1, 2), -1), places])[None]
    return Step.of(torch.arange(len(axes[0]))[None], axes=axes)


def test_axial_equals_the_papers_tables() -> None:
    """Column first, complex pairs, theta 100, as in the authors' compute_axial_cis; written out by hand."""
    rows, columns, x = 2, 3, draw(1, 7, 4, D)
    frequency = 100.0 ** (-torch.arange(0, D, 4).double() / D)
    at = torch.arange(rows * columns)
    angle = torch.cat([(at % columns)[:, None] * frequency, (at // columns)[:, None] * frequency], -1)
    cis = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    pairs = torch.view_as_complex(x[:, 1:].double().unflatten(-1, (-1, 2)))
    got = position("rope_axial", axes=[1, 0]).rotate(x, grid(rows, columns))
    torch.testing.assert_close(got[:, 1:], torch.view_as_real(pairs * cis).flatten(-2).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(got[:, 0], x[:, 0])


def test_mixed_is_a_sum_over_axes_for_each_head() -> None:
    x, step = draw(1, 7, 4, D), grid(2, 3)
    ours = randomise(position("rope_mixed", sets=2))
    got = ours.rotate(x, step)
    assert step.axes is not None
    for token, (row, column) in enumerate(step.axes[0].clamp(min=0).tolist()):
        for head in range(4):
            angle = row * ours.frequencies[0, head // 2] + column * ours.frequencies[1, head // 2]
            want = rotary.reference(x[0, token, head], angle.detach(), "interleaved")
            torch.testing.assert_close(got[0, token, head], want, rtol=1e-5, atol=1e-5)


def test_mixed_starts_with_perpendicular_directions_of_the_axial_magnitudes() -> None:
    row, column = position("rope_mixed", sets=4).frequencies.detach()
    first, second = torch.stack([row, column]).chunk(2, -1)
    torch.testing.assert_close((first * second).sum(0), torch.zeros(4, D // 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(first.norm(dim=0), (10.0 ** (-torch.arange(0, D, 4) / D)).expand(4, -1))


def test_the_number_of_axes_must_fit() -> None:
    with pytest.raises(ValueError, match=r"turns by 2 axes, the call's tokens have 3"):
        position("rope_axial").rotate(draw(1, 7, 4, D), Step.of(torch.arange(7)[None], axes=AXES))
    with pytest.raises(ValueError, match=r"4 sets of frequencies, which 2 key/value heads"):
        position("rope_mixed", sets=4).rotate(draw(1, 7, 2, D), grid(2, 3))


@pytest.mark.parametrize(("spec", "wrong"), [
    ({"name": "rope", "width": 5}, "width: rope turns an even number of at most 16 channels, got 5"),
    ({"name": "rope", "scaling": {"name": "longrope", "short": [1.0], "long": [1.0] * 8, "context": 8, "factor": 2.0}},
     "scaling.short: needs a factor for each of 8 frequencies, got 1"),
    ({"name": "mrope", "sections": [2, 2]}, "sections: must add up to 8 pairs of channels, got [2, 2]"),
    ({"name": "rope_axial", "axes": [0, 0]}, "axes: must name each coordinate once, got [0, 0]"),
    ({"name": "rope_mixed", "sets": 3}, "sets: must divide the 4 query heads, got 3"),
    ({"name": "t5_bias", "buckets": 6}, "buckets: must be a multiple of 4, got 6"),
])  # fmt: skip
def test_mistakes_are_named(spec: dict[str, Any], wrong: str) -> None:
    assert check(load(Position, spec), D, 4) == [wrong]


def test_a_misspelt_scaling_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"scaling: no rope_scaling named 'longrop'; did you mean 'longrope'"):
        load(Position, {"name": "rope", "scaling": "longrop"})


# ---- scalings ----------------------------------------------------------------------------------------------------------------

LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"factor": 4.0}, {}),
    "dynamic_ntk": ({"rope_type": "dynamic", "factor": 2.0}, {"context": 64}),
    "llama3": ({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, {"context": 16}),
    "yarn": ({"factor": 4.0}, {"context": 16}),
    "yarn mscales": ({"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}, {"context": 16}),
    "longrope": ({"factor": 4.0, **LONG}, {"context": 16}),
    "longrope scaled": ({"factor": 4.0, "attention_factor": 1.3, **LONG}, {"context": 16}),
}
OURS = {"short_factor": "short", "long_factor": "long", "attention_factor": "attention_scale"}


@pytest.mark.parametrize("case", THEIRS)
@pytest.mark.parametrize("length", [10, 16, 17, 65, 200])
def test_scalings_equal_transformers(case: str, length: int) -> None:
    fields, extra = THEIRS[case]
    name = case.split()[0]
    rope = {"rope_type": name, "rope_theta": THETA, "original_max_position_embeddings": 16, **fields}
    config = LlamaConfig(hidden_size=4 * D, num_attention_heads=4, head_dim=D, max_position_embeddings=64, rope_parameters=rope)
    want, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=length)
    spec = scaling(name, **{OURS.get(k, k): v for k, v in fields.items() if k != "rope_type"}, **extra)
    got = spec.frequencies(THETA, D, torch.tensor([length]) if spec.uses_length else None)
    torch.testing.assert_close(got.view(-1), want, rtol=2e-6, atol=0)
    assert spec.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("name", ["dynamic_ntk", "longrope"])
def test_each_row_follows_its_own_length(name: str) -> None:
    spec = {"name": name, **registry.get("rope_scaling", name).example}
    module, x = position("rope", width=8, scaling=spec), draw(3, 20, 2, 8)
    lengths = [20, 5, 12]
    pos = torch.where(torch.arange(20) < torch.tensor(lengths)[:, None], torch.arange(20), -1)
    together = module.rotate(x, Step.of(pos))
    for row, n in enumerate(lengths):
        torch.testing.assert_close(together[row, :n], module.rotate(x[row : row + 1, :n], Step.plain(0, 1, n))[0])


def test_ntk_keeps_the_fastest_and_divides_the_slowest() -> None:
    got, plain = scaling("ntk", factor=4.0).frequencies(THETA, D, None), rotary.frequencies(THETA, D)
    torch.testing.assert_close(got[[0, -1]], plain[[0, -1]] / torch.tensor([1.0, 4.0]))


def test_ntk_by_parts_equals_definition_2() -> None:
    got = scaling("ntk_by_parts", factor=4.0, context=128, alpha=1.0, beta=8.0).frequencies(THETA, D, None)
    for i, value in enumerate(got.tolist()):
        frequency = THETA ** (-2 * i / D)
        turns = 128 * frequency / (2 * math.pi)
        gamma = 0.0 if turns < 1 else 1.0 if turns > 8 else (turns - 1) / 7
        assert value == pytest.approx((1 - gamma) * frequency / 4 + gamma * frequency, rel=1e-6)
    assert len({round(v / p, 4) for v, p in zip(got.tolist(), rotary.frequencies(THETA, D).tolist(), strict=True)}) > 2


@pytest.mark.parametrize(("mscale", "all_dim"), [(1.0, 1.0), (0.7, 1.3), (None, None)])
def test_yarn_of_deepseek_scales_logits_by_mscale_all_dim(mscale: float | None, all_dim: float | None) -> None:
    """The ratio goes to cos and sin, the square of mscale_all_dim to all logits (Megatron-LM 1429, imp 880)."""
    given = {k: v for k, v in (("mscale", mscale), ("mscale_all_dim", all_dim)) if v}
    rope = {"rope_type": "yarn", "rope_theta": THETA, "factor": 40.0, "original_max_position_embeddings": 16, **given}
    config = DeepseekV3Config(hidden_size=32, num_attention_heads=2, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, q_lora_rank=8,
                              kv_lora_rank=8, max_position_embeddings=640, rope_parameters=rope)  # fmt: skip
    theirs = DeepseekV3Attention(config, 0)
    spec = scaling("yarn", factor=40.0, context=16, scale_logits=True, **given)
    assert spec.logit_scale * 16**-0.5 == pytest.approx(theirs.scaling)
    if mscale == all_dim and mscale:
        assert spec.attention_factor == 1.0


# ---- biases ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 20, 32])
def test_alibi_equals_bloom_and_mpt(heads: int) -> None:
    """Up to a constant in each row, which no softmax sees."""
    at = torch.arange(9)[None]
    got = position("alibi", heads=heads).bias(at, at)[0]
    causal = torch.ones(9, 9).tril().bool()
    for theirs in (build_alibi_tensor(torch.ones(1, 9), heads, torch.float32), build_mpt_alibi_tensor(heads, 9)):
        want = (theirs - theirs[..., :1]).expand(heads, 9, 9)
        torch.testing.assert_close((got - got[..., :1])[:, causal], want[:, causal])


def test_alibi_with_another_largest_bias_equals_mpt() -> None:
    at = torch.arange(9)[None]
    got, want = position("alibi", heads=6, max_bias=4.0).bias(at, at)[0, :, -1], build_mpt_alibi_tensor(6, 9, alibi_bias_max=4)[:, 0]
    torch.testing.assert_close(got, want)


def test_alibi_is_scaled() -> None:
    at = torch.arange(9)[None]
    torch.testing.assert_close(position("alibi", heads=6, scale=0.5).bias(at, at), position("alibi", heads=6).bias(at, at) / 2)


def test_alibi_is_the_same_on_both_sides_and_falls_with_distance() -> None:
    at = torch.arange(5)[None]
    bias = position("alibi", heads=3).bias(at, at)[0]
    assert torch.equal(bias, bias.mT)
    assert (bias[:, 0].diff(dim=-1) < 0).all()


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 20)])
def test_t5_bias_equals_transformers(bidirectional: bool, buckets: int, reach: int) -> None:
    config = T5Config(d_model=32, num_heads=4, is_decoder=not bidirectional, relative_attention_num_buckets=buckets,
                      relative_attention_max_distance=reach)  # fmt: skip
    theirs = randomise(T5Attention(config, has_relative_attention_bias=True, layer_idx=0))
    ours = position("t5_bias", buckets=buckets, max_distance=reach, bidirectional=bidirectional)
    ours.weight.data.copy_(theirs.relative_attention_bias.weight)
    at = torch.arange(300)[None]
    assert torch.equal(ours.bias(at, at), theirs.compute_bias(300, 300))


# ---- temperature -------------------------------------------------------------------------------------------------------------


def test_temperature_equals_llama4_and_ministral() -> None:
    at = torch.tensor([[0, 3, 4, 7, 8, 100, -1]])
    llama4 = position("temperature", floor=4, scale=0.3).factor(at).flatten()
    want = torch.log1p(torch.floor((at[0].float() + 1.0) / 4)) * 0.3 + 1.0
    torch.testing.assert_close(llama4[:-1], want[:-1])
    ministral = position("temperature", floor=4, scale=0.3, offset=0).factor(at).flatten()
    torch.testing.assert_close(ministral[:-1], get_llama_4_attn_scale(at[:, :-1], 0.3, 4).flatten())
    assert llama4[-1] == ministral[-1] == 1


def test_temperature_scales_queries_and_leaves_the_rest_to_its_inner() -> None:
    ours, rope, step = position("temperature", floor=2, inner="rope"), position("rope"), Step.plain(0, 1, 6)
    q = draw(1, 6, 4, D)
    assert torch.equal(ours.rotate(q, step), rope.rotate(q, step))
    torch.testing.assert_close(ours.temper(q, step), q * ours.factor(step.pos))
    spec = load(Position, {"name": "temperature", "inner": "alibi"})
    assert spec.has_bias
    assert not load(Position, "temperature").has_bias


def test_yarn_gives_its_logit_scale_to_whatever_wraps_rope() -> None:
    yarn = {"name": "yarn", "factor": 4.0, "context": 8, "mscale_all_dim": 1.0, "scale_logits": True}
    inner = {"name": "rope", "scaling": yarn}
    assert position("temperature", inner=inner).logit_scale == position("rope", scaling=yarn).logit_scale > 1


def test_no_position_tells_attention_nothing() -> None:
    module, x = position("none"), draw(1, 3, 2, D)
    assert module.rotate(x, SimpleNamespace()) is x
    assert module.temper(x, SimpleNamespace()) is x
    assert module.bias(x, x) is None
