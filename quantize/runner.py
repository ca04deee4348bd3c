"""Quantize a model layer by layer.

Only the activations between two layers are kept, [samples, length, width], never a layer's inside. Each layer is run on them with
its inputs watched, quantized, and run again as it now is to make the next layer's inputs. Layers may be on the meta device; each is
loaded when its turn comes.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.components.contracts import NoCache, Prepared, Step, StoredLinear, unfilled
from zoo.components.spec import dump
from zoo.installed import version
from zoo.storages import set_storage
from zoo.model import Model
from zoo.quantize.calibration import Calibration, windows
from zoo.quantize.capture import second_moments
from zoo.quantize.contracts import Quantizer
from zoo.quantize.progress import progress as show_progress
from zoo.quantize.report import Report, Row
from zoo.quantize.resume import WorkDir
from zoo.quantize.rules import plan, quantizer
from zoo.quantize.stats.hessian import Hessian, relative_output_error
from zoo.weights import linear_names, linears, materialize

TOKENS_PER_PASS = 4096


@torch.no_grad()
def quantize(model: Model, method: str | Quantizer = "gptq", *, calibration: Calibration | None = None, samples: int | None = None,
             length: int | None = None, seed: int = 0, rules: Sequence[str] = (), true_sequential: bool = False,
             work_dir: str | Path | None = None, progress: bool = True, **options: Any) -> Report:  # fmt: skip
    """Quantize a model in place: its linear modules are replaced, and its spec says so.

    method: a name (``rtn``, ``gptq``) or a spec; options are its fields (bits=4, group_size=64, symmetric=True, ...). calibration:
    text, file, texts or token ids, see ``zoo.quantize.calibration``; methods without data use it, where given, to measure errors.
    samples, length: windows taken from it (32 x 512). rules: what differs for some modules, see ``zoo.quantize.rules``; heads and
    routers are kept by default. true_sequential: within a layer, modules see inputs made by those quantized before them, at the
    price of one more pass for each distinct input. work_dir: a folder to continue from after a crash, to the same bits.

    Raises SpecError or ValueError for mistakes in any of these before work starts.
    """
    chosen_method = quantizer(method, options)
    chosen = plan(model.spec, chosen_method, rules, linear_names(model.source.table) if model.source else {})
    settings = {"method": dump(chosen_method), "rules": list(rules), "true_sequential": true_sequential}
    ids = None
    given = any(x is not None for x in (calibration, samples, length))
    if given or any(q.calibrated for q in chosen.values()):
        ids = windows(model, calibration, samples, length, seed)
        settings |= {"samples": len(ids), "length": ids.shape[1], "seed": seed, "tokens": _digest([ids.numpy().tobytes()])}
    elif true_sequential:
        raise ValueError(f"{chosen_method.name} uses no data, so true_sequential changes nothing; leave it out, or give calibration")
    work = WorkDir(work_dir, _fingerprint(model, settings)) if work_dir else None
    start, kept = time.perf_counter(), tuple(path for path, _ in linears(model.spec) if path not in chosen)
    rows = _Run(model, chosen, ids, true_sequential, work).execute(progress)
    return Report(tuple(rows), kept, settings, time.perf_counter() - start)


@dataclass(frozen=True)
class Stage:
    """A part of the model that is quantized in one go. modules: those of its linear modules that are, by path."""

    parts: tuple[str, ...]  # of the model, loaded together; the first gives the stage its name
    run: Callable[[Tensor, Step], Tensor]
    modules: dict[str, Quantizer]

    @property
    def name(self) -> str:
        return self.parts[0]


def stages(model: Model, chosen: Mapping[str, Quantizer]) -> list[Stage]:
    """The layers and the head, up to the last with a module to quantize."""
    found = [Stage((f"layers.{i}",), partial(_through, layer), _below(f"layers.{i}", chosen)) for i, layer in enumerate(model.layers)]
    found.append(Stage(("head", "norm"), lambda x, step: model.head(model.norm(x)), _below("head", chosen)))
    last = max(i for i, stage in enumerate(found) if stage.modules)
    return found[: last + 1]


def _through(layer: nn.Module, x: Tensor, step: Step) -> Tensor:
    return layer(x, step, NoCache())


class _Run:
    """One quantization under way. hidden: activations entering the next stage, [samples, length, width] on the CPU; empty without data."""

    def __init__(self, model: Model, chosen: Mapping[str, Quantizer], ids: Tensor | None, true_sequential: bool, work: WorkDir | None):
        self.model, self.ids, self.true_sequential, self.work = model, ids, true_sequential, work
        self.stages = stages(model, chosen)
        self.hidden = torch.empty(0)

    def execute(self, show: bool) -> list[Row]:
        done = self.work.finished([stage.name for stage in self.stages]) if self.work else 0
        rows = [row for stage in self.stages[:done] for row in self._restore(stage)]
        if done < len(self.stages) and self.ids is not None:
            self._enter(done, self.ids)
        with show_progress(len(self.stages), done, show) as report:
            for number, stage in enumerate(self.stages[done:], done + 1):
                new = self._quantize(stage, number)
                rows += new
                report(f"{stage.name}: {_words(new)}")
        _load(self.model, *(name for name, _ in self.model.named_children()))
        return rows

    def _quantize(self, stage: Stage, number: int) -> list[Row]:
        _load(self.model, *stage.parts)
        rows: list[Row] = []
        left = dict(stage.modules)
        while left:
            modules = {path: self.model.get_submodule(path) for path in left}
            hessians = second_moments(modules, self._passes(stage), first_only=self.true_sequential)
            now = [path for path in left if path in hessians or not (self.true_sequential and hessians)]
            rows += [quantize_module(self.model, path, left.pop(path), hessians.get(path)) for path in now]
        prepare(self.model, stage)
        if number < len(self.stages):
            self._advance(stage)
        if self.work:
            held = {f"{path}.{name}": tensor for path in stage.modules for name, tensor in _stored(self.model.get_submodule(path)).items()}
            self.work.store(stage.name, held, [asdict(row) for row in rows], self.hidden, number)
        return rows

    def _restore(self, stage: Stage) -> list[Row]:
        assert self.work is not None
        _load(self.model, *stage.parts)
        tensors, rows = self.work.stage(stage.name)
        for path, method in stage.modules.items():
            own = {name.removeprefix(f"{path}."): tensor for name, tensor in tensors.items() if name.startswith(f"{path}.")}
            replace_linear(self.model, path, method, own)
        prepare(self.model, stage)
        return [Row(**row) for row in rows]

    def _enter(self, done: int, ids: Tensor) -> None:
        """Take up the activations that leave ``done`` restored stages: kept ones, led on from where they are, or else from the start."""
        kept = self.work.hidden(done) if self.work else None
        number, self.hidden = kept or (0, self._embedded(ids))
        for stage in self.stages[number:done]:
            self._advance(stage)

    def _advance(self, stage: Stage) -> None:
        """Let the activations that enter a stage become those that leave it."""
        for rows_of_batch, run in self._batches(stage):
            self.hidden[rows_of_batch] = run().cpu()

    def _embedded(self, ids: Tensor) -> Tensor:
        _load(self.model, "embed")
        size = max(1, TOKENS_PER_PASS // ids.shape[1])
        device, length = self.model.device, ids.shape[1]
        batches = (batch.to(device) for batch in ids.split(size))
        return torch.cat([self.model.embed(batch, Step.plain(0, len(batch), length, device)).cpu() for batch in batches])

    def _batches(self, stage: Stage) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
        """(rows, what runs the stage on them), for the activations there are."""
        if not self.hidden.numel():
            return
        device, length = self.model.device, self.hidden.shape[1]
        size = max(1, TOKENS_PER_PASS // length)
        for start in range(0, len(self.hidden), size):
            rows = slice(start, start + size)
            x = self.hidden[rows].to(device)
            yield rows, partial(stage.run, x, Step.plain(0, len(x), length, device))

    def _passes(self, stage: Stage) -> Iterator[Callable[[], Tensor]]:
        return (run for _, run in self._batches(stage))


def quantize_module(model: Model, path: str, method: Quantizer, hessian: Hessian | None) -> Row:
    """Quantize one linear module of a model in place."""
    start = time.perf_counter()
    weight = linear(model, path).dense_weight(torch.float32)
    if not weight.isfinite().all():
        raise ValueError(f"{path}: the weight holds NaN or infinity; the checkpoint is damaged or was cast to a dtype too small for it")
    result = method.quantize(weight, hessian)
    replace_linear(model, path, method, result.tensors)
    rounded = linear(model, path).dense_weight(torch.float32)
    return Row(
        module=path,
        method=method.name,
        settings={f.name: getattr(method, f.name) for f in fields(method)},
        weights=weight.numel(),
        bits_per_weight=8 * sum(t.nbytes for t in result.tensors.values()) / weight.numel(),
        weight_error=float((weight - rounded).norm() / weight.norm().clamp(min=torch.finfo(weight.dtype).tiny)),
        tokens=hessian.tokens if hessian else None,
        output_error=_finite(relative_output_error(weight, rounded, hessian)) if hessian else None,
        seconds=time.perf_counter() - start,
        facts=result.facts,
    )


def linear(model: Model, path: str) -> Any:
    """A module of the family ``linear``: it has inputs, outputs, bias and dense_weight."""
    return model.get_submodule(path)


def replace_linear(model: Model, path: str, method: Quantizer, tensors: dict[str, Tensor]) -> None:
    """Put a storage module with these tensors in the place of a linear module, and its part into the model's spec."""
    old = linear(model, path)
    with unfilled():
        new = method.storage.build(old.inputs, old.outputs, old.bias is not None)
    assert isinstance(new, StoredLinear)
    device = old.dense_weight().device
    new.bias = old.bias
    new.hold({name: tensor.to(device) for name, tensor in tensors.items()})
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)
    model.spec = set_storage(model.spec, path, method.storage)


def prepare(model: Model, stage: Stage) -> None:
    """Let the stage's modules arrange themselves anew: experts' weights that lay together may have been replaced."""
    for part in stage.parts:
        for module in model.get_submodule(part).modules():
            if isinstance(module, Prepared):
                module.prepare()


def _load(model: Model, *parts: str) -> None:
    """Load those parts of the model that are still on the meta device."""
    for part in parts:
        module = model.get_submodule(part)
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            materialize(model, part)


def _below(prefix: str, chosen: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    return {path: method for path, method in chosen.items() if path.startswith(f"{prefix}.")}


def _stored(module: nn.Module) -> dict[str, Tensor]:
    assert isinstance(module, StoredLinear)
    return {name: tensor for name, tensor in module.canonical().items() if name != "bias"}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _words(rows: Sequence[Row]) -> str:
    errors = [row.output_error for row in rows if row.output_error is not None]
    return f"{len(rows)} modules" + (f", output error at most {max(errors):.4f}" if errors else "")


def _fingerprint(model: Model, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the result: settings, spec, and the weights by their bytes, or by their files where they are still to be loaded."""
    state = model.state_dict()
    if model.source and any(t.is_meta for t in state.values()):
        weights = _digest([json.dumps(model.source.checkpoint.identity()).encode()])
    else:
        weights = _digest(t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in state.values() if t.numel())
    return {
        **settings,
        "zoo": version("modular-zoo"),
        "model": _digest([repr(model.spec).encode()]),
        "weights": weights,
        "dtype": str(model.dtype),
    }


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
