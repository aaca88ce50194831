"""The file of traces: one JSON array, whole at any moment, however many pieces it was written in.

A thread writes it, so that who ends a request only puts its trace into a queue."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Generic, TypeVar

Item = TypeVar("Item")

MOST_WAITING_BYTES = 256 << 20
"""About; traces that come while so much waits to be written are dropped."""
CLOSE_SECONDS = 10.0


class WriterThread(Generic[Item]):
    """A thread of its own because a disk or a collector may take its time. It starts with the first item."""

    def __init__(self, handle: Callable[[list[Item]], None], log: logging.Logger) -> None:
        """`handle` is called on the thread with all that has come since it was called last."""
        self._handle = handle
        self._log = log
        self._condition = threading.Condition()
        self._waiting: deque[tuple[Item, int]] = deque()
        self._nbytes = 0
        self._dropped = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, item: Item, nbytes: int = 0) -> None:
        """`nbytes`: about how much memory it takes; 0 = it is never dropped."""
        with self._condition:
            if nbytes and self._nbytes + nbytes > MOST_WAITING_BYTES and self._waiting:
                self._dropped += 1
                return
            self._waiting.append((item, nbytes))
            self._nbytes += nbytes
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
                self._thread.start()
            self._condition.notify()

    def close(self) -> None:
        """Handle what is there, and end; for a bounded time."""
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
                items = [item for item, _ in self._waiting]
                self._waiting.clear()
                self._nbytes = 0
                dropped, self._dropped = self._dropped, 0
                is_last = self._closing
            if dropped:
                self._log.warning("%d traces were dropped: they came faster than they can be written", dropped)
            try:
                if items:
                    self._handle(items)
            except Exception:
                self._log.exception("traces could not be written")
            if is_last and not items:
                return


class TraceFile:
    """Used by one thread. A disk that is full, or a path that leads nowhere, is said in the log and does no more."""

    def __init__(self, path: str, log: logging.Logger) -> None:
        self._path = path
        self._log = log
        self._file: FileIO | None = None
        self._end = 0
        """Where the array's last bracket stands; 0 = nothing has been written."""
        self._next_index = 0
        self._is_failing = False

    def append(self, entries: str) -> None:
        """Add to the array. `entries`: JSON values with commas between them."""
        try:
            if self._file is None:
                # Unbuffered: a byte that cannot be written is told now, not at the end.
                self._file = FileIO(self._path, "w")
            self._file.seek(self._end)
            data = (("," if self._end else "[") + entries + "]").encode()
            _write_all(self._file, data)
            self._end += len(data) - 1
            self._is_failing = False
        except OSError as error:
            self._fail(self._path, error)
            self._repair()

    def write_indexed(self, entries: str) -> None:
        """An array of its own in a file of its own: the path with .0, .1, ... behind it."""
        path = f"{self._path}.{self._next_index}"
        self._next_index += 1
        try:
            Path(path).write_bytes(f"[{entries}]".encode())
            self._is_failing = False
        except OSError as error:
            self._fail(path, error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _repair(self) -> None:
        """Leave behind what could be written before."""
        if self._file is None:
            return
        try:
            self._file.seek(self._end)
            self._file.truncate()
            if self._end:
                _write_all(self._file, b"]")
        except OSError as error:
            self._log.debug("trace file %s could not be repaired: %s", self._path, error)

    def _fail(self, path: str, error: OSError) -> None:
        # Once, not for each trace that follows.
        if not self._is_failing:
            self._log.error("failed creating trace file %s: %s; traces are lost", path, error.strerror or error)
        self._is_failing = True


def why_unwritable(path: str) -> str:
    """Why a file cannot be written there, as far as can be told without making it; empty = it seems that it can."""
    file = Path(path)
    folder = file.parent
    if file.is_dir():
        number = errno.EISDIR
    elif not folder.is_dir():
        number = errno.ENOENT
    elif not os.access(file if file.exists() else folder, os.W_OK):
        number = errno.EACCES
    else:
        return ""
    return os.strerror(number)


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
