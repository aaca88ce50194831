"""Scans the repositories: finds their model folders however they are mounted, and the single model that `rocserve serve
WHAT` names by a file, by a folder of files or by a model folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from pathlib import Path

from rocserve.backends.registry import BackendRegistry
from rocserve.config.model_folder import FlatModel, ModelFolder, is_true, is_version_name
from rocserve.config.preprocess.text_files import TOKENIZER
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_names import ModelKey
from rocserve.core.printable import printable_name
from rocserve.repository.misplaced import advice_on_stray, model_filename
from rocserve.repository.scan import CONFIG_FILENAMES, ModelScan, is_temporary, link_refusal, scan_model
from rocserve.settings import RepositorySettings
from rocserve.settings.repository import SingleModel, WhatKind

_YOUNG_SECONDS = 60.0
"""Seconds in which a new folder is still being filled."""
_CLOCK_SECONDS = 1.0
"""Seconds by which a file system's times may be behind the clock."""
_EXPORTED = "onnx/model.onnx"
"""Where Hugging Face's exports for several engines have the model."""
UNPRINTABLE = "the name of the folder '{}' has bytes that are not UTF-8, or unprintable characters; rename the folder"


@dataclass(frozen=True, slots=True)
class RepositoryScan:
    """The state of all repositories at one moment."""

    models: dict[ModelKey, ModelScan]
    """Folder's key -> its scan; without namespaces the key is the folder's name."""
    unreadable: dict[Path, str]
    """Repositories that are missing or cannot be read, with the reason. `models` keeps their last known models."""


class RepositoryScanner:
    """Scans the repositories in a thread, one scan at a time, and keeps the last scan."""

    def __init__(self, settings: RepositorySettings, registry: BackendRegistry, log: logging.Logger) -> None:
        self.roots = tuple(dict.fromkeys(root.absolute() for root in settings.roots))
        self.latest = RepositoryScan({}, {})
        self.cpu_seconds = 0.0
        """CPU time of the last scan."""
        self._registry = registry
        self._most_entries = settings.max_folder_entries
        self._namespacing = settings.model_namespacing
        self._single = settings.single
        self._log = log
        self._lock = asyncio.Lock()
        self._ignored: set[tuple[Path, str]] = set()
        self._model_filenames = tuple(name for backend in registry.backends for name in backend.model_filenames)
        self._is_model_filename = re.compile("|".join(map(translate, self._model_filenames))).match
        self._seen: dict[Path, dict[str, ModelScan]] = {root: {} for root in self.roots}
        """Repository -> (name of an entry in it -> scan)."""
        self._devices: dict[Path, int] = {}
        self._started_ns = time.time_ns() - int(_CLOCK_SECONDS * 1e9)

    async def run(self, changed: Collection[Path] | None = None) -> RepositoryScan:
        """Run `scan` in a thread, and log what changed in the repositories' state."""
        async with self._lock:
            before, self.latest = self.latest, await asyncio.to_thread(self.scan, changed)
            scan = self.latest
        self._report(before, scan)
        return scan

    async def changed_file(self, scan: ModelScan, version: int) -> str | None:
        """Return the path of the model's file that changed last, relative to its folder. "" = the folder is gone; None
        = all files that a load of the version reads are unchanged."""
        now: ModelScan | None = None
        with contextlib.suppress(OSError):
            now = await asyncio.to_thread(self.rescan, scan)
        if scan.same_for(version, now):
            return None
        return "" if now is None else now.changed

    def scan(self, changed: Collection[Path] | None = None) -> RepositoryScan:
        """Scan all repositories. `changed`: the folders to scan again; None = all. Blocks on the disk."""
        began = time.thread_time()
        allowed = tuple(root.resolve() for root in self.roots)
        unreadable = {}
        for root in self.roots:
            try:
                identity = _identity(root)
                kept = {} if changed is None else self._kept(root, changed)
                scans = self._scan_root(root, allowed, kept)
                if _identity(root) != identity:
                    raise OSError(0, "it was replaced while it was scanned")
                # Scanning a vanished repository raised above; an empty result here is real.
                self._seen[root] = scans
            except OSError as error:
                unreadable[root] = error.strerror or str(error)
        scan = RepositoryScan(_merge(scans.values() for scans in self._seen.values()), unreadable)
        self.cpu_seconds = time.thread_time() - began
        return scan

    def rescan(self, scan: ModelScan) -> ModelScan | None:
        """Scan a model's folder again; None = it is gone. Blocks on the disk."""
        if not scan.folder.is_dir():
            return None
        # A client may have named a file outside of the repositories.
        allowed = tuple(root.resolve() for root in (*self.roots, scan.root))
        return scan_model(scan, allowed, self._most_entries)

    def _report(self, before: RepositoryScan, scan: RepositoryScan) -> None:
        for root, reason in scan.unreadable.items():
            if before.unreadable.get(root) != reason:
                self._log.error("failed to read model repository '%s': %s; its models stay unchanged", root, reason)
        for root in before.unreadable.keys() - scan.unreadable.keys():
            self._log.info("model repository '%s' can be read again", root)
        for model in scan.models.values():
            for name in model.ignored:
                if (model.folder, name) not in self._ignored:
                    self._ignored.add((model.folder, name))
                    why = "no leading zeros" if name.startswith("0") else "at most 63 bits"
                    self._log.warning(
                        "ignoring version folder '%s' of model '%s': a version has %s", name, model.name, why
                    )

    def _kept(self, root: Path, changed: Collection[Path]) -> dict[str, ModelScan]:
        """Return the previous scans of folders that need no new one. Folders with links need one, because they may
        change without a notification; so do folders that have changed since the server's start and in the last minute,
        because notifications miss files that are written into a new folder."""
        young_ns = max(time.time_ns() - int(_YOUNG_SECONDS * 1e9), self._started_ns)
        names = {path.name for path in changed if path.parent == root}
        return {
            name: scan
            for name, scan in self._seen[root].items()
            if not (name in names or scan.has_links or scan.is_root)
            and scan.looks_like_model
            and scan.changed_ns < young_ns
        }

    def _scan_root(self, root: Path, allowed: tuple[Path, ...], kept: dict[str, ModelScan]) -> dict[str, ModelScan]:
        with os.scandir(root) as scanned:
            entries = [entry for entry in scanned if not is_temporary(entry.name)]
        device = root.stat().st_dev
        if not entries and self._devices.setdefault(root, device) != device:
            raise OSError(0, "it is empty because its file system is no longer mounted")
        self._devices[root] = device
        if self._single is not None:
            return {scan.name: scan for scan in self._scan_single(self._single)}
        namespace = str(root) if self._namespacing else ""
        folders = sorted(entry.name for entry in entries if is_true(entry.is_dir))
        has_version = any(is_version_name(entry.name) for entry in entries)
        is_flat = not has_version and any(self._is_model_filename(entry.name) for entry in entries)
        if is_one_model(root, folders, is_flat):
            flat = FlatModel() if is_flat else None
            model = ModelScan(printable_name(root.name), root, root, namespace=namespace, is_root=True, flat=flat)
            return {model.name: scan_model(model, allowed, self._most_entries)}
        found = {name: kept.get(name) or self._scan_folder(root / name, root, namespace, allowed) for name in folders}
        for entry in entries:
            if entry.name not in found and (stray := self._scan_stray(Path(entry.path), root, namespace)):
                found[entry.name] = stray
        return found

    def _scan_stray(self, file: Path, root: Path, namespace: str) -> ModelScan | None:
        """Scan a file directly in the repository, to advise where to put it; None = not a model file."""
        filename = model_filename(file.name, self._model_filenames)
        if not filename or printable_name(file.name) != file.name:
            return None
        try:
            status = file.stat()
        except OSError:
            return None
        return ModelScan(
            file.name,
            file,
            root,
            other_files=f"{status.st_size} {status.st_mtime_ns}",
            namespace=namespace,
            looks_like_model=False,
            is_stray=True,
            advice=(advice_on_stray(file, filename),),
            changed_ns=status.st_ctime_ns,
        )

    def _scan_single(self, single: SingleModel) -> list[ModelScan]:
        folder, file, refusal = single.folder, single.file, ""
        if not file and not ModelFolder(folder).versions:
            try:
                file = find_flat_file(folder, self._registry)
            except ServeError as error:
                refusal = error.text
        if not ((folder / file).is_file() if file else refusal or is_model(folder)):
            return []
        flat = FlatModel(file, is_alone=bool(single.file)) if file else None
        # A named file may be a link, for example into a download's cache.
        root = Path(os.path.commonpath((folder.resolve(), (folder / single.file).resolve().parent)))
        scan = scan_model(ModelScan(single.name, folder, root, is_root=True, flat=flat), (root,), self._most_entries)
        return [replace(scan, refusal=scan.refusal or refusal)]

    def _scan_folder(self, folder: Path, root: Path, namespace: str, allowed: tuple[Path, ...]) -> ModelScan:
        name = printable_name(folder.name)
        model = ModelScan(name, folder, root, namespace=namespace)
        if name != folder.name:
            return replace(model, refusal=UNPRINTABLE.format(name))
        if folder.is_symlink() and (refusal := link_refusal(folder, allowed)):
            return replace(model, refusal=refusal)
        doubled = folder / name
        if is_true(doubled.is_dir) and not doubled.is_symlink() and not is_model(folder) and is_model(doubled):
            model = replace(model, folder=doubled)
        return scan_model(model, allowed, self._most_entries, self._model_filenames)


def _is_misnamed(scan: ModelScan) -> bool:
    return scan.name != scan.folder.name


def _identity(root: Path) -> tuple[int, int]:
    status = root.stat()
    return status.st_dev, status.st_ino


def _merge(repositories: Iterable[Iterable[ModelScan]]) -> dict[ModelKey, ModelScan]:
    """Merge the scans by key, and refuse a key that occurs twice. A folder with an unprintable name comes last, so its
    replacement name hides no other folder."""
    models: dict[ModelKey, ModelScan] = {}
    numbers: dict[ModelKey, int] = {}
    scans = ((scan, number) for number, found in enumerate(repositories, 1) for scan in found)
    for scan, number in sorted(scans, key=lambda item: _is_misnamed(item[0])):
        first = models.setdefault(scan.key, scan)
        one = numbers.setdefault(scan.key, number)
        if first is not scan and not _is_misnamed(scan):
            # Clients do not see the folders' paths; the repositories' numbers distinguish the folders.
            reason = (
                f"model appears in two or more repositories: '{scan.name}' is in '{first.folder}' (--model-repository"
                f" no. {one}) and '{scan.folder}' (no. {number}); keep one"
            )
            models[scan.key] = replace(first, refusal=reason)
    return models


def find_single_model(what: Path, name: str, registry: BackendRegistry) -> SingleModel | None:
    """Find the model at a path; None = the path is a repository. `name`: chosen by the user; "" = the configuration's
    name, else the file's, else the folder's. Raises OSError if the folder cannot be read."""
    what = what.absolute()
    if not what.is_dir():
        return SingleModel(WhatKind.FILE, what.parent, what.name, name or printable_name(what.stem), bool(name))
    try:
        file, is_flat = find_flat_file(what, registry), False
    except ServeError:
        # The choice is ambiguous; the scan reports that.
        file, is_flat = "", True
    folders = [path.name for path in what.iterdir() if is_true(path.is_dir)]
    if not is_one_model(what, folders, is_flat or bool(file)):
        return None
    has_versions = any(map(is_version_name, folders))
    kind = WhatKind.FILES if not has_versions and (is_flat or file) else WhatKind.MODEL
    # A backend's standard file name says nothing about the model.
    is_telling = kind is WhatKind.FILES and file and Path(file).name not in exact_filenames(registry)
    own = Path(file).stem if is_telling else what.name
    return SingleModel(kind, what, "", name or printable_name(own), bool(name))


def find_flat_file(folder: Path, registry: BackendRegistry) -> str:
    """Find the model's file in a folder; "" = none. In this order: a backend's standard name (model.onnx),
    onnx/model.onnx beside a tokenizer, the only file with a model's ending (resnet.onnx), the only file that matches a
    backend's pattern (*.json). Raises ServeError (INVALID_ARGUMENT) if several files match, or if a tokenizer lies
    alone; OSError if the folder cannot be read."""
    names = sorted(path.name for path in folder.iterdir() if not is_temporary(path.name) and is_true(path.is_file))
    for known in exact_filenames(registry):
        if known in names:
            return known
    if TOKENIZER in names and is_true((folder / _EXPORTED).is_file):
        return _EXPORTED
    endings = tuple(ending for spec in registry.backends for ending in spec.file_endings)
    patterns = [name for spec in registry.backends for name in spec.model_filenames if "*" in name]
    named = [name for name in names if name.lower().endswith(endings)]
    if TOKENIZER in names and not named:
        raise invalid_argument(
            f"'{folder}' holds {TOKENIZER} but no model: expected model.onnx, {_EXPORTED} or model.pt2 beside it;"
            " optimum writes one: optimum-cli export onnx --model NAME FOLDER"
        )
    for found in (
        named,
        [name for name in names if any(Path(name).match(pattern) for pattern in patterns)],
    ):
        if len(found) > 1:
            raise invalid_argument(
                f"'{folder}' holds several files that may be the model: {', '.join(found)}; name the one to"
                f" serve: rocserve serve {folder / found[0]}"
            )
        if found:
            return found[0]
    return ""


def exact_filenames(registry: BackendRegistry) -> tuple[str, ...]:
    """Return the backends' standard names of model files."""
    return tuple(name for spec in registry.backends for name in spec.model_filenames if "*" not in name)


def model_endings(registry: BackendRegistry) -> tuple[str, ...]:
    """Return the endings of files that can be served by name."""
    return tuple(
        dict.fromkeys(
            ending
            for spec in registry.backends
            for ending in (*spec.file_endings, *(Path(name).suffix for name in spec.model_filenames))
        )
    )


def is_one_model(root: Path, folders: Sequence[str], is_flat: bool) -> bool:
    """Whether a folder is the folder of one model and not a repository. `folders`: names of its subfolders. `is_flat`:
    it holds a model file directly."""
    is_configured = has_config(root)
    has_version = any(map(is_version_name, folders))
    if is_configured and has_version:
        return True
    if any(is_model(root / name) for name in folders):
        return False
    return is_configured or has_version or is_flat


def is_model(folder: Path) -> bool:
    """Whether a folder holds a configuration or a version."""
    return has_config(folder) or bool(ModelFolder(folder).versions)


def has_config(folder: Path) -> bool:
    return any(is_true((folder / name).is_file) for name in CONFIG_FILENAMES)
