"""Walks a folder and tells its files by path, size, time and inode, without reading what is in them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_TEMPORARY_ENDINGS = ("~", ".tmp", ".part", ".swp")


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this name belongs to a copy, an editor or Python, and is no part of a model."""
    return name.startswith(".") or name.endswith(_TEMPORARY_ENDINGS) or name == "__pycache__"


class TooManyEntries(Exception):
    """A folder holds more files and folders than a model may have."""


class FileMark(NamedTuple):
    """What tells one state of a file from another. A tuple, since a scan makes one for each file of all models."""

    path: str
    """Relative to the folder that was walked, with "/", and ending in it for a folder."""
    size: int
    mtime_ns: int
    inode: int
    changed_ns: int
    """The inode's own time of change, which no copy can set back; not part of the fingerprint."""
    refusal: str = ""
    """Why the file must not be read; "" = it may."""
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class FilesScan:
    """A set of files at one moment."""

    fingerprint: str
    refusal: str
    """Why the files must not be read; "" = they may."""
    changed_ns: int = field(compare=False)
    """When one of the files last changed, in nanoseconds since the epoch; 0 without files."""
    total_bytes: int = field(compare=False)


def summarise(marks: Iterable[FileMark]) -> FilesScan:
    """One fingerprint of files, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    refusal = ""
    changed_ns = total_bytes = 0
    for mark in sorted(marks, key=lambda mark: mark.path):
        line = f"{mark.path}\0{mark.size}\0{mark.mtime_ns}\0{mark.inode}\0{mark.refusal}\n"
        digest.update(line.encode(errors="surrogateescape"))
        refusal = refusal or mark.refusal
        changed_ns = max(changed_ns, mark.changed_ns)
        total_bytes += mark.size
    return FilesScan(digest.hexdigest(), refusal, changed_ns, total_bytes)


def link_refusal(path: Path, allowed: tuple[Path, ...]) -> str:
    """Why the link `path` must not be followed: it leads out of the resolved folders `allowed`; "" = it may."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        return f"'{path}' is a link that leads nowhere"
    if any(target.is_relative_to(folder) for folder in allowed):
        return ""
    return f"'{path}' is a link that leads out of the model repository, to '{target}'; put the file itself there"


def output_inodes() -> frozenset[int]:
    """Of the files that are this process's standard output and error."""
    inodes = set()
    for number in (1, 2):
        with contextlib.suppress(OSError):
            inodes.add(os.fstat(number).st_ino)
    return frozenset(inodes)


def own_output(folder: Path) -> frozenset[str]:
    """The files of a folder, relative to it, that are this process's standard output and error: to load a model writes
    to them, and is no change of it."""
    base = folder.resolve()
    files = (Path(f"/proc/self/fd/{number}").resolve() for number in (1, 2))
    return frozenset(str(file.relative_to(base)) for file in files if file.is_relative_to(base))


def walk(
    folder: Path, allowed: tuple[Path, ...], most_entries: int, is_meant: Callable[[str], bool] | None = None
) -> Iterator[FileMark]:
    """The files below a folder, in no order; temporary names are left out. What vanishes meanwhile is not there.

    Links within the resolved folders `allowed` are followed; others are refused, as is all that is no regular file.
    `is_meant` says by their names which of the folder's entries count; None: all, and the folder itself.

    Raises:
        TooManyEntries: there are more than `most_entries`; no more of them are scanned.
    """
    if is_meant is None:
        marks = _walk(str(folder), "", None, allowed, frozenset())
    else:
        marks = _meant(folder, allowed, is_meant)
    for count, mark in enumerate(marks):
        if count > most_entries:
            raise TooManyEntries
        yield mark


def _walk(
    folder: str,
    prefix: str,
    status: os.stat_result | None,
    allowed: tuple[Path, ...],
    above: frozenset[tuple[int, int]],
) -> Iterator[FileMark]:
    try:
        status = status or Path(folder).stat()
        with os.scandir(folder) as entries:
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                yield _refused(prefix.rstrip("/"), f"'{folder}' is a link to a folder that it is in")
                return
            # So that a folder made just now, with nothing in it yet, is young too.
            yield FileMark(prefix, 0, 0, 0, status.st_ctime_ns)
            # Each step reads on in the folder, and may fail as well.
            for entry in entries:
                if not is_temporary(entry.name):
                    yield from _mark(entry, prefix + entry.name, allowed, above | {identity})
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        yield _refused(prefix.rstrip("/"), f"'{folder}' cannot be read: {error.strerror}")


def _meant(folder: Path, allowed: tuple[Path, ...], is_meant: Callable[[str], bool]) -> Iterator[FileMark]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_meant(entry.name) and not is_temporary(entry.name):
                yield from _mark(entry, entry.name, allowed, frozenset())


def _mark(
    entry: os.DirEntry[str], relative: str, allowed: tuple[Path, ...], above: frozenset[tuple[int, int]]
) -> Iterator[FileMark]:
    is_link = entry.is_symlink()
    if is_link and (refusal := link_refusal(Path(entry.path), allowed)):
        yield _refused(relative, refusal, is_link)
        return
    try:
        status = entry.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        yield _refused(relative, f"'{entry.path}' cannot be read: {error.strerror}")
        return
    if stat.S_ISDIR(status.st_mode):
        if is_link:
            yield FileMark(relative + "/", 0, 0, 0, status.st_ctime_ns, is_link=True)
        yield from _walk(entry.path, relative + "/", status, allowed, above)
    else:
        refusal = "" if stat.S_ISREG(status.st_mode) else f"'{entry.path}' is not a regular file"
        times = status.st_mtime_ns, status.st_ino, status.st_ctime_ns
        yield FileMark(relative, status.st_size, *times, refusal, is_link)


def _refused(relative: str, refusal: str, is_link: bool = False) -> FileMark:
    return FileMark(relative, 0, 0, 0, 0, refusal, is_link)
