"""Hit rates and bytes moved of experts kept in host memory, by size of the LRU set and number of experts sent ahead.

    python benchmarks/expert_offload.py MODEL TEXT [--steps 150] [--out benchmarks/results/expert_offload.json]

The workload: a dense model is upcycled to a mixture (copies of its feed-forward parts, random routers), which is then trained for
``steps`` steps on the first half of the text, so that experts and routers part ways; then the second half is read token by token, as
in decoding. Every setting sees the same tokens and the same choices of experts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from zoo.components.experts.offload import Traffic, traffic
from zoo.components.ops.moe.balance import routings, switch_loss
from zoo.components.spec import override
from zoo.conversion import convert
from zoo.eval.environment import describe_environment
from zoo.eval.results import write_atomic
from zoo.model import Model

BATCH, LENGTH, RATE, BALANCE = 8, 64, 1e-3, 0.01
CHARACTERS = 400_000  # of the text


def train(model: Model, ids: Tensor, steps: int) -> list[float]:
    """AdamW on random windows with the balance loss of Switch Transformer; the losses of all steps."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.requires_grad_(True).parameters(), RATE)
    losses = []
    for _ in range(steps):
        start = torch.randint(len(ids) - LENGTH - 1, (BATCH, 1), generator=generator)
        window = ids[start + torch.arange(LENGTH + 1)]
        with routings(model) as found:
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        balance = torch.stack([switch_loss(r) for r in found.values()]).mean()
        optimizer.zero_grad()
        (loss + BALANCE * balance).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.requires_grad_(False)
    return losses


@torch.no_grad()
def read(model: Model, ids: Tensor) -> tuple[Traffic, list[dict[str, Any]]]:
    """Feed tokens one by one through a cache; counters of all layers together and of each."""
    cache = model.new_cache(1)
    for token in ids:
        model(token.view(1, 1), cache=cache)
    found = traffic(model)
    return sum(found.values(), Traffic()), [{"layer": n, **asdict(t)} for n, t in found.items()]


def measure(trained: Model, ids: Tensor, resident: int, prefetch: int) -> dict[str, Any]:
    model = override(trained.spec, f"layers.*.mlp.dispatch={{name: offload, resident: {resident}, prefetch: {prefetch}}}").build().eval()
    model.load_state_dict(trained.state_dict())
    total, layers = read(model, ids)
    expert = sum(p.nbytes for p in model.layers[0].mlp.experts[0].parameters())  # pyright: ignore[reportIndexIssue, reportCallIssue]
    row = {
        "resident": resident,
        "prefetch": prefetch,
        "hit_rate": total.hits / total.uses,
        "hit_rate_with_prefetch": (total.hits + total.prefetch_hits) / total.uses,
        "prefetch_precision": total.prefetch_hits / total.sent_ahead if total.sent_ahead else None,
        "bytes_moved_per_token": total.bytes_moved / len(ids),
        "experts_moved_per_token": total.bytes_moved / len(ids) / expert,
    }
    return {**row, "total": asdict(total), "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("expert_offload.json"))
    a = parser.parse_args()
    dense = zoo.load(a.model, dtype="float32")
    ids = torch.tensor(dense.tokenizer(a.text.read_text(encoding="utf-8")[:CHARACTERS])["input_ids"])
    model, _ = convert(dense, {"name": "moe", "experts": a.experts, "k": a.k})
    losses = train(model, ids[: len(ids) // 2], a.steps)
    how = {"model": Path(a.model).name, "text": a.text.name, "experts": a.experts, "k": a.k, "steps": a.steps, "tokens": a.tokens,
           "layers": len(model.layers), "first_loss": losses[:1], "last_loss": losses[-1:]}  # fmt: skip
    workload = " ".join((__doc__ or "").split("\n\n")[2].split())
    rows = []
    for resident in sorted({1, a.k, a.experts // 2, a.experts - a.k, a.experts}):
        for prefetch in (0, 1, a.k):
            rows.append(measure(model, ids[len(ids) // 2 :][: a.tokens], resident, prefetch))
            print({k: v for k, v in rows[-1].items() if k not in ("total", "layers")}, flush=True)
            report = {"environment": describe_environment(), "workload": workload, "how": how, "rows": rows}
            write_atomic(a.out, (json.dumps(report, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
