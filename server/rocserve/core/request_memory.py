"""Limits the memory of requests (partly received, waiting or running) and of responses that are not sent yet.

A holder is an object that keeps bytes of a request or a response. RequestMemory notes these bytes in the holder's
`held_bytes` and releases only noted bytes, so no byte is released twice, however many ways a request may end.

Partly received requests may use half of the limit, because clients that never finish a request must not keep out whole
requests, at least those that arrive in one piece.

Responses have a separate count with the same limit: a memory full of requests must not prevent responses to requests
that were admitted before. Tensors between the steps of an ensemble count as responses and may use half of that limit,
so that they leave room for finished responses. Requests and responses together use at most twice the limit.

The server and its front end processes share one limit. Each process counts in its row of a shared table. A process adds
first and reads the sums afterwards, so if two requests arrive at the same moment both may be refused although there is
room for one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Protocol

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.printable import readable_size

LARGEST_DEFAULT_BYTES = 8 << 30
"""The largest default limit: more memory would only make queues longer."""
_PART_OF_MEMORY = 4
"""The default limit is the memory divided by this: responses may use as much again, and half remains for models."""

_FLAG = "--max-request-memory"
_ALL = 1 << 62
"""More bytes than any holder keeps."""


def default_limit(total_bytes: int | None) -> int:
    """Return the limit if none is configured. `total_bytes`: memory of the container or the machine; None = unknown."""
    return LARGEST_DEFAULT_BYTES if total_bytes is None else min(LARGEST_DEFAULT_BYTES, total_bytes // _PART_OF_MEMORY)


class Holder(Protocol):
    """An object that keeps bytes of one request, or of one call's responses. Only RequestMemory writes `held_bytes`."""

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


_COLUMNS = len(fields(MemoryUse))


def table_bytes(processes: int) -> int:
    return 8 * _COLUMNS * processes


class RequestMemory:
    """Counts and limits memory. Safe on any thread, because slow methods end on the event loop."""

    def __init__(self, limit_bytes: int = LARGEST_DEFAULT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        # acquire() and release() instead of `with`, which takes twice as long; a request has four such steps. On x86
        # the release is also the fence between the addition to this process's row and the reading of the sums. On other
        # processors two processes that add at the same moment may both be admitted.
        self._lock = threading.Lock()
        self.share(memoryview(bytearray(table_bytes(1))), 0)

    def share(self, table: memoryview, row: int) -> None:
        """Count in this row of a shared table (of `table_bytes`) from now on. Called before anything is counted."""
        self._table = words = table.cast("Q")
        rows = self._rows = len(words) // _COLUMNS
        self._own = range(row, len(words), rows)
        self._requests, self._answers, self._unfinished, self._steps, self._refused, self._refused_answers = self._own
        self._all_used = words[: 2 * rows]
        self._all_answers, self._all_unfinished = words[rows : 2 * rows], words[2 * rows : 3 * rows]
        self._free_rows = [other for other in range(rows) if other != row]

    @property
    def share_bytes(self) -> int:
        """Return each front end's share of the limit; without front end processes, the whole limit."""
        return self.limit_bytes // max(self._rows - 1, 1)

    def add_front_end(self) -> int:
        return self._free_rows.pop()

    def forget_front_end(self, row: int) -> None:
        """Free the row of a front end that has ended; its refusals stay counted."""
        table = self._table
        with self._lock:
            for place, own in zip(range(row, len(table), self._rows), self._own, strict=True):
                if own in (self._refused, self._refused_answers):
                    table[own] += table[place]
                table[place] = 0
        self._free_rows.append(row)

    @property
    def request_bytes(self) -> int:
        """Return the bytes of this process's requests."""
        return self._table[self._requests]

    @property
    def answer_bytes(self) -> int:
        return self._table[self._answers]

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all processes' requests and responses."""
        return sum(self._all_used)

    def use(self) -> MemoryUse:
        """Return the use of all processes, with the refusals of front ends that have ended."""
        rows = self._rows
        return MemoryUse(*(sum(self._table[begin : begin + rows]) for begin in range(0, len(self._table), rows)))

    def admit(self, holder: Holder, nbytes: int) -> None:
        """Note more bytes of a request. Raises MemoryFull, with nothing noted, if there is no room."""
        # Written out here and below instead of calling _add, because every gRPC request comes through here.
        self._lock.acquire()
        self._table[self._requests] += nbytes
        holder.held_bytes += nbytes
        self._lock.release()
        used = sum(self._all_used)
        if used > self.limit_bytes:
            self._take_back(self._refused, holder, nbytes, self._requests)
            raise self._full("request", holder.held_bytes + nbytes, used - nbytes)

    def release(self, holder: Holder) -> None:
        """Release all bytes of a request that has ended."""
        self._add(holder, -_ALL, self._requests)

    def admit_part(self, holder: Holder, nbytes: int) -> None:
        """Note more bytes of a partly received request. Raises MemoryFull, with nothing noted, if there is no room."""
        share = self.limit_bytes // 2
        self._add(holder, nbytes, self._requests, self._unfinished)
        unfinished, used = sum(self._all_unfinished), sum(self._all_used)
        if unfinished <= share and used <= self.limit_bytes:
            return
        self._take_back(self._refused, holder, nbytes, self._requests, self._unfinished)
        asked = holder.held_bytes + nbytes
        if unfinished <= share:
            raise self._full("request", asked, used - nbytes)
        raise MemoryFull(
            f"incomplete requests may take {readable_size(share)} together, half of the server's memory"
            f" for requests ({_FLAG}), and {readable_size(asked)} have come of this one; send fewer or"
            " smaller requests at once, and try again later",
            fits_never=asked > share,
        )

    def release_part(self, holder: Holder, nbytes: int = _ALL) -> None:
        """Release `nbytes` that `admit_part` noted, or all of them if they are fewer. The default releases all."""
        self._add(holder, -nbytes, self._requests, self._unfinished)

    def admit_answer(self, holder: Holder, nbytes: int) -> None:
        """Note more bytes of a response to send. Raises MemoryFull, with nothing noted, if there is no room."""
        self._add(holder, nbytes, self._answers)
        used = sum(self._all_answers)
        if used > self.limit_bytes:
            self._take_back(self._refused_answers, holder, nbytes, self._answers)
            raise self._full("answer", nbytes, used - nbytes)

    def exchange(self, holder: Holder, nbytes: int) -> None:
        """Replace a request's bytes by its response's. Raises MemoryFull, with nothing noted, if there is no room."""
        self._lock.acquire()
        self._table[self._requests] -= holder.held_bytes
        self._table[self._answers] += nbytes
        holder.held_bytes = nbytes
        self._lock.release()
        used = sum(self._all_answers)
        if used > self.limit_bytes:
            self._take_back(self._refused_answers, holder, nbytes, self._answers)
            raise self._full("answer", nbytes, used - nbytes)

    def release_answer(self, holder: Holder, nbytes: int = _ALL) -> None:
        """Release bytes of a response that were sent, at most the noted ones. The default releases all, sent or not."""
        self._lock.acquire()
        sent = min(nbytes, holder.held_bytes)
        self._table[self._answers] -= sent
        holder.held_bytes -= sent
        self._lock.release()

    def admit_step(self, holder: Holder, nbytes: int) -> None:
        """Note bytes between the steps of an ensemble, negative if a step's outputs are smaller than its inputs. Only
        the server runs ensembles. Raises MemoryFull, with nothing noted, if there is no room."""
        share = self.limit_bytes // 2
        self._add(holder, nbytes, self._answers, self._steps)
        steps, used = self._table[self._steps], sum(self._all_answers)
        if nbytes <= 0 or (steps <= share and used <= self.limit_bytes):
            return
        self._take_back(self._refused_answers, holder, nbytes, self._answers, self._steps)
        if steps <= share:
            raise self._full("answer", nbytes, used - nbytes)
        raise MemoryFull(
            f"tensors between the steps of ensembles may take {readable_size(share)} together, half of the server's"
            f" memory for requests ({_FLAG}), and {readable_size(nbytes)} more are needed; send fewer or"
            " smaller requests at once, and try again later"
        )

    def release_step(self, holder: Holder, nbytes: int = _ALL) -> None:
        """Release `nbytes` that `admit_step` noted, or all of them if they are fewer."""
        self._add(holder, -nbytes, self._answers, self._steps)

    def _add(self, holder: Holder, nbytes: int, place: int, part: int | None = None) -> None:
        """Add `nbytes` to the columns `place` and `part`; a negative number releases at most the holder's bytes."""
        self._lock.acquire()
        try:
            if nbytes < -holder.held_bytes:
                nbytes = -holder.held_bytes
            self._table[place] += nbytes
            if part is not None:
                self._table[part] += nbytes
            holder.held_bytes += nbytes
        finally:
            self._lock.release()

    def _take_back(self, refused: int, holder: Holder, nbytes: int, place: int, part: int | None = None) -> None:
        self._add(holder, -nbytes, place, part)
        with self._lock:
            self._table[refused] += 1

    def _full(self, what: str, nbytes: int, used: int) -> MemoryFull:
        limit = readable_size(self.limit_bytes)
        if nbytes > self.limit_bytes:
            remedy = "send smaller requests" if what == "request" else "ask for fewer or smaller outputs"
            return MemoryFull(
                f"this {what} takes {readable_size(nbytes)} of memory, more than the {limit} that the server has for"
                f" all {what}s ({_FLAG}); {remedy}, or have the limit raised",
                fits_never=what == "request",
            )
        held_by = "requests and answers" if what == "request" else "answers that are not read yet or within ensembles"
        return MemoryFull(
            f"the server's memory for requests is full: {readable_size(used)} of {limit} ({_FLAG}) are in"
            f" use by {held_by}, and this {what} needs {readable_size(nbytes)}; send fewer or smaller requests at once,"
            " and try again later"
        )
