"""Specs by name, from files and from Python; the catalogue of parts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import zoo.components.contracts  # noqa: F401 (declares the families)
from zoo.components import registry
from zoo.components.registry import Part
from zoo.components.spec import SpecError, check, load, override
from zoo.model import Model, ModelSpec


def spec(model: str | Path | Mapping[str, Any] | ModelSpec, *edits: str) -> ModelSpec:
    """A checked spec: a named model (``llama3-8b``), a YAML file, plain data, or a checkpoint reference (its config alone is read).

    edits: one-line overrides. Raises SpecError with every mistake, ValueError for a name that is not known.
    """
    found = override(_find(model), *edits)
    problems = check(found)
    if problems:
        raise SpecError(problems)
    return found


def _find(model: str | Path | Mapping[str, Any] | ModelSpec) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, Mapping):
        return load(ModelSpec, model)
    path = Path(model)
    if path.suffix in (".yaml", ".yml"):
        return load(ModelSpec, read_yaml(path))
    if str(model) in names():
        return load(ModelSpec, read_yaml(files("zoo.models") / f"{model}.yaml"))
    if "/" in str(model) or "#" in str(model) or path.exists():
        return checkpoint_spec(model)
    raise ValueError(f"no model named {str(model)!r}{registry.nearest(str(model), names())}; or give a folder, a .gguf file or a YAML file")


def checkpoint_spec(reference: str | Path) -> ModelSpec:
    """The spec that a checkpoint's config declares; no weights are read."""
    from zoo.checkpoint import open_checkpoint, read_config
    from zoo.family import family_for
    from zoo.loading import read_spec

    config, tensors = read_config(reference), None
    if "quantization_config" in config:
        checkpoint = open_checkpoint(reference)
        config, tensors = checkpoint.config, checkpoint.tensors()
    return read_spec(family_for(config, str(reference)), config, str(reference), tensors=tensors)[0]


def names() -> list[str]:
    """The named models that ship with the zoo."""
    return sorted(p.name.removesuffix(".yaml") for p in files("zoo.models").iterdir() if p.name.endswith(".yaml"))


def read_yaml(path: Any) -> Any:
    """A YAML file (a path or a package resource). Raises ValueError naming file and line."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except yaml.YAMLError as e:
        raise ValueError(f"{path}: not YAML: {' '.join(str(e).split())}") from None


def build(model: str | Path | Mapping[str, Any] | ModelSpec, *edits: str, dtype: str | torch.dtype = "float32",
          device: str | torch.device = "cpu", seed: int = 0) -> Model:  # fmt: skip
    """A model with fresh random weights (PyTorch's default initialisation under ``seed``)."""
    from zoo.loading import check_memory, parse_device, parse_dtype

    wanted = spec(model, *edits)
    kind, place = parse_dtype(dtype, torch.float32), parse_device(device)
    check_memory(wanted, kind, place, str(model) if isinstance(model, str) else "the spec")
    with torch.random.fork_rng(), torch.device(place):
        torch.manual_seed(seed)
        return wanted.build().to(kind).eval()


def parts(family: str | None = None) -> list[Part]:
    """Every registered part, of one family or of all. Raises RegistryError for an unknown family, with the nearest name."""
    return registry.parts(family)
