"""Latent and tied projections against transformers and against themselves read the other way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from zoo.components.contracts import NoCache, Position, PositionModule, Projection, Step
from zoo.components.projection._latent import LatentBase
from zoo.components.registry import get
from zoo.components.spec import check, load
from zoo.model import Mixer, MixerSpec

M, H, NOPE, ROPE, VALUE, RANK, T, OFFSET = 32, 4, 8, 4, 6, 12, 7, 5000
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.8, "mscale_all_dim": 1.2}  # fmt: skip
NAMES = {"q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_up", "q_proj": "q_up", "kv_a_proj_with_mqa": "kv_down",
         "kv_a_layernorm": "kv_norm", "kv_b_proj": "kv_up", "o_proj": "o"}  # fmt: skip


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5 + (p.dim() == 1)


def hf_attention(code: Any, **options: Any) -> tuple[Any, Any]:
    name = "DeepseekV3" if code is v3 else "DeepseekV2"
    config = getattr(code, f"{name}Config")(
        hidden_size=M, num_attention_heads=H, num_key_value_heads=H, kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
        v_head_dim=VALUE, num_hidden_layers=1, rope_parameters=YARN, max_position_embeddings=163840, **options)  # fmt: skip
    config._attn_implementation = "eager"
    attention = getattr(code, f"{name}Attention")(config, 0).eval()
    randomise(attention)
    return attention, getattr(code, f"{name}RotaryEmbedding")(config)


def ours(hf: Any, layout: str, **fields: Any) -> Mixer:
    scaling = {"name": "yarn", "factor": 40.0, "context": 4096, "mscale": 0.8, "mscale_all_dim": 1.2, "scale_logits": True}
    projection = {"name": "latent", "heads": H, "nope": NOPE, "rope": ROPE, "value": VALUE, "rank": RANK, **fields}
    position = {"name": "rope", "theta": 1e4, "layout": layout, "scaling": scaling}
    mixer = load(MixerSpec, {"projection": projection, "position": position, "kernel": "eager"}).build(M, 0).eval()
    state = {f"{NAMES[n.rpartition('.')[0]]}.{n.rpartition('.')[2]}": x for n, x in hf.state_dict().items()}
    mixer.projection.load_state_dict(state)
    return mixer


def hf_run(hf: Any, rotary: Any, x: Tensor, start: int, cache: Any = None) -> Tensor:
    past = cache.get_seq_length() if cache is not None else 0
    mask = torch.full((x.shape[1], past + x.shape[1]), float("-inf")).triu(1 + past)[None, None]
    pos = torch.arange(start, start + x.shape[1])[None]
    return hf(x, attention_mask=mask, cache=cache, position_embeddings=rotary(x, pos))[0]


CASES = [
    pytest.param(v3, "interleaved", {"q_lora_rank": 10, "rope_interleave": True}, {"q_rank": 10}, id="v3"),
    pytest.param(v3, "half", {"q_lora_rank": None, "rope_interleave": False}, {}, id="v3-half-no-query-rank"),
    pytest.param(
        v3,
        "interleaved",
        {"q_lora_rank": 10, "attention_bias": True},
        {"q_rank": 10, "bias": True, "out_bias": True},
        id="v3-bias",
    ),
    pytest.param(v2, "interleaved", {"q_lora_rank": None}, {}, id="v2-lite"),
    pytest.param(v2, "interleaved", {"q_lora_rank": 10}, {"q_rank": 10}, id="v2"),
]


@pytest.mark.parametrize(("code", "layout", "theirs", "fields"), CASES)
@torch.no_grad()
def test_latent_equals_deepseek(code: Any, layout: str, theirs: dict[str, Any], fields: dict[str, Any]) -> None:
    hf, rotary = hf_attention(code, **theirs)
    mixer, x = ours(hf, layout, **fields), torch.randn(2, T, M)
    want = hf_run(hf, rotary, x, OFFSET)
    torch.testing.assert_close(mixer(x, Step.plain(OFFSET, 2, T), NoCache()), want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_cached_latent_equals_deepseek_with_its_cache() -> None:
    hf, rotary = hf_attention(v3, q_lora_rank=10, rope_interleave=True)
    mixer, x = ours(hf, "interleaved", q_rank=10), torch.randn(2, T, M)
    theirs = DynamicCache(config=hf.config)
    store = get("cache", "dense").small().build([mixer.slots], 2, torch.float32, torch.device("cpu"))
    start = 0
    for n in (4, 1, 2):
        part = x[:, start : start + n]
        got = mixer(part, Step.plain(start, 2, n), store)
        store.commit()
        torch.testing.assert_close(got, hf_run(hf, rotary, part, start, theirs), rtol=1e-5, atol=1e-5)
        start += n


@pytest.mark.parametrize("name", ["latent", "grouped_latent"])
@torch.no_grad()
def test_absorbed_equals_expanded(name: str) -> None:
    part = get("projection", name)
    module = part.small().build(M).double()
    randomise_double(module)
    spec = module.spec
    q = torch.randn(2, 2, spec.heads, spec.nope + spec.rope, dtype=torch.float64)
    c = torch.randn(2, 9, spec.latent_count, spec.rank, dtype=torch.float64)
    r = torch.randn(2, 9, 1, spec.rope, dtype=torch.float64)
    results = []
    for a in (module.expanded(q, c, r), module.absorbed(q, c, r)):
        assert a.scale == (spec.nope + spec.rope) ** -0.5
        k, v = (x.repeat_interleave(spec.heads // x.shape[2], 2) for x in (a.k, a.v))
        weights = (torch.einsum("bthd,bshd->bhts", a.q, k) * a.scale).softmax(-1)
        results.append(a.finish(torch.einsum("bhts,bshd->bthd", weights, v)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def randomise_double(module: nn.Module) -> None:
    randomise(module)
    module.double()


def test_absorbs_only_when_the_past_is_long_against_the_new_tokens() -> None:
    spec: Any = load(Projection, {"name": "latent", "heads": 1, "nope": 128, "rope": 64, "value": 128, "rank": 512})
    assert spec.absorbs(1, 4096)
    assert spec.absorbs(1, 2)
    assert not spec.absorbs(1, 1)
    assert not spec.absorbs(4096, 4096)
    assert not spec.absorbs(1024, 8192)  # 1024 queries against 512 + 64 channels cost more than making 8192 keys


def test_both_readings_are_used_within_one_cached_run(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = load(MixerSpec, {"projection": dict(get("projection", "latent").example, name="latent"), "kernel": "eager"}).build(M, 0)
    seen = []
    original = LatentBase.absorbs
    monkeypatch.setattr(LatentBase, "absorbs", lambda self, n, s: seen.append(original(self, n, s)) or seen[-1])
    store = get("cache", "dense").small().build([mixer.slots], 1, torch.float32, torch.device("cpu"))
    for start, n in ((0, 6), (6, 1)):
        mixer(torch.randn(1, n, M), Step.plain(start, 1, n), store)
        store.commit()
    assert seen == [False, True]


@pytest.mark.parametrize(
    ("projection", "numbers"),
    [
        ({"name": "gqa", "heads": 128, "kv_heads": 128, "head_dim": 128}, 32768),
        ({"name": "latent", "heads": 128, "nope": 128, "rope": 64, "value": 128, "rank": 512, "q_rank": 1536}, 576),
        ({"name": "grouped_latent", "heads": 128, "latents": 2, "nope": 128, "rope": 64, "value": 128, "rank": 256}, 576),
        ({"name": "grouped_tied", "heads": 128, "kv_heads": 8, "head_dim": 128, "rope": 64}, 1088),
    ],
    ids=lambda p: p["name"] if isinstance(p, dict) else "",
)
def test_numbers_kept_per_token(projection: dict[str, Any], numbers: int) -> None:
    slots = load(MixerSpec, {"projection": projection}).slots()
    assert get("cache", "dense").small().bytes_per_token(slots, 2) == 2 * numbers


@torch.no_grad()
def test_grouped_latent_with_one_latent_is_latent() -> None:
    fields = {"heads": 4, "nope": 6, "rope": 4, "value": 8, "rank": 12, "q_rank": 10}
    one = load(MixerSpec, {"projection": {"name": "latent", **fields}, "position": "rope"}).build(M, 0)
    many = load(MixerSpec, {"projection": {"name": "grouped_latent", "latents": 1, **fields}, "position": "rope"}).build(M, 0)
    randomise(one)
    many.load_state_dict({n.replace("kv_norm.", "kv_norm.0.").replace("kv_up.", "kv_up.0."): x for n, x in one.state_dict().items()})
    x, step = torch.randn(2, T, M), Step.plain(3, 2, T)
    torch.testing.assert_close(one(x, step, NoCache()), many(x, step, NoCache()))


@torch.no_grad()
def test_grouped_latent_is_the_formula_of_the_paper() -> None:
    spec = get("projection", "grouped_latent").small()
    mixer = MixerSpec(projection=spec, kernel=get("kernel", "eager").small()).build(M, 0)
    randomise(mixer)
    p, x = mixer.projection, torch.randn(1, T, M)
    c, r = p.kv_down(x).split([16, 4], -1)
    kv = [p.kv_up[i](p.kv_norm[i](part)).unflatten(-1, (2, 14)) for i, part in enumerate(c.chunk(2, -1))]  # two heads for each latent
    k, v = torch.cat(kv, 2).split([6, 8], -1)
    k = torch.cat([k, r[:, :, None].expand(-1, -1, 4, -1)], -1)
    q = p.q_up(x).unflatten(-1, (4, 10))
    o = nn.functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
    torch.testing.assert_close(mixer(x, Step.plain(0, 1, T), NoCache()), p.o(o.transpose(1, 2).flatten(-2)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_gqa_clips_what_it_makes_before_it_is_turned() -> None:
    plain, clipped = (
        load(Projection, {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8, **o}).build(M) for o in ({}, {"clip": 0.3})
    )
    randomise(plain)
    clipped.load_state_dict(plain.state_dict())
    x, step, rope = torch.randn(2, T, M), Step.plain(3, 2, T), load(Position, "rope").build(8, 4)
    (q, new), (other_q, other_new) = (m.write(x, step, PositionModule()) for m in (plain, clipped))
    cut = q.clamp(-0.3, 0.3)
    assert not torch.equal(cut, q)
    assert torch.equal(other_q, cut)
    assert all(torch.equal(other_new[n], new[n].clamp(-0.3, 0.3)) for n in ("k", "v"))
    assert torch.equal(clipped.write(x, step, rope)[0], rope.rotate(cut, step))


@torch.no_grad()
def test_grouped_tied_is_the_formula_of_the_paper() -> None:
    """The value is the whole tied state, the key its first half and one rotated half that all groups share."""
    spec = get("projection", "grouped_tied").small()
    mixer = MixerSpec(projection=spec, position=get("position", "rope").small(), kernel=get("kernel", "eager").small()).build(M, 0)
    randomise(mixer)
    p, x, step = mixer.projection, torch.randn(1, T, M), Step.plain(4, 1, T)
    rotate = lambda y: mixer.position.rotate(y, step)  # noqa: E731
    q, kv = p.q(x).unflatten(-1, (4, 8)), p.kv(x).unflatten(-1, (2, 8))
    q = torch.cat([q[..., :4], rotate(q[..., 4:])], -1)
    k = torch.cat([kv[..., :4], rotate(p.r(x)[:, :, None]).expand(-1, -1, 2, -1)], -1)
    k, v = (y.repeat_interleave(2, 2) for y in (k, kv))
    o = nn.functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
    torch.testing.assert_close(mixer(x, step, NoCache()), p.o(o.transpose(1, 2).flatten(-2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "place"),
    [
        ("latent", {"rank": 0}, "rank"),
        ("latent", {"q_rank": 0}, "q_rank"),
        ("latent", {"rope": -2}, "rope"),
        ("grouped_latent", {"latents": 3}, "latents"),
        ("grouped_tied", {"rope": 9}, "rope"),
        ("grouped_tied", {"kv_heads": 3}, "kv_heads"),
        ("gated_delta", {"key_heads": 3}, "key_heads"),
        ("gated_linear", {"temperature": 0.0}, "temperature"),
    ],
)
def test_mistakes_are_named(name: str, change: dict[str, Any], place: str) -> None:
    spec = load(Projection, {"name": name, **get("projection", name).example, **change})
    assert [line.partition(":")[0] for line in check(spec, M)] == [place]


@torch.no_grad()
def test_latent_without_a_rotated_part() -> None:
    fields = {"name": "latent", "heads": 2, "nope": 8, "rope": 0, "value": 8, "rank": 6}
    mixer = load(MixerSpec, {"projection": fields, "position": "none"}).build(M, 0)
    store = get("cache", "dense").small().build([mixer.slots], 1, torch.float32, torch.device("cpu"))
    x = torch.randn(1, 5, M)
    got = [mixer(x[:, i : i + 1], Step.plain(i, 1, 1), store) for i in range(5) if not store.commit()]
    torch.testing.assert_close(torch.cat(got, 1), mixer(x, Step.plain(0, 1, 5), NoCache()))
