"""Quantize a model layer by layer.

Only the activations between two layers are kept, [samples, length, width], never a layer's inside. Each layer is transformed where
that is asked for, run on them with its inputs watched, quantized, and run again as it now is to make the next layer's inputs. Layers
may be on the meta device; each is loaded when its turn comes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.components.contracts import Step
from zoo.components.spec import dump
from zoo.installed import version
from zoo.model import Model
from zoo.quantize.activations import Activations, rows_of_pass
from zoo.quantize.budget import budgeted
from zoo.quantize.calibration import Calibration, windows
from zoo.quantize.capture import every_expert, second_moments
from zoo.quantize.contracts import Block, BlockwiseQuantizer, Quantizer
from zoo.quantize.estimate import estimate
from zoo.quantize.modules import checked_weight, fitted, put, quantize_module, replace_linear, stored
from zoo.quantize.preparation import Preparation, TransformLike, spec_after, stage_tensors, wanted_transforms
from zoo.quantize.progress import progress as show_progress
from zoo.quantize.report import Change, Report, Row
from zoo.quantize.resume import WorkDir
from zoo.quantize.rules import check_data, plan, quantizer, shared_weights
from zoo.quantize.scaling import Surroundings
from zoo.quantize.stage import Stage, arrange, load, stages
from zoo.weights import linear_names, linears


@torch.no_grad()
def quantize(model: Model, method: str | Quantizer = "gptq", *, transforms: Sequence[TransformLike] = (),
             calibration: Calibration | None = None, samples: int | None = None, length: int | None = None, seed: int = 0,
             rules: Sequence[str] = (), choices: Sequence[int] | None = None, true_sequential: bool = False, least_tokens: int = 1,
             all_experts: bool = False, work_dir: str | Path | None = None, offload: str | Path | None = None, progress: bool = True,
             **options: Any) -> Report:  # fmt: skip
    """Quantize a model in place: its linear modules are replaced, and its spec says so.

    method: a name (``rtn``, ``gptq``) or a spec; options are its fields (bits=4, group_size=64, symmetric=True, ...). transforms: what
    is done to weights before, in this order, each a name or a spec (``smoothquant``, ``{name: rotation, block: 32}``).

    calibration: text, file, texts or token ids, see ``zoo.quantize.calibration``; methods without data use it, where given, to measure
    errors. samples, length: windows taken from it (32 x 512). rules: what differs for some modules, see ``zoo.quantize.rules``; heads,
    routers and the up-projections of latent attention are kept by default. true_sequential: within a layer, modules see inputs made by
    those quantized before them, at the price of one more pass for each distinct input.

    least_tokens: a module (an expert) that saw fewer is rounded without data, and its row says so. all_experts: while inputs are
    gathered, every expert is shown every token. work_dir: a folder to continue from after a crash, to the same bits. offload: a folder
    for the activations between layers, which else lie in memory.

    bits with a decimal point (bits=4.25), or choices, the widths that a module may have (2, 3, 4, 8), ask for the widths that lose least
    within that many bits per weight, scales included, see ``zoo.quantize.budget``; the report keeps them, and the rules that repeat it.

    Raises SpecError or ValueError for mistakes in any of these, and NotEnoughMemory, before work starts.
    """
    model.check_whole("quantizing")
    budget = budgeted(model, method, options, choices, rules, lambda: windows(model, calibration, samples, length, seed))
    if budget is not None:
        options, rules = options | {"bits": budget.base}, [*budget.rules, *rules]
    chosen_method = quantizer(method, options)
    names = linear_names(model.source.table) if model.source else {}
    planned = spec_after(model.spec, wanted_transforms(transforms, ()))
    chosen = plan(planned, chosen_method, rules, names)
    wanted = wanted_transforms(transforms, chosen.values())
    shared_weights(model, planned, chosen)
    preparation = Preparation(model, wanted, chosen)
    settings = {"method": dump(chosen_method), "transforms": [dump(t) for t in wanted], "rules": list(rules),
                "true_sequential": true_sequential, "least_tokens": least_tokens, "all_experts": all_experts}  # fmt: skip
    given = any(x is not None for x in (calibration, samples, length))
    needed = any(part.calibrated for part in (*chosen.values(), *wanted))
    check_data(model.spec, chosen, settings, given or needed)
    ids = windows(model, calibration, samples, length, seed) if given or needed else None
    if ids is not None:
        settings |= {"samples": len(ids), "length": ids.shape[1], "seed": seed, "tokens": _digest([ids.numpy().tobytes()])}
    folder = _folder(offload)
    cost = estimate(model, chosen, None if ids is None else (ids.shape[0], ids.shape[1]), wanted, folder)
    cost.check()
    work = WorkDir(work_dir, _fingerprint(model, settings)) if work_dir else None
    start, kept = time.perf_counter(), tuple(path for path, _ in linears(model.spec) if path not in chosen)
    run = _Run(model, chosen, preparation, ids, _Choices(true_sequential, least_tokens, all_experts), work, folder)
    rows = run.execute(progress, str(cost))
    return Report(tuple(rows), kept, settings, time.perf_counter() - start, tuple(preparation.changes), budget)


@dataclass(frozen=True)
class _Choices:
    """How the runner goes about it; see ``quantize``."""

    true_sequential: bool
    least_tokens: int
    all_experts: bool


class _Run:
    """One quantization under way."""

    def __init__(self, model: Model, chosen: Mapping[str, Quantizer], preparation: Preparation, ids: Tensor | None, choices: _Choices,
                 work: WorkDir | None, offload: Path | None):  # fmt: skip
        self.model, self.preparation, self.ids, self.choices, self.work = model, preparation, ids, choices, work
        self.offload = offload
        self.stages = stages(model, chosen)
        self.blockwise = any(isinstance(method, BlockwiseQuantizer) for method in chosen.values())
        self.between = Activations(model.device)

    def execute(self, show: bool, cost: str) -> list[Row]:
        done = self._done()
        with show_progress(len(self.stages), done, show, cost) as report:
            self.preparation.begin()
            rows = [row for stage in self.stages[:done] for row in self._restore(stage)]
            if done < len(self.stages) and self.ids is not None:
                self._enter(done, self.ids)
            for number, stage in enumerate(self.stages[done:], done + 1):
                new = self._quantize(stage, number)
                rows += new
                report(f"{stage.name}: {_words(new)}")
        self.preparation.finish()
        return rows

    def _done(self) -> int:
        """Stages that can be taken up. What they were before is not kept, so blockwise methods need the activations after them."""
        if self.work is None:
            return 0
        done = self.work.finished([stage.name for stage in self.stages])
        if not self.blockwise or done == len(self.stages):
            return done
        kept = self.work.hidden(done)
        return kept[0] if kept else 0

    def _quantize(self, stage: Stage, number: int) -> list[Row]:
        self.preparation.enter(stage.parts)
        around = Surroundings(self.model, stage.modules, lambda: self._passes(stage), self.between.tokens)
        changes = self.preparation.scale(stage.name, around)
        self.preparation.changes += changes
        self.between.advance_reference(stage)
        rows = [*self._together(stage), *self._one_by_one(stage)]  # gradients pass modules only while they are dense
        rows.sort(key=lambda row: list(stage.modules).index(row.module))
        arrange(self.model, stage)
        if number < len(self.stages):
            self.between.advance(stage)
        if self.work:
            self.work.store(stage.name, self._held(stage), rows, changes, self.between.tensors(), number)
        return rows

    def _one_by_one(self, stage: Stage) -> list[Row]:
        rows: list[Row] = []
        left = {path: method for path, method in stage.modules.items() if not isinstance(method, BlockwiseQuantizer)}
        while left:
            hessians = self._second_moments(stage, left, self.choices.true_sequential)
            now = [path for path in left if path in hessians or not (self.choices.true_sequential and hessians)]
            methods = fitted(self.model, {path: left.pop(path) for path in now})
            rows += [quantize_module(self.model, path, m, hessians.get(path), self.choices.least_tokens) for path, m in methods.items()]
        return rows

    def _together(self, stage: Stage) -> list[Row]:
        """Quantize the modules of a stage that have a blockwise method."""
        methods = {path: method for path, method in stage.modules.items() if isinstance(method, BlockwiseQuantizer)}
        if not methods:
            return []
        start = time.perf_counter()
        hessians = self._second_moments(stage, methods)
        weights = {path: checked_weight(self.model, path).detach().clone() for path in methods}
        inputs, targets = self.between.hidden, self.between.reference
        assert targets is not None
        device = self.between.device

        def run(x: Tensor, changed: Mapping[str, Tensor]) -> Tensor:
            return stage.run_with(x, Step.plain(0, len(x), x.shape[1], device), changed)

        results = next(iter(methods.values())).quantize_block(Block(weights, methods, inputs, targets, run, hessians))
        each = (time.perf_counter() - start) / len(methods)
        return [put(self.model, path, methods[path], weights[path], results[path], hessians.get(path), each) for path in methods]

    def _second_moments(self, stage: Stage, paths: Iterable[str], first_only: bool = False) -> dict[str, Any]:
        return second_moments({path: self.model.get_submodule(path) for path in paths}, self._passes(stage), first_only)

    def _passes(self, stage: Stage) -> Iterator[Callable[[], Tensor]]:
        """What runs a stage to gather its inputs."""
        with every_expert(stage.module) if self.choices.all_experts else nullcontext():
            yield from self.between.passes(stage)

    def _held(self, stage: Stage) -> dict[str, Tensor]:
        """What a stage is restored from: its packed tensors, and where transforms were at work all others too."""
        packed = {f"{path}.{n}": t for path in stage.modules for n, t in stored(self.model.get_submodule(path)).items()}
        return dict(stage_tensors(self.model, stage.parts)) | packed if self.preparation.active else packed

    def _restore(self, stage: Stage) -> list[Row]:
        assert self.work is not None
        load(self.model, *stage.parts)
        tensors, rows, changes = self.work.stage(stage.name)
        for path, method in stage.modules.items():
            own = {name.removeprefix(f"{path}."): tensor for name, tensor in tensors.items() if name.startswith(f"{path}.")}
            own.pop("bias", None)
            replace_linear(self.model, path, method, own)
        if self.preparation.active:
            self.preparation.restore(stage.parts, tensors)
        self.preparation.changes += [Change(**change) for change in changes]
        arrange(self.model, stage)
        return [Row(**row) for row in rows]

    def _enter(self, done: int, ids: Tensor) -> None:
        """Take up the activations that leave ``done`` restored stages: kept ones, led on from where they are, or else from the start."""
        load(self.model, "embed")
        self.between = Activations(self.model.device, self.offload)
        kept = self.work.hidden(done) if self.work else None
        number, held = kept or (0, self._embedded(ids))
        self.between.take(held["hidden"], held.get("reference"))
        for stage in self.stages[number:done]:
            self.between.advance(stage)

    def _embedded(self, ids: Tensor) -> dict[str, Tensor]:
        device, length = self.model.device, ids.shape[1]
        batches = (batch.to(device) for batch in ids.split(rows_of_pass(length)))
        hidden = torch.cat([self.model.embed(batch, Step.plain(0, len(batch), length, device)).cpu() for batch in batches])
        return {"hidden": hidden} | ({"reference": hidden.clone()} if self.blockwise else {})


def _folder(offload: str | Path | None) -> Path | None:
    if offload is not None and not Path(offload).is_dir():
        raise ValueError(f"offload: {offload} is not a folder; make it, on a disk with room for the activations")
    return None if offload is None else Path(offload)


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
