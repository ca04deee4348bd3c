"""Models, tokenizers and results for the evaluation tests."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zoo
from tests.zoo.oracle import llama_checkpoint
from zoo.eval.held_out import Perplexity, Protocol
from zoo.eval.results import Results, Variant
from zoo.model import Model
from zoo.quantize.report import Row

DOCUMENTS = 200
WINDOWS = 12


def protocol(**changes: Any) -> Protocol:
    settings = {"source": "a text", "sha256": "0" * 64, "joining": None, "documents": 1, "tokenizer": "1" * 64, "bos": "none",
                "context": 64, "stride": 64, "tail": "dropped", "unit": "token", "limit": None}  # fmt: skip
    return Protocol(**(settings | changes))


def measured_perplexity(nll: float, noise: float, seed: int, how: Protocol) -> dict[str, Any]:
    draw, shared = random.Random(seed), random.Random(0)
    windows = tuple((63 * (nll + shared.gauss(0, 0.3) + draw.gauss(0, noise)), 63) for _ in range(WINDOWS))
    total = sum(x for x, _ in windows) / sum(n for _, n in windows)
    return asdict(Perplexity(value=math.exp(total), nll=total, tokens=63 * WINDOWS, words=None, seconds=1.0, protocol=how, windows=windows))


def make_variant(name: str, bits: float, nll: float, noise: float, accuracy: float, speed: float, **more: Any) -> Variant:
    """A variant with plausible figures; ``more`` replaces any of them."""
    seed = sum(map(ord, name))
    draw, shared = random.Random(seed), random.Random(1)
    hits = [float((shared.random() if draw.random() > noise else draw.random()) < accuracy) for _ in range(DOCUMENTS)]
    mean = sum(hits) / DOCUMENTS
    text = measured_perplexity(nll, noise / 10, seed, protocol())
    spread = {"median": speed, "low": 0.97 * speed, "high": 1.02 * speed}
    conditions = {
        "batch_size": 1,
        "prompt_tokens": 512,
        "new_tokens": 64,
        "repeats": 3,
        "warmup": 1,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
    }
    task = {"acc": mean, "stderr": {"acc": math.sqrt(mean * (1 - mean) / DOCUMENTS)}, "n": DOCUMENTS, "version": "1.0", "shots": 0,
            "higher_is_better": {"acc": True}}  # fmt: skip
    figures: dict[str, Any] = {
        "perplexity": text["value"],
        "tasks": {"zoo_facts": task, "zoo_piqa": dict(task)},
        "bytes": int(16_000_000 * bits),
        "disk_bytes": int(16_100_000 * bits),
        "bits_per_weight": bits,
        "decode_tokens_per_s": speed,
        "prefill_tokens_per_s": 20 * speed,
        "time_to_first_token_s": 25 / speed,
        "peak_bytes": int(20_000_000 * bits + 3e8),
        "measured": {
            "perplexity": text,
            "tasks": {"settings": {"limit": None, "seed": 0}, "items": {"zoo_facts": {"acc": hits}, "zoo_piqa": {"acc": hits}}},
            "speed": conditions | {"decode_tokens_per_s": spread, "prefill_tokens_per_s": spread},
            "memory": {"bytes": int(16_000_000 * bits), "components": {"embed": 28_311_552, "layers.mixer": 26_542_080}},
            "peak": {"what": "VmHWM: resident memory of the whole process", "start": 300_000_000, "peak": 900_000_000},
        },
        "seconds": {"load": 2.0, "quantize": 31.5},
    }
    return Variant(name=name, **(figures | more))


def made_row(module: str, error: float | None, **facts: Any) -> dict[str, Any]:
    """A quantizer's row as a results file has it; without an output error where ``error`` is None."""
    tokens = None if error is None else 8192
    row = Row(module, "gptq", {"bits": 4, "group_size": 64}, 4096, 4.25, 0.09, tokens, error, 0.25, facts or {"damping": 0.01})
    return asdict(row)


def make_results() -> Results:
    """A baseline, quantized variants, one that failed and one that was only half measured."""
    modules = [made_row(f"layers.{i}.mlp.down", 0.011 * (i + 1)) for i in range(3)]
    diff = [("layers.0:30.mlp.down", "dense", "int4")]
    made = [
        make_variant("fp32", 32.0, 3.00, 0.0, 0.52, 9.5),
        make_variant("rtn-int8", 8.5, 3.001, 0.05, 0.52, 14.2, spec_diff=diff),
        make_variant("gptq-int4-g64", 4.25, 3.03, 0.2, 0.51, 21.0, spec_diff=diff, modules=modules),
        make_variant("rtn-int4-g64", 4.25, 3.09, 0.3, 0.49, 21.2, spec_diff=diff, modules=modules),
        make_variant("gptq-int3-g64", 3.25, 3.35, 0.5, 0.44, 23.5, spec_diff=diff),
        make_variant("half measured", 6.0, 3.01, 0.1, 0.5, 10.0, tasks={}, decode_tokens_per_s=None, peak_bytes=None),
        Variant(name="broken", error="ValueError: layers.3.mlp.up: a group of 48 does not divide 576"),
    ]
    environment = {
        "date": "2026-01-01T00:00:00+00:00",
        "python": "3.11.7",
        "cpu": {"model": "A <b>processor</b>", "logical_cores": 8},
        "gpus": [],
    }
    return Results(environment=environment, variants=made, recipe={"about": "Round-to-nearest & GPTQ on a <small> model", "device": "cpu"})


CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer that puts <s> before a text, with a chat template, in ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "Ġaeiou" for b in "nrstl"]
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore[reportAttributeAccessIssue]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = CHAT
    wrapped.save_pretrained(folder)


@dataclass(frozen=True)
class Pair:
    """The same checkpoint twice: ours, and transformers' model."""

    ours: Model
    theirs: Any


def make_tiny(folder: Path) -> Pair:
    """A random LLaMA that transformers saved."""
    theirs = llama_checkpoint(folder, vocab_size=300, max_position_embeddings=64, tie_word_embeddings=True)
    save_tokenizer(folder)
    return Pair(zoo.load(folder), theirs)


def load_pair(folder: Path) -> Pair:
    """A checkpoint on disk."""
    from transformers import AutoModelForCausalLM

    return Pair(zoo.load(folder), AutoModelForCausalLM.from_pretrained(folder).eval())
