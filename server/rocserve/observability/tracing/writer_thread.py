"""The thread that writes traces: whoever ends a request only puts its trace into a queue."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
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
