"""Vectors of whole texts do not depend on what they are computed with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo
from tests.zoo.families.harness import randomized
from zoo.model import Model

WORDS = ["[PAD]", "the", "a", "cat", "dog", "sees", "hears", "and", "or"]
TEXTS = ["the cat", "a dog sees the cat and the dog", "cat", "the dog hears a cat or a dog or the cat and a dog"]
SPEC = {
    "width": 16,
    "context": 12,
    "embed": {"name": "tokens", "vocab": len(WORDS)},
    "layers": [{"mixer": {"projection": {"name": "gqa", "heads": 2, "kv_heads": 2, "head_dim": 8}, "position": "rope", "pattern": "full"},
                "mlp": {"name": "gated", "hidden": 24}}],
    "head": {"name": "pooling", "normalize": True},
}  # fmt: skip


class Words:
    """A source of a tokenizer of words."""

    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[PAD]")), pad_token="[PAD]"
    )


Words.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def model(**changes: Any) -> Model:
    torch.manual_seed(0)
    built = zoo.build({**SPEC, **changes}).eval()
    built.source = Words()
    return built


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_each_text_gets_what_it_gets_alone(batch: int) -> None:
    ours = model()
    together = zoo.embed(ours, TEXTS, batch=batch)
    assert together.shape == (4, 16)
    for text, got in zip(TEXTS, together, strict=True):
        torch.testing.assert_close(zoo.embed(ours, text), got)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(4))


def test_long_texts_are_cut() -> None:
    ours = model()
    torch.testing.assert_close(zoo.embed(ours, TEXTS[3]), zoo.embed(ours, " ".join(TEXTS[3].split()[:12])))
    torch.testing.assert_close(zoo.embed(ours, TEXTS[1], length=3), zoo.embed(ours, "a dog sees"))


@torch.no_grad()
def test_texts_of_siglip_are_filled_as_in_training(tmp_path: Path) -> None:
    """Its vector is that of the last place of a row of full length, padding and all."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.SiglipTextConfig(**sizes, vocab_size=len(WORDS), max_position_embeddings=12)
    theirs = randomized(transformers.SiglipTextModel(config))
    theirs.save_pretrained(tmp_path)
    ours, source = zoo.load(tmp_path), Words()
    ours.source = source
    filled = Words.tokenizer(TEXTS, padding="max_length", truncation=True, max_length=12, return_tensors="pt")["input_ids"]
    want = theirs(input_ids=filled).pooler_output
    torch.testing.assert_close(zoo.embed(ours, TEXTS, batch=3), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(zoo.embed(ours, TEXTS[1]), want[1], rtol=1e-4, atol=1e-5)
    short = torch.nn.functional.pad(filled[1:2, :3], (0, 9))
    torch.testing.assert_close(zoo.embed(ours, TEXTS[1:2], length=3), theirs(input_ids=short).pooler_output, rtol=1e-4, atol=1e-5)
    source.tokenizer = copy.deepcopy(Words.tokenizer)
    source.tokenizer.pad_token = None
    with pytest.raises(ValueError, match=r"texts for siglip_text_model are filled.*set tokenizer\.pad_token"):
        zoo.embed(ours, TEXTS)


@pytest.mark.parametrize(("texts", "match"), [([], "texts is empty"), (["cat", ""], r"texts\[1\] has no tokens")])
def test_nothing_to_embed(texts: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        zoo.embed(model(), texts)


@pytest.mark.parametrize(("changes", "options", "match"), [
    ({"head": "lm"}, {}, r"head lm gives no vector of a whole text; load the model with override"),
    ({}, {"length": 13}, r"length must lie in 1\.\.12"), ({}, {"batch": 0}, "batch be at least 1"),
])  # fmt: skip
def test_what_cannot_be_done_is_said(changes: dict[str, Any], options: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        zoo.embed(model(**changes), TEXTS, **options)
