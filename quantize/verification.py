"""What is checked about a quantization before its work: memory, shapes that engines refuse, modules that are better left alone.

The checks after it, of what was saved, are in ``zoo.verification``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.engines import REFUSED, refusals
from zoo.model import ModelSpec
from zoo.quantize.contracts import Quantizer
from zoo.quantize.rules import KEPT
from zoo.storages import set_storage
from zoo.verification import VerificationError, Verified, verify
from zoo.weights import folded

__all__ = ["Findings", "VerificationError", "Verified", "findings", "verify"]


@dataclass(frozen=True)
class Findings:
    """memory: what the work will take, in words. engines: what serving engines' kernels will refuse, by number of GPUs, with the modules.

    sensitive: modules that are quantized by a rule, although they are kept by default because that costs much accuracy or keeps engines
    from loading the model.
    """

    memory: str
    engines: tuple[str, ...]
    sensitive: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """All but the memory, for people."""
        if self.engines:
            yield f"{REFUSED}:"
            yield from (f"  {refusal}" for refusal in self.engines)
        if self.sensitive:
            yield f"quantized by a rule, though kept by default: {folded(self.sensitive)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON gives it back."""
        return {"memory": self.memory, "engines": list(self.engines), "sensitive": list(self.sensitive)}


def findings(spec: ModelSpec, chosen: Mapping[str, Quantizer], memory: str) -> Findings:
    """The checks of a plan. spec: of the model before; chosen: the quantizer of each module, by path. Nothing is loaded."""
    for path, method in chosen.items():
        spec = set_storage(spec, path, method.storage)
    return Findings(memory, tuple(map(str, refusals(spec))), tuple(path for path in chosen if sensitive(path)))


def sensitive(path: str) -> bool:
    """Whether a module is kept by default: embeddings, heads, routers, the up-projections of latent attention."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in KEPT)
