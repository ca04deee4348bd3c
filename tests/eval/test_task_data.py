"""The evaluation tasks: their data is sound and balanced, and lm-eval builds the prompts that it should from it."""

import json
from collections import Counter, defaultdict

import pytest

from zoo.eval.tasks import FOLDER, VARIABLE, local_path, task_manager

CHOICE_TASKS = {"zoo_facts": ("question", 4, 130), "zoo_common_sense": ("premise", 2, 120)}  # text field, choices, least items


def read(task: str) -> list[dict]:
    with (FOLDER / "data" / f"{task}.jsonl").open(encoding="ascii") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(params=CHOICE_TASKS)
def choice_task(request):
    text, width, least = CHOICE_TASKS[request.param]
    rows = read(request.param)
    assert len(rows) >= least
    return rows, text, width


def test_choice_items_are_well_formed(choice_task):
    rows, text, width = choice_task
    for row in rows:
        assert row[text] == row[text].strip() != ""
        assert len(set(row["choices"])) == len(row["choices"]) == width, row
        assert all(choice == choice.strip() != "" for choice in row["choices"]), row
        assert row["gold"] in range(width)


def test_no_item_comes_twice(choice_task):
    rows, text, _ = choice_task
    assert [item for item, times in Counter(row[text].lower() for row in rows).items() if times > 1] == []


def test_gold_positions_are_balanced(choice_task):
    rows, _, width = choice_task
    assert Counter(row["gold"] for row in rows) == dict.fromkeys(range(width), len(rows) // width)


def test_choices_alone_give_nothing_away(choice_task):
    right = defaultdict(list)
    for row in choice_task[0]:
        right[tuple(sorted(row["choices"]))].append(row["choices"][row["gold"]])
    assert [(choices, gold) for choices, gold in right.items() if sorted(gold) != list(choices)] == []


def test_continuations_have_about_the_same_length():
    for row in read("zoo_common_sense"):
        short, long = sorted(map(len, row["choices"]))
        assert long <= 1.3 * short, row


def test_facts_cover_every_topic():
    topics = Counter(row["topic"] for row in read("zoo_facts"))
    assert set(topics) == {"animals", "everyday", "geography", "history", "science"}
    assert min(topics.values()) >= 20


def test_last_words_are_plain_and_all_different():
    texts = [row["text"] for row in read("zoo_last_word")]
    last = [text.split(" ")[-1] for text in texts]
    assert len(texts) >= 110
    assert [word for word in last if not word.isalpha()] == []
    assert len({word.lower() for word in last}) == len(texts)  # so that no fixed word scores above one item
    assert all(text.split() == text.split(" ") and len(text.split()) > 20 for text in texts)


def test_most_last_words_are_in_their_passage():
    def repeated(text: str) -> bool:
        *before, last = text.lower().split()
        return last in {word.strip('.,?!"') for word in before}

    hits = [repeated(row["text"]) for row in read("zoo_last_word")]
    assert 0.5 < sum(hits) / len(hits) < 0.9


@pytest.mark.parametrize("task", [*CHOICE_TASKS, "zoo_last_word"])
def test_lm_eval_knows_our_tasks_from_any_folder(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = task_manager(builtin=False).load([task])["tasks"][task]
    assert list(loaded.test_docs()) == read(task)


LOCAL = {  # task: file, a line of it, prompt, target, choices
    "zoo_lambada": ("lambada_openai.jsonl", {"context": 'A\u2028"b c', "continuation": "d"}, 'A\u2028"b c', " d", None),
    "zoo_arc_easy": ("arc_easy.jsonl", {"query": "Question: Q?", "choices": ["a", "b"], "gold": 1}, "Question: Q?\nAnswer:", 1, ["a", "b"]),
    "zoo_piqa": ("piqa.jsonl", {"query": "Question: Q\n", "choices": ["a", "b"], "gold": 0}, "Question: Q\nAnswer:", 0, ["a", "b"]),
}


@pytest.mark.parametrize("task", LOCAL)
def test_prompts_of_local_tasks_are_those_of_lm_eval(task, tmp_path):
    file, row, prompt, target, choices = LOCAL[task]
    (tmp_path / file).write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    loaded = task_manager(tmp_path, builtin=False).load([task])["tasks"][task]
    (doc,) = loaded.test_docs()
    assert loaded.doc_to_text(doc) == prompt
    assert loaded.doc_to_target(doc) == target
    assert choices is None or loaded.doc_to_choice(doc) == choices


def test_argument_goes_before_environment(tmp_path, monkeypatch):
    for folder in ("given", "set"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "piqa.jsonl").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "set"))
    assert local_path("piqa.jsonl") == tmp_path / "set" / "piqa.jsonl"
    assert local_path("piqa.jsonl", str(tmp_path / "given")) == tmp_path / "given" / "piqa.jsonl"


def test_missing_file_is_an_error_with_folder_and_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(FileNotFoundError, match=rf"no folder was given that holds piqa\.jsonl.*{VARIABLE}"):
        task_manager(builtin=False).load(["zoo_piqa"])
    with pytest.raises(FileNotFoundError, match=rf"no piqa\.jsonl in {tmp_path}.*{VARIABLE}"):
        task_manager(tmp_path, builtin=False).load(["zoo_piqa"])
