"""Vectors of whole texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.components.head.attention_pooling import AttentionPooling
from zoo.components.head.pooling import Pooling
from zoo.model import Model
from zoo.saving import family_of


@torch.no_grad()
def embed(model: Model, texts: str | Sequence[str], *, length: int | None = None, batch: int = 32) -> Tensor:
    """One vector for each text, [texts, width] in the model's dtype on the CPU; [width] for a single text.

    The model's head pools, as in ``zoo.load(reference, override=["head={name: pooling, normalize: true}"])``: then the vectors are
    those of Sentence-BERT (Reimers & Gurevych 2019, arXiv:1908.10084), the mean of the last hidden states at length 1. length: tokens
    that longer texts are cut to; None is the model's context. Families whose texts are ``filled`` (SigLIP) get rows of the whole
    context, with the tokenizer's padding id after the text. batch: texts that are computed at once, those of like length together.

    Raises ValueError for a head that does not pool, a model without a tokenizer or padding token, texts without tokens and numbers
    out of range.
    """
    if not isinstance(model.spec.head, (Pooling, AttentionPooling)):
        raise ValueError(
            f"head {model.spec.head.name} gives no vector of a whole text; load the model with "
            "override=['head={name: pooling, normalize: true}']"
        )
    most = model.spec.context if length is None else length
    if not 0 < most <= model.spec.context or batch < 1:
        raise ValueError(f"length must lie in 1..{model.spec.context} and batch be at least 1, got {length} and {batch}")
    if isinstance(texts, str):
        return embed(model, [texts], length=length, batch=batch)[0]
    rows = [model.tokenizer(text, truncation=True, max_length=most)["input_ids"] for text in texts]
    if not rows or not all(rows):
        raise ValueError("texts is empty" if not rows else f"texts[{rows.index([])}] has no tokens, so there is no vector of it")
    if family_of(model.spec).filled:
        rows = [row + [padding(model)] * (model.spec.context - len(row)) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    parts = [_vectors(model, [rows[i] for i in order[at : at + batch]]) for at in range(0, len(order), batch)]
    return torch.cat(parts)[torch.tensor(order).argsort()]


def padding(model: Model) -> int:
    """The id of the tokenizer's padding token. Raises ValueError where it has none."""
    pad = model.tokenizer.pad_token_id
    if pad is None:
        raise ValueError(f"texts for {model.spec.checkpoint} are filled with the padding token, of which the tokenizer has none; "
                         "set tokenizer.pad_token")  # fmt: skip
    return pad


def _vectors(model: Model, rows: list[list[int]]) -> Tensor:
    lengths = [len(row) for row in rows]
    ids = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows], device=model.device)
    return model(ids, lengths=lengths).cpu()
