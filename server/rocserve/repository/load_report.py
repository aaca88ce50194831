"""Reports the facts for repairing a version that failed to load: the failure, the files, the written configuration."""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from rocserve.config.model_folder import (
    CONFIG_FILENAME,
    CONFIGS_FOLDER,
    TOML_FILENAME,
    ModelFolder,
    is_version_name,
)
from rocserve.core.errors import ServeError
from rocserve.core.printable import encodable, printable_name
from rocserve.protocol.page_pb2 import LoadReportResponse
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


def make_report(load: LastLoad, settings: RepositorySettings) -> LoadReportResponse:
    """Report a load, without its failure. Blocks on the disk."""
    report = LoadReportResponse(
        backend=load.backend,
        members=map(encodable, load.members),
        is_served=load.served_change_ns > 0,
        follows_files=settings.control_mode is ControlMode.POLL,
        loads_on_request=settings.control_mode is ControlMode.EXPLICIT,
    )
    if load.scan is None:
        return report
    marks = list(_marks(load.scan, load.version, settings.max_folder_entries))
    report.file_count = sum(not mark.path.endswith("/") for mark in marks)
    for mark in heapq.nlargest(MOST_FILES, marks, key=attrgetter("changed_ns")):
        report.files.add(
            path=printable_name(mark.path),
            bytes=mark.size,
            changed_ms=mark.changed_ns // 1_000_000,
            is_changed=0 < load.served_change_ns < mark.changed_ns,
        )
    _add_config(report, load.failure, load.scan, settings.model_config_name)
    return report


def _marks(scan: ModelScan, version: int | None, most_entries: int) -> Iterator[FileMark]:
    """Yield the readable files of a load of the version."""
    flat = scan.flat
    is_meant = flat.has if flat is not None and flat.is_alone else None
    with contextlib.suppress(TooManyEntries, OSError):
        for mark in walk(scan.folder, (scan.root.resolve(),), most_entries, is_meant):
            top, is_below, _ = mark.path.partition("/")
            if version is None or not (is_below and is_version_name(top) and int(top) != version):
                yield mark if mark.path else mark._replace(path="./")


def _add_config(report: LoadReportResponse, failure: Failure | None, scan: ModelScan, config_name: str) -> None:
    """Add the configuration's text, and the line that the failure's text names."""
    folder = ModelFolder(scan.folder, scan.root)
    chosen = [f"{CONFIGS_FOLDER}/{config_name}.pbtxt"] if config_name else []
    for name in (*chosen, CONFIG_FILENAME, TOML_FILENAME):
        # A link that leads out of the repository is not followed.
        with contextlib.suppress(ServeError, OSError):
            path = folder.find(name, "configuration file")
            if path is None:
                continue
            with path.open("rb") as file:
                raw = file.read(MOST_CONFIG_BYTES + 1)
            reason = "" if failure is None else failure.error.text
            place = re.search(rf"(?<![\w.-]){re.escape(path.name)}:(\d{{1,9}}):", reason)
            report.config_file, report.config_line = name, 0 if place is None else int(place[1])
            report.config_text = raw[:MOST_CONFIG_BYTES].decode("utf-8-sig", "backslashreplace")
            report.config_is_cut = len(raw) > MOST_CONFIG_BYTES
            return
