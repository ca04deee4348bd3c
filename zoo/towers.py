"""One model of a checkpoint that holds several: ``REFERENCE#vision`` and ``REFERENCE#text`` of CLIP and SigLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.checkpoint import Checkpoint, CheckpointError
from zoo.family import family_for
from zoo.wrapped import Wrapped


class Tower(Wrapped):
    """``whole`` with the config of one of its models; the tensors of the others are still listed, the tower's family ignores them.

    Raises CheckpointError where the checkpoint has no tower of that name.
    """

    def __init__(self, whole: Checkpoint, name: str):
        super().__init__(whole)
        self.reference = f"{whole.reference}#{name}"
        self.config = tower_config(whole.config, name, self.reference)


def tower_config(config: Mapping[str, Any], name: str, reference: str) -> dict[str, Any]:
    """The config of the tower ``name`` as if it were saved alone. Raises CheckpointError naming the towers that there are."""
    towers = family_for(config, reference).towers
    if name not in towers:
        there = f"has the towers {', '.join(towers)}" if towers else "holds one model; leave out what follows the #"
        raise CheckpointError(f"{reference}: the checkpoint has no tower {name!r}; it {there}")
    part = config.get(f"{name}_config") or {}
    if not isinstance(part, Mapping):
        raise CheckpointError(f"{reference}: {name}_config in config.json must be an object, it is {part!r:.60}; download it again")
    shared = {k: config[k] for k in ("projection_dim", "dtype", "torch_dtype", "quantization_config") if k in config}
    return {**part, **shared, **towers[name]}
