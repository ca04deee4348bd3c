"""Tokenizers: from a Hugging Face folder, and from the metadata of a GGUF file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.checkpoint import CheckpointError, NoTokenizer, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

CONVERTIBLE = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")  # transformers makes a fast tokenizer of these
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
SPACE = "▁"  # how SentencePiece spells a space

# ---- folders ------------------------------------------------------------------------------------------------------------------


def from_folder(folder: str | Path, reference: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder; nothing is fetched and no code of the folder is run.

    reference: what errors call the folder, its path by default.

    tokenizer.json is taken as it is. transformers' AutoTokenizer would rebuild it from the class that tokenizer_config.json names,
    and the rebuilt LLaMA tokenizer drops leading spaces that SentencePiece and tokenizer.json keep. Raises NoTokenizer where the folder
    holds none, CheckpointError naming the file where it holds one that cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder)
    place = reference or str(folder)
    there = [name for name in ("tokenizer.json", *CONVERTIBLE) if (folder / name).is_file()]
    if not there:
        known = ", ".join(("tokenizer.json", *CONVERTIBLE))
        raise NoTokenizer(f"{place}: no tokenizer in the folder ({known}); put the model's tokenizer files there, or pass token ids")
    reader = PreTrainedTokenizerFast if there[0] == "tokenizer.json" else AutoTokenizer
    try:
        return _tried(reader.from_pretrained(folder, local_files_only=True))
    except Exception as e:  # the libraries raise whatever they come upon, plain Exception too
        raise CheckpointError(
            f"{place}: {_suspects(folder, place)} cannot be read as a tokenizer ({in_a_line(e)}); download it again, or pass token ids"
        ) from e


def in_a_line(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())}"


def _suspects(folder: Path, reference: str) -> str:
    """The files of which one must be wrong: tokenizer.json where it is wrong by itself, else the others.

    Raises CheckpointError for one that is no JSON object.
    """
    from tokenizers import Tokenizer

    for name in OBJECTS:
        if (folder / name).is_file():
            read_json(folder / name, reference)
    file = folder / "tokenizer.json"
    others = [name for name in (*CONVERTIBLE, *OBJECTS[1:], "chat_template.jinja") if (folder / name).is_file()]
    try:
        if file.is_file():
            Tokenizer.from_file(str(file))
    except Exception:  # the library has no narrower kind
        return file.name
    return ", ".join(others) or file.name


def _tried(tokenizer: Any) -> Any:
    """The tokenizer once it has been used: some settings of the wrong kind only show then. Raises what the libraries raise."""
    tokenizer.encode("a")
    if not isinstance(tokenizer.chat_template, (str, dict, type(None))):
        raise TypeError(f"chat_template is a {type(tokenizer.chat_template).__name__}, not a text")
    return tokenizer


def beginning(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The special tokens that a tokenizer puts before a text by default; what it puts after one is not among them."""
    return _leading(_marked(tokenizer))


def ending(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The special tokens that a tokenizer puts after a text by default, as </s> or [SEP]."""
    return _leading(_marked(tokenizer)[::-1])[::-1]


def _marked(tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """(id, 1 if it was put there) of a text's tokens."""
    found = tokenizer("a", return_special_tokens_mask=True)
    return list(zip(found["input_ids"], found["special_tokens_mask"], strict=True))


def _leading(marked: Sequence[tuple[int, int]]) -> list[int]:
    return [i for i, _ in itertools.takewhile(lambda pair: pair[1], marked)]


# ---- GGUF ---------------------------------------------------------------------------------------------------------------------


def from_gguf(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file's metadata describes (the ``tokenizer.*`` keys), as llama.cpp reads them.

    Raises NoTokenizer where there are no such keys, CheckpointError for a tokenizer model or pre-tokenizer that is not known, and for
    metadata that is incomplete or of the wrong kind.
    """
    if not any(key.startswith("tokenizer.") for key in metadata):
        raise NoTokenizer("the GGUF metadata has no tokenizer; convert the model anew, or pass token ids")
    try:
        return _tried(_from_gguf(metadata))
    except CheckpointError:
        raise
    except Exception as e:  # the library has no narrower kind
        raise CheckpointError(
            f"the GGUF metadata tokenizer.* cannot be understood ({in_a_line(e)}); convert the model anew, or pass token ids"
        ) from e


def _from_gguf(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    read = _Metadata(metadata)
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    if read.model not in kinds:
        raise CheckpointError(f"tokenizer.ggml.model {read.model!r} is not supported; supported: {', '.join(kinds)}")
    backend, adds_bos = kinds[read.model](read)
    backend.add_special_tokens(read.added(UNKNOWN, CONTROL))
    backend.add_tokens(read.added(USER_DEFINED))
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{ours: read.special(theirs) for ours, theirs in named.items()},
        add_bos_token=bool(read.get("add_bos_token", adds_bos)),
        add_eos_token=bool(read.get("add_eos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


class _Metadata:
    """The tokenizer's part of GGUF metadata. tokens: text by id."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        self.model = str(self.need("model"))
        self.tokens: list[str] = list(self.need("tokens"))
        self.types: list[int] = list(self.get("token_type") or [1] * len(self.tokens))
        self.vocab = {token: i for i, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.tokens: only {len(self.vocab)} of {len(self.tokens)} tokens differ; each must be unique")

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"the GGUF metadata has no tokenizer.ggml.{key}; convert the model anew, or pass token ids")
        return value

    def special(self, name: str) -> str | None:
        """The token whose id is ``tokenizer.ggml.NAME_token_id``."""
        at = self.get(f"{name}_token_id")
        if at is not None and not 0 <= at < len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.{name}_token_id is {at}, the vocabulary has ids 0..{len(self.tokens) - 1}")
        return None if at is None else self.tokens[at]

    def added(self, *types: int) -> list[Any]:
        """The tokens of these types, which are found in text before anything is cut or merged."""
        from tokenizers import AddedToken

        pairs = zip(self.tokens, self.types, strict=True)
        return [AddedToken(t, normalized=False, special=kind != USER_DEFINED) for t, kind in pairs if kind in types]


def _byte_level(read: _Metadata) -> tuple[Tokenizer, bool]:
    """Byte-pair merges over bytes spelled as printable characters (GPT-2)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = str(read.need("pre"))
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(f"tokenizer.ggml.pre {name!r} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    pre = PRE_TOKENIZERS[name]
    merges = [_pair(merge) for merge in read.need("merges")]
    backend = Tokenizer(models.BPE(vocab=read.vocab, merges=merges, ignore_merges=pre.whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    if pre.composed:
        backend.normalizer = normalizers.NFC()
    return backend, pre.adds_bos


def _pair(merge: str) -> tuple[str, str]:
    """``"left right"`` -> (left, right); the first character is never the separator."""
    left, _, right = merge[1:].partition(" ")
    return merge[0] + left, right


def _sentencepiece(read: _Metadata) -> tuple[Tokenizer, bool]:
    """SentencePiece's byte-pair model: merges by score, bytes for what the vocabulary lacks."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = read.tokens[read.get("unknown_token_id", 0)]
    merges = _merges(read.vocab, read.types, read.need("scores"))
    backend = Tokenizer(models.BPE(vocab=read.vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = bool(read.get("add_space_prefix", True))
    prefix = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend, True


def _merges(vocab: Mapping[str, int], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a normal token of two others, best score first."""
    found = []
    for token, at in vocab.items():
        if types[at] == 1:
            halves = ((token[:i], token[i:]) for i in range(1, len(token)))
            found += [(-scores[at], vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab]
    return [(a, b) for *_, a, b in sorted(found)]


# ---- how byte-level vocabularies cut text -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreTokenizer:
    """What a name in ``tokenizer.ggml.pre`` stands for (llama.cpp, src/llama-vocab.cpp).

    splits: regular expressions applied in turn; matches and the text between them become pieces of their own. whole_words: a piece
    that is a token is taken as it is, without merging. adds_bos: where the file does not say. composed: text is put in Unicode
    form C first, as the tokenizers of these models do.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    composed: bool = False


_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_EDGE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_LLAMA3 = rf"{_SUFFIX}|{_EDGE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_QWEN2 = rf"{_SUFFIX}|{_EDGE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_QWEN35 = rf"{_SUFFIX}|{_EDGE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
_TEKKEN = rf"{_EDGE}{_UPPER}*{_LOWER}+|{_EDGE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
_GPT4O = rf"{_EDGE}{_UPPER}*{_LOWER}+{_SUFFIX}?|{_EDGE}{_UPPER}+{_LOWER}*{_SUFFIX}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
_DEEPSEEK3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" + _LINES

_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_WHOLE = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS_GPT2),
    "command-r": PreTokenizer((r"\p{N}", _GPT2), composed=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3_WHOLE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    "qwen2": PreTokenizer((_QWEN2,), composed=True),
    "qwen35": PreTokenizer((_QWEN35,), composed=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), PreTokenizer((_QWEN2,))),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_GPT4O,))),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
