"""GPTQ checkpoints of version 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zoo.components.registry import part
from zoo.formats import Format
from zoo.quantize.formats.gptq import GPTQFormat


@part(Format, "gptq_v2", source="GPTQModel, checkpoint_format gptq_v2")
@dataclass(frozen=True, kw_only=True)
class GPTQv2Format(GPTQFormat):
    """As version 1, but zero points are stored as they are. Read by GPTQModel and vLLM."""

    version: ClassVar[str] = "gptq_v2"
    less: ClassVar[int] = 0
