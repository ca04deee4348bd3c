"""Tokenizers against the files they come from, against transformers, and against the definition of their algorithm."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from zoo.checkpoint import CheckpointError
from zoo.gguf_file import read_metadata
from zoo.tokenizers import PRE_TOKENIZERS, from_folder, from_gguf

TEXTS = [
    "Once upon a time, there was a little girl.",
    " leading and  double   spaces, trailing  ",
    "lines\nof\r\n\r\n  text\n\n\n\tand tabs\t\t",
    "I'll say you're THEY'RE we've O'Neill's",
    "def f(x):\n    return x[1:] + {'a': 0x1F}  # comment\n",
    "in 2024, 3.14 and 1234567 x1 y22z",
    "héllo wörld ☃ 😀👩‍👩‍👧 漢字かな한국어 русский ñ İ",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>x",
    "$5 + 7% = ^_^ ~|~ `code` «quoted» … — https://a.b/c?d=e&f",
    "",
]

# ---- folders


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
def test_folder_follows_its_file(shared_data: Path, name: str):
    folder = shared_data / "weights" / name
    ours, file = from_folder(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in [*TEXTS, "<s> a </s> b"]:
        assert ours.encode(text) == file.encode(text).ids
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)


def test_class_named_in_the_config_does_not_change_the_file(shared_data: Path, tmp_path: Path):
    source = shared_data / "weights/stories260K"
    shutil.copy(source / "tokenizer.json", tmp_path)
    config = json.loads((source / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = "  two spaces"
    assert from_folder(tmp_path).encode(text) == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    assert from_folder(tmp_path).decode(from_folder(tmp_path).encode(text), skip_special_tokens=True) == text


def test_folder_with_vocabulary_and_merges(tmp_path: Path):
    vocab = {c: i for i, c in enumerate(["a", "b", "Ġ", "ab", "Ġab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert from_folder(tmp_path).encode("ab ab") == [3, 4]


def test_folder_without_tokenizer(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no tokenizer in the folder.*tokenizer\.json"):
        from_folder(tmp_path)


# ---- GGUF: a real file


@pytest.fixture(scope="module")
def metadata(smollm2: Path) -> dict[str, Any]:
    return read_metadata(smollm2)


@pytest.fixture(scope="module")
def smol(metadata: dict[str, Any]) -> Any:
    return from_gguf(metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(smol: Any, text: str):
    assert smol.decode(smol.encode(text)) == text


def test_digits_stand_alone_as_in_the_published_tokenizer(smol: Any, metadata: dict[str, Any]):
    """The published file splits digits off first, so spaces before one stay together; the vocabulary shows it: none has a digit in it."""
    assert not [t for t in metadata["tokenizer.ggml.tokens"] if len(t) > 1 and any(c in "0123456789" for c in t)]
    assert smol.tokenize("a  7 12") == ["a", "ĠĠ", "7", "Ġ", "1", "2"]


def test_special_tokens(smol: Any):
    assert smol.tokenize("<|im_start|>a<repo_name>") == ["<|im_start|>", "a", "<repo_name>"]
    assert (smol.bos_token_id, smol.eos_token_id, smol.pad_token_id, smol.unk_token_id) == (1, 2, 2, 0)
    assert smol.encode("a") == smol.encode("a", add_special_tokens=False)  # add_bos_token is false in this file
    assert smol.decode(smol.encode("<|im_start|>a<file_sep>"), skip_special_tokens=True) == "a"


def test_chat_template(smol: Any):
    text = smol.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_saved_and_loaded_again(smol: Any, tmp_path: Path):
    smol.save_pretrained(tmp_path)
    again = from_folder(tmp_path)
    assert [again.encode(t) for t in TEXTS] == [smol.encode(t) for t in TEXTS]
    assert (again.chat_template, again.all_special_ids) == (smol.chat_template, smol.all_special_ids)


@pytest.mark.slow
def test_real_file_equals_transformers(smol: Any, smollm2: Path):
    """transformers 5.24 does not know the pre-tokenizer ``smollm`` and splits as GPT-2 does, so texts with digits differ by design."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    for text in TEXTS:
        if not any(c.isnumeric() for c in text):
            assert smol.encode(text) == theirs.encode(text), text
    assert theirs.tokenize("a  7") == ["a", "Ġ", "Ġ", "7"]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert smol.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert (len(smol), smol.all_special_ids) == (len(theirs), theirs.all_special_ids)


# ---- GGUF: byte-level vocabularies


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of all bytes, two merges and two control tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġab", "<s>", "</s>"]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1] * 258 + [3, 3], "merges": ["a b", "Ġ ab"],
            "bos_token_id": 258, "eos_token_id": 259}  # fmt: skip
    return {f"tokenizer.ggml.{k}": v for k, v in (keys | more).items() if v is not None}


def pieces(splitter: Any, text: str) -> list[str]:
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]


def reference_splitters() -> dict[str, Any]:
    """Pre-tokenizers as other code has them, by their name in GGUF files."""
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    plain, digits = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(individual_digits=True)
    llama3 = TikTokenConverter().pattern
    found = {"gpt-2": plain, "smollm": pre_tokenizers.Sequence([digits, plain]), "command-r": pre_tokenizers.Sequence([digits, plain])}
    patterns = {"llama-bpe": llama3, "dbrx": llama3, "qwen2": PRETOKENIZE_REGEX} | {
        name: GGUF_PRE_TOKENIZER_SPLITS[name] for name in ("tekken", "gpt-4o", "qwen35", "llama4", "pixtral", "deepseek-r1-qwen")
    }
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return found | {n: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated"), to_bytes]) for n, p in patterns.items()}


SPLITTERS = reference_splitters()


@pytest.mark.parametrize("pre", SPLITTERS)
def test_pre_tokenizer_cuts_as_the_models_own(pre: str):
    ours = from_gguf(byte_level(pre)).backend_tokenizer.pre_tokenizer
    alphabet = "aBé漢\u0301 ǅʰ\u0e33٣½²12 .,-_/'sRe\n\r\t\u00a0😀"
    noise = ["".join(random.Random(i).choices(alphabet, k=40)) for i in range(100)]
    for text in [*TEXTS, *noise]:
        assert pieces(ours, text) == pieces(SPLITTERS[pre], text), text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_every_byte(pre: str):
    tokenizer = from_gguf(byte_level(pre))
    for text in TEXTS:
        kept = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == kept


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("default", "a12345b", ["a", "123", "45", "b"]),
        ("default", "x=-1", ["x", "=-", "1"]),
        ("falcon", "a1234 `", ["a", "123", "4", "Ġ", "`"]),
        ("deepseek-v3", "a1234 .b漢c", ["a", "123", "4", "Ġ.", "b", "æ¼¢", "c"]),
        ("deepseek-coder", "a12\n b", ["a", "1", "2", "Ċ", "Ġb"]),
        ("starcoder", "ab12", ["ab", "1", "2"]),
    ],
)
def test_pre_tokenizers_without_a_reference(pre: str, text: str, expected: list[str]):
    assert pieces(from_gguf(byte_level(pre)).backend_tokenizer.pre_tokenizer, text) == expected


def test_words_that_are_tokens_are_not_merged():
    """Llama 3 takes a whole word that is in the vocabulary although no merges lead to it; GPT-2 cannot."""
    tokens = [*byte_level("gpt-2")["tokenizer.ggml.tokens"], "xyz"]
    for pre, expected in {"llama-bpe": ["xyz"], "gpt-2": ["x", "y", "z"]}.items():
        tokenizer = from_gguf(byte_level(pre, tokens=tokens, token_type=[1] * 261))
        assert tokenizer.tokenize("xyz") == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ["ab"]),
        ({"add_bos_token": True}, ["<s>", "ab"]),
        ({"add_eos_token": True}, ["ab", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "ab"]),
        ({"pre": "llama-bpe", "add_bos_token": False, "add_eos_token": True}, ["ab", "</s>"]),
    ],
)
def test_begin_and_end(more: dict[str, Any], expected: list[str]):
    tokenizer = from_gguf(byte_level(**({"pre": "gpt-2"} | more)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab")) == expected


def test_user_defined_tokens_are_found_but_not_special():
    tokens = [*byte_level("gpt-2")["tokenizer.ggml.tokens"], "<think>"]
    tokenizer = from_gguf(byte_level("gpt-2", tokens=tokens, token_type=[1] * 258 + [3, 3, 4]))
    assert tokenizer.tokenize("a<think>b") == ["a", "<think>", "b"]
    assert tokenizer.decode(tokenizer.encode("a<think></s>"), skip_special_tokens=True) == "a<think>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model 'bert' is not supported; supported: gpt2, llama"),
        ({"model": None}, r"no tokenizer\.ggml\.model"),
        ({"pre": "mystery"}, r"tokenizer\.ggml\.pre 'mystery' is not known; known: codeshell, .*, smollm, .*tekken"),
        ({"pre": None}, r"no tokenizer\.ggml\.pre"),
        ({"merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"eos_token_id": 1000}, r"eos_token_id is 1000, the vocabulary has ids 0\.\.259"),
        ({"tokens": ["a", "b", "a"]}, "only 2 of 3 tokens differ"),
    ],
)
def test_bad_metadata_is_named(change: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        from_gguf(byte_level(**({"pre": "gpt-2"} | change)))


# ---- GGUF: SentencePiece


def sentencepiece(folder: Path) -> dict[str, Any]:
    """The metadata that llama.cpp would write for a Hugging Face tokenizer of this kind; later pieces have lower scores."""
    data = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(data, key=data.__getitem__)
    types = [2 if t == "<unk>" else 3 if t in ("<s>", "</s>") else 6 if t.startswith("<0x") else 1 for t in tokens]
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": [-float(i) for i in range(len(tokens))],
            "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # fmt: skip
    return {f"tokenizer.ggml.{k}": v for k, v in keys.items()}


def by_definition(tokens: list[str], scores: list[float], text: str) -> list[str]:
    """Join the neighbours whose joint piece scores best, leftmost first, until none is a piece; bytes for the rest."""
    score = dict(zip(tokens, scores, strict=True))
    found = list(text)
    while joins := [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(found)) if a + b in score]:
        at = min(joins)[1]
        found[at : at + 2] = [found[at] + found[at + 1]]
    return [p for piece in found for p in ([piece] if piece in score else [f"<0x{b:02X}>" for b in piece.encode()])]


@pytest.mark.parametrize("text", [*TEXTS, "<s> a </s> b", "漢字 and ☃"])
def test_sentencepiece_equals_the_folder(shared_data: Path, text: str):
    folder = shared_data / "weights/stories260K"
    ours, theirs = from_gguf(sentencepiece(folder)), from_folder(folder)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text), skip_special_tokens=True) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_sentencepiece_by_definition(shared_data: Path):
    metadata = sentencepiece(shared_data / "weights/stories260K")
    shuffled = random.Random(0).sample(metadata["tokenizer.ggml.scores"], len(metadata["tokenizer.ggml.scores"]))
    tokenizer = from_gguf(metadata | {"tokenizer.ggml.scores": shuffled})
    text = "▁" + TEXTS[0].replace(" ", "▁") + "▁漢"
    expected = by_definition(metadata["tokenizer.ggml.tokens"], shuffled, text)
    assert tokenizer.tokenize(text.replace("▁", " ")[1:]) == expected


def test_sentencepiece_without_prefix_space(shared_data: Path):
    tokenizer = from_gguf(sentencepiece(shared_data / "weights/stories260K") | {"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.tokenize("the")[0] != "▁the"
    assert tokenizer.decode(tokenizer.encode(" the"), skip_special_tokens=True) == " the"


def test_a_merge_is_split_at_the_first_space_after_its_first_character():
    from zoo.tokenizers import _pair

    assert _pair("a b") == ("a", "b")
    assert _pair("  b") == (" ", "b")
