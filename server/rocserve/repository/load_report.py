"""Reports the facts for repairing a version that failed to load: the failure, the files, the written configuration."""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from rocserve.config.model_folder import (
    CONFIG_FILENAME,
    CONFIGS_FOLDER,
    TOML_FILENAME,
    ModelFolder,
    is_version_name,
)
from rocserve.core.errors import ServeError
from rocserve.repository.retries import Failure
from rocserve.repository.scan import FileMark, ModelScan, TooManyEntries, walk
from rocserve.settings import ControlMode, RepositorySettings

MOST_FILES = 100
"""Files in a report."""
MOST_CONFIG_BYTES = 64 << 10
"""Bytes of a configuration in a report."""


@dataclass(frozen=True, slots=True)
class LastLoad:
    """The server's knowledge of a row of the repository index, without reading the disk."""

    scan: ModelScan | None
    """The model's folder; None = it is gone."""
    version: int | None
    failure: Failure | None = None
    backend: str = ""
    members: tuple[str, ...] = ()
    """An ensemble's."""
    served_change_ns: int = 0
    """The last change of the files that are served; 0 = nothing is served."""


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The text of a configuration file."""

    file: str = ""
    """Relative to the model's folder; "" = there is none."""
    text: str = ""
    is_cut: bool = False
    line: int = 0
    """The line that the failure's text names, counted from 1; 0 = none."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    load: LastLoad
    mode: ControlMode
    files: tuple[FileMark, ...]
    """The last changed first."""
    file_count: int
    config: ConfigText


def make_report(load: LastLoad, settings: RepositorySettings) -> LoadReport:
    """Report a load. Blocks on the disk."""
    mode = settings.control_mode
    if load.scan is None:
        return LoadReport(load, mode, (), 0, ConfigText())
    marks = list(_marks(load.scan, load.version, settings.max_folder_entries))
    count = sum(not mark.path.endswith("/") for mark in marks)
    files = heapq.nlargest(MOST_FILES, marks, key=attrgetter("changed_ns"))
    return LoadReport(load, mode, tuple(files), count, _config(load, load.scan, settings.model_config_name))


def _marks(scan: ModelScan, version: int | None, most_entries: int) -> Iterator[FileMark]:
    """Yield the readable files of a load of the version."""
    flat = scan.flat
    is_meant = flat.has if flat is not None and flat.is_alone else None
    with contextlib.suppress(TooManyEntries, OSError):
        for mark in walk(scan.folder, (scan.root.resolve(),), most_entries, is_meant):
            top, is_below, _ = mark.path.partition("/")
            if version is None or not (is_below and is_version_name(top) and int(top) != version):
                yield mark if mark.path else mark._replace(path="./")


def _config(load: LastLoad, scan: ModelScan, config_name: str) -> ConfigText:
    folder = ModelFolder(scan.folder, scan.root)
    chosen = [f"{CONFIGS_FOLDER}/{config_name}.pbtxt"] if config_name else []
    for name in (*chosen, CONFIG_FILENAME, TOML_FILENAME):
        # A link that leads out of the repository is not followed.
        with contextlib.suppress(ServeError, OSError):
            path = folder.find(name, "configuration file")
            if path is not None:
                return _read(path, name, load.failure)
    return ConfigText()


def _read(path: Path, name: str, failure: Failure | None) -> ConfigText:
    with path.open("rb") as file:
        raw = file.read(MOST_CONFIG_BYTES + 1)
    place = re.search(rf"(?<![\w.-]){re.escape(path.name)}:(\d{{1,9}}):", "" if failure is None else failure.error.text)
    text = raw[:MOST_CONFIG_BYTES].decode("utf-8-sig", "backslashreplace")
    return ConfigText(name, text, len(raw) > MOST_CONFIG_BYTES, 0 if place is None else int(place[1]))
