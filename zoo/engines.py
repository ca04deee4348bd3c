"""What serving engines make of a quantized model: which weights their fast kernels refuse, and how a saved folder is loaded.

The limits are those of the Marlin kernels as vLLM and SGLang check them (marlin_utils.py, verify_marlin_supports_shape and
check_moe_marlin_supports_layer); they hold for the part of a weight that one GPU has, after tensor parallelism has cut it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zoo.components.contracts import Linear
from zoo.components.linear.packed_float import PackedFloat
from zoo.components.linear.packed_int import PackedInt
from zoo.components.spec import Child, Spec, dump
from zoo.model import ModelSpec
from zoo.weights import folded, linears

DEGREES = (1, 2, 4, 8)  # GPUs among which a model is cut
OUTPUTS, INPUTS = 64, 128  # of a weight on one GPU: multiples of these
EXPERT_WIDTH, EXPERT_HIDDEN = 64, 128  # likewise of experts: along their own width, which is cut, and the model's
GROUPS, FLOAT_GROUPS = (32, 64, 128), (16, 32)
FUSED = (("q", "k", "v"), ("gate", "up"))  # modules that engines make one of
ONE_SCALE = (*FUSED, ("q_down", "kv_down"))  # likewise, those that every GPU has whole too: one global scale holds for each group
BY_OUTPUTS, BY_INPUTS = {"q", "k", "v", "gate", "up"}, {"o", "down"}  # how a module is cut; others each GPU has whole
VLLM = {"compressed-tensors", "gptq", "awq", "bitsandbytes", "fp8", "mxfp4"}  # quant_method words that are read
REFUSED = "vLLM and SGLang multiply some of the weights by slower kernels than Marlin, or refuse to load them"
SGLANG = {"compressed-tensors", "gptq", "awq", "fp8", "mxfp4"}
PADDED = {"mxfp4"}  # whose weights engines fill up to the sizes that their kernels take


@dataclass(frozen=True)
class Refusal:
    """Modules that a kernel refuses when the model is cut for one of these numbers of GPUs, and why."""

    gpus: tuple[int, ...]
    modules: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"on {counted(self.gpus)}: {folded(self.modules)} ({self.reason})"


def counted(gpus: Sequence[int]) -> str:
    return f"{' or '.join(map(str, gpus))} GPU{'s' * (tuple(gpus) != (1,))}"


def refusals(spec: ModelSpec, degrees: Sequence[int] = DEGREES) -> list[Refusal]:
    """What Marlin kernels refuse of a spec's packed weights, for each number of GPUs: engines then take slower ones, or none.

    Weights of other kinds than packed integers and 4-bit floats have other kernels and are not judged.
    """
    modules = {path: child for path, child in linears(spec) if marlin(child.spec)}
    reasons: dict[tuple[str, str], list[int]] = {}
    for gpus in degrees:
        for path in modules:
            for reason in refused(spec, path, modules, gpus):
                reasons.setdefault((path, reason), []).append(gpus)
    found: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for (path, reason), gpus in reasons.items():
        found.setdefault((tuple(gpus), reason), []).append(path)
    return [Refusal(gpus, tuple(paths), reason) for (gpus, reason), paths in sorted(found.items(), key=lambda item: item[0][0])]


def marlin(storage: Any) -> bool:
    """Whether a storage is of a kind that Marlin kernels multiply."""
    return isinstance(storage, PackedInt) or (isinstance(storage, PackedFloat) and storage.element == "e2m1")


def refused(spec: ModelSpec, path: str, modules: Mapping[str, Child], gpus: int) -> Iterator[str]:
    """Reasons against a module."""
    storage, leaf = modules[path].spec, path.rpartition(".")[2]
    assert isinstance(storage, Linear)
    yield from kinds(storage)
    sizes = cut(spec, path, modules, gpus)
    if isinstance(sizes, str):
        yield sizes
        return
    group, expert = getattr(storage, "group_size", None) or 1, ".experts." in path
    for side, size, here in zip(("outputs", "inputs"), sizes, (leaf in BY_OUTPUTS, leaf in BY_INPUTS), strict=True):
        plain = OUTPUTS if side == "outputs" else INPUTS
        least = (max(EXPERT_WIDTH, group) if here else EXPERT_HIDDEN) if expert else plain
        if size % least:
            yield f"{size} {side} are no multiple of {least}"
        elif side == "inputs" and size % group:
            yield f"{size} inputs cut groups of {group}"


def cut(spec: ModelSpec, path: str, modules: Mapping[str, Child], gpus: int) -> tuple[int, int] | str:
    """(outputs, inputs) that one GPU has of a module and those that it is fused with, or why it cannot be cut."""
    parent, _, leaf = path.rpartition(".")
    inputs, owner = modules[path].at[0], part_at(spec, parent)
    heads, kv_heads = (getattr(owner, name, None) for name in ("heads", "kv_heads"))
    if heads and leaf in BY_OUTPUTS | BY_INPUTS and heads % gpus:
        return f"{heads} heads do not divide among {gpus}"
    if leaf in BY_INPUTS:
        return f"{inputs} inputs do not divide among {gpus}" if inputs % gpus else (modules[path].at[1], inputs // gpus)
    parts = 1 if leaf not in BY_OUTPUTS else gpus
    names = next((names for names in FUSED if leaf in names), (leaf,)) if ".experts." not in path else (leaf,)
    total = 0
    for name in (n for n in names if f"{parent}.{n}" in modules):
        size = modules[f"{parent}.{name}"].at[1]
        share = min(parts, kv_heads) if kv_heads and name in ("k", "v") else parts  # few key heads: several GPUs have the same one
        if size % share:
            return f"{size} outputs do not divide among {gpus}"
        total += size // share
    return total, inputs


def sharing(paths: Iterable[str]) -> list[list[str]]:
    """The modules among some that engines give one global scale, whatever the names are that files give them, experts' one by one."""
    parents: dict[tuple[str, int], list[str]] = {}
    for path in paths:
        parent, _, leaf = path.rpartition(".")
        for i, names in enumerate(ONE_SCALE):
            if leaf in names:
                parents.setdefault((parent, i), []).append(path)
    return [group for group in parents.values() if len(group) > 1]


def part_at(spec: Spec, path: str) -> Any:
    """The part at a module's path, None where the path leads to none."""
    at: Any = spec
    for word in path.split("."):
        at = at[int(word)] if isinstance(at, tuple) else getattr(at, word, None)
    return at


def kinds(storage: Linear) -> Iterator[str]:
    """Reasons that hold for any shape."""
    size = getattr(storage, "group_size", None)
    if isinstance(storage, PackedInt):
        if storage.bits not in ((4, 8) if storage.symmetric else (4,)):
            yield f"{storage.bits} bits{'' if storage.symmetric else ' with zero points'}"
        if size is not None and size not in GROUPS:
            yield f"groups of {size}"
    elif size not in FLOAT_GROUPS:
        yield f"groups of {size} with 4-bit floats"


def in_words(found: Sequence[Refusal]) -> str:
    """One line for a warning: what is refused on one GPU, or else on the fewest."""
    least = min(gpus for refusal in found for gpus in refusal.gpus)
    first = [f"{folded(r.modules)} ({r.reason})" for r in found if least in r.gpus]
    where = f"README.md beside the weights has those for up to {DEGREES[-1]} GPUs, zoo.engines.refusals(model.spec) gives them"
    return f"{REFUSED}: on {counted((least,))} {'; '.join(first)}. {where}"


NEEDED = {"awq": " (with gptqmodel)", "gptq": " (with optimum and gptqmodel)", "aqlm": " (with aqlm)"}


def readme(spec: ModelSpec, name: str, quantization: Mapping[str, Any], reason: str | None) -> str:
    """README.md of a saved quantized model. reason: why transformers cannot run it, None where it can."""
    method, storages = str(quantization["quant_method"]), storage_lines(spec)
    lines = [f"# {name}", "", "A quantized model, written by modular-zoo. Its linear modules are stored as", "", *storages, ""]
    lines += ["## How to load it", "", *block("Here:", "import zoo", "", f'model = zoo.load("{name}")', language="python")]
    if reason is None:
        dtype = ', dtype="bfloat16"' if "nvfp4" in str(quantization) else ""  # the one in which compressed-tensors decodes it
        code = ("from transformers import AutoModelForCausalLM", "", f'model = AutoModelForCausalLM.from_pretrained("{name}"{dtype})')
        lines += block(f"In transformers{NEEDED.get(method, '')}:", *code, language="python")
    else:
        lines += [f"transformers does not load it: {reason}.", ""]
    for engine, command, read in (("vLLM", f"vllm serve {name}", VLLM),
                                  ("SGLang", f"python -m sglang.launch_server --model-path {name}", SGLANG)):  # fmt: skip
        known = method in read and reason is None
        lines += block(f"In {engine}:", command, language="bash") if known else [f"{engine} does not load it.", ""]
    found = refusals(spec) if method in VLLM - PADDED else []
    if found and reason is None:
        lines += [f"{REFUSED}:", ""]
        lines += [*(f"- {refusal}" for refusal in found), ""]
    return "\n".join(lines)


def block(title: str, *code: str, language: str) -> list[str]:
    return [title, "", f"```{language}", *code, "```", ""]


def storage_lines(spec: ModelSpec) -> list[str]:
    """A line for each storage, with the modules that have it."""
    found: dict[str, list[str]] = {}
    for path, child in linears(spec):
        part = replace(child.spec, matmul=None) if hasattr(child.spec, "matmul") else child.spec
        data = dump(part)
        words = data if isinstance(data, str) else ", ".join(f"{key}: {value}" for key, value in data.items())
        found.setdefault(words, []).append(path)
    return [f"- `{words}`: {folded(paths)}" for words, paths in found.items()]
