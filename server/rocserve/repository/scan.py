"""Scans a model's folder, apart for its configuration files, its versions and the rest; files by their path, size, time
and inode, without reading them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rocserve.config.model_folder import FlatModel, is_version_name
from rocserve.config.sources import CONFIG_FILENAME, CONFIGS_FOLDER, TOML_FILENAME
from rocserve.core.errors import ServeError
from rocserve.core.model_names import ModelKey, qualified
from rocserve.repository.misplaced import advice_on_folder

_TEMPORARY_ENDINGS = ("~", ".tmp", ".part", ".swp")


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this name belongs to a copy, an editor or Python, and is no part of a model."""
    return name.startswith(".") or name.endswith(_TEMPORARY_ENDINGS) or name == "__pycache__"


class TooManyEntries(Exception):
    """A folder holds more files and folders than a model may have."""


class FileMark(NamedTuple):
    """One state of a file. A tuple, since a scan makes one for each file of all models."""

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
    changed: str = field(compare=False)
    """That file."""
    total_bytes: int = field(compare=False)


def summarise(marks: Iterable[FileMark]) -> FilesScan:
    """One fingerprint of files, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    refusal = changed = ""
    changed_ns = total_bytes = 0
    for mark in sorted(marks, key=lambda mark: mark.path):
        line = f"{mark.path}\0{mark.size}\0{mark.mtime_ns}\0{mark.inode}\0{mark.refusal}\n"
        digest.update(line.encode(errors="surrogateescape"))
        refusal = refusal or mark.refusal
        # Of a file and its folder, which come with the same time, it is the file.
        if mark.changed_ns >= changed_ns:
            changed_ns, changed = mark.changed_ns, mark.path
        total_bytes += mark.size
    return FilesScan(digest.hexdigest(), refusal, changed_ns, changed, total_bytes)


def link_refusal(path: Path, allowed: tuple[Path, ...]) -> str:
    """Why the link `path` must not be followed: it leads out of the resolved folders `allowed`; "" = it may."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        return f"'{path}' is a link that leads nowhere"
    if any(target.is_relative_to(folder) for folder in allowed):
        return ""
    return f"'{path}' is a link that leads out of the model repository, to '{target}'; put the file itself there"


def walk(
    folder: Path, allowed: tuple[Path, ...], most_entries: int, is_meant: Callable[[str], bool] | None = None
) -> Iterator[FileMark]:
    """The files below a folder, in no order; temporary names are left out. What vanishes meanwhile is not there.

    Links within the resolved folders `allowed` are followed; others are refused, as is all that is no regular file.
    `is_meant` says by their names which of the folder's entries count; None: all, and the folder itself. Raises:
    TooManyEntries: there are more than `most_entries`; no more of them are scanned.
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
_CONFIG_SUFFIXES = (".pbtxt", ".toml")
"""A configuration may have another name, if it is the only one."""


@dataclass(frozen=True, slots=True)
class ModelScan:
    """The folder of one model at one moment. Two scans are equal when nothing that counts has changed."""

    name: str
    folder: Path
    root: Path
    """The repository that it is in."""
    config_files: str = ""
    """Fingerprint of the configuration files."""
    other_files: str = ""
    """Fingerprint of all that is neither configuration nor version."""
    versions: dict[int, FilesScan] = field(default_factory=dict)
    refusal: str = ""
    """Why the model must not be loaded from this folder; "" = it may."""
    namespace: str = ""
    """The repository, where models of several may have the same name."""
    is_root: bool = False
    """The repository is itself the one model, which its configuration names."""
    flat: FlatModel | None = None
    """The model file lies directly in the folder, as version 1."""
    looks_like_model: bool = True
    """Whether there is a configuration, a version or a model file at all."""
    is_stray: bool = False
    """It is no folder but a model file that lies in the repository."""
    advice: tuple[str, ...] = field(default=(), compare=False)
    """Names files that are not read or served because of where they lie, and the commands that repair it."""
    ignored: tuple[str, ...] = ()
    """Sub-folders that would be versions but for a leading zero, or too many digits."""
    changed_ns: int = field(default=0, compare=False)
    """When a file last changed, in nanoseconds since the epoch."""
    changed: str = field(default="", compare=False)
    """That file, by its path in the folder."""
    has_links: bool = field(default=False, compare=False)
    """A part of it, or all, may lie elsewhere."""
    fingerprint: tuple[object, ...] = field(init=False, repr=False, compare=False)
    """What the debounce compares."""

    @property
    def key(self) -> ModelKey:
        """The folder's name within the server."""
        return qualified(self.namespace, self.name)

    def __post_init__(self) -> None:
        versions = tuple((number, scan.fingerprint) for number, scan in sorted(self.versions.items()))
        fingerprint = (str(self.folder), self.config_files, self.other_files, versions, self.refusal)
        object.__setattr__(self, "fingerprint", fingerprint)

    def version_folder(self, version: int) -> Path:
        return self.folder / ("" if self.flat else str(version))

    def advised(self, error: ServeError) -> ServeError:
        """The error, with the commands that may repair it behind it."""
        return ServeError(error.code, "; ".join((error.text, *self.advice))) if self.advice else error

    def same_for(self, version: int, other: ModelScan | None) -> bool:
        """Whether all that a load of `version` reads is as it is in `other`."""
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
    """Scan a folder for a model, of which `model` says all but what is in it. Blocks on the disk. `allowed` are the
    resolved folders that links may lead into; `most_entries` the files and folders that it may hold; `model_filenames`
    those of all backends, for advice on what lies in the wrong place."""
    folder, flat = model.folder, model.flat
    parts: dict[str | int, list[FileMark]] = defaultdict(list)
    paths = set()
    ignored = set()
    # This process's standard output and error: to load a model writes to them, and is no change of it.
    outputs = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            outputs[status.st_ino] = status
    has_links = folder.is_symlink()
    try:
        for mark in walk(folder, allowed, most_entries, flat.has if flat is not None and flat.is_alone else None):
            if not mark.path.endswith("/"):
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
            f"'{folder}' holds more than {most_entries} files and folders; keep elsewhere what is no part of the model,"
            " or raise --max-folder-entries"
        )
        # `model` may be an earlier scan, whose files must not pass for what the folder holds now.
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
    """Which part of a model a file belongs to: a version's number, "config", "other", or None (an ignored version)."""
    top, in_folder, _ = path.partition("/")
    if (path.endswith(_CONFIG_SUFFIXES) and not in_folder) or (in_folder and top == CONFIGS_FOLDER):
        return "config"
    if flat:
        return 1
    if in_folder and is_version_name(top):
        return int(top)
    if in_folder and top.isascii() and top.isdigit():
        return None
    return "other"
