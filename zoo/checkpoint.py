"""Checkpoints as we read them: names, shapes and one tensor at a time, whatever the file format.

``open_checkpoint`` understands a local folder, a ``.zip`` of one, a ``.gguf`` file, ``package:NAME/FILE`` and a hub id with
optional ``@revision``.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zoo.components.spec import TensorInfo

FLOATS = ("float32", "bfloat16", "float16", "float64")
METADATA = "__metadata__"  # in the header of a .safetensors file, beside the tensors
LARGEST_JSON = 256 << 20  # bytes; the largest tokenizers and indices have a tenth
LONGEST_NAME, LONGEST_PATH = 255, 4096  # bytes, on the file systems of Linux
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
          "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64",
          "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, is damaged, or does not fit; says which file, why, and what to do."""


class NoTokenizer(CheckpointError):
    """A checkpoint that came without a tokenizer."""


class Checkpoint(ABC):
    """config: the contents of config.json. reference: how the user named it. dtype: the dtype that its weights are meant to have."""

    reference: str
    config: dict[str, Any]
    dtype: torch.dtype

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor, by name on disk."""

    @property
    def private(self) -> bool:
        """Whether tensors that ``read`` gives may be kept and changed; where not, who keeps one copies it."""
        return False

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor on the CPU; it may be a view of the mapped file."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies where it was read, so that nothing has looked at its values yet."""
        return False

    def release(self, name: str) -> None:  # noqa: B027 (most hold no memory)
        """Say that what ``read`` gave of a tensor is in use no more, so that its memory may go back."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer. Raises NoTokenizer where it has none, CheckpointError where it cannot be used."""

    @property
    def generation(self) -> dict[str, Any]:
        """The contents of generation_config.json, empty where there is none."""
        return {}

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The settings of the image processor (preprocessor_config.json), empty where there are none."""
        return {}

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """The files that decide what the model is."""

    def identity(self) -> list[list[Any]]:
        """Path, size and time of each file: what must be the same for work on this checkpoint to be taken up again."""
        stats = [(p.resolve(), p.stat()) for p in sorted(self.files)]
        return [[str(path), s.st_size, s.st_mtime_ns] for path, s in stats]


def open_checkpoint(reference: str | Path) -> Checkpoint:
    """Find and open a checkpoint. Raises CheckpointError that names the reference and what would be accepted."""
    text = str(reference)
    check_length(Path(text))
    path = package_file(text) if text.startswith("package:") else Path(text).expanduser()
    if "#" in text and not path.exists():
        from zoo.towers import Tower

        whole, _, tower = text.rpartition("#")
        return Tower(open_checkpoint(whole), tower)
    if path.is_file():
        return _open_file(path, text)
    if path.is_dir():
        return SafetensorsFolder(path, text)
    if is_hub_id(text):
        from zoo.hub import download

        return SafetensorsFolder(download(text), text)
    raise CheckpointError(
        f"{text}: nothing is there. A model is a local folder, a .gguf file, package:NAME/FILE, or a hub id such as org/name@revision"
    )


def read_config(reference: str | Path) -> dict[str, Any]:
    """A checkpoint's config alone; of a model on the hub nothing else is downloaded."""
    text = str(reference)
    check_length(Path(text))
    whole, hash, tower = text.rpartition("#")
    if hash and not Path(text).exists():
        from zoo.towers import tower_config

        return tower_config(read_config(whole), tower, text)
    if is_hub_id(text) and not Path(text).exists():
        from zoo.hub import download

        return read_json(download(text, ["config.json"]) / "config.json", text)
    if Path(text).is_dir():
        return read_json(Path(text) / "config.json", text)
    return open_checkpoint(reference).config


def check_length(path: Path, place: str = "") -> None:
    """Raise CheckpointError, with the place where it is written, for a path that no file system takes."""
    length = len(os.fsencode(path))
    if length >= LONGEST_PATH or any(len(os.fsencode(step)) > LONGEST_NAME for step in path.parts) or "\0" in str(path):
        raise CheckpointError(
            f"{place}{str(path)[-60:]!r} cannot be a path: it has {length:,} bytes, of at most {LONGEST_PATH - 1:,}, and may have no name "
            f"of more than {LONGEST_NAME} and no zero byte"
        )


def is_hub_id(text: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", text) is not None and not text.startswith((".", "~"))


def _open_file(path: Path, text: str) -> Checkpoint:
    if path.suffix == ".gguf":
        from zoo.gguf_file import GGUFCheckpoint

        return GGUFCheckpoint(path, text)
    if path.suffix == ".zip":
        from zoo.zipped import ZippedFolder

        return ZippedFolder(path, text)
    raise CheckpointError(
        f"{text}: a single file must be a .gguf file or a .zip of a checkpoint's folder; for .safetensors give the folder that holds "
        "config.json too"
    )


def package_file(reference: str) -> Path:
    """``package:NAME/FILE`` -> the path of FILE inside the installed package NAME, which is not imported."""
    name, _, file = reference.removeprefix("package:").partition("/")
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or not file:
        raise CheckpointError(f"{reference}: write package:NAME/FILE, with NAME an installed Python package")
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise CheckpointError(f"{reference}: no package {name} is installed here; install it with pip first")
    folders = [Path(p) for p in found.submodule_search_locations]
    for folder in folders:
        if (folder / file).is_file() and (folder / file).resolve().is_relative_to(folder.resolve()):
            return folder / file
    there = sorted(p.name for folder in folders for p in folder.iterdir() if p.is_file())
    raise CheckpointError(f"{reference}: package {name} has no file {file}; it has {', '.join(there)}")


def read_json(path: Path, reference: str) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError where it is absent or is not one."""
    if not path.is_file():
        raise CheckpointError(f"{reference}: no {path.name} in the folder; a checkpoint has config.json beside its .safetensors files")
    if path.stat().st_size > LARGEST_JSON:
        raise CheckpointError(f"{reference}: {path.name} has {path.stat().st_size:,} bytes, which no settings have; download it again")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{reference}: {path.name} is not JSON ({e}); download it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{reference}: {path.name} must hold a JSON object, it holds a {type(data).__name__}; download it again")
    return data


def read_preprocessing(folder: Path, reference: str) -> dict[str, Any]:
    """Settings of the image processor, alone in their file or beside a tokenizer's; empty where there are none."""
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        if (folder / name).is_file():
            data = read_json(folder / name, reference)
            found = data if key is None else data.get(key, {})
            if not isinstance(found, dict):
                raise CheckpointError(f"{reference}: {key} in {name} must be an object; download it again")
            return found
    return {}


class SafetensorsFolder(Checkpoint):
    """A Hugging Face folder: config.json and one or more .safetensors files."""

    def __init__(self, folder: Path, reference: str):
        self.folder, self.reference = folder, reference
        self.config = read_json(folder / "config.json", reference)
        settings = folder / "generation_config.json"
        self._generation = read_json(settings, reference) if settings.is_file() else {}
        self._preprocessing = read_preprocessing(folder, reference)
        self._file, self._infos = self._index()
        self._mapped: dict[Path, MappedFile] = {}
        self.dtype = self._dtype()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}  # a file is mapped anew by whoever needs it

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    @property
    def private(self) -> bool:
        return True

    def read(self, name: str) -> Tensor:
        return self._map(name).tensor(name)

    def holds(self, tensor: Tensor) -> bool:
        return any(mapped.holds(tensor) for mapped in self._mapped.values())

    def release(self, name: str) -> None:
        self._map(name).release(name)

    def _map(self, name: str) -> MappedFile:
        path = self._file[name]
        if path not in self._mapped:
            self._mapped[path] = MappedFile(path)
        return self._mapped[path]

    @property
    def tokenizer(self) -> Any:
        from zoo.tokenizers import from_folder

        return from_folder(self.folder, self.reference)

    @property
    def generation(self) -> dict[str, Any]:
        return self._generation

    @property
    def preprocessing(self) -> dict[str, Any]:
        return self._preprocessing

    @property
    def files(self) -> list[Path]:
        return [self.folder / "config.json", *set(self._file.values())]

    def _dtype(self) -> torch.dtype:
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        if named not in (None, "auto"):
            word = str(named).removeprefix("torch.")
            if word not in FLOATS:
                raise CheckpointError(
                    f"{self.reference}: config.json: dtype {named!r:.60} is no kind of floating-point number; "
                    f"write {', '.join(FLOATS)}, or leave the field out to take that of the weights"
                )
            return getattr(torch, word)
        floats = [getattr(torch, i.dtype or "") for i in self._infos.values() if i.dtype in FLOATS]
        return max(set(floats), key=floats.count) if floats else torch.float32

    def _index(self) -> tuple[dict[str, Path], dict[str, TensorInfo]]:
        files: dict[str, Path] = {}
        infos: dict[str, TensorInfo] = {}
        for path in self._shards():
            for name, info in read_header(path, self.reference).items():
                if name in files:
                    raise CheckpointError(f"{self.reference}: tensor {name} is in {files[name].name} and again in {path.name}")
                files[name], infos[name] = path, info
        return files, infos

    def _shards(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return self._indexed(index)
        found = sorted(self.folder.glob("*.safetensors"))
        single = self.folder / "model.safetensors"
        numbered = [m for p in found if (m := re.fullmatch(r".*-(\d+)-of-(\d+)\.safetensors", p.name))]
        if single in found:
            return [single]
        if numbered and len(numbered) != int(numbered[0][2]):
            raise CheckpointError(f"{self.reference}: {len(numbered)} of {int(numbered[0][2])} shards are there; download the rest")
        if found:
            return found
        pickled = sorted(p.name for suffix in ("*.bin", "*.pt", "*.pth") for p in self.folder.glob(suffix))
        hint = f"; {', '.join(pickled)} may run code when loaded and is not read, convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{self.reference}: no .safetensors file in the folder{hint}")

    def _indexed(self, index: Path) -> list[Path]:
        names = read_json(index, self.reference).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(f, str) for f in names.values()):
            raise CheckpointError(f"{self.reference}: {index.name} has no weight_map of tensor names to file names")
        files = sorted(set(names.values()))
        odd = [f for f in files if Path(f).name != f or f in (".", "..")]
        if odd:
            raise CheckpointError(f"{self.reference}: {index.name} points outside the folder: {', '.join(odd)}")
        for name in files:
            check_length(self.folder / name, f"{self.reference}: {index.name}: ")
        missing = [f for f in files if not (self.folder / f).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.reference}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing)}; download them"
            )
        return [self.folder / f for f in files]


class MappedFile:
    """A .safetensors file in memory as it lies on the disk: read where it is touched, and private, so that changes stay in memory.

    The library's own reader gives views of one storage for the whole file, which every copy of a tensor would drag along. The header is
    one that ``read_header`` has checked.
    """

    def __init__(self, path: Path):
        self._name = path.name
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._start = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        size = int.from_bytes(self._map[:8], "little")
        header = json.loads(self._map[8 : 8 + size])
        self._places = {n: (t["dtype"], t["shape"], *(8 + size + o for o in t["data_offsets"])) for n, t in header.items() if n != METADATA}

    def tensor(self, name: str) -> Tensor:
        """A tensor that is a view of the file's bytes, and of no others."""
        kind, shape, start, stop = self._places[name]
        if kind not in DTYPES:
            raise CheckpointError(f"{self._name}: {name} is stored as {kind}, which torch has no numbers for; convert it")
        dtype = getattr(torch, DTYPES[kind])
        if start == stop:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=stop - start, offset=start).view(dtype).view(shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the file."""
        return tensor.device.type == "cpu" and 0 <= tensor.data_ptr() - self._start < len(self._map)

    def release(self, name: str) -> None:
        """Give back the pages that hold this tensor alone; what is read there again comes from the file."""
        *_, start, stop = self._places[name]
        first, last = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


def read_header(path: Path, reference: str) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of a .safetensors file, checked by the safetensors library against the file's size."""
    try:
        with safe_open(str(path), "pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {n: TensorInfo(tuple(v.get_shape()), DTYPES.get(v.get_dtype(), v.get_dtype())) for n, v in views.items()}
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{reference}: {path.name} is damaged or cut short ({e}); download it again") from None
