"""``evaluate`` runs lm-eval's tasks by name and says what is needed to compare and repeat the result."""

from __future__ import annotations

import math
import subprocess
import sys
from statistics import fmean

import pytest

from tests.eval.made import Pair
from zoo.eval import evaluate
from zoo.eval.harness import _unknown, paired_difference


def test_results_carry_what_a_comparison_needs(tiny: Pair) -> None:
    found = evaluate(tiny.ours, ["zoo_facts", "zoo_last_word"], limit=12, num_fewshot=1, seed=3)
    facts = found.tasks["zoo_facts"]
    assert (facts.n, facts.shots, facts.version) == (12, 1, "1.0")
    assert facts.items["acc"] == tuple(facts.items["acc"])
    assert len(facts.items["acc"]) == 12
    assert fmean(facts.items["acc"]) == pytest.approx(facts.metrics["acc"])
    assert facts.stderr["acc"] == pytest.approx(math.sqrt(facts.metrics["acc"] * (1 - facts.metrics["acc"]) / 11))
    last = found.tasks["zoo_last_word"]
    assert last.higher_is_better == {"perplexity": False, "acc": True}
    assert "perplexity" not in last.items, "it is no mean of the documents' values"
    assert found.settings["seed"] == 3
    assert found.settings["num_fewshot"] == 1


def test_the_same_evaluation_gives_the_same_items(tiny: Pair) -> None:
    first, again = (evaluate(tiny.ours, "zoo_common_sense", limit=10, batch_size=b) for b in (3, 8))
    assert first.tasks["zoo_common_sense"].items == again.tasks["zoo_common_sense"].items


def test_a_tag_runs_all_its_tasks(tiny: Pair) -> None:
    found = evaluate(tiny.ours, "zoo_own", limit=2)
    assert set(found.tasks) == {"zoo_facts", "zoo_common_sense", "zoo_last_word"}


def test_conversations_change_the_prompts(tiny: Pair) -> None:
    plain, chat = (evaluate(tiny.ours, "zoo_last_word", limit=4, **how) for how in ({}, {"chat_template": True, "system": "Go on."}))
    assert plain.tasks["zoo_last_word"].metrics["perplexity"] != chat.tasks["zoo_last_word"].metrics["perplexity"]
    assert chat.settings["system"] == "Go on."


def test_a_word_like_no_task_says_where_the_names_are() -> None:
    assert _unknown("zoo_fact", ["zoo_facts", "piqa"]) == "no task named 'zoo_fact'; the nearest are zoo_facts"
    assert "lm_eval ls tasks" in _unknown("xyzzy", ["zoo_facts", "piqa"])


@pytest.mark.slow  # reads lm-eval's own index
def test_unknown_tasks_name_the_nearest(tiny: Pair) -> None:
    with pytest.raises(ValueError, match=r"(?s)'zoo_fact'.*zoo_facts.*'hellaswga'.*hellaswag"):
        evaluate(tiny.ours, ["zoo_fact", "hellaswga", "zoo_facts"])


def test_a_template_that_is_not_there_is_an_error(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.ours.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="chat_template: the tokenizer"):
        evaluate(tiny.ours, "zoo_facts", chat_template=True)


def test_no_tasks_are_an_error(tiny: Pair) -> None:
    with pytest.raises(ValueError, match="no tasks"):
        evaluate(tiny.ours, [])


def test_paired_noise_is_that_of_the_differences() -> None:
    ours, theirs = [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]
    difference, stderr = paired_difference(ours, theirs)
    assert difference == 0
    assert stderr == pytest.approx(math.sqrt(2 / 3) / 2)
    assert paired_difference([1.0], [0.0]) == (1.0, None)


@pytest.mark.slow
def test_lm_evals_command_line_knows_the_model(tiny: Pair) -> None:
    from zoo.eval.tasks import FOLDER

    command = [sys.executable, "-m", "zoo.eval", "run", "--model", "zoo", "--model_args", f"pretrained={tiny.ours.source.reference}",
               "--include_path", str(FOLDER), "--tasks", "zoo_facts", "--limit", "4", "--device", "cpu"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "|zoo_facts|" in done.stdout
