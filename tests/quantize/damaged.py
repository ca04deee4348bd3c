"""Saved models that tests damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from tests.zoo.oracle import llama_checkpoint
from zoo.model import Model
from zoo.quantize import quantize

Tensors = dict[str, Tensor]


def quantized_and_saved(folder: Path, dtype: str = "float32") -> tuple[Model, Path]:
    """A small Llama in 4 bits, made and saved inside ``folder``, and where it was saved to."""
    llama_checkpoint(folder / "model", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=64)
    model = zoo.load(folder / "model", dtype=dtype)
    quantize(model, "rtn", group_size=32, progress=False)
    zoo.save(model, folder / "saved")
    return model, folder / "saved"


def damage(folder: Path, change: Callable[[Tensors], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
