"""Writes finished traces to trace files, in the JSON form that Triton's tools read."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.tensors import Tensor, bfloat16_values
from rocserve.core.trace import Moment, TraceGroup
from rocserve.observability.tracing.trace_settings import TraceSetting

Item = TypeVar("Item")

CLOSE_SECONDS = 10.0


@dataclass(eq=False)
class WriterThread(Generic[Item]):
    """Handles items on a separate thread, because a disk or a collector may be slow. It starts with the first item."""

    _handle: Callable[[list[Item]], None]
    """Gets all items since its last call, on the thread."""
    _log: logging.Logger
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _waiting: list[Item] = field(default_factory=list)
    _nbytes: int = 0
    _dropped: int = 0
    _closing: bool = False
    _thread: threading.Thread | None = None

    def put(self, item: Item, nbytes: int = 0) -> None:
        """`nbytes`: approximate memory of the item; 0 = never drop it."""
        with self._condition:
            # Traces that wait take about 256 MiB at most; further ones are dropped.
            if nbytes and self._nbytes + nbytes > 256 << 20 and self._waiting:
                self._dropped += 1
                return
            self._waiting.append(item)
            self._nbytes += nbytes
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
                self._thread.start()
            self._condition.notify()

    def close(self) -> None:
        """Handle the remaining items and end the thread, within CLOSE_SECONDS."""
        with self._condition:
            self._closing = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                self._log.error("traces are lost: they could not be written within %g s", CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._closing:
                    self._condition.wait()
                items, self._waiting, self._nbytes = self._waiting, [], 0
                dropped, self._dropped = self._dropped, 0
                is_last = self._closing
            if dropped:
                self._log.warning("%d traces were dropped: they arrived faster than they can be written", dropped)
            try:
                if items:
                    self._handle(items)
            except Exception:
                self._log.exception("traces could not be written")
            if is_last and not items:
                return


def write_problem(path: str) -> str:
    """Return why a file cannot be written; "" if it seems possible. Does not create the file."""
    file = Path(path)
    if file.is_dir():
        return os.strerror(errno.EISDIR)
    if not file.parent.is_dir():
        return os.strerror(errno.ENOENT)
    return "" if os.access(file if file.exists() else file.parent, os.W_OK) else os.strerror(errno.EACCES)


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


class JsonSink:
    """Writes traces to JSON files (a TraceSink). For a TraceSetting without a count, it appends traces to one file as
    they finish, or writes a file per `log_frequency` traces. With a count, it writes only such files, the last one
    after the last trace, as Triton does. If the disk is full or the folder is missing, traces are lost; the log says
    so."""

    def __init__(self, path: str, log: logging.Logger) -> None:
        self._path = path
        self._log = log
        self._file: FileIO | None = None
        self._end = 0
        """Position of the array's closing bracket; 0 = nothing is written yet."""
        self._next_index = 0
        self._is_failing = False
        self._writer: WriterThread[tuple[TraceSetting, TraceGroup | None]] = WriterThread(self._handle, log)

    def take(self, setting: TraceSetting, group: TraceGroup) -> None:
        self._writer.put((setting, group), group.nbytes)

    def retire(self, setting: TraceSetting) -> None:
        self._writer.put((setting, None))

    def close(self) -> None:
        self._writer.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    # The methods below run on the writer's thread.

    def _handle(self, items: list[tuple[TraceSetting, TraceGroup | None]]) -> None:
        streamed: list[str] = []
        for setting, group in items:
            per_file = setting.initial_values.log_frequency
            if group is None:
                setting.is_retired = True
                if setting.kept:
                    write = self._write_indexed if per_file else self._append
                    write(",".join(setting.kept))
                    setting.kept.clear()
            elif setting.is_retired and per_file:
                self._write_indexed(group_json(group))
            elif setting.is_retired or not (per_file or setting.initial_values.count > 0):
                streamed.append(group_json(group))
            else:
                setting.finished += 1
                setting.kept.append(group_json(group))
                if len(setting.kept) == per_file or setting.is_complete():
                    self._write_indexed(",".join(setting.kept))
                    setting.kept.clear()
        if streamed:
            self._append(",".join(streamed))

    def _append(self, entries: str) -> None:
        """Append to the JSON array in the file. `entries`: JSON values separated by commas."""
        try:
            if self._file is None:
                # Unbuffered, so that a failing write raises here and not at the end.
                self._file = FileIO(self._path, "w")
            self._file.seek(self._end)
            data = (("," if self._end else "[") + entries + "]").encode()
            _write_all(self._file, data)
            self._end += len(data) - 1
            self._is_failing = False
        except OSError as error:
            self._fail(self._path, error)
            if self._file is None:
                return
            try:
                # Cut off the part that was written before the error.
                self._file.seek(self._end)
                self._file.truncate()
                if self._end:
                    _write_all(self._file, b"]")
            except OSError as fault:
                self._log.debug("trace file %s could not be repaired: %s", self._path, fault)

    def _write_indexed(self, entries: str) -> None:
        """Write an array to a separate file: the path plus .0, .1, ..."""
        path = f"{self._path}.{self._next_index}"
        self._next_index += 1
        try:
            Path(path).write_bytes(f"[{entries}]".encode())
            self._is_failing = False
        except OSError as error:
            self._fail(path, error)

    def _fail(self, path: str, error: OSError) -> None:
        # Logged once, not for each trace that follows.
        if not self._is_failing:
            self._log.error("failed creating trace file %s: %s; traces are lost", path, error.strerror or error)
        self._is_failing = True


def group_json(group: TraceGroup) -> str:
    """Return the entries of a request and of the requests that it caused, separated by commas."""
    entries: list[dict[str, Any]] = []
    for record in group.records:
        head = {"id": record.number, "model_name": record.model_name, "model_version": int(record.model_version)}
        if record.request_id:
            # Lone surrogates cannot be encoded.
            head["request_id"] = record.request_id.encode(errors="replace").decode()
        if record.parent_id:
            head["parent_id"] = record.parent_id
        moments = record.moments + (group.front_end if not record.parent_id else [])
        entries += [head, *(_entry(record.number, moment) for moment in sorted(moments, key=attrgetter("ns")))]
    return ",".join(json.dumps(entry, separators=(",", ":"), ensure_ascii=False) for entry in entries)


def _entry(number: int, moment: Moment) -> dict[str, Any]:
    tensor = moment.tensor
    if tensor is None:
        return {"id": number, "timestamps": [{"name": moment.activity, "ns": moment.ns}]}
    shape, dtype = ",".join(map(str, tensor.shape)), tensor.datatype.value
    shown = {"name": tensor.name, "data": _data(tensor), "shape": shape, "dtype": dtype}
    return {"id": number, "activity": moment.activity, "tensor": shown}


def _data(tensor: Tensor) -> str:
    """Return the elements separated by commas; texts are quoted as in CSV."""
    try:
        elements = tensor.numpy().ravel()
    except (ServeError, ValueError):
        # A client's data may be too short for the shape; the request's answer reports that.
        return ""
    if tensor.datatype is DataType.BYTES:
        texts = (element.decode("utf-8", "backslashreplace") for element in elements)
        return ",".join('"' + text.replace('"', '""') + '"' for text in texts)
    if tensor.datatype is DataType.BOOL:
        elements = elements.astype(np.uint8)
    if tensor.datatype is DataType.BF16:
        elements = bfloat16_values(elements)
    # Elements of a tensor that are converted together: each string takes about 60 bytes of memory.
    at_once = 1 << 16
    parts = (elements[start : start + at_once] for start in range(0, len(elements), at_once))
    return ",".join(",".join(map(str, part.tolist() if part.dtype.kind in "iu" else part)) for part in parts)
