"""Perplexity and prompts with tokenizers that put tokens before a text, after it, or both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import zoo
from zoo.eval import perplexity
from zoo.model import Model
from zoo.tokenizers import beginning

VOCABULARY = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "and", "ran"])}
TEXT = "the cat sat on a mat and the cat ran on and on"
PLAIN = [VOCABULARY[word] for word in TEXT.split()]
WRAPPED = {"none": "$A", "before": "<s> $A", "after": "$A </s>", "both": "<s> $A </s>", "two before": "<s> <s> $A </s>"}
BEFORE = {"none": [], "before": [0], "after": [], "both": [0], "two before": [0, 0]}


def tokenizer(template: str) -> Any:
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def speaking(template: str) -> Model:
    layer = {"mixer": {"projection": {"name": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 8}, "position": "rope"},
             "mlp": {"name": "gated", "hidden": 24}}  # fmt: skip
    spec = {"width": 16, "context": 8, "embed": {"name": "tokens", "vocab": len(VOCABULARY)}, "layers": [layer], "head": "lm"}
    model = zoo.build(spec)
    model.source = SimpleNamespace(tokenizer=tokenizer(template), generation={})
    return model


@torch.no_grad()
def nll(model: Model, ids: list[int], first: int) -> float:
    logits = model(torch.tensor([ids])).double().log_softmax(-1)[0]
    return -sum(float(logits[i - 1, ids[i]]) for i in range(first, len(ids)))


@pytest.mark.parametrize("kind", WRAPPED)
def test_only_what_comes_before_a_text_is_put_there(kind: str) -> None:
    model = speaking(WRAPPED[kind])
    assert beginning(model.tokenizer) == BEFORE[kind]
    ids = BEFORE[kind] + PLAIN
    windows = [ids[i : i + 8] for i in range(0, len(ids) - len(ids) % 8, 8)]
    found = perplexity(model, TEXT)
    assert found.nll * found.tokens == pytest.approx(sum(nll(model, w, 1) for w in windows), rel=1e-6)
    assert found.tokens == 7 * len(windows)
    assert found.protocol.bos == ("tokenizer" if BEFORE[kind] else "none")


@pytest.mark.parametrize("kind", WRAPPED)
def test_each_document_begins_like_a_text_and_no_end_is_scored(kind: str) -> None:
    model = speaking(WRAPPED[kind])
    documents = ["the cat sat", "a mat ran on", "</s> and on"]  # what a text itself says is kept
    rows = [BEFORE[kind] + [VOCABULARY[word] for word in text.split()] for text in documents]
    found = perplexity(model, documents, joining=None)
    assert found.nll * found.tokens == pytest.approx(sum(nll(model, row, 1) for row in rows), rel=1e-6)
    assert found.tokens == sum(len(row) - 1 for row in rows)


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_prompt_goes_on_after_its_text(kind: str) -> None:
    model = speaking(WRAPPED[kind])
    ids = BEFORE[kind] + PLAIN[:4]
    expected = model.tokenizer.decode(model.generate(ids, max_new_tokens=3, eos=False), skip_special_tokens=True)
    assert model.generate("the cat sat on", max_new_tokens=3, eos=False).split() == expected.split()
