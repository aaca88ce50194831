"""Scans a model's folder: fingerprints of its configuration files, its versions and its other files. Files are compared
by path, size, time and inode, and are not read."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rocserve.config.model_folder import (
    CONFIG_FILENAME,
    CONFIGS_FOLDER,
    TOML_FILENAME,
    FlatModel,
    is_version_name,
)
from rocserve.core.errors import ServeError
from rocserve.core.load_check import RECORDED_FILE
from rocserve.core.model_names import ModelKey, qualified
from rocserve.repository.misplaced import advice_on_folder


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this name belongs to a copy, an editor or Python, and is not part of a model."""
    return name.startswith(".") or name.endswith(("~", ".tmp", ".part", ".swp")) or name == "__pycache__"


class TooManyEntries(Exception):
    """A folder holds more files and folders than a model may have."""


class FileMark(NamedTuple):
    """The state of a file at one moment. A tuple for speed, because a scan creates one for each file of all models."""

    path: str
    """Path relative to the scanned folder, separated by "/"; a folder's path ends in "/"."""
    size: int
    mtime_ns: int
    inode: int
    changed_ns: int
    """The inode's change time, which no copy can set back; not part of the fingerprint."""
    refusal: str = ""
    """Why the file must not be read; "" = it may."""
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class FilesScan:
    """What a scan found of a folder's files."""

    fingerprint: str
    refusal: str
    """Why the files must not be read; "" = they may."""
    changed_ns: int = field(compare=False)
    """Last change of any of the files, in nanoseconds since the epoch; 0 without files."""
    changed: str = field(compare=False)
    """Path of the file that changed last."""
    total_bytes: int = field(compare=False)


def summarise(marks: Iterable[FileMark]) -> FilesScan:
    """Compute one fingerprint of files, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    refusal = changed = ""
    changed_ns = total_bytes = 0
    for mark in sorted(marks, key=lambda mark: mark.path):
        line = f"{mark.path}\0{mark.size}\0{mark.mtime_ns}\0{mark.inode}\0{mark.refusal}\n"
        digest.update(line.encode(errors="surrogateescape"))
        refusal = refusal or mark.refusal
        # A file and its new folder may carry the same time; the file's path is more specific.
        if mark.changed_ns >= changed_ns:
            changed_ns, changed = mark.changed_ns, mark.path
        # Recorded answers are read once, and take no memory of a loaded model.
        total_bytes += mark.size if PurePosixPath(mark.path).name != RECORDED_FILE else 0
    return FilesScan(digest.hexdigest(), refusal, changed_ns, changed, total_bytes)


def link_refusal(path: Path, allowed: tuple[Path, ...]) -> str:
    """Return why the link `path` must not be followed: it leads out of the resolved folders `allowed`; "" = it may."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        return f"'{path}' is a broken link"
    if any(target.is_relative_to(folder) for folder in allowed):
        return ""
    return f"'{path}' is a link that leads out of the model repository, to '{target}'; put the file itself there"


def walk(
    folder: Path, allowed: tuple[Path, ...], most_entries: int, is_meant: Callable[[str], bool] | None = None
) -> Iterator[FileMark]:
    """Yield the files below a folder, in no order, without temporary files and files that vanish meanwhile.

    Links within the resolved folders `allowed` are followed. Other links, and everything that is not a regular file,
    are refused. `is_meant` chooses entries of the folder by their names; None = all entries, and the folder itself.
    Raises TooManyEntries after `most_entries` entries.
    """
    marks: Iterable[FileMark]
    if is_meant is None:
        marks = _walk(str(folder), "", None, allowed, frozenset())
    else:
        with os.scandir(folder) as entries:
            meant = [entry for entry in entries if is_meant(entry.name) and not is_temporary(entry.name)]
        marks = itertools.chain.from_iterable(_mark(entry, entry.name, allowed, frozenset()) for entry in meant)
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
            # A new folder counts as a change even while it is empty.
            yield FileMark(prefix, 0, 0, 0, status.st_ctime_ns)
            # The iteration itself reads the folder, and may fail like its opening.
            for entry in entries:
                if not is_temporary(entry.name):
                    yield from _mark(entry, prefix + entry.name, allowed, above | {identity})
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        yield _refused(prefix.rstrip("/"), f"'{folder}' cannot be read: {error.strerror}")


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


CONFIG_FILENAMES = (CONFIG_FILENAME, TOML_FILENAME)


@dataclass(frozen=True, slots=True)
class ModelScan:
    """The state of one model's folder at one moment. Equal scans mean that nothing relevant has changed."""

    name: str
    folder: Path
    root: Path
    config_files: str = ""
    other_files: str = ""
    """Fingerprint of all files outside of the configuration and the versions."""
    versions: dict[int, FilesScan] = field(default_factory=dict)
    refusal: str = ""
    """Why the model must not be loaded from this folder; "" = it may."""
    namespace: str = ""
    """The repository's path if repositories are namespaces; else ""."""
    is_root: bool = False
    """The repository itself is the folder of the only model. Its configuration names the model."""
    flat: FlatModel | None = None
    """The model file lies directly in the folder, as version 1."""
    looks_like_model: bool = True
    """Whether the folder has a configuration, a version or a model file."""
    is_stray: bool = False
    """A model file that lies directly in the repository, without a folder."""
    advice: tuple[str, ...] = field(default=(), compare=False)
    """Warnings about files that are not served because of their location, with the commands that repair it."""
    ignored: tuple[str, ...] = ()
    """Folders that would be versions without a leading zero or with fewer digits."""
    changed_ns: int = field(default=0, compare=False)
    """Last change of any file, in nanoseconds since the epoch."""
    changed: str = field(default="", compare=False)
    has_links: bool = field(default=False, compare=False)
    """The folder or a part of it may lie elsewhere."""
    fingerprint: tuple[object, ...] = field(init=False, repr=False, compare=False)
    """The value that the debounce compares."""

    @property
    def key(self) -> ModelKey:
        """The folder's key within the server."""
        return qualified(self.namespace, self.name)

    def __post_init__(self) -> None:
        versions = tuple((number, scan.fingerprint) for number, scan in sorted(self.versions.items()))
        fingerprint = (str(self.folder), self.config_files, self.other_files, versions, self.refusal)
        object.__setattr__(self, "fingerprint", fingerprint)

    def version_folder(self, version: int) -> Path:
        return self.folder / ("" if self.flat else str(version))

    def advised(self, error: ServeError) -> ServeError:
        """Return the error with the repairing commands appended."""
        return error.with_text("; ".join((error.text, *self.advice))) if self.advice else error

    def same_for(self, version: int, other: ModelScan | None) -> bool:
        """Whether all files that a load of `version` reads are the same in `other`."""
        return (
            other is not None
            and version in self.versions
            and self.versions[version] == other.versions.get(version)
            and (self.folder, self.config_files, self.other_files)
            == (other.folder, other.config_files, other.other_files)
        )


def scan_model(
    model: ModelScan, allowed: tuple[Path, ...], most_entries: int, model_filenames: tuple[str, ...] = ()
) -> ModelScan:
    """Scan `model.folder`. Blocks on the disk. `allowed`: resolved folders that links may lead into. `most_entries`:
    bound of the files and folders in it. `model_filenames`: file names of all backends, for advice on misplaced
    files."""
    folder, flat = model.folder, model.flat
    parts: dict[str | int, list[FileMark]] = defaultdict(list)
    paths = set()
    ignored = set()
    # If this process writes its standard output or error to a file in the folder, that file is skipped: loading the
    # model writes to it, which does not change the model.
    outputs = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            outputs[status.st_ino] = status
    has_links = folder.is_symlink()
    try:
        for mark in walk(folder, allowed, most_entries, flat.has if flat is not None and flat.is_alone else None):
            if not mark.path.endswith("/") and PurePosixPath(mark.path).name != RECORDED_FILE:
                paths.add(mark.path)
            part = _part_of(mark.path, flat is not None)
            has_links |= mark.is_link
            if mark.inode in outputs:
                with contextlib.suppress(OSError):
                    if os.path.samestat(outputs[mark.inode], (folder / mark.path).stat()):
                        continue
            if part is None:
                ignored.add(mark.path.split("/", 1)[0])
            else:
                parts[part].append(mark)
    except TooManyEntries:
        refusal = (
            f"'{folder}' holds more than {most_entries} files and folders; move files that do not belong to the model,"
            " or raise --max-folder-entries"
        )
        # Not replace(model): `model` may be an earlier scan, whose files must not count as the folder's present ones.
        return ModelScan(
            model.name, folder, model.root, refusal=refusal, namespace=model.namespace, is_root=model.is_root, flat=flat
        )
    has_config = any(mark.path in CONFIG_FILENAMES for mark in parts["config"])
    config = summarise(parts.pop("config"))
    other = summarise(parts.pop("other", ()))
    versions = {part: summarise(marks) for part, marks in parts.items() if isinstance(part, int)}
    latest = max((config, other, *versions.values()), key=lambda part: part.changed_ns)
    return replace(
        model,
        config_files=config.fingerprint,
        other_files=other.fingerprint,
        versions=versions,
        refusal=config.refusal or other.refusal,
        looks_like_model=bool(versions) or has_config,
        advice=() if flat else advice_on_folder(folder, paths, versions, model_filenames),
        ignored=tuple(sorted(ignored)),
        changed_ns=latest.changed_ns,
        changed=latest.changed,
        has_links=has_links,
    )


def _part_of(path: str, flat: bool) -> str | int | None:
    """Return the model's part that has a file: a version's number, "config", "other", or None (an ignored version)."""
    top, in_folder, _ = path.partition("/")
    # A configuration file may have any name if it is the only one.
    if (path.endswith((".pbtxt", ".toml")) and not in_folder) or (in_folder and top == CONFIGS_FOLDER):
        return "config"
    if flat:
        return 1
    if in_folder and is_version_name(top):
        return int(top)
    if in_folder and top.isascii() and top.isdigit():
        return None
    return "other"
