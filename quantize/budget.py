"""Mixed precision by a budget of bits: what each module loses at each width is measured, and the widths that lose least are chosen.

The loss of a unit (modules that engines fuse, or a layer's experts) at a width is the Kullback-Leibler divergence of the model's
outputs, on a few windows of calibration data, from those with this unit alone rounded. Losses of several units are taken to add up,
so the best widths within the budget are a knapsack with a choice in each unit, which is solved exactly on a grid of bits.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.components.contracts import NoCache, Step
from zoo.model import Model
from zoo.quantize.contracts import Quantizer
from zoo.quantize.flow import siblings
from zoo.quantize.modules import checked_weight
from zoo.quantize.rules import QuantizerLike, plan, quantizer
from zoo.quantize.stage import Stage, Tail, load
from zoo.weights import linear_names

if TYPE_CHECKING:
    from rich.table import Table

CHOICES = (2, 3, 4, 8)
WINDOWS = 4  # of the calibration data, for the losses
STEPS = 20_000  # of the grid on which bits are counted, and for each unit
STEPS_PER_UNIT = 200
TINY = 1e-9  # stands for no bits to spare
EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Unit:
    """Modules that are given one width. patterns: of their paths. bits: of a weight, scales included, and loss: by choice."""

    patterns: tuple[str, ...]
    weights: int
    bits: dict[int, float]
    loss: dict[int, float]
    chosen: int


@dataclass(frozen=True)
class Budget:
    """What was chosen. base: the width of all modules that no rule names."""

    wanted: float
    units: tuple[Unit, ...]

    @property
    def base(self) -> int:
        return Counter(unit.chosen for unit in self.units).most_common(1)[0][0]

    @property
    def rules(self) -> tuple[str, ...]:
        """The choice as rules on top of ``base``, which give the same model again."""
        other = (unit for unit in self.units if unit.chosen != self.base)
        return tuple(f"{pattern}={{bits: {unit.chosen}}}" for unit in other for pattern in unit.patterns)

    @property
    def bits(self) -> float:
        """Mean bits of a weight, scales included."""
        return sum(u.weights * u.bits[u.chosen] for u in self.units) / sum(u.weights for u in self.units)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        units = [asdict(unit) for unit in self.units]
        return {"wanted": self.wanted, "bits": self.bits, "base": self.base, "rules": list(self.rules), "units": units}

    def table(self) -> Table:
        """The losses of all choices, those taken marked, for a terminal."""
        from rich.table import Table

        choices = sorted({choice for unit in self.units for choice in unit.loss})
        table = Table("modules", "weights", *(f"{c} bits" for c in choices), "chosen", "bits/weight", show_footer=True)
        for unit in self.units:
            losses = (f"{unit.loss[c]:.2e}" + " *" * (c == unit.chosen) if c in unit.loss else "-" for c in choices)
            table.add_row(", ".join(unit.patterns), f"{unit.weights:,}", *losses, str(unit.chosen), f"{unit.bits[unit.chosen]:.2f}")
        table.columns[-1].footer = f"{self.bits:.3f}"
        return table


@torch.no_grad()
def allocate(model: Model, method: QuantizerLike, bits: float, ids: Tensor, *, choices: Sequence[int] = CHOICES,
             rules: Sequence[str] = (), **options: Any) -> Budget:  # fmt: skip
    """The widths of least loss for a mean of ``bits`` per quantized weight, scales included.

    ids: calibration windows [samples, length], of which the first few are used. choices: widths of a module. rules: what differs for
    some modules; a width that they fix stays. options: further fields of the method. The whole model is loaded.

    Raises ValueError for a budget below what the smallest choices take, SpecError for choices that the method does not have.
    """
    plans = _plans(model, method, choices, rules, options)
    units = list(_units(model, next(iter(plans.values()))).values())
    load(model, *(name for name, _ in model.named_children()))
    sizes = [{c: _size(model, paths, plan) for c, plan in plans.items()} for paths in units]
    counts = [sum(_numel(model, path) for path in paths) for paths in units]
    _check_capacity(sizes, bits * sum(counts))
    losses = _losses(model, units, plans, ids[:WINDOWS])
    chosen = knapsack(sizes, losses, bits * sum(counts))
    rows = zip(units, counts, sizes, losses, chosen, strict=True)
    return Budget(bits, tuple(Unit(_patterns(p), n, {c: s / n for c, s in size.items()}, loss, c) for p, n, size, loss, c in rows))


def budgeted(model: Model, method: QuantizerLike, options: Mapping[str, Any], choices: Sequence[int] | None, rules: Sequence[str],
             data: Callable[[], Tensor]) -> Budget | None:  # fmt: skip
    """The budget that settings of ``quantize`` ask for, by choices or bits with a decimal point; None where they ask for none.

    data: gives the calibration windows.
    """
    bits = options.get("bits")
    if choices is None and not isinstance(bits, float):
        return None
    if isinstance(bits, bool) or not isinstance(bits, int | float):
        raise ValueError(f"choices={tuple(choices or ())} needs bits, the mean per weight that is allowed, as bits=4.25; it is {bits!r}")
    check_mean(bits)
    others = {name: value for name, value in options.items() if name != "bits"}
    return allocate(model, method, bits, data(), choices=CHOICES if choices is None else choices, rules=rules, **others)


def check_mean(bits: float) -> None:
    """Raise ValueError for what is no number of bits."""
    if not 0 < bits < math.inf:
        raise ValueError(f"bits={bits}: give a positive, finite number of bits per weight, as 4 or 4.25")


def knapsack(sizes: Sequence[Mapping[int, float]], losses: Sequence[Mapping[int, float]], capacity: float) -> list[int]:
    """The choice of each unit with which the losses sum to the least, the sizes to at most ``capacity``.

    By dynamic programming over what is left above the least sizes, on a grid on which sizes are rounded up. Raises ValueError where
    not even the least fit.
    """
    spare = _check_capacity(sizes, capacity)
    steps = STEPS + STEPS_PER_UNIT * len(sizes)
    grid = [{c: math.ceil((size - min(unit.values())) / max(spare, TINY) * steps) for c, size in unit.items()} for unit in sizes]
    grid = [{c: size for c, size in unit.items() if size <= steps} for unit in grid]
    best, taken = torch.zeros(steps + 1, dtype=torch.float64), []  # the least loss within each number of steps
    for unit, loss in zip(grid, losses, strict=True):
        tried = torch.stack([F.pad(best[: steps + 1 - size] + loss[c], (size, 0), value=math.inf) for c, size in unit.items()])
        best, index = tried.min(0)
        taken.append(index)
    left, chosen = steps, []
    for index, unit in zip(reversed(taken), reversed(grid), strict=True):
        chosen.append(list(unit)[int(index[left])])
        left -= unit[chosen[-1]]
    return chosen[::-1]


def _check_capacity(sizes: Sequence[Mapping[int, float]], capacity: float) -> float:
    """What is left of the capacity when every unit takes its least size. Raises ValueError where they do not fit."""
    least = sum(min(unit.values()) for unit in sizes)
    if least > capacity:
        raise ValueError(
            f"the budget of bits is too small: the smallest choices, scales included, take {least / capacity:.3f} times as many; "
            "give more bits, smaller choices or larger groups"
        )
    return capacity - least


def _plans(model: Model, method: QuantizerLike, choices: Sequence[int], rules: Sequence[str],
           options: Mapping[str, Any]) -> dict[int, dict[str, Quantizer]]:  # fmt: skip
    """The quantizer of each module for each choice of bits."""
    base = quantizer(method, options)
    if "bits" not in {f.name for f in fields(base)}:
        raise ValueError(f"{base.name} has one width only, so there is nothing to choose; give a method with bits, as gptq, or no budget")
    if not choices:
        raise ValueError("choices is empty; give the widths that a module may have, as (2, 3, 4, 8)")
    names = linear_names(model.source.table) if model.source else {}
    return {c: plan(model.spec, quantizer(base, {"bits": c}), rules, names) for c in sorted(set(choices))}


def _units(model: Model, chosen: Mapping[str, Quantizer]) -> dict[str, list[str]]:
    """Modules that are given one width: those that engines fuse, and all experts' of a layer."""
    first: dict[str, str] = {}
    for index, layer in enumerate(model.spec.layers):
        for group in siblings(layer):
            first |= {_pattern(f"layers.{index}.{name}"): _pattern(f"layers.{index}.{group[0]}") for name in group}
    found: dict[str, list[str]] = {}
    for path in chosen:
        found.setdefault(first.get(_pattern(path), _pattern(path)), []).append(path)
    return found


def _pattern(path: str) -> str:
    return EXPERT.sub(".experts.*.", path)


def _patterns(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_pattern, paths)))


def _numel(model: Model, path: str) -> int:
    module: Any = model.get_submodule(path)
    return module.inputs * module.outputs


def _size(model: Model, paths: Sequence[str], chosen: Mapping[str, Quantizer]) -> float:
    """Bits that the modules take, scales included."""
    sizes = ((model.get_submodule(path), chosen[path].storage) for path in paths)
    tensors = (info for module, storage in sizes for info in storage.tensors(module.inputs, module.outputs, False).values())
    return 8.0 * sum(math.prod(info.shape) * getattr(torch, info.dtype or "float32").itemsize for info in tensors)


# ---- losses ------------------------------------------------------------------------------------------------------------------


def _losses(model: Model, units: Sequence[list[str]], plans: Mapping[int, Mapping[str, Quantizer]], ids: Tensor) -> list[dict[int, float]]:
    """The loss of each unit at each choice. Stage by stage, so that what lies before a unit is computed once."""
    stages = _stages(model)
    step = Step.plain(0, len(ids), ids.shape[1], model.device)
    x = model.embed(ids.to(model.device), step)
    target = _outputs(stages, x, step)
    if not target.isfinite().all():
        raise ValueError("the model's outputs on the calibration data hold NaN or infinity, so no loss can be measured against them; load "
                         "it in a wider dtype (bfloat16 or float32), or look for damaged weights")  # fmt: skip
    found: dict[int, dict[int, float]] = {}
    for number, stage in enumerate(stages):
        loss = partial(_loss, [stage, *stages[number + 1 :]], x, step, target)
        inside = (index for index, paths in enumerate(units) if paths[0].startswith(f"{stage.name}."))
        found |= {index: _unit_losses(model, units[index], plans, loss) for index in inside}
        x = stage.run(x, step)
    return [found[index] for index in range(len(units))]


def _loss(stages: Sequence[Stage], x: Tensor, step: Step, target: Tensor, weights: Mapping[str, Tensor]) -> float:
    """The divergence with other weights in the first of these stages, which x enters."""
    return _divergence(target, _outputs(stages[1:], stages[0].run_with(x, step, weights), step))


def _unit_losses(model: Model, paths: Sequence[str], plans: Mapping[int, Mapping[str, Quantizer]],
                 loss: Callable[[Mapping[str, Tensor]], float]) -> dict[int, float]:  # fmt: skip
    """By choice. Choices that come to the same, since a rule fixes the width, are measured once."""
    weights = {path: checked_weight(model, path) for path in paths}
    known: dict[tuple[Quantizer, ...], float] = {}
    found = {}
    for choice, chosen in plans.items():
        methods = tuple(chosen[path] for path in paths)
        if methods not in known:
            known[methods] = loss({path: chosen[path].rounded(weight) for path, weight in weights.items()})
        found[choice] = known[methods]
    return found


def _stages(model: Model) -> list[Stage]:
    """All layers, then the norm and the head."""
    layers = [Stage((n,), model.get_submodule(n), f"{n}.", (NoCache(),), {}) for n in (f"layers.{i}" for i in range(len(model.layers)))]
    return [*layers, Stage(("head", "norm"), Tail(model), "", (), {})]


def _outputs(stages: Sequence[Stage], x: Tensor, step: Step) -> Tensor:
    """What leaves the last stage, for activations that enter the first; themselves where there are none."""
    for stage in stages:
        x = stage.run(x, step)
    return x


def _divergence(target: Tensor, outputs: Tensor) -> float:
    """The mean Kullback-Leibler divergence, in nats, of predictions by logits [..., vocabulary] from those of ``target``.

    Infinite where the predictions are not finite, so that what made them so is never the least loss.
    """
    wanted, given = (F.log_softmax(logits.double().flatten(0, -2), -1) for logits in (target, outputs))
    return float(F.kl_div(given, wanted, log_target=True, reduction="batchmean").nan_to_num(nan=math.inf, posinf=math.inf))
