"""``zoo.load``: a model from a reference."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from zoo.arguments import check_arguments
from zoo.checkpoint import FLOATS, Checkpoint, CheckpointError, open_checkpoint
from zoo.components import registry
from zoo.components.contracts import Prepared, StoredLinear, unfilled
from zoo.components.spec import Spec, SpecError, TensorInfo, check, dump, override
from zoo.components.spec import load as load_spec
from zoo.config_checks import check_config, check_experts
from zoo.dequantized import input_scales
from zoo.family import Family, family_for
from zoo.formats import Format
from zoo.kv_scales import is_scale, with_declared, with_stored
from zoo.model import Model, ModelSpec
from zoo.renamed import Renamed
from zoo.storages import Quantized, format_for, idle_bias, plain_spec, quantized_spec, unpacked, without_rest
from zoo.weights import Entry, Rule, below, check_names, entries, fill, folded

if TYPE_CHECKING:
    from zoo.placement import Plan

DeviceMap = Literal["auto", "balanced"] | Mapping[str, int | str | torch.device]
GIB = 1 << 30
NAMED = 8  # tensors, in a warning
GLANCE = 1 << 18  # elements of a tensor that are looked at where it stays in its file, which is read in full when it is used


@dataclass
class Source:
    """Where a model's weights come from: enough to read any part of them again. left_out: weights in the files that are not its."""

    checkpoint: Checkpoint
    table: list[Entry]
    dtype: torch.dtype
    device: torch.device
    left_out: Sequence[str] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        return self  # files are only read: a copied model has the same source

    @property
    def reference(self) -> str:
        return self.checkpoint.reference

    @cached_property
    def tokenizer(self) -> Any:
        return self.checkpoint.tokenizer

    @property
    def generation(self) -> dict[str, Any]:
        return self.checkpoint.generation

    @property
    def preprocessing(self) -> dict[str, Any]:
        return self.checkpoint.preprocessing

    def fill(self, model: Model, prefix: str = "") -> None:
        """Load the tensors below ``prefix``. Warns (UserWarning) of those with NaN or infinite values."""
        with ThreadPoolExecutor(1) as pool:  # each tensor is looked at while further ones are read
            counts: list[tuple[str, Future[int]]] = []

            def placed() -> Iterator[Entry]:
                for entry in self.table:
                    yield entry
                    for name in (n for n in entry.ours if below(prefix, n)):
                        tensor, label = stored_tensor(model, name), entry.theirs[0] if len(entry.theirs) == 1 else name
                        looked = tensor.view(-1)[:GLANCE] if self.checkpoint.holds(tensor) else tensor
                        counts.append((label, pool.submit(not_finite, numbers(model, name, looked))))

                        if model.placement is not None:
                            counts[-1][1].result()  # else those that wait to be looked at would pile up in memory

            if model.placement is None:
                fill(model, placed(), self.checkpoint, self.dtype, self.device, prefix)
            else:
                model.placement.fill(model, placed(), self.checkpoint, self.dtype, prefix)
        found: Counter[str] = Counter()
        for label, count in counts:
            found[label] += count.result()
        self._warn_of_damage(+found)
        finish(model, prefix)

    def _warn_of_damage(self, found: Mapping[str, int]) -> None:
        """Warn of tensors that hold so many values which are no numbers."""
        if not found:
            return
        some = ", ".join(f"{name} ({count:,})" for name, count in list(found.items())[:NAMED])
        rest = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        warnings.warn(
            f"{self.reference}: {len(found)} tensors hold NaN or infinite values: {some}{rest}. What the model computes with them is NaN. "
            "Either the files are damaged, then download them again, or their values are too large for "
            f"{str(self.dtype).removeprefix('torch.')}, then load with dtype='float32'",
            stacklevel=4,
        )


def load(reference: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu",
         override: Sequence[str] = (), lazy: bool = False, quantized: Quantized = "keep", device_map: DeviceMap | None = None,
         max_memory: Mapping[int | str, int | str] | None = None, offload_folder: str | Path | None = None) -> Model:  # fmt: skip
    """A model with its weights.

    reference: a local folder, a .gguf file, ``package:NAME/FILE``, or a hub id with optional ``@revision``. dtype: of the weights;
    "auto" is the checkpoint's own. override: one-line edits of the spec, as ``layers.*.mixer.kernel=eager``. lazy: leave the tensors
    on the meta device; ``zoo.weights.materialize`` loads them part by part. quantized: what becomes of quantized weights: they stay
    packed as in the files, or are read as plain ones of ``dtype`` ("dequantize"), which take their inputs as they are; overrides are then
    of the plain model. Weights that no packed storage here holds, as where one tensor is several, are plain in any case.
    device_map, max_memory: spread the model over GPUs, the CPU and the disk, see ``zoo.placement.plan``; weights on the CPU beside a
    GPU, and on disk in ``offload_folder``, are streamed to where they are used. ``device`` and ``lazy`` are for models at one place.

    Raises TypeError for arguments of another type, ValueError for devices and dtypes that are not there, CheckpointError for a
    checkpoint that is absent, damaged or does not fit, SpecError for overrides that do not, NotEnoughMemory before anything is read if
    the model cannot fit. Warns (UserWarning) of weights that are no part of the model, as a vision tower, of scales of inputs that
    dequantized weights have no use for, and of weights that are NaN or infinite; of a large tensor that stays as it lies in its file,
    which is then read when it is used, only the beginning is looked at.
    """
    if quantized not in get_args(Quantized):
        raise ValueError(f"quantized={quantized!r} is no choice{registry.nearest(str(quantized), get_args(Quantized))}")
    check_options(override, device, lazy, device_map, max_memory, offload_folder)
    place, checkpoint = parse_device(device), open_checkpoint(reference)
    family, kind = family_for(checkpoint.config, checkpoint.reference), parse_dtype(dtype, checkpoint.dtype)
    if quantized == "keep":
        spec, format = read_spec(family, checkpoint.config, checkpoint.reference, override, checkpoint.tensors())
        checkpoint, spec = arranged(checkpoint, spec, family, format)
    else:
        checkpoint, spec = dequantized(checkpoint, family, kind)
        spec, format = edited(spec, override, checkpoint.reference), None
        checkpoint = Renamed(checkpoint, family.known_as(checkpoint.tensors(), spec))
    table = table_of(checkpoint, spec, family, family.rules_for(spec, checkpoint.tensors()), format)
    if scales := input_scales(checkpoint):
        warnings.warn(f"{checkpoint.reference}: dequantized weights take their inputs as they are, and the {len(scales)} scales that "
                      f"inputs are rounded by are left out: {folded(scales)}", stacklevel=2)  # fmt: skip
    left = sorted(name for name in checkpoint.tensors() if family.leaves_out(name, spec))
    if left:
        warnings.warn(
            f"{checkpoint.reference}: {len(left)} tensors are no part of the model and are not loaded: {folded(left)}", stacklevel=2
        )
    planned = None if device_map is None else placed(spec, kind, device_map, max_memory, offload_folder, checkpoint.reference)
    if not lazy and planned is None:
        check_memory(spec, kind, place, checkpoint.reference)
    with unfilled():
        model = spec.build()
    model.config, model.source = checkpoint.config, Source(checkpoint, table, kind, place, left)
    if planned is not None:
        spread(model, planned, offload_folder)
    if not lazy:
        model.source.fill(model)
    return model.eval()


def arranged(checkpoint: Checkpoint, spec: ModelSpec, family: Family, format: Format | None) -> tuple[Checkpoint, ModelSpec]:
    """The checkpoint under the names of the family's table, without quantized weights that no module keeps packed, and the whole spec."""
    spec = with_stored(spec, checkpoint)
    named = Renamed(checkpoint, family.known_as(checkpoint.tensors(), spec))
    return (named if format is None else without_rest(named, spec, family)), spec


def dequantized(checkpoint: Checkpoint, family: Family, dtype: torch.dtype) -> tuple[Checkpoint, ModelSpec]:
    """The checkpoint and the spec that it declares, with plain weights of ``dtype``."""
    spec, format = read_spec(family, checkpoint.config, checkpoint.reference, (), checkpoint.tensors())
    found, spec = arranged(checkpoint, spec, family, format)
    if format is None:
        return found, spec
    rules = family.rules_for(spec, found.tensors())
    table = table_of(found, spec, family, rules, format)
    read = {name for entry in table for name in entry.theirs}
    idle = {name for name in found.tensors() if name not in read and not family.leaves_out(name, spec)}
    plain = unpacked(found, spec, rules, table, dtype, idle)
    return plain, plain_spec(spec)


def table_of(checkpoint: Checkpoint, spec: ModelSpec, family: Family, rules: Sequence[Rule], format: Format | None) -> list[Entry]:
    """Which tensor of the files is which of the model. Raises CheckpointError, naming all of them, for those that do not fit."""
    table = entries(spec, rules, format)
    check_names(spec, table, checkpoint, lambda name: family.ignores(name, spec) or family.leaves_out(name, spec)
                or tied_copy(spec, table, checkpoint, name) or idle_bias(checkpoint, name)
                or is_scale(name, checkpoint.config.get("quantization_config")))  # fmt: skip
    return table


def check_options(override: Sequence[str], device: str | torch.device, lazy: bool, device_map: DeviceMap | None,
                  max_memory: Mapping[int | str, int | str] | None, offload_folder: str | Path | None) -> None:  # fmt: skip
    """Raise TypeError for options of another type, ValueError for those of a spread model without a device_map, or that it excludes."""
    maps = {} if isinstance(device_map, str) else {"device_map": device_map}  # of words, the nearest is named later
    check_arguments(check_options, {"override": override, "max_memory": max_memory, "offload_folder": offload_folder, **maps})
    given = [n for n, v in (("max_memory", max_memory), ("offload_folder", offload_folder)) if v is not None]
    if device_map is None and given:
        raise ValueError(f"{' and '.join(given)} say how a model is spread; give device_map='auto' with them")
    if device_map is not None and (lazy or str(device) != "cpu"):
        raise ValueError(f"device_map says where each part goes; leave {'lazy' if lazy else 'device'} out")


def placed(spec: ModelSpec, dtype: torch.dtype, device_map: DeviceMap, max_memory: Mapping[int | str, int | str] | None,
           offload_folder: str | Path | None, reference: str) -> Plan:  # fmt: skip
    """Where each unit of a model goes. Raises ValueError for devices that are not there, NotEnoughMemory where it does not fit."""
    from zoo.placement import check_devices, check_fits, plan  # accelerate takes seconds to import

    planned = plan(spec, dtype, device_map, max_memory)
    check_devices(planned)
    check_fits(planned, spec, dtype, reference, disk=offload_folder is not None)
    return planned


def spread(model: Model, planned: Plan, offload_folder: str | Path | None) -> None:
    from zoo.streaming import Streaming

    Streaming(planned, offload_folder).attach(model)


def stored_tensor(model: Model, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def numbers(model: Model, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A stored tensor, or a part of it, as what its elements stand for where it packs floats."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return module.numbers(leaf, tensor) if isinstance(module, StoredLinear) else tensor


def not_finite(tensor: torch.Tensor) -> int:
    """How many elements are NaN or infinite."""
    if not tensor.is_floating_point():
        return 0
    if tensor.itemsize == 1:  # few operators know 8-bit floats, and as others they take four times the room: codes are counted
        codes = torch.arange(256, dtype=torch.uint8, device=tensor.device)
        counts = torch.bincount(tensor.view(torch.uint8).flatten(), minlength=256)
        return int(counts[~codes.view(tensor.dtype).float().isfinite()].sum())
    if bool(tensor.sum().isfinite()):  # NaN and infinity survive a sum, which needs one pass and no memory
        return 0
    return int(tensor.isfinite().logical_not_().sum())


def finish(model: Model, prefix: str) -> None:
    """What follows once tensors are in place: ties, and the memory layout that each storage computes with."""
    tie = model.spec.head.tie()
    if model.placement is not None:
        model.placement.tie(model)
    elif tie and not getattr(model.embed, tie[1]).is_meta:
        model.tie()
    for name, module in model.named_modules():
        if below(prefix, name) and isinstance(module, Prepared):
            module.prepare()


def read_spec(family: Family, config: Mapping[str, Any], reference: str, edits: Sequence[str] = (),
              tensors: Mapping[str, TensorInfo] | None = None) -> tuple[ModelSpec, Format | None]:  # fmt: skip
    """The spec that a checkpoint declares, with its quantized storages and the overrides; checked.

    tensors: those of the files, which a quantized checkpoint's storages depend on.
    """
    format = None
    try:
        check_config(family, config, tensors)
        read = family.read(config)
        check_experts(read, tensors)
        spec = load_spec(ModelSpec, dump(read))  # checks the types of what the config gave
        quantization = config.get("quantization_config")
        if quantization is not None:
            format = format_for(quantization)
            names = family.known_as(tensors or {}, spec)
            spec = quantized_spec(spec, family, format, quantization, {names[n]: t for n, t in (tensors or {}).items()})
            spec = with_declared(spec, quantization)
    except KeyError as e:
        word = family.spelling.get(e.args[0], e.args[0])
        raise CheckpointError(f"{reference}: config.json has no {word}") from None
    except SpecError as e:
        raise CheckpointError(f"{reference}: config.json gives values that no model can have: {'; '.join(e.errors[:8])}") from None
    except RecursionError:
        raise CheckpointError(f"{reference}: config.json nests a spec too deeply to be read") from None
    except IndexError as e:
        raise CheckpointError(f"{reference}: config.json cannot be understood: a list in it has too few entries ({e})") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, re.error) as e:
        raise CheckpointError(f"{reference}: config.json cannot be understood: {e}") from None
    return edited(spec, edits, reference), format


def edited(spec: ModelSpec, edits: Sequence[str], reference: str) -> ModelSpec:
    """The spec with the overrides, checked. Raises SpecError with every mistake."""
    try:
        spec = override(spec, *edits)
        problems = check(spec)
    except SpecError as e:
        problems = e.errors
    if problems:
        raise SpecError([f"{reference}: {problem}" for problem in problems])
    return spec


def tied_copy(spec: ModelSpec, table: Sequence[Entry], checkpoint: Checkpoint, name: str) -> bool:
    """True where a tensor is the tied head, stored although it is tied, and equals the embedding.

    Raises CheckpointError where it differs: then the flag is wrong, and following either would be a guess.
    """
    tie = spec.head.tie()
    if not tie or name not in _head_names(spec):
        return False
    embedding = next(e.theirs[0] for e in table if e.ours == (f"embed.{tie[1]}",))
    if torch.equal(checkpoint.read(name), checkpoint.read(embedding)):
        return True
    raise CheckpointError(
        f"{checkpoint.reference}: config.json says that the head is tied, but {name} differs from {embedding}. Set "
        f'"tie_word_embeddings": false to use the stored head, or remove {name} to use the embedding'
    )


def _head_names(spec: ModelSpec) -> set[str]:
    family = registry.get("family", spec.checkpoint).spec()
    assert isinstance(family, Family)
    tie = spec.head.tie()
    return {r.theirs[0] for r in family.rules(spec) if tie and r.ours == (f"head.{tie[0]}",)}


class NotEnoughMemory(CheckpointError, MemoryError):
    """The model would not fit; said before anything is loaded."""


def check_memory(spec: ModelSpec, dtype: torch.dtype, device: torch.device, reference: str) -> None:
    """Raise NotEnoughMemory if the weights do not fit on the device."""
    need, have = weight_bytes(spec, dtype), available_bytes(device)
    if need > have:
        raise NotEnoughMemory(
            f"{reference}: the weights take {need / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}, "
            f"{device} has {have / GIB:.2f} GiB free. "
            "Load with a smaller dtype (dtype='bfloat16'), a quantized checkpoint, or on another device"
        )


def weight_bytes(spec: Spec, dtype: torch.dtype, *at: Any) -> int:
    """Bytes of all stored tensors of a spec."""
    return sum(math.prod(t.shape) * (getattr(torch, t.dtype) if t.dtype else dtype).itemsize for t in spec.tensors(*at).values())


def available_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "meta":
        return 1 << 62
    import psutil

    return min(psutil.virtual_memory().available, container_bytes(Path("/sys/fs/cgroup")))


def container_bytes(group: Path) -> int:
    """What a container's memory limit leaves (control groups version 2, then 1); a huge number where there is no limit."""
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        if (group / limit).is_file() and (group / used).is_file():
            most, now = (group / limit).read_text().strip(), int((group / used).read_text())
            return 1 << 62 if most == "max" else max(0, int(most) - now)
    return 1 << 62


def parse_dtype(dtype: str | torch.dtype, auto: torch.dtype) -> torch.dtype:
    """The dtype that weights are to have. Raises ValueError for one that models do not compute in."""
    if dtype == "auto":
        return auto
    word = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if word not in FLOATS:
        near = registry.nearest(str(word), ["auto", *FLOATS])
        raise ValueError(f"dtype={dtype!r} is none that weights can have{near}; known: auto, {', '.join(FLOATS)}")
    return getattr(torch, word)


def parse_device(device: str | torch.device) -> torch.device:
    """The device that a model is to lie on. Raises ValueError for one that is none, or that is not there."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    choices = f"here are {', '.join(['cpu', 'meta', *gpus])}"
    if not isinstance(device, str | torch.device):
        raise ValueError(f"device={device!r} is no device; give a text or a torch.device; {choices}")
    try:
        return torch.empty(0, device=device).device if torch.device(device).type != "cpu" else torch.device("cpu")
    except (RuntimeError, AssertionError) as e:  # what torch raises where it is built without a kind of device
        reason = str(e).partition("\n")[0]
        raise ValueError(f"device={str(device)!r} cannot be used ({reason:.160}); {choices}") from None
