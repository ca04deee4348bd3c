"""Perplexity equals transformers' on the same ids, scores each token once, and refuses comparisons across protocols."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.eval.made import Pair, measured_perplexity, protocol
from zoo.eval import Perplexity, perplexity
from zoo.eval.held_out import _windows


def nll_of(model: Any, ids: list[int], first: int) -> float:
    """transformers' summed nll of the tokens from ``first`` on."""
    tensor = torch.tensor([ids])
    with torch.inference_mode():
        logits = model(tensor).logits.double()
    return float(-logits.log_softmax(-1)[0, first - 1 : -1].gather(-1, tensor[0, first:, None]).sum())


def test_windows_without_overlap_equal_transformers(pair: Pair, prose: str) -> None:
    ours = perplexity(pair.ours, prose, context=60, limit=20)
    ids = pair.ours.tokenizer.encode(prose)
    windows = [ids[i : i + 60] for i in range(0, 20 * 60, 60)]
    theirs = math.exp(sum(nll_of(pair.theirs, w, 1) for w in windows) / (20 * 59))
    assert ours.value == pytest.approx(theirs, rel=1e-5)
    assert (ours.tokens, len(ours.windows), ours.protocol.tail) == (20 * 59, 20, "dropped")


def test_overlapping_windows_equal_transformers(pair: Pair, prose: str) -> None:
    ours = perplexity(pair.ours, prose[:600], context=50, stride=20, batch_size=4)
    ids = pair.ours.tokenizer.encode(prose[:600])
    total = nll_of(pair.theirs, ids[:50], 1)
    for begin in range(20, len(ids) - 30, 20):
        total += nll_of(pair.theirs, ids[begin : begin + 50], 30)
    assert ours.tokens == len(ids) - 1
    assert ours.nll * ours.tokens == pytest.approx(total, rel=1e-5)


def test_a_beginning_before_each_window_scores_every_token(pair: Pair, prose: str) -> None:
    ours = perplexity(pair.ours, prose[:500], context=50, bos="window")
    ids = pair.ours.tokenizer.encode(prose[:500], add_special_tokens=False)
    total = sum(nll_of(pair.theirs, [1, *ids[i : i + 49]], 1) for i in range(0, len(ids), 49))
    assert ours.tokens == len(ids)
    assert ours.nll * ours.tokens == pytest.approx(total, rel=1e-5)


def test_documents_on_their_own_are_scored_to_their_end(pair: Pair, prose: str) -> None:
    documents = [prose[:100], prose[100:330], prose[330:400]]
    ours = perplexity(pair.ours, documents, context=64, joining=None, batch_size=2)
    encoded = [pair.ours.tokenizer.encode(d) for d in documents]
    windows = [ids[i : i + 64] for ids in encoded for i in range(0, len(ids), 64)]
    assert ours.nll * ours.tokens == pytest.approx(sum(nll_of(pair.theirs, w, 1) for w in windows if len(w) > 1), rel=1e-5)
    assert ours.protocol.documents == 3


@pytest.mark.parametrize("batch_size", [2, 7])
def test_batches_do_not_change_the_figure(tiny: Pair, prose: str, batch_size: int) -> None:
    documents = [prose[i : i + 37 * (1 + i % 5)] for i in range(0, 900, 90)]
    alone, together = (perplexity(tiny.ours, documents, joining=None, batch_size=b) for b in (1, batch_size))
    assert together.value == pytest.approx(alone.value, rel=1e-5)
    assert [n for _, n in together.windows] == [n for _, n in alone.windows]


@pytest.mark.parametrize(("context", "stride", "start"), [(8, 8, []), (8, 3, []), (8, 1, []), (7, 7, [1]), (7, 2, [1])])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 40])
def test_each_token_is_scored_once_at_most_and_new_ones_always(length: int, context: int, stride: int, start: list[int]) -> None:
    ids = list(range(100, 100 + length))
    scored = [w[i] for w, first in _windows(ids, start, context, stride, tail=True) for i in range(first, len(w))]
    if stride < context or start:
        assert scored == ids[0 if start else 1 :]
    else:
        assert scored == [t for i, t in enumerate(ids) if i % context]
    assert all(len(w) <= context + len(start) for w, _ in _windows(ids, start, context, stride, tail=True))


def test_perplexity_by_word_is_that_of_lm_eval(tiny: Pair, prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.instance import Instance

    from zoo.eval.lm_eval_model import ZooLM

    def encode(text: str) -> list[int]:
        """As tokenizers do that add no beginning by themselves; lm-eval puts one before each text."""
        return tiny.ours.tokenizer.encode(text, add_special_tokens=False)

    def whole_windows(text: str) -> str:
        """The longest beginning of a text that full windows cover."""
        return next(text[:n] for n in range(len(text), 0, -1) if len(encode(text[:n])) % 40 == 0)

    pages = [whole_windows(prose[:700]), whole_windows(prose[700:1100])]
    model = ZooLM(tiny.ours, max_length=40)
    monkeypatch.setattr(model, "tok_encode", encode)
    rolling = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (page,), 0) for page in pages], disable_tqdm=True)
    ours = perplexity(tiny.ours, pages, joining=None, bos="text", context=41, stride=40, unit="word")
    words = sum(len(page.split()) for page in pages)
    assert ours.words == words
    assert ours.value == pytest.approx(math.exp(-sum(rolling) / words), rel=1e-4)


def test_token_ids_need_no_tokenizer(tiny: Pair) -> None:
    model = zoo.build(tiny.ours.spec)
    ids = torch.randint(3, 300, (200,), generator=torch.Generator().manual_seed(0))
    found = perplexity(model, ids, context=32)
    assert (found.words, found.protocol.source, found.protocol.tokenizer) == (None, "token ids", "")
    assert found == dataclasses.replace(perplexity(model, ids.tolist(), context=32), seconds=found.seconds)


def test_the_default_text_and_context_are_recorded(tiny: Pair) -> None:
    found = perplexity(tiny.ours, limit=3)
    assert found.protocol.source.startswith("pydoc_data.topics")
    assert found.protocol.context == tiny.ours.spec.context == 64
    assert len(found.windows) == found.protocol.limit == 3


def test_a_file_is_the_same_text(tiny: Pair, prose: str, tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text(prose[:500], encoding="utf-8")
    found = perplexity(tiny.ours, tmp_path / "page.txt")
    assert found.protocol.source == "page.txt"
    assert found.versus(perplexity(tiny.ours, prose[:500])).ratio == 1


def test_a_cache_that_loses_precision_is_judged(tiny: Pair, prose: str) -> None:
    reference = tiny.ours.source.reference
    exact, coarse = (perplexity(zoo.load(reference, override=[f"cache={cache}"]), prose[:800]) for cache in ("dense", "int4"))
    assert abs(coarse.versus(exact).nll) > 1e-4


LOSSY = {
    "int8": "int8",
    "kivi": "{name: kivi, bits: 2, group: 4, residual: 8}",
    "h2o": "{name: h2o, heavy: 6, recent: 6, interval: 4}",
    "snapkv": "{name: snapkv, tokens: 8, window: 4, pool: 3}",
    "sinks_recent": "{name: sinks_recent, sinks: 1, window: 6, room: 4}",
}


@torch.inference_mode()
def step_by_step(model: Any, ids: list[int], prompt: int) -> float:
    """Summed nll of the tokens behind the prompt, fed one at a time as generation does."""
    cache = model.new_cache(1)
    logits = model(torch.tensor([ids[:prompt]]), cache=cache, last=True)
    total = 0.0
    for token in ids[prompt:]:
        total -= float(logits[0, -1].double().log_softmax(-1)[token])
        logits = model(torch.tensor([[token]]), cache=cache)
    return total


@pytest.mark.parametrize("cache", LOSSY.values(), ids=LOSSY.keys())
@pytest.mark.parametrize("prompt", [1, 21])
def test_a_cache_that_loses_is_read_through_as_generation_does(tiny: Pair, prose: str, cache: str, prompt: int) -> None:
    model = zoo.load(tiny.ours.source.reference, override=[f"cache={cache}"])
    exact, found = (perplexity(m, prose[:400], context=60, limit=2, prompt=prompt, batch_size=2) for m in (tiny.ours, model))
    windows = [model.tokenizer.encode(prose[:400])[i : i + 60] for i in (0, 60)]
    assert found.nll * found.tokens == pytest.approx(sum(step_by_step(model, w, prompt) for w in windows), rel=1e-5)
    assert found.tokens == exact.tokens == 2 * (60 - prompt)
    assert "through the" in found.protocol.reading
    lossless = prompt == 1 and "snapkv" in cache  # it thins out prompts alone
    assert (found.versus(exact).nll == pytest.approx(0, abs=1e-6)) == lossless


def test_without_a_prompt_a_lossy_cache_is_read_through_from_the_start(tiny: Pair, prose: str) -> None:
    model = zoo.load(tiny.ours.source.reference, override=[f"cache={LOSSY['kivi']}"])
    found = perplexity(model, prose[:200], context=60, limit=1)
    [ids] = [model.tokenizer.encode(prose[:200])[:60]]
    assert found.nll * found.tokens == pytest.approx(step_by_step(model, ids, 1), rel=1e-5)
    assert found.protocol.reading == "through the kivi cache: calls of at most 8 tokens"


@pytest.mark.parametrize("cache", ["dense", "paged", "{name: sliding, room: 8}"])
def test_a_prompt_of_an_exact_cache_only_says_what_is_scored(tiny: Pair, prose: str, cache: str) -> None:
    window = "layers.*.mixer.pattern={name: window, size: 9}"
    model = zoo.load(tiny.ours.source.reference, override=[window, f"cache={cache}"])
    whole, rest = (perplexity(model, prose[:700], context=40, stride=11, limit=3, prompt=p) for p in (None, 25))
    reference = zoo.load(tiny.ours.source.reference, override=[window])
    assert rest.value == pytest.approx(perplexity(reference, prose[:700], context=40, stride=11, limit=3, prompt=25).value, rel=1e-6)
    assert [n for _, n in whole.windows] == [39, 11, 11]
    assert [n for _, n in rest.windows] == [15, 11, 11]
    assert (rest.words, rest.protocol.reading) == (None, "each window in one call")


def test_the_cache_of_a_window_is_weighed(tiny: Pair) -> None:
    """Dense: what the declaration says of a token, and eight bytes for its position; a window holds no more than it needs."""
    per_token = tiny.ours.spec.cache_bytes_per_token(4) + 8
    ids = torch.randint(3, 300, (600,), generator=torch.Generator().manual_seed(0))
    assert perplexity(zoo.build(tiny.ours.spec), ids, context=300, batch_size=2).cache_bytes == 300 * per_token
    recent = zoo.build(tiny.ours.spec, "cache={name: sinks_recent, sinks: 1, window: 6, room: 2}")
    assert 7 * per_token <= (perplexity(recent, ids, context=300).cache_bytes or 0) < 15 * per_token


# ---- comparisons --------------------------------------------------------------------------------------------------------------


def test_protocols_that_differ_are_not_compared(tiny: Pair, prose: str) -> None:
    a = perplexity(tiny.ours, prose[:900], context=32)
    for b in (perplexity(tiny.ours, prose[:900], context=64), perplexity(tiny.ours, prose[:901], context=32)):
        with pytest.raises(ValueError, match=r"context 32 against 64|sha256"):
            b.versus(a)


def test_noise_is_that_of_the_paired_windows() -> None:
    a, b = (Perplexity.from_dict(measured_perplexity(nll, noise, seed, protocol())) for nll, noise, seed in ((3, 0, 1), (3.2, 0.1, 2)))
    change = b.versus(a)
    differences = torch.tensor([(x - y) / n for (x, n), (y, _) in zip(b.windows, a.windows, strict=True)], dtype=torch.float64)
    assert change.nll == pytest.approx(float(differences.mean()))
    assert change.stderr == pytest.approx(float(differences.std() / len(differences) ** 0.5))
    assert change.ratio == pytest.approx(b.value / a.value)


def test_results_survive_json(tiny: Pair, prose: str) -> None:
    found = perplexity(tiny.ours, prose[:900], context=32)
    assert Perplexity.from_dict(json.loads(json.dumps(dataclasses.asdict(found)))) == found


# ---- mistakes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 65}, "stride lie in 1..64"),
        ({"context": 1}, "context must be at least 2"),
        ({"unit": "word"}, "bos='window'"),
        ({"unit": "word", "bos": "window", "limit": 1}, "every token"),
        ({"text": ""}, "at least two"),
        ({"text": [5]}, "at least two"),
        ({"text": list(range(9)), "prompt": 9}, "9 tokens; at least 10"),
        ({"prompt": 64}, "prompt must leave tokens of the 64"),
        ({"prompt": -1}, "prompt must leave tokens"),
    ],
)
def test_mistakes_are_told_before_the_model_runs(tiny: Pair, prose: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any],
                                                 message: str) -> None:  # fmt: skip
    monkeypatch.setattr(type(tiny.ours), "hidden", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        perplexity(tiny.ours, **({"text": prose} | options))


def test_a_tokenizer_without_a_beginning_says_so(tiny: Pair, prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = copy.deepcopy(tiny.ours.tokenizer)
    tokenizer.bos_token = None
    monkeypatch.setitem(vars(tiny.ours.source), "tokenizer", tokenizer)
    with pytest.raises(ValueError, match="bos='none'"):
        perplexity(tiny.ours, prose, bos="text")


@pytest.mark.gpu
def test_on_a_gpu_the_figure_is_the_same(tiny: Pair, prose: str) -> None:
    documents = [prose[:400], prose[400:700]]
    cpu, gpu = (perplexity(zoo.load(tiny.ours.source.reference, device=d), documents, joining=None, batch_size=2) for d in ("cpu", "cuda"))
    assert gpu.value == pytest.approx(cpu.value, rel=1e-3)
