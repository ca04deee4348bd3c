"""Residual wirings equal their formulas and one layer of the models that they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.dinov2.modeling_dinov2 import Dinov2Layer
from transformers.models.falcon.modeling_falcon import FalconDecoderLayer
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer
from transformers.models.phi.modeling_phi import PhiDecoderLayer

from tests.components.draw import draw, randomise
from zoo.components import registry
from zoo.components.contracts import NoCache, Step
from zoo.components.spec import load
from zoo.model import Layer, LayerSpec

hf: Any = transformers  # its configs take fields that their signatures do not name
M, HEADS, T = 32, 4, 7
PROJECTION = {"name": "gqa", "heads": HEADS, "kv_heads": HEADS, "head_dim": 8}
CAUSAL = torch.full((T, T), float("-inf")).triu(1)[None, None]
COMMON = {"hidden_size": M, "num_attention_heads": HEADS, "num_hidden_layers": 1, "intermediate_size": 24, "attn_implementation": "eager"}
PLAIN = {"name": "plain", "hidden": 24}
RMS, LAYER = {"name": "rms", "eps": 1e-5, "cast": "after_weight"}, {"name": "layer", "eps": 1e-5}


def layer(wiring: Any, mlp: Any, norm: Any, position: Any = "none", pattern: str = "causal", **projection: Any) -> Layer:
    mixer = {"projection": {**PROJECTION, **projection}, "position": position, "pattern": pattern, "kernel": "eager"}
    spec = load(LayerSpec, {"mixer": mixer, "mlp": mlp, "norm": norm, "wiring": wiring})
    return randomise(spec.build(M, 0))


def run(module: Layer, x: Tensor) -> Tensor:
    return module(x, Step.plain(0, x.shape[0], T), NoCache())


# ---- formulas ----------------------------------------------------------------------------------------------------------------

FORMULAS: dict[str, Any] = {
    "pre": lambda m, f, n, x: (y := x + m(n["mixer_norm"](x))) + f(n["mlp_norm"](y)),
    "pre_mlp": lambda m, f, n, x: (y := x + m(x)) + f(n["mlp_norm"](y)),
    "pre_shortcut": lambda m, f, n, x: (z := n["mlp_norm"]((y := n["mixer_norm"](x)) + m(y))) + f(z),
    "post": lambda m, f, n, x: n["mlp_norm"]((y := n["mixer_norm"](x + m(x))) + f(y)),
    "sandwich": lambda m, f, n, x: (y := x + n["mixer_out_norm"](m(n["mixer_norm"](x)))) + n["mlp_out_norm"](f(n["mlp_norm"](y))),
    "output_norm": lambda m, f, n, x: (y := x + n["mixer_out_norm"](m(x))) + n["mlp_out_norm"](f(y)),
    "parallel": lambda m, f, n, x: x + m(n["mixer_norm"](x)) + f(n["mixer_norm"](x)),
    "parallel_norms": lambda m, f, n, x: x + m(n["mixer_norm"](x)) + f(n["mlp_norm"](x)),
}


def test_every_wiring_has_a_formula() -> None:
    assert set(FORMULAS) == set(registry.names("wiring"))


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"layer_scale": 0.1}, {"scale": 0.3, "layer_scale": 0.1}], ids=str)
@torch.no_grad()
def test_wirings_equal_their_formulas(name: str, options: dict[str, float]) -> None:
    """The factors act on what is added, so after the norm of a branch's output."""
    module, x, step = layer({"name": name, **options}, PLAIN, RMS), draw(2, T, M), Step.plain(0, 2, T)
    norms = {n: getattr(module, n) for n in module.wiring.norms}
    scales = {
        b: options.get("scale", 1.0) * (getattr(module, f"{b}_scale").weight if "layer_scale" in options else 1.0) for b in ("mixer", "mlp")
    }
    branches = {"mixer": lambda x: module.mixer(x, step, NoCache()), "mlp": module.mlp}
    for branch, run_branch in list(branches.items()):
        out = f"{branch}_out_norm"
        if out in norms:
            norms[out] = lambda y, norm=norms[out], scale=scales[branch]: norm(y) * scale
        else:
            branches[branch] = lambda y, inner=run_branch, scale=scales[branch]: inner(y) * scale
    torch.testing.assert_close(run(module, x), FORMULAS[name](branches["mixer"], branches["mlp"], norms, x))


@pytest.mark.parametrize("name", FORMULAS)
def test_layers_hold_what_the_spec_names_and_all_of_it_learns(name: str) -> None:
    wiring = {"name": name, "layer_scale": 0.5}
    spec = load(LayerSpec, {"mixer": {"projection": PROJECTION}, "mlp": PLAIN, "wiring": wiring})
    module = spec.build(M, 0)
    assert {n: t.shape for n, t in spec.tensors(M, 0).items()} == {n: t.shape for n, t in module.state_dict().items()}
    assert module.get_parameter("mixer_scale.weight").tolist() == [0.5] * M
    run(randomise(module), draw(2, T, M)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@torch.no_grad()
def test_shortcut_multiplies_the_stream() -> None:
    module, x = layer({"name": "post", "shortcut": 2.5}, PLAIN, LAYER), draw(1, T, M)
    y = module.get_submodule("mixer_norm")(2.5 * x + module.mixer(x, Step.plain(0, 1, T), NoCache()))
    torch.testing.assert_close(run(module, x), module.get_submodule("mlp_norm")(2.5 * y + module.mlp(y)))


@torch.no_grad()
def test_shortcuts_and_gains_of_each_branch() -> None:
    factors = {"mixer_shortcut": 2.5, "mixer_gain": 0.5, "mlp_shortcut": 0.7, "mlp_gain": 3.0}
    module, x = layer({"name": "pre_shortcut", **factors}, PLAIN, LAYER), draw(1, T, M)
    y = module.get_submodule("mixer_norm")(x)
    y = module.get_submodule("mlp_norm")(2.5 * y + 0.5 * module.mixer(y, Step.plain(0, 1, T), NoCache()))
    torch.testing.assert_close(run(module, x), 0.7 * y + 3.0 * module.mlp(y))


# ---- one layer of published models ---------------------------------------------------------------------------------------------


def copy(ours: Layer, theirs: nn.Module, names: dict[str, str]) -> None:
    """names: their modules to ours, the dot-separated rest of a tensor's name unchanged. All tensors on both sides are used."""
    given, wanted = theirs.state_dict(), ours.state_dict()
    renamed = {f"{names[n.rpartition('.')[0]]}.{n.rpartition('.')[2]}": t for n, t in given.items()}
    renamed = {n.replace(".lambda1", ".weight"): t for n, t in renamed.items()}
    assert renamed.keys() == wanted.keys()
    ours.load_state_dict(renamed)


def split_heads(theirs: nn.Module, fused: str, order: str) -> dict[str, Tensor]:
    """A fused q, k, v of equal head counts in plain q, k, v; order ``head`` has q, k and v of each head side by side."""
    weight = theirs.get_parameter(f"{fused}.weight").detach()
    rows = weight.view(HEADS, 3, 8, M).transpose(0, 1) if order == "head" else weight.view(3, HEADS, 8, M)
    return dict(zip("qkv", rows.reshape(3, M, M), strict=True))


def rope(config: Any, x: Tensor) -> Any:
    return LlamaRotaryEmbedding(config)(x, torch.arange(T)[None])


QKVO = {f"self_attn.{n}_proj": f"mixer.projection.{n}" for n in "qkvo"}
GATED = {f"mlp.{n}_proj": f"mlp.{n}" for n in ("gate", "up", "down")}
GATED_MLP = {"name": "gated", "hidden": 24, "activation": "gelu_tanh"}


def llama_like(theirs: Any, config: Any, ours: Layer, norms: dict[str, str], **call: Any) -> tuple[Tensor, Tensor]:
    other, x = randomise(theirs(config, 0)).eval(), draw(2, T, M)
    copy(ours, other, QKVO | GATED | norms)
    got = other(x, position_embeddings=rope(config, x), attention_mask=CAUSAL, **call)
    return run(ours, x), got[0] if isinstance(got, tuple) else got


@torch.no_grad()
def test_sandwich_equals_gemma2() -> None:
    config = hf.Gemma2Config(**COMMON, num_key_value_heads=HEADS, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=None,
                             rms_norm_eps=1e-5)  # fmt: skip
    norms = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mixer_out_norm", "pre_feedforward_layernorm": "mlp_norm",
             "post_feedforward_layernorm": "mlp_out_norm"}  # fmt: skip
    got, want = llama_like(Gemma2DecoderLayer, config, layer("sandwich", GATED_MLP, {**RMS, "offset": 1.0}, "rope"), norms)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_output_norm_equals_olmo2() -> None:
    config = hf.Olmo2Config(**COMMON, num_key_value_heads=HEADS, rms_norm_eps=1e-5, hidden_act="gelu_pytorch_tanh")
    names = {"self_attn.q_norm": "mixer.projection.q_norm", "self_attn.k_norm": "mixer.projection.k_norm",
             "post_attention_layernorm": "mixer_out_norm", "post_feedforward_layernorm": "mlp_out_norm"}  # fmt: skip
    ours = layer("output_norm", GATED_MLP, RMS, "rope", qk_norm=RMS, qk_norm_at="flat")
    got, want = llama_like(Olmo2DecoderLayer, config, ours, names)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_residual_scale_equals_granite() -> None:
    config = hf.GraniteConfig(**COMMON, num_key_value_heads=HEADS, rms_norm_eps=1e-5, hidden_act="gelu_pytorch_tanh",
                              residual_multiplier=0.22, attention_multiplier=0.4)  # fmt: skip
    norms = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"}
    ours = layer({"name": "pre", "scale": 0.22}, GATED_MLP, {"name": "rms", "eps": 1e-5}, "rope", logit_scale=0.4)
    got, want = llama_like(GraniteDecoderLayer, config, ours, norms)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_parallel_equals_phi() -> None:
    config = hf.PhiConfig(**COMMON, layer_norm_eps=1e-5, partial_rotary_factor=0.5, hidden_act="gelu")
    other, x = randomise(PhiDecoderLayer(config, 0)).eval(), draw(2, T, M)
    ours = layer("parallel", PLAIN, LAYER, {"name": "rope", "width": 4}, bias=True, out_bias=True)
    attention = {f"self_attn.{n}": f"mixer.projection.{o}" for n, o in zip(("q_proj", "k_proj", "v_proj", "dense"), "qkvo", strict=True)}
    copy(ours, other, attention | {"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down", "input_layernorm": "mixer_norm"})
    small = hf.LlamaConfig(hidden_size=M, num_attention_heads=HEADS, head_dim=4)
    got = other(x, position_embeddings=rope(small, x), attention_mask=CAUSAL)
    torch.testing.assert_close(run(ours, x), got[0] if isinstance(got, tuple) else got, rtol=1e-4, atol=1e-4)


def load_split(ours: Layer, other: nn.Module, fused: str, order: str, names: dict[str, str]) -> None:
    tensors = {f"mixer.projection.{n}.weight": t for n, t in split_heads(other, fused, order).items()}
    tensors |= {f"{n}.{leaf}": other.get_parameter(f"{o}.{leaf}") for o, n in names.items()
                for leaf in ("weight", "bias") if f"{o}.{leaf}" in other.state_dict()}  # fmt: skip
    assert tensors.keys() == ours.state_dict().keys()
    ours.load_state_dict(tensors)


@torch.no_grad()
def test_parallel_norms_equal_gpt_neox() -> None:
    config = hf.GPTNeoXConfig(**COMMON, layer_norm_eps=1e-5, rotary_pct=1.0, attention_bias=False, hidden_act="gelu")
    other, x = randomise(GPTNeoXLayer(config, 0)).eval(), draw(2, T, M)
    ours = layer("parallel_norms", PLAIN, LAYER, "rope")
    names = {"attention.dense": "mixer.projection.o", "mlp.dense_h_to_4h": "mlp.up", "mlp.dense_4h_to_h": "mlp.down",
             "input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"}  # fmt: skip
    load_split(ours, other, "attention.query_key_value", "head", names)
    want = other(x, position_embeddings=rope(hf.LlamaConfig(hidden_size=M, num_attention_heads=HEADS), x), attention_mask=CAUSAL)
    torch.testing.assert_close(run(ours, x), want[0] if isinstance(want, tuple) else want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_parallel_equals_falcon() -> None:
    config = hf.FalconConfig(**{**COMMON, "intermediate_size": None}, ffn_hidden_size=24, layer_norm_epsilon=1e-5, bias=False, alibi=False,
                             multi_query=False, parallel_attn=True, new_decoder_architecture=False)  # fmt: skip
    other, x = randomise(FalconDecoderLayer(config, 0)).eval(), draw(2, T, M)
    ours = layer("parallel", {**PLAIN, "bias": False}, LAYER, "rope")
    names = {"self_attention.dense": "mixer.projection.o", "mlp.dense_h_to_4h": "mlp.up", "mlp.dense_4h_to_h": "mlp.down",
             "input_layernorm": "mixer_norm"}  # fmt: skip
    load_split(ours, other, "self_attention.query_key_value", "head", names)
    turned = rope(hf.LlamaConfig(hidden_size=M, num_attention_heads=HEADS), x)
    want = other(x, alibi=None, attention_mask=CAUSAL, position_embeddings=turned)[0]
    torch.testing.assert_close(run(ours, x), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_post_equals_bert() -> None:
    config = hf.BertConfig(**COMMON, layer_norm_eps=1e-5, hidden_act="gelu")
    other, x = randomise(BertLayer(config, 0)).eval(), draw(2, T, M)
    ours = layer("post", PLAIN, LAYER, pattern="full", bias=True, out_bias=True)
    attention = {f"attention.self.{n}": f"mixer.projection.{n[0]}" for n in ("query", "key", "value")}
    copy(ours, other, attention | {"attention.output.dense": "mixer.projection.o", "attention.output.LayerNorm": "mixer_norm",
                                   "intermediate.dense": "mlp.up", "output.dense": "mlp.down", "output.LayerNorm": "mlp_norm"})  # fmt: skip
    want = other(x)
    torch.testing.assert_close(run(ours, x), want[0] if isinstance(want, tuple) else want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_layer_scale_equals_dinov2() -> None:
    config = hf.Dinov2Config(**{k: v for k, v in COMMON.items() if k != "intermediate_size"}, mlp_ratio=1, layer_norm_eps=1e-5)
    other, x = randomise(Dinov2Layer(config)).eval(), draw(2, T, M)
    ours = layer({"name": "pre", "layer_scale": 1.0}, {"name": "plain", "hidden": M}, LAYER, pattern="full", bias=True, out_bias=True)
    names = {"norm1": "mixer_norm", "norm2": "mlp_norm", "layer_scale1": "mixer_scale", "layer_scale2": "mlp_scale",
             "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"}  # fmt: skip
    projections = {n.rpartition(".")[0] for n in other.state_dict() if n.startswith("attention.")}
    letters = {
        "query": "q",
        "key": "k",
        "value": "v",
        "q_proj": "q",
        "k_proj": "k",
        "v_proj": "v",
        "dense": "o",
        "o_proj": "o",
        "out_proj": "o",
    }
    names |= {n: f"mixer.projection.{letters[n.rpartition('.')[2]]}" for n in projections}
    copy(ours, other, names)
    torch.testing.assert_close(run(ours, x), other(x), rtol=1e-4, atol=1e-4)
