"""Limits the memory of requests (partly received, waiting or running) and of responses that are not sent yet.

A holder is an object that keeps bytes of a request or a response. A pool counts the bytes of one kind. It notes them in
the holder's `held_bytes` and releases only noted bytes, so no byte is released twice, however many ways a request may
end.

Partly received requests may use half of the limit, because clients that never finish a request must not keep out whole
requests, at least those that arrive in one piece.

Responses have a separate count with the same limit: a memory full of requests must not prevent responses to requests
that were admitted before. Tensors between the steps of an ensemble count as responses and may use half of that limit,
so that they leave room for finished responses. Requests and responses together use at most twice the limit.

The server and its front end processes share one limit. Each process counts in its row of a shared table. A process adds
first and reads the sums afterwards, so if two requests arrive at the same moment, both may be refused although one of
them would fit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import NoReturn, Protocol

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.printable import readable_size

LARGEST_DEFAULT_BYTES = 8 << 30
"""The largest default limit: more memory would only make queues longer."""

_FLAG = "--max-request-memory"
_ALL = 1 << 62
"""More bytes than any holder keeps."""


def default_limit(total_bytes: int | None) -> int:
    """Return the limit if none is configured. `total_bytes`: memory of the container or the machine; None = unknown."""
    # A quarter of the memory: responses may use as much again, and half remains for models.
    return LARGEST_DEFAULT_BYTES if total_bytes is None else min(LARGEST_DEFAULT_BYTES, total_bytes // 4)


class Holder(Protocol):
    """An object that keeps bytes of one request, or of one call's responses. Only pools write `held_bytes`."""

    held_bytes: int


class Holding:
    __slots__ = ("held_bytes",)

    def __init__(self) -> None:
        self.held_bytes = 0


class MemoryFull(ServeError):
    """RESOURCE_EXHAUSTED: no room for a request or a response."""

    def __init__(self, text: str, fits_never: bool = False) -> None:
        super().__init__(StatusCode.RESOURCE_EXHAUSTED, text)
        self.fits_never = fits_never
        """Whether the bytes can never fit, however little memory others use."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory in use, and the number of refusals since the start: the columns of the table."""

    request_bytes: int = 0
    answer_bytes: int = 0
    unfinished_bytes: int = 0
    """The part of `request_bytes` in partly received requests."""
    step_bytes: int = 0
    """The part of `answer_bytes` between the steps of ensembles."""
    refused_requests: int = 0
    refused_answers: int = 0


_COLUMNS = [entry.name for entry in fields(MemoryUse)]


def table_bytes(processes: int) -> int:
    return 8 * len(_COLUMNS) * processes


@dataclass(slots=True, eq=False)
class Pool:
    """Counts the bytes of one kind that this process holds, and bounds those of all processes. Safe on any thread,
    because slow methods end on the event loop."""

    # acquire() and release() instead of `with`, which takes twice as long; a request has four such steps. On x86 the
    # release is also the fence between the addition to this process's row and the reading of the sums. On other
    # processors two processes that add at the same moment may both be admitted.
    _lock: threading.Lock
    _row: int
    """This process's word in each column."""
    _column: memoryview
    _bounded: memoryview
    """The words whose sum is bounded."""
    _bound: int
    _refusals: memoryview
    _error: Callable[[int, int, int], MemoryFull]
    """Makes the error from the bytes that the holder would have, the requested ones, and those in use."""
    _whole: Pool | None = None
    """The pool of which this one is a part: its bytes count there too."""

    @property
    def own_bytes(self) -> int:
        """Return the bytes of this process."""
        return self._column[self._row]

    def admit(self, holder: Holder, nbytes: int) -> None:
        """Note more bytes. Raises MemoryFull, with nothing noted, if there is no room."""
        whole = self._whole
        self._lock.acquire()
        self._column[self._row] += nbytes
        if whole is not None:
            whole._column[self._row] += nbytes
        holder.held_bytes += nbytes
        self._lock.release()
        used = sum(self._bounded)
        if used > self._bound:
            self._refuse(holder, nbytes, used, self)
        if whole is not None:
            used = sum(whole._bounded)
            if used > whole._bound:
                self._refuse(holder, nbytes, used, whole)

    def take_over(self, holder: Holder, nbytes: int, other: Pool) -> None:
        """Note bytes instead of those that the holder has in another pool. Raises MemoryFull, with nothing noted, if
        there is no room."""
        self._lock.acquire()
        other._column[self._row] -= holder.held_bytes
        self._column[self._row] += nbytes
        holder.held_bytes = nbytes
        self._lock.release()
        used = sum(self._bounded)
        if used > self._bound:
            self._refuse(holder, nbytes, used, self)

    def release(self, holder: Holder, nbytes: int = _ALL) -> None:
        """Release noted bytes, at most those that the holder has. The default releases all."""
        self._lock.acquire()
        if nbytes > holder.held_bytes:
            nbytes = holder.held_bytes
        self._column[self._row] -= nbytes
        if self._whole is not None:
            self._whole._column[self._row] -= nbytes
        holder.held_bytes -= nbytes
        self._lock.release()

    def _refuse(self, holder: Holder, nbytes: int, used: int, full: Pool) -> NoReturn:
        self.release(holder, nbytes)
        with self._lock:
            self._refusals[self._row] += 1
        raise full._error(holder.held_bytes + nbytes, nbytes, used - nbytes)


class RequestMemory:
    """The pools of this process, and its access to those of all processes."""

    requests: Pool
    unfinished: Pool
    """Partly received requests."""
    answers: Pool
    steps: Pool
    """Tensors between the steps of ensembles, which only the server runs."""

    def __init__(self, limit_bytes: int = LARGEST_DEFAULT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self.share(memoryview(bytearray(table_bytes(1))), 0)

    def share(self, table: memoryview, row: int) -> None:
        """Count in this row of a shared table (of `table_bytes`) from now on. Called before anything is counted."""
        words = table.cast("Q")
        rows = len(words) // len(_COLUMNS)
        self._row = row
        self._free_rows = [other for other in range(rows) if other != row]
        self._columns = {name: words[place * rows : (place + 1) * rows] for place, name in enumerate(_COLUMNS)}
        requests, answers, unfinished, steps, refused, refused_answers = self._columns.values()
        # The first two columns. One sum over both takes less time than two.
        self._all_used = words[: 2 * rows]
        limit, half = self.limit_bytes, self.limit_bytes // 2
        pool = partial(Pool, self._lock, row)
        self.requests = pool(requests, self._all_used, limit, refused, self._no_room_for_request)
        self.unfinished = pool(unfinished, unfinished, half, refused, self._no_room_for_part, self.requests)
        self.answers = pool(answers, answers, limit, refused_answers, self._no_room_for_answer)
        self.steps = pool(steps, steps, half, refused_answers, self._no_room_for_step, self.answers)

    @property
    def share_bytes(self) -> int:
        """Return a front end's share of the limit. The server's process has the whole limit: it serves clients only
        while there are no front ends."""
        return self.limit_bytes // self.front_ends

    @property
    def front_ends(self) -> int:
        """Return the number of processes that serve clients together with this one."""
        return len(self._all_used) // 2 - 1 if self._row else 1

    def add_front_end(self) -> int:
        return self._free_rows.pop()

    def forget_front_end(self, row: int) -> None:
        """Free the row of a front end that has ended; its refusals stay counted."""
        with self._lock:
            for name, column in self._columns.items():
                if name.startswith("refused"):
                    column[self._row] += column[row]
                column[row] = 0
        self._free_rows.append(row)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all processes' requests and responses."""
        return sum(self._all_used)

    def use(self) -> MemoryUse:
        """Return the use of all processes, with the refusals of front ends that have ended."""
        return MemoryUse(*map(sum, self._columns.values()))

    def _no_room_for_request(self, held: int, nbytes: int, used: int) -> MemoryFull:
        if held > self.limit_bytes:
            return self._too_large("request", held, "send smaller requests")
        return self._full("request", held, used, "requests and answers")

    def _no_room_for_answer(self, held: int, nbytes: int, used: int) -> MemoryFull:
        if nbytes > self.limit_bytes:
            return self._too_large("answer", nbytes, "ask for fewer or smaller outputs")
        return self._full("answer", nbytes, used, "unread answers and tensors within ensembles")

    def _no_room_for_part(self, held: int, nbytes: int, used: int) -> MemoryFull:
        fact = f"this one already has {readable_size(held)}"
        return self._half_full("incomplete requests", fact, fits_never=held > self.limit_bytes // 2)

    def _no_room_for_step(self, held: int, nbytes: int, used: int) -> MemoryFull:
        return self._half_full("tensors between the steps of ensembles", f"{readable_size(nbytes)} more are needed")

    def _half_full(self, what: str, fact: str, fits_never: bool = False) -> MemoryFull:
        return MemoryFull(
            f"{what} may take {readable_size(self.limit_bytes // 2)} together, half of the server's memory for requests"
            f" ({_FLAG}), and {fact}; send fewer or smaller requests at once, and try again later",
            fits_never,
        )

    def _too_large(self, what: str, nbytes: int, remedy: str) -> MemoryFull:
        return MemoryFull(
            f"this {what} takes {readable_size(nbytes)} of memory, more than the {readable_size(self.limit_bytes)} that"
            f" the server has for all {what}s ({_FLAG}); {remedy}, or raise the limit",
            fits_never=what == "request",
        )

    def _full(self, what: str, nbytes: int, used: int, held_by: str) -> MemoryFull:
        return MemoryFull(
            f"the server's memory for requests is full: {readable_size(used)} of {readable_size(self.limit_bytes)}"
            f" ({_FLAG}) are in use by {held_by}, and this {what} needs {readable_size(nbytes)}; send fewer or smaller"
            " requests at once, and try again later"
        )
