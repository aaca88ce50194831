"""Folders of what engines have compiled, each under a name of all that it depends on, with a digest of its files."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rocserve.cache.digests import folder_digest
from rocserve.cache.locks import wait_for_lock
from rocserve.cache.private_folder import make_private
from rocserve.core.errors import ServeError, unavailable

_HIDDEN = "."
"""Begins the names of locks and of unfinished folders."""
_DIGEST = ".sha256"
"""The file with a folder's digest, which does not count itself."""


def cached_folder(
    place: Path,
    name: str,
    limit_bytes: int,
    make: Callable[[Path], None],
    waiting: Callable[[], None],
    warn: Callable[[str], None],
) -> Path:
    """The folder of this name, made where it is not there: by one process at a time, and there whole or not at all.
    One whose files are not those that were made is made anew.

    Args:
        limit_bytes: of all folders together; those used least lately go.
        make: fills an empty folder; what it raises is passed on.
        waiting: called again and again while another process makes it.
        warn: takes a sentence about a folder that is damaged.

    Raises:
        ServeError: UNAVAILABLE, the place cannot be used.
    """
    folder = place / name
    try:
        make_private(place)
        lock = wait_for_lock(place / f"{_HIDDEN}{name}.lock", waiting)
        try:
            if folder.is_dir() and not _is_sound(folder):
                warn(f"{folder} is damaged, and made anew: its files are not those that were stored")
                shutil.rmtree(folder)
            if not folder.is_dir():
                _make(folder, make)
        finally:
            lock.release()
        os.utime(folder)
    except OSError as error:
        raise unavailable(
            f"the cache of compiled programs {place} cannot be used: {error.strerror or error}; name another folder"
            " with --cache-directory"
        ) from None
    # Another server may be trimming the same folders.
    with suppress(OSError):
        trim_folders([entry for entry in place.iterdir() if not entry.name.startswith(_HIDDEN)], limit_bytes)
    return folder


def trim_folders(folders: Sequence[Path], limit_bytes: int) -> None:
    """Remove those that were used least lately until the others take no more than the limit; the last one stays."""
    by_age = sorted(folders, key=lambda folder: folder.stat().st_mtime)
    sizes = [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in by_age]
    total = sum(sizes)
    for folder, size in zip(by_age[:-1], sizes[:-1], strict=True):
        if total <= limit_bytes:
            return
        shutil.rmtree(folder, ignore_errors=True)
        total -= size


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    scratch = folder.with_name(f"{_HIDDEN}{folder.name}-{secrets.token_hex(4)}")
    scratch.mkdir(mode=0o700)
    try:
        make(scratch)
        (scratch / _DIGEST).write_text(folder_digest(scratch))
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_sound(folder: Path) -> bool:
    """Whether its files are what they were when it was made: a changed one could end the process that loads it."""
    try:
        return (folder / _DIGEST).read_text() == folder_digest(folder)
    except (OSError, ServeError):
        return False
