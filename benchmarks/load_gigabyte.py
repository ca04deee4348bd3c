"""Loading a random checkpoint of a gigabyte against transformers: seconds until every weight was read once, and peak memory.

Each in a fresh process, in turns. Imports are apart: both load a tiny checkpoint of the same family before the clock starts.

    python benchmarks/load_gigabyte.py [--out benchmarks/results/load_gigabyte.json] [--rounds 5]

The checkpoint is a LLaMA with random bfloat16 weights in two shards, written once; files are in the page cache for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from zoo.eval.environment import describe_environment
from zoo.eval.results import write_atomic

CHILD = """
import re, sys, time, torch
{imports}
resident = lambda what: int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
load = lambda folder: {load}
load(sys.argv[2])
before, began = resident("VmRSS"), time.perf_counter()
model = load(sys.argv[1])
with torch.no_grad():
    total = sum(float(p.sum()) for p in model.parameters())  # every page is really there: a file that is only mapped is not read
seconds = time.perf_counter() - began
held = sum(p.nbytes for p in {{id(p): p for p in model.parameters()}}.values())
print(seconds, resident("VmHWM") - before, held)
"""
OURS = CHILD.format(imports="import zoo, zoo.loading, zoo.families.llama", load="zoo.load(folder, dtype='bfloat16')")
THEIRS = CHILD.format(imports="from transformers import LlamaForCausalLM as M", load="M.from_pretrained(folder, dtype=torch.bfloat16)")


LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
         "vocab_size": 32000}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def write_checkpoint(folder: Path, sizes: dict[str, int]) -> int:
    """A LLaMA of these sizes with random weights, of about 10^9 bytes for LARGE; returns its size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="600MB")
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def child(code: str, folder: Path, tiny: Path) -> dict[str, float]:
    out = subprocess.run([sys.executable, "-c", code, str(folder), str(tiny)], capture_output=True, text=True, check=True).stdout
    seconds, peak, held = map(float, out.split()[-3:])
    return {"seconds": seconds, "peak_bytes": peak, "model_bytes": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "load_gigabyte.json")
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, tiny = Path(scratch) / "large", Path(scratch) / "tiny"
        size, _ = write_checkpoint(folder, LARGE), write_checkpoint(tiny, TINY)
        rounds = [{"zoo": child(OURS, folder, tiny), "transformers": child(THEIRS, folder, tiny)} for _ in range(a.rounds)]
    results = {
        "environment": describe_environment(),
        "checkpoint_bytes": size,
        "rounds": rounds,
        "transformers_over_zoo_seconds": statistics.median(r["transformers"]["seconds"] / r["zoo"]["seconds"] for r in rounds),
        "zoo_peak_over_model": max(r["zoo"]["peak_bytes"] / r["zoo"]["model_bytes"] for r in rounds),
        "transformers_peak_over_model": max(r["transformers"]["peak_bytes"] / r["transformers"]["model_bytes"] for r in rounds),
    }
    write_atomic(a.out, (json.dumps(results, indent=1) + "\n").encode())
    print(json.dumps({k: v for k, v in results.items() if k not in ("environment", "rounds")}, indent=1))


if __name__ == "__main__":
    main()
