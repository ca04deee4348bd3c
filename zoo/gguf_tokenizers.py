"""A tokenizer as the metadata of a GGUF file: the way back from zoo.tokenizers.from_gguf, and checked by it.

GGUF names a few kinds of tokenizers instead of describing them, so what is written is read again and compared on texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zoo.checkpoint import CheckpointError
from zoo.tokenizers import CONTROL, PRE_TOKENIZERS, UNKNOWN, USER_DEFINED, from_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NORMAL, UNUSED, BYTE = 1, 5, 6  # values of tokenizer.ggml.token_type
SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
TEXTS = (
    "Hello world, it's 12345.67 o'clock: don't WE'LL go?",
    "  two  spaces\t\ttabs\n\n\n  lines \r\n\r\nend   ",
    "naïve façade Ωmega 你好，世界 こんにちは 안녕 हिन्दी עברית 🙂👍🏽 e\u0301",
    "def f(x_1):\n    return {'a': [x_1**2, 3.5e-7]}  # __init__ CamelCase\n",
    "!!!???...—–“quoted” (a)[b]{c}<d> a/b\\c $9,999 50% #tag @user x=y&&z||w ^~`",
)  # what pre-tokenizers cut in different ways


def to_gguf(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The ``tokenizer.*`` keys for a tokenizer. Raises CheckpointError where none of GGUF's kinds cuts texts as it does."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise CheckpointError(f"its tokenizer is a {model['type']} model; GGUF files are written for BPE")
    common = _common(tokenizer, state)
    for keys in _sentencepiece(common, model) if model.get("byte_fallback") else _byte_level(common, model):
        if _same(tokenizer, keys):
            return keys
    raise CheckpointError("none of the kinds of tokenizers that GGUF names cuts texts as the model's own does")


def _common(tokenizer: PreTrainedTokenizerFast, state: Mapping[str, Any]) -> dict[str, Any]:
    added = {token["id"]: token for token in state["added_tokens"]}
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [by_id.get(i, f"[UNUSED{i}]") for i in range(max(by_id) + 1)]
    unknown = state["model"].get("unk_token")
    types = [_type(token, added.get(i), i in by_id, unknown) for i, token in enumerate(tokens)]
    ids = {f"tokenizer.ggml.{name}_token_id": getattr(tokenizer, word) for name, word in SPECIAL.items()}
    start = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    found = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.add_bos_token": start,
             **{key: value for key, value in ids.items() if value is not None}}  # fmt: skip
    template = tokenizer.chat_template
    return found | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _type(token: str, added: Mapping[str, Any] | None, there: bool, unknown: str | None) -> int:
    if not there:
        return UNUSED
    if token == unknown:
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else USER_DEFINED
    return BYTE if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else NORMAL


def _byte_level(common: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """With each way to cut text that has a name; several names stand for one way, of which the first is taken."""
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    names = {pre: name for name, pre in reversed(PRE_TOKENIZERS.items())}
    for name in names.values():
        yield {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, **common, "tokenizer.ggml.merges": merges}


def _sentencepiece(common: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """With scores in the order of the merges, and with and without a space before the text."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ")), rank)
    scores = [-float(ranks.get(token, len(ranks))) for token in common["tokenizer.ggml.tokens"]]
    for prefixed in (True, False):
        yield {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", **common, "tokenizer.ggml.scores": scores,
               "tokenizer.ggml.add_space_prefix": prefixed}  # fmt: skip


def _same(tokenizer: PreTrainedTokenizerFast, keys: Mapping[str, Any]) -> bool:
    again = from_gguf(keys)
    return all(_pieces(again, text) == _pieces(tokenizer, text) for text in TEXTS)


def _pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[list[str], list[int]]:
    """What a text is cut into before merging, which a small vocabulary may not show, and its ids."""
    backend = tokenizer.backend_tokenizer
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)] if backend.pre_tokenizer else [normal]
    return pieces, tokenizer(text)["input_ids"]
