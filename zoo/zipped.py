"""Checkpoints in a .zip file: a Hugging Face folder that was packed whole."""

from __future__ import annotations

import lzma
import os
import shutil
import tempfile
import zlib
from pathlib import Path, PurePosixPath
from zipfile import BadZipFile, ZipFile, ZipInfo

from zoo.checkpoint import LONGEST_NAME, CheckpointError, SafetensorsFolder

READ = (".json", ".safetensors", ".txt", ".model", ".jinja")  # config, weights and tokenizer
DAMAGE = (BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, NotImplementedError, ValueError)  # what readers of archives raise
MOST = 10_000  # entries that are looked at


class ZippedFolder(SafetensorsFolder):
    """The folder of the archive that holds config.json, at its top or one level below, as if it lay on the disk.

    Its files, no others, are unpacked into a temporary folder that is deleted with this object. Raises CheckpointError before anything
    is unpacked for what is no such archive, is encrypted, or says that it needs more space than there is.
    """

    def __init__(self, path: Path, reference: str):
        self.archive = path
        self._scratch = tempfile.TemporaryDirectory(prefix="zoo-zip-")
        try:
            unpack(path, Path(self._scratch.name), reference)
            super().__init__(Path(self._scratch.name), reference)
        except BaseException:
            self._scratch.cleanup()
            raise

    @property
    def files(self) -> list[Path]:
        return [self.archive]


def unpack(path: Path, folder: Path, reference: str) -> None:
    """Write the checkpoint's files of an archive into ``folder``, under their bare names."""
    try:
        with ZipFile(path) as archive:
            for member in members(archive, folder, reference):
                with archive.open(member) as packed, (folder / PurePosixPath(member.filename).name).open("xb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)  # the library reads no more than the size that was checked
    except FileExistsError as e:
        raise CheckpointError(f"{reference}: {path.name} holds {Path(str(e.filename)).name} twice; pack it again") from None
    except DAMAGE as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise CheckpointError(f"{reference}: {path.name} cannot be unpacked into {folder.parent} ({e}); set TMPDIR") from None
        raise CheckpointError(f"{reference}: {path.name} is damaged or no zip archive that can be read ({e}); download it again") from None


def members(archive: ZipFile, folder: Path, reference: str) -> list[ZipInfo]:
    """The checkpoint's files in an archive, checked."""
    there = archive.infolist()
    if len(there) > MOST:
        raise CheckpointError(
            f"{reference}: the archive has {len(there):,} entries, a checkpoint has at most {MOST:,}; pack its folder alone"
        )
    parents = {PurePosixPath(i.filename).parent for i in there if PurePosixPath(i.filename).name == "config.json"}
    root = min(parents, key=lambda p: (len(p.parts), str(p)), default=None)
    if root is None or len(root.parts) > 1:
        raise CheckpointError(f"{reference}: the archive has no config.json at its top; pack the files of a checkpoint's folder")
    mine = [i for i in there if not i.is_dir() and PurePosixPath(i.filename).parent == root and i.filename.endswith(READ)]
    long = [name for i in mine if len(os.fsencode(name := PurePosixPath(i.filename).name)) > LONGEST_NAME]
    if long:
        raise CheckpointError(f"{reference}: the archive holds a name of {len(long[0])} characters ({long[0]:.60}...); pack it again")
    if any(i.flag_bits & 1 for i in mine):
        raise CheckpointError(f"{reference}: the archive is encrypted; unpack it and give the folder")
    need, have = sum(i.file_size for i in mine), shutil.disk_usage(folder).free
    if need > have:
        raise CheckpointError(
            f"{reference}: unpacked the archive takes {need:,} bytes, {folder.parent} has {have:,} free; "
            "unpack it where there is space and give the folder, or set TMPDIR"
        )
    return mine
