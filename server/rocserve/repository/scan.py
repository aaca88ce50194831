"""One scan of a model's folder: its configuration files, its versions, and the rest, told apart."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.config.sources import CONFIG_FILENAME, CONFIGS_FOLDER, TOML_FILENAME
from rocserve.config.versions import is_version_name
from rocserve.core.flat_model import FlatModel
from rocserve.core.model_names import qualified
from rocserve.repository.fingerprint import (
    FileMark,
    FilesScan,
    TooManyEntries,
    output_inodes,
    own_output,
    summarise,
    walk,
)
from rocserve.repository.misplaced import advice_on_folder

CONFIG_FILENAMES = (CONFIG_FILENAME, TOML_FILENAME)
_CONFIG_SUFFIXES = (".pbtxt", ".toml")
"""A configuration may have another name, if it is the only one."""


@dataclass(frozen=True, slots=True)
class VersionScan:
    """The folder of one version at one moment."""

    number: int
    folder: Path
    files: FilesScan


@dataclass(frozen=True, slots=True)
class ModelScan:
    """The folder of one model at one moment. Two scans are equal when nothing that counts has changed."""

    name: str
    folder: Path
    root: Path
    """The repository that it is in."""
    config_files: str
    """Fingerprint of the configuration files."""
    other_files: str
    """Fingerprint of all that is neither configuration nor version."""
    versions: dict[int, VersionScan]
    refusal: str = ""
    """Why the model must not be loaded from this folder; "" = it may."""
    namespace: str = ""
    """The repository, where models of several may have the same name."""
    is_root: bool = False
    """The repository is itself the one model, whose name its configuration tells."""
    flat: FlatModel | None = None
    """The model file lies directly in the folder, as version 1."""
    looks_like_model: bool = True
    """Whether there is a configuration, a version or a model file at all."""
    is_stray: bool = False
    """It is no folder but a model file that lies in the repository."""
    advice: tuple[str, ...] = field(default=(), compare=False)
    """What is not read or served because of where it lies, and the commands that repair it."""
    ignored: tuple[str, ...] = ()
    """Sub-folders that would be versions but for a leading zero."""
    changed_ns: int = field(default=0, compare=False)
    """When a file last changed, in nanoseconds since the epoch."""
    has_links: bool = field(default=False, compare=False)
    """A part of it, or all, may lie elsewhere."""
    fingerprint: tuple[object, ...] = field(init=False, repr=False, compare=False)
    """What the debounce compares."""

    @property
    def key(self) -> str:
        """The folder's name within the server."""
        return qualified(self.namespace, self.name)

    def __post_init__(self) -> None:
        versions = tuple((number, scan.files.fingerprint) for number, scan in sorted(self.versions.items()))
        fingerprint = (str(self.folder), self.config_files, self.other_files, versions, self.refusal)
        object.__setattr__(self, "fingerprint", fingerprint)

    def same_for(self, version: int, other: ModelScan | None) -> bool:
        """Whether all that a load of `version` reads is as it is in `other`."""
        if other is None or version not in other.versions or version not in self.versions:
            return False
        return (
            self.folder == other.folder
            and self.config_files == other.config_files
            and self.other_files == other.other_files
            and self.versions[version].files.fingerprint == other.versions[version].files.fingerprint
        )


def scan_model(
    name: str,
    folder: Path,
    root: Path,
    allowed: tuple[Path, ...],
    most_entries: int,
    *,
    is_root: bool = False,
    flat: FlatModel | None = None,
    model_filenames: tuple[str, ...] = (),
) -> ModelScan:
    """Scan a model's folder; `flat`: the model file lies directly in it, as version 1. Blocks on the disk.

    `allowed` are the resolved folders that links may lead into; `most_entries` the files and folders that it may hold;
    `model_filenames` those of all backends, for advice on what lies in the wrong place.
    """
    parts: dict[str | int, list[FileMark]] = defaultdict(list)
    paths = set()
    ignored = set()
    outputs = output_inodes()
    has_links = folder.is_symlink()
    try:
        for mark in walk(folder, allowed, most_entries, flat.has if flat is not None and flat.is_alone else None):
            if not mark.path.endswith("/"):
                paths.add(mark.path)
            part = _part_of(mark.path, flat is not None)
            has_links |= mark.is_link
            if mark.inode in outputs and mark.path in own_output(folder):
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
        return ModelScan(name, folder, root, "", "", {}, refusal, is_root=is_root, flat=flat)
    has_config = any(mark.path in CONFIG_FILENAMES for mark in parts["config"])
    config = summarise(parts.pop("config"))
    other = summarise(parts.pop("other", ()))
    versions = {
        part: VersionScan(part, folder if flat else folder / str(part), summarise(marks))
        for part, marks in parts.items()
        if isinstance(part, int)
    }
    return ModelScan(
        name=name,
        folder=folder,
        root=root,
        config_files=config.fingerprint,
        other_files=other.fingerprint,
        versions=versions,
        refusal=config.refusal or other.refusal,
        is_root=is_root,
        flat=flat,
        looks_like_model=bool(versions) or has_config,
        advice=() if flat else advice_on_folder(folder, paths, versions, model_filenames),
        ignored=tuple(sorted(ignored)),
        changed_ns=max(scan.changed_ns for scan in (config, other, *(each.files for each in versions.values()))),
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
