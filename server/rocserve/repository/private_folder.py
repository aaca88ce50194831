"""A folder of the server's own for a model whose files do not lie in the repository as a model's should."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from rocserve.core.errors import ServeError, internal


class PrivateFolder:
    """`folder` goes when nothing refers to this object any more."""

    def __init__(self, name: str) -> None:
        """Blocks on the disk. Raises: OSError."""
        parent = Path(tempfile.mkdtemp(prefix="rocserve-model-"))
        weakref.finalize(self, shutil.rmtree, parent, ignore_errors=True)
        self.folder = parent / name
        self.folder.mkdir()


def write_files(name: str, files: Mapping[PurePosixPath, bytes]) -> PrivateFolder:
    """A model's folder with the files of a load request. Raises: ServeError INTERNAL when they cannot be written."""
    try:
        private = PrivateFolder(name)
        for path, data in files.items():
            target = private.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    except OSError as error:
        raise _failed(name, error) from error
    return private


def link_file(name: str, file: Path | None) -> PrivateFolder:
    """A model's folder whose version 1 holds a link to one file, or nothing for an ensemble.

    Raises: ServeError INTERNAL when it cannot be made.
    """
    try:
        private = PrivateFolder(name)
        version = private.folder / "1"
        version.mkdir()
        if file is not None:
            (version / file.name).symlink_to(file)
    except OSError as error:
        raise _failed(name, error) from error
    return private


def _failed(name: str, error: OSError) -> ServeError:
    why = error.strerror or str(error)
    return internal(f"failed to load '{name}', its files cannot be put into a temporary folder: {why}")
