"""Checkpoints on the Hugging Face hub: fetched and checked, and published in one commit.

The token comes from the environment (``HF_TOKEN``) or the hub library's own store; nothing here takes, keeps or prints one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.checkpoint import CheckpointError

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".bin.index.json")  # what a loader would find and read
KEPT = (".gitattributes",)  # files of the hub itself, which are no content
CHUNK = 1 << 20


class HubError(CheckpointError):
    """The hub refused, could not be reached, or sent something else than it announced."""


# ---- fetching ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pulled:
    """What lies in ``folder`` now. fetched: names of the files that were not there before, each checked against the hub's hashes."""

    folder: Path
    files: list[str]
    bytes: int
    fetched: list[str]


def download(reference: str, files: list[str] = FILES) -> Path:
    """``org/name`` or ``org/name@revision`` -> the local folder; uses the files that are there already when the hub is out of reach.

    files: glob patterns of what is wanted. Raises HubError with the hub's reason.
    """
    return pull(reference, files=files).folder


def pull(reference: str, to: Path | None = None, *, files: Sequence[str] = FILES) -> Pulled:
    """Fetch a checkpoint into the hub's cache, or into the folder ``to``; what an interrupted call fetched is not fetched again.

    files: glob patterns of what is wanted. Every file that is fetched is compared with the size and the hash that the hub has on
    record; one that differs is deleted. Raises HubError with the hub's reason, FileExistsError for a folder with other things in it.
    """
    from huggingface_hub import constants, snapshot_download

    name, _, revision = reference.partition("@")
    _check_target(to)
    where = {"revision": revision or None, "allow_patterns": list(files), "local_dir": to}
    with _hub_errors(reference):
        missing = [] if constants.HF_HUB_OFFLINE else _missing(name, where)
        folder = Path(snapshot_download(name, **where))
        if missing:
            _verify(reference, folder, missing)
    found = sorted(p for p in folder.rglob("*") if p.is_file() and ".cache" not in p.relative_to(folder).parts)
    return Pulled(folder, [p.relative_to(folder).as_posix() for p in found], sum(p.stat().st_size for p in found), missing)


def _missing(name: str, where: dict[str, Any]) -> list[str]:
    """The wanted files that are not here yet. None where the hub cannot say: what is here must do, or else the fetching tells why."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

    try:
        plan = snapshot_download(name, **where, dry_run=True)
    except (DryRunError, LocalEntryNotFoundError):
        return []
    return [f.filename for f in plan if f.will_download]


def _check_target(to: Path | None) -> None:
    if to is None or not to.exists():
        return
    if not to.is_dir():
        raise FileExistsError(f"{to} is a file; give a folder")
    if any(to.iterdir()) and not (to / ".cache" / "huggingface").is_dir():
        raise FileExistsError(f"{to} is not empty and holds no earlier download; give another folder")


def _verify(reference: str, folder: Path, names: Iterable[str]) -> None:
    """Raise HubError, after deleting the file, where one is not what the hub has on record."""
    from huggingface_hub import HfApi

    name, _, revision = reference.partition("@")
    known = {s.rfilename: s for s in HfApi().model_info(name, revision=revision or None, files_metadata=True).siblings or []}
    for file in names:
        path, record = folder / file, known.get(file)
        if record is None:
            continue
        wanted, found = (record.lfs.sha256, _sha256(path)) if record.lfs else (record.blob_id, _git_hash(path))
        if wanted is not None and wanted != found:
            blob = path.resolve()
            blob.unlink()
            path.unlink(missing_ok=True)
            raise HubError(f"{reference}: {file} is damaged: its hash is {found}, the hub has {wanted} on record. "
                           "It was deleted; run again to fetch it anew")  # fmt: skip


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _git_hash(path: Path) -> str:
    """What git calls a file of this content."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ---- publishing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Publication:
    """What is to be published. files: by name on the hub, a local file or the content itself."""

    files: Mapping[str, Path | bytes]

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {name: len(f) if isinstance(f, bytes) else f.stat().st_size for name, f in self.files.items()}


def gather(folder: Path, extra: Mapping[str, Path | bytes] | None = None) -> Publication:
    """The files of a saved checkpoint, and others beside them. Raises CheckpointError for a folder that is none."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} is not a saved checkpoint: it needs config.json and *.safetensors (zoo.save writes them)")
    here = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    hidden = [name for name in here if any(part.startswith(".") for part in Path(name).parts)]
    return Publication({n: p for n, p in here.items() if n not in hidden} | dict(extra or {}))


def push(publication: Publication, name: str, *, revision: str | None = None, private: bool = False, overwrite: bool = False,
         message: str = "Upload by zoo") -> str:  # fmt: skip
    """Publish in one commit; returns its address. Large files that an interrupted call has sent are not sent again.

    name: ``org/name``, made if it is not there (``private``: visible to its owners alone; an existing one stays as it is). revision:
    a branch, made if it is not there. overwrite: replace files that are there; weights of other names are removed, for a loader would
    read them too. Raises HubError with the hub's reason, or naming the files that would be replaced, before anything is sent.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    with _hub_errors(name):
        api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        there = api.model_info(name, revision=revision)
        old = sorted(s.rfilename for s in there.siblings or [] if s.rfilename not in KEPT)
        if old and not overwrite:
            raise HubError(f"{name} holds {len(old)} files already ({', '.join(old[:8])}{', ...' if len(old) > 8 else ''}); "
                           "pass --overwrite to replace them, or publish under another name or --revision")  # fmt: skip
        stale = [f for f in old if f.endswith(WEIGHTS) and f not in publication.files]
        add = [CommitOperationAdd(f, str(c) if isinstance(c, Path) else c) for f, c in publication.files.items()]
        remove = [CommitOperationDelete(f) for f in stale]
        try:
            commit = api.create_commit(name, [*add, *remove], commit_message=message, revision=revision, parent_commit=there.sha)
        except RuntimeError as e:  # what the hub library makes of a large file that did not get through
            raise HubError(f"{name}: {_first_line(e)} Nothing was published; run again, what was sent is not sent anew") from None
    return str(commit.commit_url)


@contextmanager
def _hub_errors(reference: str) -> Iterator[None]:
    """The hub library's errors as one line that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] (its library's name differs between versions)
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    login = "log in with `hf auth login` or set HF_TOKEN if it needs permission"
    try:
        yield
    except LocalEntryNotFoundError:
        raise HubError(f"{reference}: the hub cannot be reached and the files are not in the local cache; "
                       "download them on a machine with a network, or give a local folder") from None  # fmt: skip
    except OfflineModeIsEnabled:
        raise HubError(f"{reference}: the hub library is switched offline; unset HF_HUB_OFFLINE") from None
    except (GatedRepoError, RepositoryNotFoundError) as e:
        raise HubError(f"{reference}: {_first_line(e)}; {login}") from None
    except (HfHubHTTPError, HFValidationError) as e:
        raise HubError(f"{reference}: {_first_line(e)}") from None
    except (HTTPError, ConnectionError) as e:
        raise HubError(f"{reference}: the connection failed ({type(e).__name__}: {_first_line(e)}); run again to go on") from None


def _first_line(e: Exception) -> str:
    return next(iter(str(e).strip().splitlines()), type(e).__name__)
