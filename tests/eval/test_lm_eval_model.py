"""As a model of lm-eval, ours gives what lm-eval's own ``hf`` model gives, request by request."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM

from tests.eval.made import Pair
from tests.eval.test_special_tokens import VOCABULARY, WRAPPED, speaking
from zoo.eval import evaluate, scoring
from zoo.eval.lm_eval_model import ZooLM
from zoo.eval.tasks import task_manager

CONTEXT = "Once upon a time there was a little girl who liked to play"
LOGLIKELIHOODS = [
    (CONTEXT, " with her friends"),
    (CONTEXT, " in the park all day"),
    (CONTEXT, " in the park all night"),
    (CONTEXT, " alone"),
    (CONTEXT, " with her friends"),  # the same again
    ("", "Tom"),
    ("", "One day, Tom"),
    ("One ", "day"),  # the space belongs to the continuation
    ("The cat sat on the", " mat"),
    ("The cat sat on the", " m"),
    (CONTEXT * 12, " the end"),  # too long for every one of the models
    (CONTEXT * 12, " the very end"),
]


def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def both(pair: Pair, batch_size: int = 4) -> tuple[ZooLM, HFLM]:
    theirs = HFLM(pretrained=pair.theirs, tokenizer=copy.deepcopy(pair.ours.tokenizer), device="cpu", batch_size=batch_size)
    return ZooLM(pair.ours, batch_size=batch_size), theirs


def test_loglikelihoods_equal_hf(pair: Pair) -> None:
    asked = requests("loglikelihood", LOGLIKELIHOODS)
    ours, theirs = (model.loglikelihood(asked, disable_tqdm=True) for model in both(pair))
    assert [x for x, _ in ours] == pytest.approx([x for x, _ in theirs], abs=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_greedy_continuations_are_recognised(pair: Pair) -> None:
    model = ZooLM(pair.ours)
    prompt = [1, *pair.ours.tokenizer.encode(CONTEXT, add_special_tokens=False)][:40]
    new = pair.ours.generate([prompt], max_new_tokens=5, eos=False)[0]
    wrong = [*new[:-1], (new[-1] + 1) % 100]
    answers = model._loglikelihood_tokens([(None, prompt, new), (None, prompt, wrong), (None, prompt, new[:1])], disable_tqdm=True)
    assert [greedy for _, greedy in answers] == [True, False, True]


def test_rolling_loglikelihoods_equal_hf(pair: Pair, prose: str) -> None:
    asked = requests("loglikelihood_rolling", [(prose[:1500],), (prose[:40],), (prose[2000:2700],), ("a",)])
    ours, theirs = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in both(pair))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_generated_texts_equal_hf(pair: Pair) -> None:
    settings = [{"until": ["\n\n", "a"], "max_gen_toks": 12}, {"until": [], "max_gen_toks": 20, "do_sample": False}]
    asked = requests("generate_until", [(text, s) for s in settings for text in (CONTEXT[:20], "One day", CONTEXT[:9], CONTEXT * 12)])
    ours, theirs = (model.generate_until(asked, disable_tqdm=True) for model in both(pair))
    assert ours == theirs
    assert any(ours)


def check_tasks(pair: Pair, tasks: list[str], limit: int, data: Path | None = None) -> None:
    """Every log-likelihood and every accuracy agrees."""
    manager = task_manager(data, builtin=False)
    ours, theirs = (simple_evaluate(m, tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0) for m in both(pair, 8))
    for task in tasks:
        assert _answers(ours, task) == pytest.approx(_answers(theirs, task), abs=1e-3)
        assert _accuracies(ours, task) == _accuracies(theirs, task)


def _answers(found: Any, task: str) -> list[float]:
    return [answer[0][0] for sample in found["samples"][task] for answer in sample["resps"]]


def _accuracies(found: Any, task: str) -> dict[str, float]:
    return {k: v for k, v in found["results"][task].items() if k in ("acc,none", "acc_norm,none")}


def test_accuracies_equal_hf(pair: Pair) -> None:
    check_tasks(pair, ["zoo_facts", "zoo_common_sense", "zoo_last_word"], 16)


@pytest.mark.slow
def test_accuracies_on_published_tasks_equal_hf(pair: Pair, shared_data: Path) -> None:
    check_tasks(pair, ["zoo_lambada", "zoo_arc_easy"], 50, shared_data / "eval")


# ---- tokenizers that end every text with a token ------------------------------------------------------------------------------

WORDS = "the cat sat on a mat and the cat ran on and on"


@pytest.mark.parametrize("kind", ["after", "both"])
def test_an_ending_is_in_no_request(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each answer is that of the same model with a tokenizer that puts no ending there."""
    with caplog.at_level(logging.WARNING):
        ended = ZooLM(speaking(WRAPPED[kind]))
    plain = ZooLM(speaking(WRAPPED["before" if kind == "both" else "none"]))
    assert [r.message for r in caplog.records] == ended.notes
    assert ended.notes[0].startswith("The tokenizer ends every text with </s>; it is left out")
    assert not plain.notes
    for kind_of_request, asked in {
        "loglikelihood": [("the cat", " sat"), ("the cat sat on", " a mat"), ("", "the cat"), ("a mat ", "and")],
        "loglikelihood_rolling": [(WORDS,), ("the cat",)],
        "generate_until": [("the cat sat", {"until": ["mat"], "max_gen_toks": 3}), ("on", {"max_gen_toks": 4})],
    }.items():
        got, want = (getattr(m, kind_of_request)(requests(kind_of_request, asked), disable_tqdm=True) for m in (ended, plain))
        assert got == want


def test_the_scored_tokens_are_the_continuations(caplog: pytest.LogCaptureFixture) -> None:
    model = ZooLM(speaking(WRAPPED["both"]))
    context, continuation = model._encode_pair("the cat", " sat on")
    assert context == [0, *(VOCABULARY[word] for word in ("the", "cat"))]
    assert continuation == [VOCABULARY[word] for word in ("sat", "on")]
    assert model.tok_encode("the </s>") == [0, VOCABULARY["the"], VOCABULARY["</s>"]]  # what a text itself says is kept


def test_results_note_a_missing_ending(tmp_path: Path) -> None:
    ended, plain = (evaluate(speaking(WRAPPED[kind]), "zoo_last_word", limit=1) for kind in ("after", "none"))
    assert ended.settings["notes"][0].startswith("The tokenizer ends every text with </s>")
    assert "notes" not in plain.settings
    assert ended.tasks["zoo_last_word"].metrics == plain.tasks["zoo_last_word"].metrics


# ---- batches and shared contexts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_answers_do_not_depend_on_the_batch(tiny: Pair, batch_size: int) -> None:
    asked = requests("loglikelihood", LOGLIKELIHOODS)
    alone, together = (ZooLM(tiny.ours, batch_size=b).loglikelihood(asked, disable_tqdm=True) for b in (2, batch_size))
    assert [x for x, _ in together] == pytest.approx([x for x, _ in alone], abs=1e-4)


def tokens_run(monkeypatch: pytest.MonkeyPatch, model: Any, pairs: list, batch_size: int) -> tuple[int, list]:
    """How many tokens the model ran for these pairs, and the answers."""
    counted = [0]
    hidden = type(model).hidden

    def count(self: Any, ids: torch.Tensor, step: Any, cache: Any) -> torch.Tensor:
        counted[0] += int(step.valid.sum())
        return hidden(self, ids, step, cache)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "hidden", count)
        answers = sorted(scoring.continuations(model, pairs, batch_size))
    return counted[0], answers


def test_a_shared_context_runs_once(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    context, other = tuple(range(3, 43)), tuple(range(50, 95))
    pairs = [(context, (7, 8, 9)), (other, (5, 6)), (context, (7, 8, 10)), (context, (11,)), (context, (12, 13)), (other, (6, 6, 6, 6))]
    shared, answers = tokens_run(monkeypatch, tiny.ours, pairs, 2)
    monkeypatch.setattr(scoring, "WORTH_SHARING", 10**9)
    apart, plain = tokens_run(monkeypatch, tiny.ours, pairs, 2)
    assert shared == 40 + 2 + 1 + 45 + 1 + 3
    assert apart == (40 + 2) + 40 + (40 + 1) + (45 + 1) + (45 + 3)
    assert [i for i, *_ in answers] == list(range(len(pairs)))
    assert [x for _, x, _ in answers] == pytest.approx([x for _, x, _ in plain], abs=1e-4)


def test_choices_of_one_token_cost_one_pass(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    context = tuple(range(3, 13))
    run, answers = tokens_run(monkeypatch, tiny.ours, [(context, (t,)) for t in range(20, 24)], 8)
    assert run == len(context)
    assert len({round(x, 6) for _, x, _ in answers}) == 4


# ---- conversation, registration, mistakes -------------------------------------------------------------------------------------


def test_conversations_use_the_template_and_get_one_beginning(tiny: Pair) -> None:
    model = ZooLM(tiny.ours)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert model.apply_chat_template(talk) == "<|system|>Be brief.</s><|user|>Hi</s><|assistant|>"
    assert model.apply_chat_template([*talk, {"role": "assistant", "content": "He"}], add_generation_prompt=False).endswith(
        "<|assistant|>He"
    )
    assert model.tok_encode("<s>Hi") == [1, *model.tok_encode("Hi", add_special_tokens=False)] == model.tok_encode("Hi")
    assert model.chat_template(True) == tiny.ours.tokenizer.chat_template
    assert model.tokenizer_name


def test_templates_without_a_system_role_lose_the_system_message(tiny: Pair, caplog: pytest.LogCaptureFixture,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    strict = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{ m.content }}]{% endfor %}"
    monkeypatch.setattr(tiny.ours.tokenizer, "chat_template", strict)
    with caplog.at_level(logging.WARNING):
        text = ZooLM(tiny.ours).apply_chat_template([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    assert text == "[u]"
    assert "system" in caplog.text


def test_a_context_that_is_too_long_is_cut_with_a_warning(tiny: Pair, caplog: pytest.LogCaptureFixture) -> None:
    model = ZooLM(tiny.ours, max_length=10)
    long, cut = (model._fit(tuple(range(n)), (1, 2, 3)) for n in (8, 9))
    assert long == (tuple(range(8)), (1, 2, 3))
    assert cut == (tuple(range(1, 9)), (1, 2, 3))
    assert "1 tokens of context were cut" in caplog.text


def test_lm_eval_finds_the_model_by_name(tiny: Pair) -> None:
    from lm_eval.api.registry import get_model

    arguments = f"pretrained={tiny.ours.source.reference},max_length=32,dtype=float32"
    model = get_model("zoo").create_from_arg_string(arguments, {"batch_size": "4", "device": "cpu", "max_batch_size": None})
    assert isinstance(model, ZooLM)
    assert (model.batch_size, model.max_length) == (4, 32)


@pytest.mark.parametrize("options", [{"batch_size": "auto"}, {"batch_size": 0}, {"device": "cpu"}, {"dtype": "float32"}])
def test_settings_that_do_not_apply_are_errors(tiny: Pair, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"batch_size|loaded already"):
        ZooLM(tiny.ours, **options)


def test_requests_that_cannot_be_served_are_errors(tiny: Pair) -> None:
    model = ZooLM(tiny.ours)
    with pytest.raises(ValueError, match="max_length is 64"):
        model._loglikelihood_tokens([(None, [1], [5] * 65)], disable_tqdm=True)
    with pytest.raises(ValueError, match="no room for its prompt"):
        model.generate_until(requests("generate_until", [("a", {"max_gen_toks": 64})]), disable_tqdm=True)
    with pytest.raises(ValueError, match="num_beams"):
        model.generate_until(requests("generate_until", [("a", {"max_gen_toks": 4, "num_beams": 2})]), disable_tqdm=True)


def test_repeated_samples_differ_and_come_back_the_same(tiny: Pair) -> None:
    asked = requests("generate_until", [("One day", {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0})] * 3)
    first = ZooLM(tiny.ours, batch_size=2).generate_until(asked, disable_tqdm=True)
    assert len(set(first)) == 3
    assert ZooLM(tiny.ours, batch_size=3).generate_until(asked, disable_tqdm=True) == first


@pytest.mark.gpu
def test_on_a_gpu_the_answers_are_the_same(tiny: Pair) -> None:
    asked = requests("loglikelihood", LOGLIKELIHOODS)
    cpu, gpu = (ZooLM(tiny.ours.source.reference, device=d).loglikelihood(asked, disable_tqdm=True) for d in ("cpu", "cuda"))
    assert [x for x, _ in gpu] == pytest.approx([x for x, _ in cpu], abs=1e-2)
