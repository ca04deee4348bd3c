"""GPTQ against round-to-nearest in perplexity, over three draws of the calibration text.

    python benchmarks/gptq_draws.py MODEL [--rule '*.mlp.down={group_size: 32}'] [--out benchmarks/results/gptq_draws.json]

Perplexity is of the test text, which shares no paragraph with the calibration text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import zoo
from zoo.eval import perplexity
from zoo.eval.environment import describe_environment
from zoo.eval.held_out import Perplexity
from zoo.eval.results import write_atomic
from zoo.quantize import quantize

DRAWS = 3


def measure(model: str, rules: list[str], samples: int, length: int, windows: int, device: str, **settings: object) -> Perplexity:
    """Perplexity of a fresh copy of the model after quantization; no settings leave it as it is."""
    loaded = zoo.load(model, dtype="float32", device=device)
    if settings:
        method, seed = str(settings.pop("method")), int(str(settings.pop("seed")))
        quantize(loaded, method, samples=samples, length=length, seed=seed, rules=rules, progress=False, **settings)
    return perplexity(loaded, context=length, limit=windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rule", action="append", default=[])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("gptq_draws.json"))
    a = parser.parse_args()
    size = (a.model, a.rule, a.samples, a.length, a.windows, a.device)
    rows = [{"method": "none", "perplexity": measure(*size).value}]
    for bits in (4, 3):
        for method, seeds in (("rtn", [0]), ("gptq", range(DRAWS))):
            for seed in seeds:
                found = measure(*size, method=method, seed=seed, bits=bits, group_size=64)
                rows.append({"method": method, "bits": bits, "seed": seed, "perplexity": found.value})
                print(rows[-1], flush=True)
                write_atomic(a.out, (json.dumps(report(a, rows), indent=1) + "\n").encode())


def report(a: argparse.Namespace, rows: list[dict[str, object]]) -> dict[str, object]:
    """The rows with how they were made."""
    how = {"model": a.model, "rules": a.rule, "group_size": 64, "samples": a.samples, "length": a.length, "windows": a.windows,
           "device": a.device}  # fmt: skip
    return {"environment": describe_environment(), "how": how, "rows": rows}


if __name__ == "__main__":
    main()
