"""One step of one variant of a recipe, run in a process of its own.

``make`` loads, edits, quantizes and saves; ``measure`` loads what will be used and measures it. They are two
processes, so that what is measured is the model that a user would load, and quantizing leaves no mark on its memory.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from zoo import conversion
from zoo.components.mlp.moe import MoE
from zoo.components.spec import dump
from zoo.components.spec import load as load_spec
from zoo.declare import spec as read_spec
from zoo.eval import disk_bytes, evaluate, memory, peak_memory, perplexity, speed
from zoo.eval.environment import describe_environment
from zoo.eval.images import image_accuracy, joined
from zoo.eval.results import Results, Variant, save_results, variant
from zoo.loading import load
from zoo.model import Model, ModelSpec
from zoo.quantize import calibrate_cache, quantize
from zoo.quantize.calibration import windows
from zoo.quantize.preparation import spec_after
from zoo.quantize.rules import plan
from zoo.recipes.recipe import Measure
from zoo.recipes.recipe import Variant as Wanted
from zoo.recipes.runner import Order
from zoo.saving import check_saved, save
from zoo.weights import linear_names


@dataclass
class Clock:
    """Seconds of each stage, announced as it begins."""

    label: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        print(f"  {self.label}: {name} ...", file=sys.stderr, flush=True)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def make(order: Order) -> None:
    """Write the variant's folder, read it back, and leave what conversions and the quantizer report beside it."""
    recipe, wanted, clock = order.recipe, order.variant, Clock(order.variant.label)
    rows: list[dict[str, Any]] = []
    with clock.stage("load"):
        lazy = wanted.quantizer is not None and not wanted.convert
        model = load(order.reference, dtype=order.dtype, device=recipe.device, override=wanted.override, lazy=lazy)
    c = recipe.calibration
    data: dict[str, Any] = {"calibration": c.text and Path(c.text), "samples": c.samples, "length": c.length, "seed": c.seed}
    for to in wanted.convert:
        with clock.stage(f"convert to {to}"):
            ids = windows(model, **data) if conversion.plan(model.spec, to).calibrated else None
            model, converted = conversion.convert(model, to, ids=ids)
        rows += [row._asdict() for row in converted.kinds()]
    if wanted.quantizer is not None:
        with clock.stage("quantize"):
            needed = calibrated(model, wanted)
            report = quantize(model, wanted.quantizer, transforms=wanted.transforms, rules=wanted.rules, work_dir=order.work,
                              least_tokens=c.least_tokens, all_experts=needed and c.all_experts, offload=recipe.offload,
                              **(data if needed else {}))  # fmt: skip
        rows += [dataclasses.asdict(row) for row in report.rows]
    if wanted.calibrated_cache:
        with clock.stage("calibrate the cache"):
            calibrate_cache(model, wanted.calibrated_cache, **data, progress=False)
    with clock.stage("save and read back"):
        save(model, order.folder, overwrite=True, check=partial(check_saved, model))
    order.leave({"modules": rows, "seconds": clock.seconds, "spec": dump(model.spec), "disk_bytes": disk_bytes(order.folder)})
    shutil.rmtree(order.work, ignore_errors=True)


def calibrated(model: Model, wanted: Wanted) -> bool:
    """Whether anything needs data: a transform, the method itself, or one that a rule names."""
    names = linear_names(model.source.table) if model.source else {}
    assert wanted.quantizer is not None
    chosen = plan(spec_after(model.spec, wanted.transforms), wanted.quantizer, wanted.rules, names)
    return any(part.calibrated for part in (*wanted.transforms, *chosen.values()))


def measure(order: Order) -> Variant:
    """Everything that the recipe asks of the variant. Raises RuntimeError where its folder was made for another one meanwhile."""
    recipe, clock = order.recipe, Clock(order.variant.label)
    made = order.made() if order.needed else None
    if order.needed and made is None:
        raise RuntimeError(f"{order.folder} is not this variant's any more; is another run writing to {order.out}? Start this one again")
    with clock.stage("load"):
        if made:
            model = load(order.folder, device=recipe.device, override=running(load_spec(ModelSpec, made["spec"])))
        else:
            model = load(order.reference, dtype=order.dtype, device=recipe.device, override=order.variant.override)
    first = recipe.variants[0]
    baseline = read_spec(first.model or recipe.model, *first.override) if order.index else None
    found = figures(model, recipe.measure, clock)
    speeds = found.pop("speeds", [])
    of_making = made or {"modules": [], "seconds": {}, "disk_bytes": None}
    done = variant(order.variant.label, spec=model.spec, baseline=baseline, modules=of_making["modules"],
                   disk_bytes=of_making["disk_bytes"] if recipe.measure.save else None,
                   seconds=of_making["seconds"] | clock.seconds, speed=speeds[0] if speeds else None, **found)  # fmt: skip
    if speeds[1:]:
        done.measured["speed of other batch sizes"] = {str(s.batch_size): dataclasses.asdict(s) for s in speeds[1:]}
    return done


def running(spec: ModelSpec) -> list[str]:
    """The edits that give a saved model its kernels, dispatches and cache again: how a model is run is not stored with it."""
    kernels = [f"layers.{i}.mixer.kernel={json.dumps(dump(layer.mixer.kernel))}" for i, layer in enumerate(spec.layers)]
    mixtures = [(i, layer.mlp) for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoE)]
    dispatches = [f"layers.{i}.mlp.dispatch={json.dumps(dump(mlp.dispatch))}" for i, mlp in mixtures]
    return [*kernels, *dispatches, f"cache={json.dumps(dump(spec.cache))}"]


def figures(model: Model, wanted: Measure, clock: Clock) -> dict[str, Any]:
    """The figures of a model by the names that ``zoo.eval.results.variant`` takes; ``speeds`` has one for each batch size."""
    found: dict[str, Any] = {"memory": memory(model)}
    with peak_memory(model.device) as peak:
        if (s := wanted.speed) is not None:
            with clock.stage("speed"):
                found["speeds"] = speed(model, prompt_tokens=s.prompt_tokens, new_tokens=s.new_tokens, batch_sizes=s.batch_sizes,
                                        repeats=s.repeats, warmup=s.warmup)  # fmt: skip
        if (p := wanted.perplexity) is not None:
            with clock.stage("perplexity"):
                found["perplexity"], *found["further"] = [
                    perplexity(model, p.text and Path(p.text), context=context, stride=p.stride, limit=p.limit, prompt=p.prompt)
                    for context in p.contexts
                ]
        if (t := wanted.tasks) is not None:
            with clock.stage("tasks"):
                found["evaluation"] = evaluate(
                    model, t.names, limit=t.limit, num_fewshot=t.shots, batch_size=t.batch_size, data_folder=t.data
                )
        if (i := wanted.images) is not None:
            with clock.stage("images"):
                scored = image_accuracy(model, i.source, limit=i.limit, batch_size=i.batch_size, progress=True)
                found["evaluation"] = joined(found.get("evaluation"), scored)
    return found | {"peak": peak}


def main(path: str) -> int:
    order = Order.read(Path(path))
    try:
        if order.step == "make":
            make(order)
            return 0
        done = measure(order)
    except (ValueError, OSError, RuntimeError, MemoryError) as e:
        print(f"  {order.variant.label}: {type(e).__name__}: {e}", file=sys.stderr)
        done = Variant(name=order.variant.label, error=f"{type(e).__name__}: {e}")
    save_results(Results(environment=describe_environment(), variants=[done], recipe=dump(order.recipe)), order.result)
    return 1 if done.error else 0
