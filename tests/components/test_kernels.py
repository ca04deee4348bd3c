"""Softmax kernels against the formula, against their published or library forms, and with parameters away from their start."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.components.mixes import M, completed, names
from zoo.components import registry
from zoo.components.contracts import Kernel, NoCache, Operands, Step, View
from zoo.components.kernel.differential import DifferentialKernel, lambda_init
from zoo.components.ops import attention as ops
from zoo.components.ops.softmax import Partial
from zoo.components.spec import check, load, override
from zoo.model import Mixer, MixerSpec

ORDERS: dict[str, Callable[[ops.Scene], Partial | Tensor]] = {
    "naive": ops.naive_attention,
    "online": lambda s: ops.online(s, 4),
    "flash_v1": lambda s: ops.flash_v1(s, 3, 4),
    "flash_v2": lambda s: ops.flash_v2(s, 3, 4),
    "flash_v3": lambda s: ops.flash_v3(s, 3, 4),
    "flash_v3 one tile": lambda s: ops.flash_v3(s, 64, 64),
    "split": lambda s: ops.split(s, 3),
    "split more than keys": lambda s: ops.split(s, 40),
    "split_unified": lambda s: ops.split_unified(s, 3, 0.5, 60.0),
    "split_unified recomputed": lambda s: ops.split_unified(s, 3, 0.0, 1e-3),
}


def scene(scale: float = 0.4, bias: bool = True) -> ops.Scene:
    """Two groups of three heads, seven queries of which one sees nothing, eleven keys."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, r, n, d, generator=g, dtype=torch.float64) for r, n, d in ((3, 7, 8), (1, 11, 8), (1, 11, 5)))
    keep = torch.rand(2, 1, 1, 7, 11, generator=g) < 0.6
    keep[0, :, :, 2] = False
    return ops.Scene(q, k, v, scale, keep, torch.randn(2, 2, 3, 7, 11, generator=g, dtype=torch.float64) if bias else None)


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_the_formula(name: str) -> None:
    s = scene()
    x = (s.q @ s.k.mT * 0.4 + s.bias).masked_fill(~s.keep, -torch.inf)  # pyright: ignore[reportOperatorIssue]
    want = x.softmax(-1).nan_to_num(0.0) @ s.v
    got = ORDERS[name](s)
    o = got.o if isinstance(got, Partial) else got
    torch.testing.assert_close(o, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ops.attention(s), want, rtol=1e-10, atol=1e-12)
    if isinstance(got, Partial):
        torch.testing.assert_close(got.lse, x.logsumexp(-1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in ORDERS if n != "naive"])
def test_logits_in_the_thousands_are_safe(name: str) -> None:
    s = scene(scale=2e3, bias=False)
    got = ORDERS[name](s)
    torch.testing.assert_close(got.o if isinstance(got, Partial) else got, ops.attention(s), rtol=1e-10, atol=1e-12)
    assert ops.naive_attention(s).isnan().any()


def test_unified_maximum_recomputes_only_rows_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    s, calls = scene(bias=False), []
    module = import_module("zoo.components.ops.attention.split")
    monkeypatch.setattr(module, "attention", lambda scene: calls.append(1) or ops.attention(scene))
    ops.split_unified(s, 2, 0.0, 60.0)
    assert not calls
    ops.split_unified(s, 2, 500.0, 60.0)
    assert calls


# ---- parts, as specs


def mixer(kernel: Any, heads: int = 4, kv_heads: int = 2, pattern: Any = "causal", index: int = 0, **fields: Any) -> Mixer:
    """With random parameters: what starts as the identity or at zero would hide mistakes."""
    projection = {"name": "gqa", "heads": heads, "kv_heads": kv_heads, "head_dim": 8} | fields
    torch.manual_seed(0)
    mix = load(MixerSpec, {"projection": projection, "pattern": pattern, "kernel": kernel}).build(M, index).double()
    for p in mix.kernel.parameters():
        torch.nn.init.normal_(p, 0.1, 0.5)
    return mix


def operands(mix: Mixer, tokens: int = 9) -> tuple[Operands, View, Step]:
    x, step = torch.randn(2, tokens, M, dtype=torch.float64), Step.plain(0, 2, tokens)
    q, new = mix.projection.write(x, step, mix.position)
    view = NoCache().extend(0, new, step, mix.slots)
    return mix.projection.read(q, view.streams), view, step


def run(mix: Mixer, a: Operands, view: View, step: Step) -> Tensor:
    return mix.kernel(a, view, step, mix.pattern, mix.position)


@pytest.mark.parametrize("kernel", names("kernel"))
def test_declared_tensors_are_the_built_ones(kernel: str) -> None:
    choice = completed(kernel=kernel)
    assert choice
    spec = choice.spec
    assert isinstance(spec.kernel, Kernel)
    built = {n: tuple(p.shape) for n, p in spec.kernel.build(spec.projection).state_dict().items()}
    assert {n: t.shape for n, t in spec.kernel.tensors(spec.projection).items()} == built


@torch.no_grad()
def test_flex_after_calls_with_a_bias_and_positions_of_their_own() -> None:
    """PyTorch's compiler failed here while it looked for the reason to compile again: the earlier call's bias is not there any more."""
    torch._dynamo.reset()
    fields = {"projection": {"name": "gqa", "heads": 2, "kv_heads": 2, "head_dim": 8}, "kernel": "flex"}
    biased, plain = (load(MixerSpec, fields | {"position": name}).build(M, 0) for name in ("alibi", "rope"))
    x, step, apart = torch.randn(1, 9, M), Step.plain(0, 1, 9), torch.arange(9)[None]

    def call(mix: Mixer, kpos: Tensor) -> Tensor:
        q, new = mix.projection.write(x, step, mix.position)
        return run(mix, mix.projection.read(q, new), View(new, kpos), Step(step.pos))

    call(biased, apart)
    for _ in range(30):  # a guard that fails often is asked first
        call(biased, apart.int())
    assert call(plain, step.pos).isfinite().all()


def with_parameters() -> list[str]:
    mixes = {name: completed(kernel=name) for name in names("kernel")}
    return [n for n, m in mixes.items() if m and m.spec.kernel.history and m.spec.kernel.tensors(m.spec.projection)]


@pytest.mark.parametrize("kernel", with_parameters())
@torch.no_grad()
def test_random_parameters_chunked_and_padded(kernel: str) -> None:
    choice = completed(kernel=kernel)
    assert choice
    mix = choice.build()
    for p in mix.kernel.parameters():
        torch.nn.init.normal_(p, 0.1, 0.5)
    x = torch.randn(2, 12, M)
    want = mix(x, Step.plain(0, 2, 12), NoCache())
    store: Any = registry.get("cache", "dense").small().build([mix.slots], 2, torch.float32, torch.device("cpu"))
    got = []
    for start, n in ((0, 5), (5, 1), (6, 4), (10, 1), (11, 1)):
        got.append(mix(x[:, start : start + n], Step.plain(start, 2, n), store))
        store.commit()
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-5)
    pos = torch.tensor([[-1, 0, 1, -1, -1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
    spread = torch.full((2, 8, M), 9.0)
    spread[0, pos[0] >= 0], spread[1] = x[0, :5], x[1, :8]
    padded = mix(spread, Step.of(pos), NoCache())
    torch.testing.assert_close(padded[0, pos[0] >= 0], want[0, :5], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded[1], want[1, :8], rtol=1e-4, atol=1e-5)


def causal(tokens: int) -> Tensor:
    return torch.full((tokens, tokens), -torch.inf, dtype=torch.float64).triu(1)


def theirs(function: Callable[..., Any], a: Operands, module: Any, **options: Any) -> Tensor:
    return function(module, *(x.transpose(1, 2) for x in (a.q, a.k, a.v)), causal(a.q.shape[1]), scaling=a.scale, **options)[0]


def test_sinks_are_those_of_gpt_oss() -> None:
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    mix = mixer("sinks")
    a, view, step = operands(mix)
    module = SimpleNamespace(num_key_value_groups=2, sinks=mix.kernel.sink, training=False)
    torch.testing.assert_close(run(mix, a, view, step), theirs(gpt_oss.eager_attention_forward, a, module), rtol=1e-10, atol=1e-12)


def test_softcap_is_that_of_gemma2() -> None:
    gemma2 = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    mix = mixer({"name": "softcap", "cap": 0.2})
    a, view, step = operands(mix)
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    want = theirs(gemma2.eager_attention_forward, a, module, softcap=0.2)  # its softmax is fp32 whatever the dtype
    torch.testing.assert_close(run(mix, a, view, step), want, rtol=1e-5, atol=1e-6)
    assert (run(mix, a, view, step) - run(mixer("eager"), a, view, step)).abs().max() > 1e-3


def test_differential_is_that_of_diffllama() -> None:
    """DiffLlama pairs head i with head i + half where ours are neighbours, and its norm has no weight."""
    diffllama = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    config = diffllama.DiffLlamaConfig(hidden_size=M, num_attention_heads=8, num_key_value_heads=4, head_dim=4, num_hidden_layers=4)
    config._attn_implementation = "eager"
    other, eps = diffllama.DiffLlamaAttention(config, 3).double(), config.rms_norm_eps
    mix = mixer({"name": "differential", "eps": eps}, 8, 4, index=3, head_dim=4)
    kernel: Any = mix.kernel
    torch.nn.init.ones_(kernel.norm)
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        setattr(other, name, torch.nn.Parameter(getattr(kernel, name).detach().clone()))
    for ours, its in (("q", other.q_proj), ("k", other.k_proj), ("v", other.v_proj)):
        weight = getattr(mix.projection, ours).weight.detach().unflatten(0, (-1, 2, 4))
        its.weight.data = weight.transpose(0, 1).flatten(0, 2).clone()
    other.o_proj.weight.data = torch.eye(M, dtype=torch.float64)
    x, step = torch.randn(2, 9, M, dtype=torch.float64), Step.plain(0, 2, 9)
    q, new = mix.projection.write(x, step, mix.position)
    view = NoCache().extend(0, new, step, mix.slots)
    still = torch.ones(2, 9, 4, dtype=torch.float64), torch.zeros(2, 9, 4, dtype=torch.float64)
    want = other(x, still, causal(9).expand(2, 1, -1, -1))[0]
    torch.testing.assert_close(run(mix, mix.projection.read(q, view.streams), view, step).flatten(2), want, rtol=1e-5, atol=1e-6)


def test_depth_reaches_the_kernels_as_data() -> None:
    kernels = [mixer("differential", index=i).kernel for i in (0, 5)]
    assert [k.first for k in kernels if isinstance(k, DifferentialKernel)] == [pytest.approx(0.2), lambda_init(5)]
    fixed = mixer({"name": "differential", "layer": 2}, index=5).kernel
    assert isinstance(fixed, DifferentialKernel)
    assert fixed.first == lambda_init(2)


@torch.no_grad()
def test_multi_token_is_the_papers_sum() -> None:
    """Equations 4 to 8 term by term: mask to 0, convolve, mask to -inf, softmax, mix heads, norm and scale by depth."""
    mix = mixer({"name": "multi_token", "queries": 3, "keys": 5, "mix": 2}, index=2)
    a, view, step = operands(mix, 6)
    kernel: Any = mix.kernel
    tokens = 6
    k, v = (x.repeat_interleave(2, 2) for x in (a.k, a.v))
    plain = torch.einsum("bthd,bshd->bhts", a.q, k) * a.scale
    x = torch.zeros_like(plain)
    for i in range(tokens):
        for j in range(i + 1):
            for back in range(3):
                for side in range(-2, 3):
                    if i - back >= 0 and 0 <= j - side <= i - back:
                        x[:, :, i, j] += kernel.convolution[:, 0, 2 - back, 2 - side] * plain[:, :, i - back, j - side]
    weights = (x + causal(tokens)).softmax(-1)
    mixed = torch.zeros_like(weights)
    for new in range(4):
        for old in range(2):
            mixed[:, new] += kernel.mixing[new // 2, old, new % 2] * weights[:, new // 2 * 2 + old]
    o = torch.einsum("bhts,bshd->bthd", mixed, v)
    want = F.rms_norm(o, (8,), kernel.norm, 1e-5) * (1 - lambda_init(2))
    torch.testing.assert_close(run(mix, a, view, step), want, rtol=1e-9, atol=1e-11)


def sparse(**fields: int) -> Mixer:
    spec = {"name": "native_sparse", "block": 4, "stride": 2, "select_block": 4, "select": 3, "window": 3} | fields
    return mixer(spec, heads=4, kv_heads=2, name="gqa_gated")


def squeezed(kernel: Any, name: str, block: Tensor) -> Tensor:
    """One compressed key or value: the MLP over a block's tokens, each with what its place adds."""
    placed = block + getattr(kernel, f"{name}_place")
    return getattr(kernel, f"{name}_out")(F.gelu(getattr(kernel, f"{name}_in")(placed.flatten())))


def attended(q: Tensor, k: list[Tensor], v: list[Tensor]) -> Tensor:
    """One already scaled query over a list of keys; 0 where there are none."""
    return torch.softmax(torch.stack(k) @ q, 0) @ torch.stack(v) if k else torch.zeros_like(q)


@torch.no_grad()
def test_native_sparse_is_its_three_branches_token_by_token() -> None:
    mix, tokens = sparse(), 27
    a, view, step = operands(mix, tokens)
    got = run(mix, a, view, step)
    for b, t, h in [(0, 0, 0), (0, 3, 1), (1, 12, 2), (0, 19, 3), (1, 26, 0)]:
        g, pair = h // 2, [h // 2 * 2, h // 2 * 2 + 1]
        k, v = a.k[b, : t + 1, g], a.v[b, : t + 1, g]
        starts = [i for i in range(0, tokens, 2) if i + 4 <= t + 1]
        ck, cv = [squeezed(mix.kernel, "k", k[i : i + 4]) for i in starts], [squeezed(mix.kernel, "v", v[i : i + 4]) for i in starts]
        score = [0.0] * (t // 4 + 1)
        for other in pair if starts else []:
            p = torch.softmax(torch.stack(ck) @ a.q[b, t, other] * a.scale, 0)
            for i, share in zip(starts, p.tolist(), strict=True):
                for j in range(len(score)):
                    score[j] += share * max(min(i + 4, j * 4 + 4) - max(i, j * 4), 0)
        forced = {0, t // 4, max(t // 4 - 1, 0)}
        ranked = sorted(range(len(score)), key=lambda j: (j in forced, score[j]), reverse=True)
        seen = [i for i in range(t + 1) if i // 4 in ranked[:3]]
        gate = a.extra["gates"][b, t, h].sigmoid()
        q, near = a.q[b, t, h] * a.scale, range(max(t - 2, 0), t + 1)
        lists = (ck, cv), *(([k[i] for i in at], [v[i] for i in at]) for at in (seen, near))
        parts = [attended(q, *pair) for pair in lists]
        torch.testing.assert_close(got[b, t, h], sum(x * o for x, o in zip(gate, parts, strict=True)), rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_native_sparse_that_selects_everything_is_full_attention() -> None:
    mix = sparse(select=50, window=100)
    a, view, step = operands(mix, 13)
    a.extra["gates"] = torch.tensor([-math.inf, 0.0, 0.0], dtype=torch.float64).expand(2, 13, 4, 3)
    dense = mixer("eager")
    torch.testing.assert_close(run(mix, a, view, step), run(dense, Operands(a.q, a.k, a.v, a.scale), view, step), rtol=1e-5, atol=1e-6)


REFUSED = [
    ({"name": "softcap"}, "gqa", "alibi", "bias"),
    ({"name": "differential"}, "latent", "rope", "only after the kernel"),
    ({"name": "multi_token", "keys": 4}, "gqa", "rope", "must be odd"),
    ({"name": "native_sparse"}, "gqa", "rope", "needs gates"),
    ({"name": "native_sparse"}, "gqa_gated", "alibi", "no one position"),
    ({"name": "split_unified", "reach": 100.0}, "gqa", "rope", "overflow"),
    ({"name": "flash_v2", "rows": 0}, "gqa", "rope", "at least 1"),
]


@pytest.mark.parametrize(("kernel", "projection", "position", "reason"), REFUSED, ids=[r[0]["name"] for r in REFUSED])
def test_what_cannot_be_served_is_refused_before_anything_is_built(kernel: Any, projection: str, position: str, reason: str) -> None:
    if position not in names("position"):
        pytest.skip(f"no position {position}")
    spec = load(MixerSpec, {"projection": registry.get("projection", projection).small(), "position": position, "kernel": kernel})
    assert any(reason in line for line in check(spec, M, 0)), check(spec, M, 0)


def test_native_sparse_refuses_patterns_that_show_no_blocks() -> None:
    spec = load(MixerSpec, {"projection": registry.get("projection", "gqa_gated").small(), "kernel": "native_sparse"})
    assert not check(spec, M, 0)
    narrow = override(spec, "pattern={name: window, size: 40}")
    assert "no query two whole blocks of 32 tokens" in check(narrow, M, 0)[0]
    assert not check(override(narrow, "pattern.size=48"), M, 0)


def test_differential_needs_pairs() -> None:
    spec = load(MixerSpec, {"projection": {"name": "gqa", "heads": 4, "kv_heads": 1, "head_dim": 8}, "kernel": "differential"})
    assert "pairs heads" in check(spec, M, 0)[0]
