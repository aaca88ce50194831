"""Computes SHA-256 digests of a model's files and calibration data. Unreadable files raise ServeError (UNAVAILABLE)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rocserve.core.errors import unavailable


def file_digest(path: Path, more: Sequence[Path] = ()) -> str:
    """Return a file's SHA-256 in hexadecimal; with `more`, one for all files, in their order. Names have no effect."""
    return joined_digests([_digest(file) for file in (path, *more)])


def joined_digests(digests: Sequence[str]) -> str:
    """Return one digest for the digests of several files; that of a single file is its own."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def folder_digest(path: Path) -> str:
    """Return one SHA-256 over names and bytes of all files below a folder, except hidden ones. If the path is a file,
    return the file's SHA-256. Raises ServeError (UNAVAILABLE) if there are no files."""
    if path.is_file():
        return file_digest(path)
    listing = folder_listing(path)
    if not listing:
        raise unavailable(f"expected a file, or a folder of files, at {path}, found none")
    return hashlib.sha256(listing).hexdigest()


def folder_listing(path: Path) -> bytes:
    """Return a line with digest and name for each file below a folder, except hidden ones, as sha256sum writes them."""
    names = sorted(
        name
        for name in (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        if not any(part.startswith(".") for part in name.parts)
    )
    lines = (f"{_digest(path / name)}  {name.as_posix()}\n" for name in names)
    return "".join(lines).encode("utf-8", "surrogateescape")


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unavailable(f"file {path} cannot be read: {error.strerror or error}") from None
