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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.arguments import check_arguments
from zoo.components.contracts import Step
from zoo.components.spec import dump
from zoo.installed import version
from zoo.model import Model
from zoo.quantize.activations import Activations, rows_of_pass
from zoo.quantize.budget import budgeted
from zoo.quantize.calibration import Calibration, windows
from zoo.quantize.capture import every_expert, second_moments
from zoo.quantize.contracts import Block, BlockwiseQuantizer, Quantizer
from zoo.quantize.distributed import Processes, joined
from zoo.quantize.estimate import cost_of, estimate, place
from zoo.quantize.modules import check_weights, checked_weight, fitted, put, quantize_module, replace_linear, stored
from zoo.quantize.preparation import Preparation, TransformLike, spec_after, stage_tensors, wanted_transforms
from zoo.quantize.progress import progress as show_progress
from zoo.quantize.report import Change, Report, Row
from zoo.quantize.resume import WorkDir, reserved
from zoo.quantize.rules import QuantizerLike, check_data, plan, quantizer, shared_weights
from zoo.quantize.scaling import Surroundings
from zoo.quantize.stage import Stage, arrange, load, stages
from zoo.quantize.stats.hessian import Hessian
from zoo.quantize.verification import Findings, findings
from zoo.weights import folded, linear_names, linears


@torch.no_grad()
def quantize(model: Model, method: QuantizerLike = "gptq", *, transforms: Sequence[TransformLike] = (),
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

    Inside an initialised group of torch.distributed, where every process calls this with the same model and settings, they share the
    work, see ``zoo.quantize.distributed``; each returns the same model.

    Raises SpecError, ValueError or TypeError for mistakes in any of these, BlockingIOError while another run has work_dir, and
    NotEnoughMemory, before work starts.
    """
    with joined() as processes:
        check_arguments(quantize, {"method": method, "transforms": transforms, "rules": rules, "choices": choices, "seed": seed,
                                   "true_sequential": true_sequential, "least_tokens": least_tokens, "all_experts": all_experts,
                                   "work_dir": work_dir, "offload": offload, "progress": progress})  # fmt: skip
        place_of_work, folder = _place("work_dir", work_dir), _folder(offload)
        model.check_whole("quantizing")
        data, lazy = partial(windows, model, calibration, samples, length, seed), is_lazy(model)  # a budget loads the model
        budget = processes.decided(lambda: budgeted(model, method, options, choices, rules, data))
        if budget is not None:
            options, rules = options | {"bits": budget.base}, [*budget.rules, *rules]
        chosen_method = quantizer(method, options)
        names = linear_names(model.source.table) if model.source else {}
        planned = spec_after(model.spec, wanted_transforms(transforms, ()))
        chosen = plan(planned, chosen_method, rules, names)
        wanted = wanted_transforms(transforms, chosen.values())
        shared_weights(model, planned, chosen)
        check_weights(model, chosen)
        preparation = Preparation(model, wanted, chosen)
        settings = {"method": dump(chosen_method), "transforms": [dump(t) for t in wanted], "rules": list(rules),
                    "true_sequential": true_sequential, "least_tokens": least_tokens, "all_experts": all_experts,
                    "processes": processes.size}  # fmt: skip
        given = any(x is not None for x in (calibration, samples, length))
        needed = any(part.calibrated for part in (*chosen.values(), *wanted))
        check_data(model.spec, chosen, settings, given or needed)
        ids = data() if given or needed else None
        if ids is not None:
            processes.check_windows(len(ids))
            settings |= {"samples": len(ids), "length": ids.shape[1], "seed": seed, "tokens": _digest([ids.numpy().tobytes()])}
        shape = None if ids is None else (ids.shape[0], ids.shape[1])
        cost = estimate(model, chosen, shape, wanted, folder, processes, work_dir is not None)
        cost.check()
        checks = findings(planned, chosen, str(cost))
        start, kept = time.perf_counter(), tuple(path for path, _ in linears(model.spec) if path not in chosen)
        with _opened(place_of_work, cache(partial(_fingerprint, model, settings, lazy)), processes) as work:
            run = _Run(model, chosen, preparation, ids, _Choices(true_sequential, least_tokens, all_experts), work, folder, processes)
            rows = run.execute(progress and processes.first, checks)
        return Report(tuple(rows), kept, settings, time.perf_counter() - start, tuple(preparation.changes), budget, checks)


@dataclass(frozen=True)
class _Choices:
    """How the runner goes about it; see ``quantize``."""

    true_sequential: bool
    least_tokens: int
    all_experts: bool


class _Run:
    """One quantization under way."""

    def __init__(self, model: Model, chosen: Mapping[str, Quantizer], preparation: Preparation, ids: Tensor | None, choices: _Choices,
                 work: WorkDir | None, offload: Path | None, processes: Processes):  # fmt: skip
        self.model, self.preparation, self.ids, self.choices, self.work = model, preparation, ids, choices, work
        self.processes = processes
        self.stages = stages(model, chosen)
        self.blockwise = any(isinstance(method, BlockwiseQuantizer) for method in chosen.values())
        _, self.device = place(model)
        self.between = Activations(self.device, offload)

    def execute(self, show: bool, checks: Findings) -> list[Row]:
        done = self.processes.decided(self._done)
        with show_progress(len(self.stages), done, show, checks.memory, checks.lines()) as report:
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
        if self.preparation.turners:
            self.processes.of_first(tensor for _, tensor in stage_tensors(self.model, stage.parts))
        changes = self.preparation.scale(stage.name, self._surroundings(stage))
        self.preparation.changes += changes
        self.between.advance_reference(stage)
        rows = [*self._together(stage), *self._one_by_one(stage)]  # gradients pass modules only while they are dense
        rows.sort(key=lambda row: list(stage.modules).index(row.module))
        arrange(self.model, stage)
        if number < len(self.stages):
            self.between.advance(stage)
        if self.work:
            between = self.between.whole(self.processes)
            if self.processes.first:
                self.work.store(stage.name, self._held(stage), rows, changes, between, number)
        return rows

    def _one_by_one(self, stage: Stage) -> list[Row]:
        rows: list[Row] = []
        left = {path: method for path, method in stage.modules.items() if not isinstance(method, BlockwiseQuantizer)}
        while left:
            hessians = self._second_moments(stage, left, self.choices.true_sequential)
            now = [path for path in left if path in hessians or not (self.choices.true_sequential and hessians)]
            methods = fitted(self.model, {path: left.pop(path) for path in now})
            mine = self.processes.share({path: cost_of(self.model, path, method) for path, method in methods.items()})
            own = [quantize_module(self.model, path, methods[path], hessians.get(path), self.choices.least_tokens) for path in mine]
            rows += self._shared(methods, own)
        return rows

    def _together(self, stage: Stage) -> list[Row]:
        """Quantize the modules of a stage that have a blockwise method: the first process does, for it is given all activations."""
        methods = {path: method for path, method in stage.modules.items() if isinstance(method, BlockwiseQuantizer)}
        if not methods:
            return []
        hessians, between = self._second_moments(stage, methods), self.between.whole(self.processes)
        return self._shared(methods, self._block(stage, methods, hessians, between) if self.processes.first else [])

    def _block(self, stage: Stage, methods: Mapping[str, BlockwiseQuantizer], hessians: Mapping[str, Hessian],
               between: Mapping[str, Tensor]) -> list[Row]:  # fmt: skip
        start = time.perf_counter()
        weights = {path: checked_weight(self.model, path).detach().clone() for path in methods}

        def run(x: Tensor, changed: Mapping[str, Tensor]) -> Tensor:
            return stage.run_with(x, Step.plain(0, len(x), x.shape[1], self.device), changed)

        if not between["reference"].isfinite().all():
            raise ValueError(f"{stage.name}: its outputs on the calibration data hold NaN or infinity; load the model in a wider dtype "
                             "(bfloat16 or float32), or look for damaged weights in it")  # fmt: skip
        block = Block(weights, methods, between["hidden"], between["reference"], run, hessians)
        results = next(iter(methods.values())).quantize_block(block)
        each = (time.perf_counter() - start) / len(methods)
        return [put(self.model, path, methods[path], weights[path], results[path], hessians.get(path), each) for path in methods]

    def _shared(self, methods: Mapping[str, Quantizer], own: list[Row]) -> list[Row]:
        """The rows of all processes, whose results take their places in each."""
        results = {row.module: stored(self.model.get_submodule(row.module)) for row in own}
        for path, tensors in self.processes.of_others(results, self.device).items():
            replace_linear(self.model, path, methods[path], tensors)
        return [row for rows in self.processes.exchange(own) for row in rows]

    def _second_moments(self, stage: Stage, paths: Iterable[str], first_only: bool = False) -> dict[str, Hessian]:
        modules = {path: self.model.get_submodule(path) for path in paths}
        found = second_moments(modules, self._passes(stage), first_only)
        if first_only:  # other windows may come to other experts first: all processes watch what one of them did
            watched = next((set(names) for names in self.processes.exchange(list(found)) if names), set())
            if watched != found.keys():
                found = second_moments({path: modules[path] for path in watched}, self._passes(stage))
        return self.processes.pooled(found, Hessian, self.device)

    def _surroundings(self, stage: Stage) -> Surroundings:
        return Surroundings(
            self.model, stage.modules, partial(self._passes, stage), partial(self._judged, stage), self.processes, self.device
        )

    def _judged(self, stage: Stage) -> Iterator[Callable[[], Tensor]]:
        """What runs a stage on the windows that searches are judged by: as many as one process runs at a time."""
        return self._passes(stage, self.processes.count(rows_of_pass(self.between.hidden.shape[1])))

    def _passes(self, stage: Stage, most: int | None = None) -> Iterator[Callable[[], Tensor]]:
        """What runs a stage to gather its inputs, on so many of this process's windows at most."""
        with every_expert(stage.module) if self.choices.all_experts else nullcontext():
            yield from self.between.passes(stage, most)

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
        kept = self.work.hidden(done) if self.work else None
        number, held = kept or (0, self._embedded(ids))
        mine = {name: self.processes.mine(tensor) for name, tensor in held.items()}
        self.between.take(mine["hidden"], mine.get("reference"))
        for stage in self.stages[number:done]:
            self.between.advance(stage)

    def _embedded(self, ids: Tensor) -> dict[str, Tensor]:
        device, length = self.device, ids.shape[1]
        batches = (batch.to(device) for batch in ids.split(rows_of_pass(length)))
        hidden = torch.cat([self.model.embed(batch, Step.plain(0, len(batch), length, device)).cpu() for batch in batches])
        return {"hidden": hidden} | ({"reference": hidden.clone()} if self.blockwise else {})


@contextmanager
def _opened(folder: Path | None, fingerprint: Callable[[], dict[str, Any]], processes: Processes) -> Iterator[WorkDir | None]:
    """The folder to continue from, which the first process makes and holds. Raises ValueError where processes were not given the same."""
    processes.check_same(lambda: fingerprint() | {"work_dir": str(folder)})
    if folder is None:
        yield None
        return
    with reserved(folder) if processes.first else nullcontext():
        work = processes.in_turn(lambda: WorkDir(folder, fingerprint()))
        processes.check_folder(folder)
        yield work


def _folder(offload: str | Path | None) -> Path | None:
    folder = _place("offload", offload)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"offload: {folder} is not a folder; make it, on a disk with room for the activations")
    return folder


def _place(name: str, given: str | Path | None) -> Path | None:
    if given == "":
        raise ValueError(f"{name} is empty; name a folder, or leave it out")
    return None if given is None else Path(given).expanduser()


def _words(rows: Sequence[Row]) -> str:
    errors = [row.output_error for row in rows if row.output_error is not None]
    said = [f"{len(rows)} modules", *([f"output error at most {max(errors):.4f}"] if errors else [])]
    for why in dict.fromkeys(row.facts["fallback"] for row in rows if "fallback" in row.facts):
        said.append(f"fallback to {why} for {folded(row.module for row in rows if row.facts.get('fallback') == why)}")
    return ", ".join(said)


def is_lazy(model: Model) -> bool:
    """Whether weights are still to be loaded from the model's files."""
    return model.source is not None and any(t.is_meta for t in model.state_dict().values())


def _fingerprint(model: Model, settings: Mapping[str, Any], lazy: bool) -> dict[str, Any]:
    """What decides the result: settings, spec, and the weights by their bytes, or by their files where they were still to be loaded."""
    if lazy and model.source is not None:
        weights = _digest([json.dumps(model.source.checkpoint.identity()).encode()])
    else:
        weights = _digest(t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in model.state_dict().values() if t.numel())
    return {
        **settings,
        "zoo": version("modular-zoo"),
        "torch": torch.__version__,
        "device": place(model)[1].type,
        "model": _digest([repr(model.spec).encode()]),
        "weights": weights,
        "dtype": str(model.dtype),
    }


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
