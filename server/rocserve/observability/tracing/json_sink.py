"""Writes finished traces into Triton's trace files, in the JSON form that its tools read."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.tensors import Tensor
from rocserve.observability.tracing.options import TraceSetting
from rocserve.observability.tracing.record import Moment, TraceGroup, TraceRecord
from rocserve.observability.tracing.trace_file import TraceFile, WriterThread


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


def group_json(group: TraceGroup) -> str:
    """The entries of a request and of those that it led to, with commas between them."""
    entries: list[dict[str, Any]] = []
    for record in group.records:
        entries.append(_head(record))
        moments = record.moments + (group.front_end if not record.parent_id else [])
        entries += [_entry(record.number, moment) for moment in sorted(moments, key=lambda moment: moment.ns)]
    return ",".join(json.dumps(entry, separators=(",", ":"), ensure_ascii=False) for entry in entries)


def _head(record: TraceRecord) -> dict[str, Any]:
    head: dict[str, Any] = {
        "id": record.number,
        "model_name": record.model_name,
        "model_version": int(record.model_version),
    }
    if record.request_id:
        # What is no text in UTF-8 could not be written.
        head["request_id"] = record.request_id.encode(errors="replace").decode()
    if record.parent_id:
        head["parent_id"] = record.parent_id
    return head


def _entry(number: int, moment: Moment) -> dict[str, Any]:
    if moment.tensor is None:
        return {"id": number, "timestamps": [{"name": moment.activity, "ns": moment.ns}]}
    tensor = moment.tensor
    return {
        "id": number,
        "activity": moment.activity,
        "tensor": {
            "name": tensor.name,
            "data": _data(tensor),
            "shape": ",".join(map(str, tensor.shape)),
            "dtype": tensor.datatype.value,
        },
    }


def _data(tensor: Tensor) -> str:
    """The elements with commas between them, texts in quotes (doubled within, as in CSV)."""
    try:
        elements = tensor.numpy().ravel()
    except (ServeError, ValueError):
        # What a client sent may be too short for its shape; the request's answer says so.
        return ""
    if tensor.datatype is DataType.BYTES:
        texts = (element.decode("utf-8", "backslashreplace") for element in elements)
        return ",".join('"' + text.replace('"', '""') + '"' for text in texts)
    if tensor.datatype is DataType.BOOL:
        elements = elements.astype(np.uint8)
    if tensor.datatype is DataType.BF16:
        # The upper half of an FP32.
        elements = (elements.astype(np.uint32) << 16).view(np.float32)
    return ",".join(map(str, elements))
