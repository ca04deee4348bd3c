"""Text from a model: batches of prompts of any length, conversations, stop strings, streams.

``generate`` answers in kind (text for text, ids for ids), ``stream`` gives the same text in pieces, ``complete`` gives all that is
known of each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from torch import Tensor

from zoo.components.registry import nearest
from zoo.model import Model
from zoo.sampling import Sampling
from zoo.tokenizers import beginning

GREEDY = Sampling()
INCOMPLETE = "\ufffd"  # what decoders write for bytes that are not (yet) a character
Eos = bool | int | str | Collection[int | str]
Kind = Literal["text", "ids", "conversation"]
CONTEXT = 8  # tokens of the prompt that the first new ones are decoded with: enough to hold the tokens of one character


@dataclass(frozen=True)
class Completion:
    """What came after one prompt.

    text: up to a stop string, without special tokens; None where the prompt was ids and there are no stop strings. ids: all new
    tokens, the one that ended it included. reason: ``eos``, ``stop`` (a stop string) or ``length``. logprobs: natural logarithm of
    the probability that the model gave each of ``ids``, before temperature and filters.
    """

    text: str | None
    ids: list[int]
    reason: Literal["eos", "stop", "length"]
    logprobs: list[float]


def generate(model: Model, prompt: Any, *, max_new_tokens: int = 128, temperature: float = 0.0, top_k: int | None = None,
             top_p: float | None = None, min_p: float | None = None, repetition_penalty: float = 1.0, seed: int | Sequence[int] = 0,
             stop: str | Sequence[str] = (), eos: Eos = True, chat: bool = False, system: str | None = None,
             stream: Callable[[str], Any] | None = None) -> Any:  # fmt: skip
    """What the model writes after a prompt, without the prompt.

    prompt: a text, token ids, a conversation (a list of ``{"role": ..., "content": ...}``), or a list of any of these; ids may be a
    tensor [T] or [B, T]. Ids are answered by ids, all else by text; a list by a list. Each prompt of a batch gets what it would get
    alone.

    A text begins as the tokenizer begins it by default; a token that it would put after the text is left out, for the text goes on.

    temperature ... seed: see Sampling. stop: strings that end the text, which is cut before them. eos: True for the ids that the
    checkpoint names, False to go on regardless, or tokens by id or as the tokenizer spells them (``"</s>"``). chat: put texts into the
    conversation format of the tokenizer, as the user's words; conversations always are. system: a system message to begin conversations
    with. stream: called with each piece of a single text as soon as it is certain.

    Raises ValueError, before anything is computed, for options out of range, prompts without tokens, and for text without a tokenizer.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed)
    asked = _read(prompt, chat, system)
    if stream is not None and (asked.many or not asked.text):
        raise ValueError("stream: only a single text can be streamed; call generate without it for lists and token ids")
    job = _job(model, asked, sampling, max_new_tokens, stop, eos)
    if stream is not None:
        for piece in _pieces(model, job):
            stream(piece)
    else:
        _finish(model, job)
    out = [row.text.so_far if asked.text and row.text else row.ids for row in job.rows]
    return out if asked.many else out[0]


def stream(model: Model, prompt: Any, *, max_new_tokens: int = 128, temperature: float = 0.0, top_k: int | None = None,
           top_p: float | None = None, min_p: float | None = None, repetition_penalty: float = 1.0, seed: int = 0,
           stop: str | Sequence[str] = (), eos: Eos = True, chat: bool = False,
           system: str | None = None) -> Iterator[str]:  # fmt: skip
    """The text of ``generate`` for one text or conversation, in pieces that do not change once they are given.

    A piece is held back while it may be half a character or the beginning of a stop string. Options and errors are those of generate.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed)
    asked = _read(prompt, chat, system)
    if asked.many or not asked.text:
        raise ValueError("only a single text or conversation can be streamed; use generate for lists and token ids")
    return _pieces(model, _job(model, asked, sampling, max_new_tokens, stop, eos))


def complete(model: Model, prompts: Sequence[str] | Sequence[Sequence[int]] | Tensor, *, max_new_tokens: int = 128,
             sampling: Sampling = GREEDY, stop: str | Sequence[str] = (),
             eos: Eos = True) -> list[Completion]:  # fmt: skip
    """Continue each prompt (all texts, or all token ids) and tell what is known of the result. Options and errors as in generate."""
    asked = _read(prompts, chat=False, system=None)
    if not asked.many:
        raise ValueError("complete takes a list of prompts; use generate for a single one")
    job = _job(model, asked, sampling, max_new_tokens, stop, eos)
    _finish(model, job)
    return [row.completion() for row in job.rows]


def eos_ids(model: Model, eos: Eos = True) -> frozenset[int]:
    """The ids that end a text: True takes those of generation_config.json, or else of config.json; both may name one or several.

    Raises ValueError for what is neither an id nor a token of the tokenizer, and for a file that names other things than ids.
    """
    if eos is False:
        return frozenset()
    if eos is not True:
        given = eos if isinstance(eos, Collection) and not isinstance(eos, str) else [eos]
        return frozenset(_token_id(model, x, "eos") for x in given)
    settings = {} if model.source is None else model.source.generation
    file = "generation_config.json" if "eos_token_id" in settings else "config.json"
    named = settings.get("eos_token_id", model.config.get("eos_token_id"))
    several = [] if named is None else named if isinstance(named, list) else [named]
    if not all(_is_id(x) for x in several):
        raise ValueError(
            f"{file}: eos_token_id must be a token id or a list of them, it is {named!r:.60}; pass eos to say what ends a text"
        )
    return frozenset(several)


def _is_id(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _token_id(model: Model, token: int | str, place: str) -> int:
    """The id of a token given by id or as the tokenizer spells it."""
    if isinstance(token, str):
        found = model.tokenizer.get_vocab().get(token)
        if found is None:
            raise ValueError(f"{place}: the tokenizer has no token {token!r}{nearest(token, model.tokenizer.all_special_tokens)}")
        return found
    if not _is_id(token):
        raise ValueError(f"{place}: a token is an id from 0 on, or a string of the tokenizer, got {token!r:.60}")
    return token


# ---- what is asked ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """Prompts of one kind. text: answer with text. many: answer with a list."""

    items: list[Any]
    kind: Kind
    many: bool

    @property
    def text(self) -> bool:
        return self.kind != "ids"


def _read(prompt: Any, chat: bool, system: str | None) -> _Asked:
    """Tell what kind of prompt it is; texts become conversations where ``chat`` asks for it."""
    asked = _sort(prompt)
    if chat and asked.kind == "ids":
        raise ValueError("chat: the prompt is token ids; give a text or a list of messages")
    if chat and asked.kind == "text":
        asked = _Asked([[{"role": "user", "content": text}] for text in asked.items], "conversation", asked.many)
    if system is None:
        return asked
    if asked.kind != "conversation" or any(c[0]["role"] == "system" for c in asked.items):
        raise ValueError("system: only conversations (chat=True, or a list of messages) without a system message of their own take one")
    return _Asked([[{"role": "system", "content": system}, *messages] for messages in asked.items], "conversation", asked.many)


def _sort(prompt: Any) -> _Asked:
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    many = isinstance(prompt, Sequence) and not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], (str, Sequence)))
    items = list(prompt) if many else [prompt]
    kinds: list[Kind] = [_kind(item) for item in items]
    if len(set(kinds)) > 1:
        raise ValueError(f"the prompts must be of one kind, these are {', '.join(sorted(set(kinds)))}")
    return _Asked(items, kinds[0] if kinds else "text", many)


def _kind(item: Any) -> Kind:
    if isinstance(item, str):
        return "text"
    if isinstance(item, Sequence) and item and all(isinstance(x, Mapping) and "role" in x for x in item):
        return "conversation"
    if isinstance(item, Sequence) and all(_is_id(x) for x in item):
        return "ids"
    raise ValueError(
        f"a prompt must be a text, token ids, or a list of messages with role and content, got {item!r:.100}; "
        "ids are whole numbers from 0 on"
    )


def _encode(model: Model, asked: _Asked) -> list[list[int]]:
    """Token ids of each prompt."""
    if asked.kind == "ids":
        found = [list(item) for item in asked.items]
    elif asked.kind == "text":
        start = beginning(model.tokenizer)
        found = [start + model.tokenizer.encode(text, add_special_tokens=False) for text in asked.items]
    else:
        found = [_encode_conversation(model.tokenizer, messages) for messages in asked.items]
    for i, ids in enumerate(found):
        if not ids:
            raise ValueError(f"prompt {i} has no tokens; a model needs at least one to go on from")
    return found


def _encode_conversation(tokenizer: Any, messages: list[Mapping[str, Any]]) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError("this model's tokenizer has no chat template; give a text without chat=True")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as e:
        raise ValueError(f"the tokenizer's chat template refuses the conversation: {type(e).__name__}: {e}") from None
    return tokenizer.encode(text, add_special_tokens=False)  # templates write the special tokens themselves


# ---- the loop -----------------------------------------------------------------------------------------------------------------


@dataclass
class _Row:
    """One prompt and what has come of it so far."""

    prompt: list[int]
    seed: int
    text: _Text | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: Literal["eos", "stop", "length"] | None = None

    def add(self, token: int, logprob: float, job: _Job) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        ended = token in job.ends
        self.reason = "eos" if ended else "length" if len(self.ids) == job.limit else None
        if self.text and self.text.add([] if ended else [token], last=self.reason is not None):
            self.reason = "stop"

    def completion(self) -> Completion:
        assert self.reason is not None
        return Completion(self.text.so_far if self.text else None, self.ids, self.reason, self.logprobs)


@dataclass(frozen=True)
class _Job:
    """Rows to be continued. limit: new tokens at most. ends: ids that end a row."""

    rows: list[_Row]
    sampling: Sampling
    limit: int
    ends: frozenset[int]


def _job(model: Model, asked: _Asked, sampling: Sampling, limit: int, stop: str | Sequence[str],
         eos: Eos) -> _Job:  # fmt: skip
    """Check and encode everything that was asked for."""
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {limit!r}")
    if not model.spec.head.says_next:
        raise ValueError(f"head {model.spec.head.name} does not say which token comes next, so this model writes no text")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise ValueError("stop: an empty string would end every text before it begins; leave it out")
    prompts = _encode(model, asked)
    tokenizer = model.tokenizer if asked.text or stops else None
    texts = [_Text(tokenizer, ids, stops) if tokenizer else None for ids in prompts]
    rows = [_Row(*row) for row in zip(prompts, sampling.seeds(len(prompts)), texts, strict=True)]
    return _Job(rows, sampling, limit, eos_ids(model, eos))


def _finish(model: Model, job: _Job) -> None:
    for _ in _steps(model, job):
        pass


def _pieces(model: Model, job: _Job) -> Iterator[str]:
    """The text of the job's only row, as it becomes certain."""
    (row,) = job.rows
    assert row.text is not None
    given = 0
    for _ in _steps(model, job):
        certain = row.text.certain() if row.reason is None else len(row.text.so_far)
        if certain > given:
            yield row.text.so_far[given:certain]
            given = certain


@torch.inference_mode()
def _steps(model: Model, job: _Job) -> Iterator[None]:
    """Add one token to every unfinished row at each step, until none is left."""
    rows = job.rows
    if not rows:
        return
    cache = model.new_cache(len(rows))
    logits = _prefill(model, [row.prompt for row in rows], cache)
    while True:
        picked = _pick(job.sampling, rows, logits)
        chances = logits.float().log_softmax(-1).gather(1, picked[:, None])[:, 0]
        for row, token, chance in zip(rows, picked.tolist(), chances.tolist(), strict=True):
            row.add(token, chance, job)
        yield
        left = [i for i, row in enumerate(rows) if row.reason is None]
        if not left:
            return
        if len(left) < len(rows):
            rows, picked, cache = [rows[i] for i in left], picked[left], cache.fork(left)
        logits = model(picked[:, None], cache=cache)[:, 0]


def _prefill(model: Model, prompts: list[list[int]], cache: Any) -> Tensor:
    """Read the prompts into the cache; logits [B, V] after the last token of each."""
    ids = _pad(prompts, 0, model.device)
    lengths = torch.tensor([len(p) for p in prompts])
    x = model.hidden(ids, model.step(ids, lengths, cache=cache), cache)
    cache.commit()
    return model.head(x[torch.arange(len(prompts)), lengths - 1][:, None])[:, 0]


def _pick(sampling: Sampling, rows: list[_Row], logits: Tensor) -> Tensor:
    positions = [len(row.prompt) + len(row.ids) for row in rows]
    penalized = sampling.repetition_penalty != 1.0
    history = _pad([row.prompt + row.ids for row in rows], -1, logits.device) if penalized else None
    return sampling.pick(logits, [row.seed for row in rows], positions, history)


def _pad(rows: Sequence[Sequence[int]], value: int, device: torch.device) -> Tensor:
    """Lists of ids -> [B, longest] int64, padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], device=device)


# ---- text while it grows ------------------------------------------------------------------------------------------------------


class _Text:
    """The text of one row while tokens arrive. so_far: all that is decoded, cut before the first stop string.

    Tokens are decoded together with those before them: alone, a token may lose its leading space or be part of a character.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Iterable[str]):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.reach = max(map(len, self.stops), default=1) - 1  # characters of a stop string that may be there already
        self.so_far = ""
        self.window = list(prompt[-CONTEXT:])
        self.begun = len(self.window)  # how much of the window is in so_far, or is prompt
        self.shown = self._decode(self.window)

    def add(self, tokens: list[int], last: bool) -> bool:
        """Take new tokens; True if a stop string was completed. last: nothing follows, so nothing is held back."""
        self.window += tokens
        text = self._decode(self.window)
        piece = text[len(self.shown) :]
        if not piece or (text.endswith(INCOMPLETE) and not last):
            return False
        self.window = self.window[self.begun :]
        self.begun, self.shown = len(self.window), self._decode(self.window)
        start = max(0, len(self.so_far) - self.reach)
        self.so_far += piece
        at = [i for i in (self.so_far.find(s, start) for s in self.stops) if i >= 0]
        self.so_far = self.so_far[: min(at)] if at else self.so_far
        return bool(at)

    def certain(self) -> int:
        """How many characters of so_far stay, whatever follows: all but a tail that may become a stop string."""
        for i in range(max(0, len(self.so_far) - self.reach), len(self.so_far)):
            if any(s.startswith(self.so_far[i:]) for s in self.stops):
                return i
        return len(self.so_far)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
