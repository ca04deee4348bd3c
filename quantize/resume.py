"""A folder in which a quantization can be taken up again after a crash.

``fingerprint.json`` says what is computed. Each finished stage (a layer) leaves one file with its packed tensors and report rows;
``hidden.safetensors`` holds the activations that enter the next one. Every file is written under another name and renamed, the
stage's before the activations', so at any moment the folder is one that a run can continue from. A file that is damaged all the same
(the disk was full, the power failed) costs only its own stage, which is computed anew. One run at a time holds the folder by a lock.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.quantize.report import Change, Row
from zoo.replacing import LOCK, locked

FINGERPRINT, HIDDEN = "fingerprint.json", "hidden.safetensors"
SCRATCH = "fingerprint.tmp"  # there where a run was killed before it was renamed
NAMED = 8  # of a folder's files, in a message


def reserved(folder: Path) -> AbstractContextManager[None]:
    """Within this, no other run has the folder, see ``zoo.replacing.locked``; for the one process of a run that writes.

    Raises ValueError for a folder of other files.
    """
    if folder.is_dir() and not (folder / FINGERPRINT).exists():
        others = sorted(p.name for p in folder.iterdir() if p.name not in (SCRATCH, LOCK))
        if others:
            raise ValueError(
                f"{folder} is where finished layers are kept, and holds other files: {', '.join(others[:NAMED])}; move them away, or "
                "choose another place"
            )
    return locked(folder, "where finished layers are kept")


class WorkDir:
    """Stages finished so far, in a folder that is there. Raises ValueError, naming what differs, for one of another quantization."""

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]):
        self.folder = folder
        path = self.folder / FINGERPRINT
        text = json.dumps(fingerprint, indent=2, sort_keys=True) + "\n"
        if path.exists():
            self._compare(_read_fingerprint(path), json.loads(text))
        else:
            scratch = self.folder / SCRATCH
            scratch.write_text(text)
            scratch.replace(path)

    def finished(self, names: Sequence[str]) -> int:
        """How many stages, of these names in this order, can be taken up; no tensor is read. Warns of files that are damaged."""
        for done, name in enumerate(names):
            if self._metadata(self._path(name), "rows") is None:
                return done
        return len(names)

    def hidden(self, most: int) -> tuple[int, dict[str, Tensor]] | None:
        """The number of stages that the kept activations have left, and they; None where it is above ``most`` or there are none."""
        path = self.folder / HIDDEN
        stages = self._metadata(path, "stages")
        return None if stages is None or stages > most else (stages, _read(path)[0])

    def stage(self, name: str) -> tuple[dict[str, Tensor], list[dict[str, Any]], list[dict[str, Any]]]:
        """A finished stage's tensors (``module path.tensor name``), its report rows and what transforms changed in it."""
        tensors, metadata = _read(self._path(name))
        return tensors, json.loads(metadata["rows"]), json.loads(metadata["changes"])

    def store(self, name: str, tensors: Mapping[str, Tensor], rows: Sequence[Row], changes: Sequence[Change],
              hidden: Mapping[str, Tensor], stages: int) -> None:  # fmt: skip
        """Record a stage, the ``stages``-th, and the activations that follow it (an empty tensor where there is no data)."""
        said = {"rows": json.dumps([asdict(row) for row in rows]), "changes": json.dumps([asdict(change) for change in changes])}
        _write(self._path(name), tensors, said)
        _write(self.folder / HIDDEN, hidden, {"stages": str(stages)})

    def _metadata(self, path: Path, field: str) -> Any:
        """What a file's metadata say, None where it is absent or, with a warning, where it is damaged."""
        if not path.exists():
            return None
        try:
            with safe_open(str(path), "pt") as file:
                return json.loads((file.metadata() or {})[field])
        except (SafetensorError, OSError, KeyError, ValueError) as e:
            warnings.warn(f"{path} is damaged or cut short ({e}); what it held is computed anew", stacklevel=4)
            return None

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _compare(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        differ = [
            f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
        ]
        if differ:
            raise ValueError(
                f"{self.folder} belongs to another quantization: {'; '.join(differ)}. Give the same settings, choose another place, or "
                "delete that folder to begin again"
            )


def _read_fingerprint(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is damaged ({e}); delete the folder {path.parent} to begin again, or choose another place") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is of no quantization; delete the folder {path.parent} to begin again, or choose another place")
    return found


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(str(path), "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118 (not a dict)


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    scratch = path.with_suffix(".tmp")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, scratch, metadata)
    except SafetensorError as e:
        raise OSError(f"{path} cannot be written ({e}); what is finished stays, start the same run again to go on") from None
    scratch.replace(path)
