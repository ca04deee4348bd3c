"""Checkpoints on the Hugging Face hub: fetched and checked, and published in one commit.

The token comes from the environment (``HF_TOKEN``) or the hub library's own store; nothing here takes, keeps or prints one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any

from zoo.checkpoint import CheckpointError

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".bin.index.json")  # what a loader would find and read
KEPT = (".gitattributes",)  # files of the hub itself, which are no content
CHUNK = 1 << 20
COMMIT = 300  # seconds for an answer to what is published, which the hub gives when it has checked all of it


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


def download(reference: str, files: Sequence[str] | None = None) -> Path:
    """``org/name`` or ``org/name@revision`` -> the local folder; uses the files that are there already when the hub is out of reach.

    files: glob patterns of what is wanted. Raises HubError with the hub's reason.
    """
    return pull(reference, files=files).folder


def pull(reference: str, to: Path | None = None, *, files: Sequence[str] | None = None) -> Pulled:
    """Fetch a checkpoint into the hub's cache, or into the folder ``to``; what an interrupted call fetched is not fetched again.

    files: glob patterns of what is wanted; None is configs, tokenizer and one set of safetensors (see ``chosen``). Every file that is
    fetched is compared with the size and the hash that the hub has on record; those that differ are deleted. A hub that gives no answer
    for HF_HUB_ETAG_TIMEOUT seconds (HF_HUB_DOWNLOAD_TIMEOUT and five more tries for a file) counts as out of reach. Raises HubError with
    the hub's reason, FileExistsError for a folder with other things in it.
    """
    from huggingface_hub import constants, snapshot_download

    name, _, revision = reference.partition("@")
    _check_target(to)
    with _hub_errors(reference), _patient(constants.HF_HUB_ETAG_TIMEOUT):
        about = None if constants.HF_HUB_OFFLINE else _about(name, revision or None)
        if to is not None and about is not None:  # the cache has a folder for each commit, another folder has not
            revision = str(about.sha)
        wanted = files or (chosen([s.rfilename for s in about.siblings or []]) if about else FILES)
        where = {"revision": revision or None, "allow_patterns": list(wanted), "local_dir": to}
        planned = _planned(name, where) if about else None
        folder = Path(snapshot_download(name, **where, local_files_only=planned is None))  # a silent hub is not asked again
        fetched: list[str] = []
        if planned is not None:
            fetched = _verify(reference, folder, folder.name if to is None else revision, planned, about)
    found = sorted(p for p in folder.rglob("*") if p.is_file() and ".cache" not in p.relative_to(folder).parts)
    return Pulled(folder, [p.relative_to(folder).as_posix() for p in found], sum(p.stat().st_size for p in found), fetched)


def chosen(names: Sequence[str]) -> list[str]:
    """What of a repository's files loads a model: FILES at its top, of several sets of weights the one that transformers takes."""
    top = [n for n in names if "/" not in n and any(fnmatch(n, pattern) for pattern in FILES)]
    usual = [n for n in top if n == "model.safetensors" or fnmatch(n, "model-*-of-*.safetensors")]
    kept = [n for n in top if not usual or n in usual or not n.endswith(".safetensors")]
    return [escape(n) for n in kept]


def _about(name: str, revision: str | None) -> Any | None:
    """What the hub has on record of a commit; None where it does not answer."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # pyright: ignore[reportPrivateImportUsage] (see _hub_errors)

    try:
        return HfApi().model_info(name, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HfHubHTTPError:
        raise
    except (HTTPError, ConnectionError):
        return None


def _planned(name: str, where: dict[str, Any]) -> dict[str, str] | None:
    """The wanted files that are not here yet, with the commit that they are of; None where the hub cannot say."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

    try:
        plan = snapshot_download(name, **where, dry_run=True)
    except (DryRunError, LocalEntryNotFoundError):
        return None
    return {f.filename: f.commit_hash for f in plan if f.will_download}


def _check_target(to: Path | None) -> None:
    if to is None or not to.exists():
        return
    if not to.is_dir():
        raise FileExistsError(f"{to} is a file; give a folder")
    if any(to.iterdir()) and not (to / ".cache" / "huggingface").is_dir():
        raise FileExistsError(f"{to} is not empty and holds no earlier download; give another folder")


def _verify(reference: str, folder: Path, commit: str, planned: Mapping[str, str], about: Any) -> list[str]:
    """The files that were fetched, each compared with what the hub has on record of the commit that lies in ``folder``.

    about: what it said of the commit before. Where the branch moved between planning and fetching, every file counts as fetched. Raises
    HubError, after deleting them, where files differ or the hub is silent about them; those that an interrupt leaves unread are deleted
    too, for nobody would look at them again.
    """
    if not planned:
        return []
    if about.sha != commit:
        about = _about(reference.partition("@")[0], commit)
    if about is None:
        _delete(folder, planned)
        raise HubError(f"{reference}: {_silent()}, so that the files that were fetched cannot be checked. Deleted; run again")
    known = {s.rfilename: s for s in about.siblings or [] if (folder / s.rfilename).is_file()}
    sure = set(planned.values()) == {commit}
    fetched = sorted(planned.keys() & known.keys()) if sure else sorted(known)
    doubtful = set(fetched)
    try:
        doubtful -= {file for file in fetched if _intact(folder / file, known[file])}
    finally:
        _delete(folder, doubtful)
    if doubtful:
        raise HubError(f"{reference}: {', '.join(sorted(doubtful))} {'is' if len(doubtful) == 1 else 'are'} damaged: the hash is another "
                       "than the hub has on record. Deleted; run again to fetch anew")  # fmt: skip
    return fetched


def _delete(folder: Path, names: Iterable[str]) -> None:
    """Remove files, and what they are links to."""
    for path in (folder / name for name in names):
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _intact(path: Path, record: Any) -> bool:
    wanted, found = (record.lfs.sha256, _sha256(path)) if record.lfs else (record.blob_id, _git_hash(path))
    return wanted in (None, found)


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
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

    api = HfApi()
    with _hub_errors(name), _patient(constants.HF_HUB_ETAG_TIMEOUT):
        new = not api.repo_exists(name)
        if new:
            api.create_repo(name, private=private)
        there = api.model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        if private and not there.private:
            raise HubError(f"{name} is there already and public; make it private in its settings first, or publish under another name")
        own = revision is None or api.revision_exists(name, revision)  # a new branch begins with main's files, which stay on main
        if revision is not None and own:
            there = api.model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        old = sorted(s.rfilename for s in there.siblings or [] if s.rfilename not in KEPT)
        if old and own and not overwrite:
            raise HubError(f"{name} holds {len(old)} files already ({', '.join(old[:8])}{', ...' if len(old) > 8 else ''}); "
                           "pass --overwrite to replace them, or publish under another name or --revision")  # fmt: skip
        if not own:
            api.create_branch(name, branch=str(revision))
            there = api.model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    with _hub_errors(name), _patient(COMMIT):
        stale = [f for f in old if f.endswith(WEIGHTS) and f not in publication.files]
        add = [CommitOperationAdd(f, str(c) if isinstance(c, Path) else c) for f, c in publication.files.items()]
        remove = [CommitOperationDelete(f) for f in stale]
        try:
            commit = api.create_commit(name, [*add, *remove], commit_message=message, revision=revision, parent_commit=there.sha)
        except RuntimeError as e:  # what the hub library makes of a large file that did not get through
            raise HubError(f"{name}: {_first_line(e)} Nothing was published; run again, what was sent is not sent anew") from None
    return str(commit.commit_url)


@contextmanager
def _patient(seconds: float) -> Iterator[None]:
    """Bound every wait for the hub: its library sets no limit to some, so that a hub which is silent would be waited for without end."""
    from huggingface_hub import get_session

    def limit(request: Any) -> None:
        waits = request.extensions["timeout"]
        request.extensions["timeout"] = {kind: seconds if wait is None else wait for kind, wait in waits.items()}

    hooks = get_session().event_hooks["request"]
    hooks.append(limit)
    try:
        yield
    finally:
        hooks.remove(limit)


@contextmanager
def _hub_errors(reference: str) -> Iterator[None]:
    """The hub library's errors as one line that says what to do."""
    from huggingface_hub import constants
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
        why = "the hub library is switched offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else _silent()
        raise HubError(f"{reference}: {why}, and the files are not in the local cache; "
                       "download them on a machine with a network, or give a local folder") from None  # fmt: skip
    except OfflineModeIsEnabled:
        raise HubError(f"{reference}: the hub library is switched offline; unset HF_HUB_OFFLINE") from None
    except (GatedRepoError, RepositoryNotFoundError) as e:
        raise HubError(f"{reference}: {_first_line(e)}; {login}") from None
    except (HfHubHTTPError, HFValidationError) as e:
        raise HubError(f"{reference}: {_first_line(e)}") from None
    except (HTTPError, ConnectionError) as e:
        raise HubError(f"{reference}: {_silent()} ({type(e).__name__}: {_first_line(e)}); run again to go on, or give a local folder; "
                       "HF_HUB_OFFLINE=1 uses what is in the local cache without asking") from None  # fmt: skip


def _silent() -> str:
    from huggingface_hub import constants

    return (
        f"the hub at {constants.ENDPOINT} cannot be reached or does not answer "
        f"(HF_HUB_ETAG_TIMEOUT={constants.HF_HUB_ETAG_TIMEOUT} s, HF_HUB_DOWNLOAD_TIMEOUT={constants.HF_HUB_DOWNLOAD_TIMEOUT} s)"
    )


def _first_line(e: Exception) -> str:
    return next(iter(str(e).strip().splitlines()), type(e).__name__)
