"""Finished traces into Triton's trace files."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from weakref import WeakSet

from rocserve.observability.tracing.record import TraceGroup
from rocserve.observability.tracing.sampling import TraceSetting
from rocserve.observability.tracing.trace_file import TraceFile
from rocserve.observability.tracing.triton_json import group_json
from rocserve.observability.tracing.writer_thread import WriterThread


@dataclass(slots=True)
class _Collected:
    """The traces of a setting that keeps them for a file of their own."""

    entries: list[str] = field(default_factory=list)
    """Those that wait for a file."""
    count: int = 0
    """All that there have been."""


class JsonSink:
    """Implements rocserve.observability.tracing.tracing.TraceSink.

    A setting without an end writes to the one file as traces come, or to a file for each `log_frequency` of them; one
    with a count keeps its traces until all are there, and gives them a file of their own, as Triton does.
    """

    def __init__(self, path: str, log: logging.Logger) -> None:
        self._log = log
        self._file = TraceFile(path, log)
        # Of those whose end has been handled; they live on with the requests that they have chosen.
        self._retired: WeakSet[TraceSetting] = WeakSet()
        self._collected: dict[TraceSetting, _Collected] = {}
        self._writer: WriterThread[tuple[TraceSetting, TraceGroup | None]] = WriterThread(self._handle, log)

    def take(self, setting: TraceSetting, group: TraceGroup) -> None:
        """See TraceSink."""
        self._writer.put((setting, group), group.nbytes)

    def retire(self, setting: TraceSetting) -> None:
        """See TraceSink."""
        self._writer.put((setting, None))

    def close(self) -> None:
        """See TraceSink."""
        self._writer.close()
        self._file.close()

    # On the writer's thread

    def _handle(self, items: list[tuple[TraceSetting, TraceGroup | None]]) -> None:
        streamed: list[str] = []
        for setting, group in items:
            is_retired = setting in self._retired
            if group is None:
                self._retired.add(setting)
                self._write_collected(setting, bool(setting.log_frequency))
            elif is_retired and setting.log_frequency:
                self._file.write_indexed(group_json(group))
            elif is_retired or not (setting.log_frequency or setting.is_counted):
                streamed.append(group_json(group))
            else:
                self._collect(setting, group_json(group))
        if streamed:
            self._file.append(",".join(streamed))

    def _collect(self, setting: TraceSetting, entries: str) -> None:
        collected = self._collected.setdefault(setting, _Collected())
        collected.count += 1
        collected.entries.append(entries)
        is_full = bool(setting.log_frequency) and len(collected.entries) >= setting.log_frequency
        if is_full or setting.has_all(collected.count):
            waiting, collected.entries = collected.entries, []
            self._file.write_indexed(",".join(waiting))

    def _write_collected(self, setting: TraceSetting, is_indexed: bool) -> None:
        """What the setting has left behind."""
        collected = self._collected.pop(setting, None)
        if collected is None or not collected.entries:
            return
        write = self._file.write_indexed if is_indexed else self._file.append
        write(",".join(collected.entries))
