"""Options that several commands share: which model, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from zoo.model import Model, ModelSpec

ModelArgument = Annotated[
    str, typer.Argument(help="A folder, a .gguf file, package:NAME/FILE, a hub id[@revision], a named model or a YAML file.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Edit the spec: path=value, e.g. layers.*.mixer.kernel=eager. Repeatable.")
]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
QuantizedOption = Annotated[str, typer.Option(help="What becomes of quantized weights: keep them packed, or dequantize.")]
DeviceMapOption = Annotated[
    list[str] | None,
    typer.Option(help="Spread the model: auto, balanced, a place (cpu, disk, a GPU's number) for all of it, a JSON object of places, "
                      "or module=place (layers.3=1). Repeatable."),
]  # fmt: skip
MaxMemoryOption = Annotated[list[str] | None, typer.Option(help="What the weights at a place may take: 0=80GiB, cpu=200GiB. Repeatable.")]
OffloadOption = Annotated[Path | None, typer.Option(help="Folder for the weights whose place is the disk.")]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The options of ``zoo.load`` as they are typed; ``with_loading`` gives them to a command."""

    set: SetOption = None
    dtype: DtypeOption = "auto"
    device: DeviceOption = "cpu"
    quantized: QuantizedOption = "keep"
    device_map: DeviceMapOption = None
    max_memory: MaxMemoryOption = None
    offload_folder: OffloadOption = None

    @property
    def edits(self) -> Sequence[str]:
        return self.set or ()

    def load(self, reference: str, *, quantized: str | None = None, lazy: bool = False) -> Model:
        """The model. quantized: in place of the option. lazy: leave its weights in the files, which a model that is spread cannot."""
        from zoo.loading import load

        return load(
            reference,
            dtype=self.dtype,
            device=self.device,
            override=self.edits,
            lazy=lazy and not self.device_map,
            quantized=quantized or self.quantized,  # type: ignore[arg-type] (load checks it)
            device_map=read_device_map(self.device_map) if self.device_map else None,
            max_memory=read_pairs(self.max_memory, "max-memory") if self.max_memory else None,  # type: ignore[arg-type] (load checks it)
            offload_folder=self.offload_folder,
        )

    def spec(self, reference: str) -> ModelSpec:
        """The spec of the model that ``load`` gives, from the config alone."""
        from zoo.declare import spec
        from zoo.storages import plain_spec

        return spec(plain_spec(spec(reference)), *self.edits) if self.quantized == "dequantize" else spec(reference, *self.edits)

    def check_whole(self, doing: str) -> None:
        """Raise ValueError, before anything is read, where the options spread a model of which ``doing`` needs all at one place."""
        spreading = {"--device-map": self.device_map, "--max-memory": self.max_memory, "--offload-folder": self.offload_folder}
        given = [option for option, value in spreading.items() if value]
        if given:
            raise ValueError(f"{doing} needs a model at one place; leave {' and '.join(given)} out, and say with --device where it goes")


def with_loading(**defaults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of ``Loading`` as options, in place of its parameter ``loading``. defaults: this command's own."""
    hints = get_type_hints(Loading, include_extras=True)
    options = [Parameter(f.name, Parameter.KEYWORD_ONLY, default=defaults.get(f.name, f.default), annotation=hints[f.name])
               for f in fields(Loading)]  # fmt: skip

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in signature(command, eval_str=True).parameters.values() if p.name != "loading"]

        @wraps(command)
        def called(**given: Any) -> None:
            chosen = Loading(**{option.name: given.pop(option.name) for option in options})
            command(**given, loading=chosen)

        called.__signature__ = signature(command).replace(parameters=[*own, *options])  # pyright: ignore[reportAttributeAccessIssue]
        return called

    return decorate


def with_home(command: Callable[..., None]) -> Callable[..., None]:
    """Let ~ in the paths that a command is given stand for the user's home, which shells replace only at the start of a word."""

    def expanded(value: Any) -> Any:
        if isinstance(value, list):
            return [expanded(one) for one in value]
        return value.expanduser() if isinstance(value, Path) else value

    @wraps(command)
    def called(**given: Any) -> None:
        command(**{name: expanded(value) for name, value in given.items()})

    return called


def read_device_map(given: Sequence[str]) -> Any:
    """What ``zoo.load`` takes as device_map, from the words of the option. Raises ValueError for words that make no sense together."""
    from zoo.components.spec import read_value

    word = given[0]
    if len(given) > 1 or ("=" in word and not word.startswith("{")):
        return read_pairs(given, "device-map")
    if word.startswith("{"):
        return read_value(word)
    return {"": word} if word in ("cpu", "disk") or word.removeprefix("cuda:").isdigit() else word


def read_pairs(given: Sequence[str], option: str) -> dict[str, str]:
    """``name=value`` texts as a mapping. Raises ValueError for others, and for names that come twice."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name in found:
            raise ValueError(f"--{option} {text}: write name=value, each name once")
        found[name] = value
    return found
