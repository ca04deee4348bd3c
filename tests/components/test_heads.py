"""Heads equal their formulas, and whole models with them equal transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.components.draw import draw, randomise
from zoo.components import registry
from zoo.components.contracts import Embed, Head, Step
from zoo.components.spec import check, load
from zoo.model import Model, ModelSpec

hf: Any = transformers  # its configs take fields that their signatures do not name
M, V, HEADS, T = 32, 50, 4, 9
TOKENS = load(Embed, {"name": "tokens", "vocab": V})
SIZES = {"hidden_size": M, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 24}
LAYER = {"name": "layer", "eps": 1e-5}


def head(name: str, **options: Any) -> Any:
    return randomise(load(Head, {"name": name, **options}).build(M, TOKENS)).eval()


def ids(rows: int = 2, length: int = T) -> Tensor:
    return torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", registry.names("head"))
def test_tensors_are_those_the_spec_names(name: str) -> None:
    spec: Any = registry.get("head", name).small()
    assert not check(spec, M, TOKENS)
    module = spec.build(M, TOKENS)
    assert {n: t.shape for n, t in spec.tensors(M, TOKENS).items()} == {n: t.shape for n, t in module.state_dict().items()}


@torch.no_grad()
def test_lm_scales_then_caps() -> None:
    plain, x = head("lm"), draw(2, 3, M)
    logits = plain(x)
    torch.testing.assert_close(head("lm", scale=0.0625)(x), logits * 0.0625)
    torch.testing.assert_close(head("lm", softcap=3.0)(x), 3 * torch.tanh(logits / 3))
    torch.testing.assert_close(head("lm", scale=2.0, softcap=3.0)(x), 3 * torch.tanh(2 * logits / 3))


PADDED = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, -1, 2, -1], [0, 1, 2, 3, 4], [-1] * 5])


@pytest.mark.parametrize(("how", "skip", "columns"), [
    ("first", 0, [[2], [0], [0]]), ("last", 0, [[4], [3], [4]]), ("mean", 0, [[2, 3, 4], [0, 1, 3], [0, 1, 2, 3, 4]]),
    ("first", 1, [[3], [1], [1]]), ("mean", 1, [[3, 4], [1, 3], [1, 2, 3, 4]]),
])  # fmt: skip
def test_pooling_leaves_padding_out(how: str, skip: int, columns: list[list[int]]) -> None:
    x = draw(4, 5, M)
    x[PADDED < 0] = float("nan")
    got = head("pooling", pool=how, skip=skip).pool(x, Step.of(PADDED))
    for row, chosen in enumerate(columns):
        torch.testing.assert_close(got[row], x[row, chosen].mean(0))
    assert (got[3] == 0).all()


def test_normalized_embeddings_have_length_one() -> None:
    module = head("pooling", normalize=True)
    torch.testing.assert_close(module(draw(4, M)).norm(dim=-1), torch.ones(4))


@torch.no_grad()
def test_masked_lm_is_an_lm_head_after_a_layer() -> None:
    module, x = head("masked_lm", tied=False, norm=LAYER, activation="relu"), draw(2, 3, M)
    want = nn.functional.linear(module.norm(module.hidden(x).relu()), module.out.weight, module.out.bias)
    torch.testing.assert_close(module(x), want)
    bare = head("masked_lm", tied=False, hidden_bias=False, bias=False)
    assert bare.hidden.bias is None
    assert bare.out.bias is None
    assert load(Head, "masked_lm").tie() == ("out.weight", "weight")


@torch.no_grad()
def test_hidden_keeps_a_pooler_that_changes_nothing() -> None:
    module, x, step = head("hidden", pooler="tanh"), draw(4, 5, M), Step.of(PADDED)
    assert torch.equal(module(x), x)
    first = torch.stack([x[0, 2], x[1, 0], x[2, 0], torch.zeros(M)])
    torch.testing.assert_close(module.pooled(x, step), module.out(first).tanh())
    with pytest.raises(ValueError, match="this head has no pooler"):
        head("hidden").pooled(x, step)


@torch.no_grad()
def test_classes_after_a_layer_with_a_norm() -> None:
    module, x = head("classification", labels=3, dense="gelu", dense_bias=False, norm=LAYER), draw(4, M)
    assert module.hidden.bias is None
    torch.testing.assert_close(module(x), module.out(module.norm(nn.functional.gelu(module.hidden(x)))))
    alone = check(load(Head, {"name": "classification", "labels": 3, "norm": LAYER}), M, TOKENS)
    assert alone == ["norm: belongs to the dense layer, of which there is none"]


def test_mistakes_are_named() -> None:
    assert check(load(Head, {"name": "lm", "softcap": 0.0}), M, TOKENS) == ["softcap: must be positive, got 0.0"]
    images = load(Embed, {"name": "patches", "patch": 4})
    assert check(load(Head, "lm"), M, images) == [": an lm head needs token embeddings, embed patches has no vocabulary"]


# ---- whole models ------------------------------------------------------------------------------------------------------------


def model(embed: Any, layer: Any, out: Any, norm: Any) -> Model:
    data = {"width": M, "context": 64, "embed": embed, "layers": [{"repeat": 2, **layer}], "head": out, "norm": norm}
    return load(ModelSpec, data).build().eval()


def mixer(position: Any = "none", pattern: str = "causal", **projection: Any) -> dict[str, Any]:
    own = {"name": "gqa", "heads": HEADS, "kv_heads": HEADS, "head_dim": 8, **projection}
    return {"projection": own, "position": position, "pattern": pattern}


def copy(ours: Model, theirs: nn.Module, names: dict[str, str], skip: tuple[str, ...] = ()) -> None:
    """names: beginnings of their names (``#`` is the layer) to ours; what is left over on either side is an error."""
    table = {old.replace("#", str(i)): new.replace("#", str(i)) for old, new in names.items() for i in range(2)}
    wanted = {}
    for name, tensor in theirs.state_dict().items():
        if not name.startswith(skip or ("\0",)):
            old = max((o for o in table if name.startswith(o)), key=len)
            wanted[table[old] + name.removeprefix(old)] = tensor
    assert wanted.keys() == ours.state_dict().keys(), wanted.keys() ^ ours.state_dict().keys()
    ours.load_state_dict({n: t.reshape(ours.state_dict()[n].shape) for n, t in wanted.items()})


BERT_LAYER = {
    "attention.self.query": "mixer.projection.q",
    "attention.self.key": "mixer.projection.k",
    "attention.self.value": "mixer.projection.v",
    "attention.output.dense": "mixer.projection.o",
    "attention.output.LayerNorm": "mixer_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "mlp_norm",
}
BERT = {f"encoder.layer.#.{theirs}": f"layers.#.{ours}" for theirs, ours in BERT_LAYER.items()} | {
    "embeddings.word_embeddings.weight": "embed.weight",
    "embeddings.token_type_embeddings.weight": "embed.segment",
    "embeddings.position_embeddings": "embed.position",
    "embeddings.LayerNorm": "embed.norm",
    "pooler.dense": "head.hidden",
}


@torch.no_grad()
def test_bert_classifier_equals_transformers_with_padding() -> None:
    config = hf.BertConfig(**SIZES, vocab_size=V, max_position_embeddings=16, layer_norm_eps=1e-5, num_labels=3)
    theirs = randomise(hf.BertForSequenceClassification(config)).eval()
    block = {
        "mixer": mixer(pattern="full", bias=True, out_bias=True),
        "mlp": {"name": "plain", "hidden": 24},
        "norm": LAYER,
        "wiring": "post",
    }
    embed = {"name": "segments", "vocab": V, "position": {"name": "learned", "count": 16}, "norm": LAYER}
    ours = model(embed, block, {"name": "classification", "labels": 3, "dense": "tanh"}, "identity")
    copy(ours, theirs, {f"bert.{o}": n for o, n in BERT.items()} | {"classifier": "head.out"}, ("bert.embeddings.position_ids",))
    x, lengths = ids(3), torch.tensor([9, 4, 1])
    mask = (torch.arange(T) < lengths[:, None]).long()
    want = theirs(x, attention_mask=mask).logits
    torch.testing.assert_close(ours(x, lengths=lengths), want, rtol=1e-4, atol=1e-4)
    kinds = (torch.arange(T) > 3).long().expand(3, T)
    want = theirs(x, attention_mask=mask, token_type_ids=kinds).logits
    torch.testing.assert_close(ours(torch.stack([x, kinds], -1), lengths=lengths), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="head classification gives one output a row"):
        ours(x, last=True)


@pytest.mark.parametrize("side", [16, 24])
@torch.no_grad()
def test_vit_classifier_equals_transformers(side: int) -> None:
    config = hf.ViTConfig(**SIZES, image_size=16, patch_size=4, layer_norm_eps=1e-5, num_labels=5)
    theirs = randomise(hf.ViTForImageClassification(config)).eval()
    block = {"mixer": mixer(pattern="full", bias=True, out_bias=True), "mlp": {"name": "plain", "hidden": 24}, "norm": LAYER}
    embed = {"name": "patches", "patch": 4, "position": {"name": "learned_grid", "rows": 4, "columns": 4}}
    ours = model(embed, block, {"name": "classification", "labels": 5}, LAYER)
    layer = "vit.layers.#."
    names = {f"{layer}attention.{n}_proj": f"layers.#.mixer.projection.{n}" for n in "qkvo"}
    names |= {f"{layer}mlp.fc1": "layers.#.mlp.up", f"{layer}mlp.fc2": "layers.#.mlp.down",
              f"{layer}layernorm_before": "layers.#.mixer_norm",
              f"{layer}layernorm_after": "layers.#.mlp_norm", "vit.embeddings.cls_token": "embed.prefix",
              "vit.embeddings.position_embeddings": "embed.position.weight", "vit.embeddings.patch_embeddings.projection": "embed.linear",
              "vit.layernorm": "norm", "classifier": "head.out"}  # fmt: skip
    copy(ours, theirs, names)
    pixels = draw(2, 3, side, side)
    want = theirs(pixels, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(ours(pixels), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_bloom_equals_transformers() -> None:
    """ALiBi, a norm after the embedding, a tied head; heads are no power of two, rows are padded on the left."""
    config = hf.BloomConfig(vocab_size=V, hidden_size=24, n_head=3, n_layer=2, layer_norm_epsilon=1e-5)
    theirs = randomise(hf.BloomForCausalLM(config)).eval()
    own = {"name": "gqa", "heads": 3, "kv_heads": 3, "head_dim": 8, "bias": True, "out_bias": True}
    block = {
        "mixer": {"projection": own, "position": "alibi"},
        "mlp": {"name": "plain", "hidden": 96, "activation": "gelu_tanh"},
        "norm": LAYER,
    }
    data = {"width": 24, "context": 64, "embed": {"name": "tokens", "vocab": V, "norm": LAYER}, "layers": [{"repeat": 2, **block}],
            "head": {"name": "lm", "tied": True}, "norm": LAYER}  # fmt: skip
    ours = load(ModelSpec, data).build().eval()
    names = {"word_embeddings.weight": "embed.weight", "word_embeddings_layernorm": "embed.norm", "ln_f": "norm"}
    parts = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm", "mlp.dense_h_to_4h": "mlp.up",
             "mlp.dense_4h_to_h": "mlp.down", "self_attention.dense": "mixer.projection.o"}  # fmt: skip
    names |= {f"h.{i}.{o}": f"layers.{i}.{n}" for o, n in parts.items() for i in range(2)}
    given, state = theirs.transformer.state_dict(), {}
    for name, tensor in given.items():
        old = next((o for o in names if name.startswith(o)), None)
        if old:
            state[names[old] + name.removeprefix(old)] = tensor
    for i in range(2):
        for leaf, shape in (("weight", (3, 3, 8, 24)), ("bias", (3, 3, 8))):
            fused = given[f"h.{i}.self_attention.query_key_value.{leaf}"].view(shape).transpose(0, 1).reshape(3, 24, *shape[3:])
            state |= {f"layers.{i}.mixer.projection.{n}.{leaf}": t for n, t in zip("qkv", fused, strict=True)}
    state["head.out.weight"] = state["embed.weight"]
    ours.load_state_dict(state)
    x, mask = ids(), torch.ones(2, T, dtype=torch.long)
    mask[1, :4] = 0
    positions = torch.where(mask > 0, mask.cumsum(-1) - 1, -1)
    got, want = ours(x, positions=positions), theirs(x, attention_mask=mask).logits
    torch.testing.assert_close(got[mask > 0], want[mask > 0], rtol=1e-4, atol=1e-4)
    cache = ours.new_cache(2)
    steps = [ours(x[:1].repeat(2, 1)[:, i : i + 1], cache=cache) for i in range(T)]
    torch.testing.assert_close(torch.cat(steps, 1)[0], want[0], rtol=1e-4, atol=1e-4)


def turned(x: Tensor) -> Tensor:
    return x.T if x.dim() == 2 else x


@torch.no_grad()
def test_gpt2_equals_transformers() -> None:
    """Learned positions; the fused q, k, v and all other weights are stored transposed."""
    config = hf.GPT2Config(vocab_size=V, n_embd=M, n_head=HEADS, n_layer=2, n_positions=16, n_inner=24, layer_norm_epsilon=1e-5)
    theirs = randomise(hf.GPT2LMHeadModel(config)).eval()
    block = {"mixer": mixer(bias=True, out_bias=True), "mlp": {"name": "plain", "hidden": 24, "activation": "gelu_tanh"}, "norm": LAYER}
    embed = {"name": "tokens", "vocab": V, "position": {"name": "learned", "count": 16}}
    ours = model(embed, block, {"name": "lm", "tied": True}, LAYER)
    given = theirs.transformer.state_dict()
    state = {"embed.weight": given["wte.weight"], "head.out.weight": given["wte.weight"], "embed.position.weight": given["wpe.weight"]}
    parts = {"attn.c_proj": "mixer.projection.o", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down", "ln_1": "mixer_norm", "ln_2": "mlp_norm"}
    for i in range(2):
        for leaf in ("weight", "bias"):
            state |= {f"layers.{i}.{n}.{leaf}": turned(given[f"h.{i}.{o}.{leaf}"]) for o, n in parts.items()}
            fused = turned(given[f"h.{i}.attn.c_attn.{leaf}"]).chunk(3)
            state |= {f"layers.{i}.mixer.projection.{n}.{leaf}": t for n, t in zip("qkv", fused, strict=True)}
            state[f"norm.{leaf}"] = given[f"ln_f.{leaf}"]
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(ids()), theirs(ids()).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"learned positions 0\.\.15, the call reaches 16"):
        ours(ids(1, 17))
