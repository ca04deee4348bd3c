"""A model of the zoo as a model of lm-eval, registered there as ``zoo``.

Token for token it does what lm-eval's own ``hf`` model does; the tests compare the two request by request. One thing differs: where a
tokenizer ends every text with a token (``</s>``, ``[SEP]``), ``hf`` lets contexts end with it and cuts the continuation one token late
(``lm_eval.api.model.TemplateLM._encode_pair`` takes the lengths of both for granted); here it is left out. From a shell:
``python -m zoo.eval run --model zoo --model_args pretrained=... --tasks ...``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from zoo.eval.scoring import continuations
from zoo.generation import GREEDY, complete
from zoo.loading import load
from zoo.model import Model
from zoo.sampling import Sampling
from zoo.tokenizers import ending

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    Encoded = tuple[tuple[str, str] | None, Sequence[int], Sequence[int]]

logger = logging.getLogger(__name__)
GENERATED = 256  # tokens, where a task says nothing; lm-eval's own default
ENDED = "The tokenizer ends every text with {}; it is left out, because contexts go on and texts are scored without it."
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}  # what tasks may ask for; the rest is an error


class ZooLM(TemplateLM):
    """pretrained: a model, or a reference for zoo.load, to which device and dtype go. batch_size: rows of one forward call.
    max_length: tokens that the model may see; None is what it was trained for. notes: what readers of the figures must know.

    Raises ValueError for a model without a tokenizer and for settings that do not apply.
    """

    def __init__(self, pretrained: Model | str | Path, *, batch_size: int | str = 8, max_length: int | None = None,
                 device: str | None = None, dtype: str | None = None):  # fmt: skip
        super().__init__()
        if isinstance(pretrained, Model) and (device or dtype):
            raise ValueError("device and dtype are for models that are loaded by reference; this one is loaded already")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a number of rows, got {batch_size!r}")
        self.model = pretrained if isinstance(pretrained, Model) else load(pretrained, device=device or "cpu", dtype=dtype or "auto")
        self.tokenizer: Any = self.model.tokenizer
        self.batch_size = int(batch_size)
        self.max_length = int(max_length or self.model.spec.context)
        self._device = self.model.device
        self.ending = ending(self.tokenizer)
        self.notes = [ENDED.format(self.tokenizer.decode(self.ending))] if self.ending else []
        for note in self.notes:
            logger.warning(note)

    # ---- text and tokens

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is: the beginning-of-sequence token, or the end-of-sequence token where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokenizer's default special tokens before the text, unless it starts with one already (chat templates write them out)."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        ids = self.tokenizer.encode(string, add_special_tokens=add_special_tokens, verbose=False)
        return ids[: len(ids) - len(self.ending)] if add_special_tokens else ids

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one prompt; templates that know no system role get it without the system message, with a warning."""
        style = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return self.tokenizer.apply_chat_template(chat_history, **style)
        except TemplateError:
            logger.warning("The chat template refuses the system message; it is left out.")
            return self.tokenizer.apply_chat_template([m for m in chat_history if m["role"] != "system"], **style)

    # ---- requests

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Summed log-probability of whole texts, each token predicted once, in windows of max_length."""
        windows: list[Encoded] = []
        owner: list[int] = []
        for i, request in enumerate(requests):
            cut = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1)
            windows += [(None, *make_disjoint_window(w)) for w in cut]
            owner += [i] * (len(windows) - len(owner))
        totals = [0.0] * len(requests)
        for i, (log_probability, _) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += log_probability
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Encoded], disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        pairs = [self._fit(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        answers = [(0.0, False)] * len(pairs)
        done = continuations(self.model, pairs, self.batch_size)
        for i, log_probability, greedy in tqdm(done, total=len(pairs), desc="Running loglikelihood requests", disable=disable_tqdm):
            answers[i] = (log_probability, greedy)
            if (text := requests[i][0]) is not None:  # windows of a rolling request are kept as a whole
                self.cache_hook.add_partial("loglikelihood", text, answers[i])
        return answers

    def _fit(self, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Cut the context on the left to what the model may see."""
        if not 0 < len(continuation) <= self.max_length:
            raise ValueError(f"a continuation of {len(continuation)} tokens cannot be scored, max_length is {self.max_length}")
        extra = len(context) + len(continuation) - self.max_length - 1  # the last token is predicted, not seen
        if extra > 0:
            logger.warning("%d tokens of context were cut on the left to fit max_length %d.", extra, self.max_length)
        return context[max(extra, 0) :], continuation

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop strings, the end token or its number of tokens."""
        asked: list[tuple[Any, ...]] = [request.args for request in requests]
        prompts = [self.tok_encode(context) for context, _ in asked]
        order = sorted(range(len(asked)), key=lambda i: (repr(asked[i][1]), -len(prompts[i])))
        alike = [list(same) for _, same in groupby(order, key=lambda i: repr(asked[i][1]))]
        batches = [same[start : start + self.batch_size] for same in alike for start in range(0, len(same), self.batch_size)]
        answers = [""] * len(asked)
        with tqdm(total=len(asked), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for batch in batches:
                for i, text in zip(batch, self._generate([prompts[i] for i in batch], batch, asked[batch[0]][1]), strict=True):
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", asked[i], text)
                bar.update(len(batch))
        return answers

    def _generate(self, prompts: Sequence[list[int]], seeds: Sequence[int], settings: dict[str, Any]) -> list[str]:
        options: dict[str, Any] = dict(normalize_gen_kwargs(settings, GENERATED))
        stop = handle_stop_sequences(options.pop("until"), eos=self.tokenizer.decode(self.eot_token_id))
        new, sample = options.pop("max_gen_toks"), options.pop("do_sample")
        if unknown := options.keys() - SAMPLING:
            raise ValueError(f"the task's generation_kwargs ask for {', '.join(sorted(unknown))}, which zoo.generate does not have")
        room = self.max_length - new
        if room < 1:
            raise ValueError(f"the task generates {new} tokens, max_length {self.max_length} leaves no room for its prompt")
        if cut := sum(len(p) > room for p in prompts):
            logger.warning("%d prompts were cut on the left to %d tokens to fit max_length %d.", cut, room, self.max_length)
        sampling = Sampling(seed=seeds, **options) if sample else GREEDY
        done = complete(self.model, [p[-room:] for p in prompts], max_new_tokens=new, sampling=sampling, stop=[s for s in stop if s])
        return [postprocess_generated_text(self.tokenizer.decode(c.ids, skip_special_tokens=True), stop, None) for c in done]


register_model("zoo")(ZooLM)
