"""Quantizing a LLaMA-3-8B-shaped random checkpoint on one GPU: seconds and peak GPU memory of round-to-nearest and GPTQ.

    python benchmarks/quantize_8b.py [--methods rtn,gptq] [--samples 128] [--length 2048] [--layers 32] [--out FILE]

Weights are normal numbers of deviation 0.02 in bfloat16, in the page cache; token ids are random. Seconds are those of ``quantize``,
which loads each layer from the files when its turn comes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import zoo
from zoo.eval.environment import describe_environment
from zoo.eval.results import write_atomic
from zoo.quantize import quantize
from zoo.saving import describe, family_of
from zoo.weights import entries

GROUP = 128


def write_checkpoint(folder: Path, layers: int) -> int:
    """Bytes of a random checkpoint, a shard for each layer and one for the rest."""
    spec = zoo.spec("llama3-8b")
    spec = dataclasses.replace(spec, layers=spec.layers[:layers])
    family, infos = family_of(spec), spec.tensors()
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for entry in entries(spec, family.rules(spec)):
        layer = entry.ours[0].split(".")[1] if entry.ours[0].startswith("layers.") else "rest"
        shards.setdefault(layer, {})[entry.theirs[0]] = infos[entry.ours[0]].shape
    generator = torch.Generator("cuda").manual_seed(0)
    folder.mkdir(parents=True)
    for i, shapes in enumerate(shards.values()):
        tensors = {n: torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(0.02).cpu() for n, s in shapes.items()}
        tensors |= {n: torch.ones_like(t) for n, t in tensors.items() if t.dim() == 1}
        save_file(tensors, folder / f"model-{i + 1:05}-of-{len(shards):05}.safetensors")
    config, _ = describe(spec, {}, family, None)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def measured(folder: Path, method: str, ids: torch.Tensor | None) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = zoo.load(folder, device="cuda", lazy=True)
    began = time.perf_counter()
    report = quantize(model, method, bits=4, group_size=GROUP, calibration=ids)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    errors = [row.output_error for row in report.rows if row.output_error is not None]
    return {
        "seconds": seconds,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        "modules": len(report.rows),
        "seconds_in_modules": sum(row.seconds for row in report.rows),
        "largest_output_error": max(errors, default=None),
        "mean_weight_error": sum(row.weight_error for row in report.rows) / len(report.rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", default="rtn,gptq")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "quantize_8b.json")
    a = parser.parse_args()
    results: dict[str, Any] = {"environment": describe_environment(), "settings": {"group_size": GROUP, "bits": 4, "layers": a.layers,
                               "samples": a.samples, "length": a.length}}  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        began = time.perf_counter()
        results["checkpoint_bytes"] = write_checkpoint(folder, a.layers)
        print(f"wrote {results['checkpoint_bytes']:,} bytes in {time.perf_counter() - began:.0f} s", flush=True)
        vocab = zoo.spec("llama3-8b").embed.vocab
        ids = torch.randint(vocab, (a.samples, a.length), generator=torch.Generator().manual_seed(0))
        for method in a.methods.split(","):
            results[method] = measured(folder, method, None if method == "rtn" else ids)
            print(method, json.dumps(results[method]), flush=True)
            write_atomic(a.out, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
