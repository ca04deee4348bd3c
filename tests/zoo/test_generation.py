"""Generation: equal to transformers, equal whatever the batch, and text that streams, stops and ends where it should."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

import zoo
from tests.zoo.oracle import llama_checkpoint
from zoo.components.spec import load
from zoo.generation import Completion, _Text, complete, eos_ids, generate, stream
from zoo.model import Model, ModelSpec
from zoo.sampling import Sampling
from zoo.tokenizers import from_gguf

PROMPTS = [[1, 5, 9, 33], [7], [2, 2, 40, 41, 42, 43, 44, 45], [90, 3]]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def byte_tokenizer() -> Any:
    """One token a byte, as ids 0..255, and ``</s>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return from_gguf({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": [*alphabet, "</s>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3], "tokenizer.ggml.merges": [], "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": TEMPLATE,
    })  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    """A random model in fp64, where no tie or rounding hides behind a difference, that speaks bytes."""
    torch.manual_seed(0)
    layer = {"mixer": {"projection": {"name": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8}, "position": "rope"},
             "mlp": {"name": "gated", "hidden": 48}}  # fmt: skip
    data = {"width": 32, "context": 64, "embed": {"name": "tokens", "vocab": 257}, "layers": [layer, layer], "head": "lm"}
    built = load(ModelSpec, data).build().double().eval()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    built.source = SimpleNamespace(tokenizer=byte_tokenizer(), generation={})
    return built


# ---- transformers


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    folder = tmp_path_factory.mktemp("llama")
    theirs = llama_checkpoint(folder, eos_token_id=[2, 17], tie_word_embeddings=False)
    return zoo.load(folder), theirs


def their_ids(theirs: Any, prompt: list[int], **options: Any) -> list[int]:
    with torch.no_grad():
        return theirs.generate(torch.tensor([prompt]), pad_token_id=0, **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_equals_transformers(pair: tuple[Model, Any], penalty: float):
    ours, theirs = pair
    expected = [their_ids(theirs, p, max_new_tokens=30, do_sample=False, repetition_penalty=penalty) for p in PROMPTS]
    assert generate(ours, PROMPTS, max_new_tokens=30, repetition_penalty=penalty) == expected
    if penalty > 1:
        assert {len(ids) for ids in expected} != {30}, "no row met an end, so ends were not compared"


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
def test_real_text_equals_transformers(shared_data: Path, name: str):
    from transformers import LlamaForCausalLM

    folder = shared_data / "weights" / name
    ours, theirs = zoo.load(folder), LlamaForCausalLM.from_pretrained(folder).eval()
    prompts = ["Once upon a time, there was", "Lily", "The dog ran to the big red"]
    for prompt, text in zip(prompts, ours.generate(prompts, max_new_tokens=25), strict=True):
        ids = ours.tokenizer.encode(prompt)
        whole = ids + their_ids(theirs, ids, max_new_tokens=25, do_sample=False)
        assert ours.tokenizer.decode(whole, skip_special_tokens=True) == prompt + text


def test_logprobs_are_those_of_the_whole_text(model: Model):
    for prompt, done in zip(PROMPTS, complete(model, PROMPTS, max_new_tokens=6, sampling=Sampling(temperature=2.0, seed=4)), strict=True):
        ids = torch.tensor([prompt + done.ids])
        with torch.no_grad():
            chances = model(ids)[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = chances.gather(1, torch.tensor(done.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), expected.float(), rtol=1e-4, atol=1e-5)


# ---- batches


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=[1, 2, 3, 4]),
        Sampling(repetition_penalty=1.3, seed=[1, 2, 3, 4]),
        Sampling(temperature=1.0, seed=[1, 2, 3, 4]),
        Sampling(temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=[5, 5, 6, 7]),
    ],
    ids=str,
)
def test_rows_equal_the_prompt_alone(model: Model, sampling: Sampling):
    """Rows end at different times, so the batch shrinks on the way."""
    ends = range(0, 257, 9)
    together = complete(model, PROMPTS, max_new_tokens=40, sampling=sampling, eos=ends)
    for prompt, seed, row in zip(PROMPTS, sampling.seeds(4), together, strict=True):
        one = Sampling(**{k: getattr(sampling, k) for k in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}, seed=seed)
        (alone,) = complete(model, [prompt], max_new_tokens=40, sampling=one, eos=ends)
        assert (alone.ids, alone.reason) == (row.ids, row.reason)
    if sampling.temperature:
        assert len({len(row.ids) for row in together}) > 1


def test_going_on_from_half_a_text_gives_the_other_half(model: Model):
    """Noise belongs to positions, so it does not matter which tokens were in the prompt."""
    whole = generate(model, PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=3)
    assert generate(model, PROMPTS[0] + whole[:5], max_new_tokens=7, temperature=1.0, seed=3) == whole[5:]


def test_finished_rows_are_not_computed(model: Model, monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    forward = Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, ids, **options: (rows.append(len(ids)), forward(self, ids, **options))[1])
    done = complete(model, PROMPTS, max_new_tokens=40, sampling=Sampling(temperature=1.0, seed=[1, 2, 3, 4]), eos=range(0, 257, 9))
    lengths = [len(d.ids) for d in done]
    assert rows == [sum(n > step for n in lengths) for step in range(1, max(lengths))]


# ---- kinds of prompts


def test_answers_are_of_the_prompt_s_kind(model: Model):
    two: dict[str, Any] = {"max_new_tokens": 2}
    ids = generate(model, [1, 2, 3], **two)
    assert isinstance(ids, list)
    assert all(isinstance(i, int) for i in ids)
    assert generate(model, torch.tensor([1, 2, 3]), **two) == ids
    assert generate(model, [[1, 2, 3], [4]], **two)[0] == ids
    assert generate(model, torch.tensor([[1, 2, 3], [4, 4, 4]]), **two)[0] == ids
    text = generate(model, "abc", **two)
    assert isinstance(text, str)
    assert generate(model, ["abc", "d"], **two)[0] == text
    assert generate(model, ("abc",), **two) == [text]
    assert generate(model, [], **two) == []
    assert model.generate("abc", **two) == text


def test_conversations(model: Model):
    messages = [{"role": "user", "content": "hey"}]
    expected = generate(model, "[user]hey[assistant]", max_new_tokens=4)
    assert generate(model, messages, max_new_tokens=4) == expected
    assert generate(model, "hey", chat=True, max_new_tokens=4) == expected
    assert generate(model, [messages, messages], max_new_tokens=4) == [expected] * 2
    assert generate(model, ["hey", "you"], chat=True, max_new_tokens=4)[0] == expected
    assert "".join(stream(model, messages, max_new_tokens=4)) == expected
    told = generate(model, "[system]x[user]hey[assistant]", max_new_tokens=4)
    assert generate(model, "hey", chat=True, system="x", max_new_tokens=4) == told


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("a", {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ("a", {"temperature": -1}, "temperature must be at least 0"),
        ("a", {"top_k": 3}, "temperature above 0"),
        ("a", {"stop": ""}, "empty string"),
        ("a", {"stop": ["x", ""]}, "empty string"),
        ("a", {"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ("", {}, "prompt 0 has no tokens"),
        (["a", ""], {}, "prompt 1 has no tokens"),
        (["a", [1]], {}, "one kind, these are ids, text"),
        ([1.5], {}, "must be a text, token ids, or a list of messages"),
        (None, {}, "must be a text, token ids, or a list of messages"),
        ([{"content": "x"}], {}, "list of messages with role and content"),
        ([1, 2], {"chat": True}, "chat: the prompt is token ids"),
        ("a", {"system": "x"}, "system: only conversations"),
        ([{"role": "system", "content": "x"}], {"system": "x"}, "system: only conversations"),
        (["a"], {"stream": print}, "only a single text"),
        ([1], {"stream": print}, "only a single text"),
        ([300], {}, "must lie in 0..256"),
        ([True, False], {}, r"got \[True, False\]; ids are whole numbers"),
        ([[1, 2], [True]], {}, "ids are whole numbers from 0 on"),
        ([1, -1], {}, r"got \[1, -1\]; ids are whole numbers"),
        (torch.tensor([True]), {}, "ids are whole numbers from 0 on"),
        (torch.tensor([1.0]), {}, "ids are whole numbers from 0 on"),
        ("a", {"eos": "</S>"}, "eos: the tokenizer has no token '</S>'; did you mean '</s>'"),
        ("a", {"eos": [1, -2]}, "eos: a token is an id from 0 on, or a string of the tokenizer, got -2"),
        ("a", {"eos": [True]}, "eos: a token is an id from 0 on.*got True"),
        ("a", {"eos": None}, "eos: a token is an id from 0 on.*got None"),
        ("a", {"eos": 2.0}, "eos: a token is an id from 0 on.*got 2.0"),
        ("a", {"eos": [[2]]}, r"eos: a token is an id from 0 on.*got \[2\]"),
    ],
)
def test_errors_name_the_place(model: Model, prompt: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, **options)


def test_stream_complains_at_once(model: Model):
    for prompt in (["a"], [1, 2]):
        with pytest.raises(ValueError, match="only a single text"):
            stream(model, prompt)
    with pytest.raises(ValueError, match="complete takes a list"):
        complete(model, "a")


def test_without_a_tokenizer_ids_work_and_text_does_not(model: Model):
    bare = load(ModelSpec, zoo.components.spec.dump(model.spec)).build()
    assert len(generate(bare, [1, 2], max_new_tokens=3)) == 3
    with pytest.raises(ValueError, match="has no tokenizer"):
        generate(bare, "a")
    with pytest.raises(ValueError, match="has no tokenizer"):
        generate(bare, [1, 2], stop="x")


def test_without_a_chat_template(model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        generate(model, "a", chat=True)


# ---- where texts end


def test_ends(model: Model):
    ids = generate(model, PROMPTS[0], max_new_tokens=20, temperature=1.0, eos=False)
    at = ids.index(ids[6])
    for eos in (ids[6], [ids[6]], (ids[6], 256)):
        (done,) = complete(model, [PROMPTS[0]], max_new_tokens=20, sampling=Sampling(temperature=1.0), eos=eos)
        assert (done.ids, done.reason) == (ids[: at + 1], "eos")
        assert len(done.logprobs) == len(done.ids)
    (done,) = complete(model, [PROMPTS[0]], max_new_tokens=20, sampling=Sampling(temperature=1.0))
    assert done == Completion(None, ids, "length", done.logprobs)


def test_end_token_is_not_text_even_where_it_is_a_letter(model: Model):
    options: dict[str, Any] = {"max_new_tokens": 50, "temperature": 0.5, "seed": 2}
    ids = model.tokenizer.encode("abc")
    letter = next(i for i in generate(model, ids, **options) if model.tokenizer.decode([i]).isascii())
    text = generate(model, "abc", eos=letter, **options)
    assert generate(model, ids, eos=letter, **options)[-1] == letter
    assert model.tokenizer.decode([letter]) not in text


def test_ends_that_the_checkpoint_names(model: Model):
    named = SimpleNamespace(config={"eos_token_id": 3}, source=SimpleNamespace(generation={"eos_token_id": [4, 5]}))
    assert eos_ids(named) == {4, 5}  # type: ignore[arg-type]
    named.source.generation = {}
    assert eos_ids(named) == {3}  # type: ignore[arg-type]
    named.source = None
    assert eos_ids(named) == {3}  # type: ignore[arg-type]
    assert eos_ids(model) == eos_ids(model, False) == frozenset()
    assert eos_ids(model, 1) == {1}  # 1 is not True
    assert eos_ids(model, "</s>") == eos_ids(model, ["</s>", 256]) == {256}
    assert eos_ids(model, {"</s>", "a", 3}) == {256, model.tokenizer.encode("a")[0], 3}


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Model:
    return zoo.load(shared_data / "weights/stories260K")


def test_stop_strings_end_the_text_wherever_tokens_lie(stories: Model):
    prompt = "Once upon a time"
    whole = generate(stories, prompt, max_new_tokens=40)
    for start in (3, 10, 26, 41):
        for length in (1, 2, 9):
            words = whole[start : start + length]
            (done,) = complete(stories, [prompt], max_new_tokens=40, stop=["never said", words])
            assert (done.text, done.reason) == (whole[: whole.index(words)], "stop")
            pieces = list(stream(stories, prompt, max_new_tokens=40, stop=words))
            assert "".join(pieces) == done.text
    assert generate(stories, prompt, max_new_tokens=40, stop=["girl", "little"]) == whole[: whole.index("little")]


def test_first_of_several_stop_strings_wins_though_another_is_found_first(model: Model):
    text = _Text(model.tokenizer, [], ["cd", "bcde"])
    assert not any(text.add([i], last=False) for i in model.tokenizer.encode("abc"))
    assert text.add(model.tokenizer.encode("de"), last=False)
    assert text.so_far == "a"


# ---- streams


@pytest.mark.parametrize("seed", range(8))
def test_stream_equals_generate_on_bytes_that_are_hardly_text(model: Model, seed: int):
    """Random bytes: broken and whole characters of all lengths."""
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 3.0, "seed": seed, "stop": ["\u00e9", "ab"]}
    pieces = list(stream(model, "é漢", **options))
    assert all(pieces)
    assert "".join(pieces) == generate(model, "é漢", **options)
    heard: list[str] = []
    assert generate(model, "é漢", stream=heard.append, **options) == "".join(heard)
    assert heard == pieces


def feed(tokenizer: Any, prompt: list[int], ids: list[int]) -> list[str]:
    """The text after each token."""
    text, out = _Text(tokenizer, prompt, []), []
    for i, token in enumerate(ids):
        text.add([token], last=i == len(ids) - 1)
        out.append(text.so_far)
    return out


@pytest.mark.parametrize("text", ["héllo ☃ 😀 漢字!", " two  spaces ", "a👩‍👩‍👧b", "\ufffd marks \ufffd"])
def test_characters_come_whole(model: Model, text: str):
    tokenizer = model.tokenizer
    seen = feed(tokenizer, tokenizer.encode("x"), tokenizer.encode(text))
    assert seen[-1] == text
    assert all(text.startswith(t) for t in seen)


@pytest.mark.parametrize("seed", range(20))
def test_growing_text_equals_decoding_at_once(stories: Model, seed: int):
    generator = torch.Generator().manual_seed(seed)
    tokenizer = stories.tokenizer
    prompt, ids = (torch.randint(259, 512, (n,), generator=generator).tolist() for n in (6, 40))
    ids[10:13] = tokenizer.encode("漢", add_special_tokens=False)[-3:]
    ids[20] = 2  # a special token within the text
    whole, before = (tokenizer.decode(x, skip_special_tokens=True) for x in (prompt + ids, prompt))
    assert feed(tokenizer, prompt, ids)[-1] == whole[len(before) :]


def test_a_stopped_stream_can_be_left(model: Model):
    pieces = stream(model, "abc", max_new_tokens=50, temperature=1.0)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert not torch.is_inference_mode_enabled()


def test_inference_mode_does_not_leak_between_pieces(model: Model):
    for _ in stream(model, "abc", max_new_tokens=5):
        assert not torch.is_inference_mode_enabled()


# ---- the demo model


@pytest.mark.slow
def test_chat_with_a_real_model(smollm2: Path):
    model = zoo.load(smollm2)
    answer = model.generate("What is the capital of France? Answer in one word.", chat=True, max_new_tokens=20)
    assert "Paris" in answer
    assert "<|im_end|>" not in answer
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    assert "".join(stream(model, messages, max_new_tokens=20)) == answer
    assert complete(model, ["1 2 3 4 5"], max_new_tokens=4)[0].text == " 6 7"
