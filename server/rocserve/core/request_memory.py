"""Bounds the memory of requests: half received ones, those that wait or run, and answers that are not yet read.

What keeps bytes of a request or of an answer is a holder. What a holder gives back is what the memory has noted for
it, so that nothing is given back twice, however many ways a request has to end.

Half received requests have half of the limit: clients that never finish a request must not keep whole ones out, those
that come in one piece at least.

Answers have a count of their own beside that of requests: requests that fill the memory must not keep those from being
answered that were taken before. What goes from step to step of an ensemble counts there too, and has half of it:
tensors on their way must not keep back finished answers. All together are therefore at most twice the limit.

Processes that have the limit together, the server and its front ends, each count in a row of a table that all of them
see. Each adds before it reads the sums: of two that come at the same moment both may be refused where there is room
for one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Protocol

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.printable import readable_size

LARGEST_DEFAULT_BYTES = 8 << 30
"""What a server takes for itself at most unless it is told to: from there on more memory only makes longer queues."""
_PART_OF_MEMORY = 4
"""The server is left this part of the memory for requests unless set otherwise: as much again may go to answers,
and half is for models."""

_FLAG = "--max-request-memory"
_ALL = 1 << 62
"""More bytes than any holder keeps."""


def default_limit(total_bytes: int | None) -> int:
    """The limit where nothing is said. `total_bytes`: of the container or the machine; None = not known."""
    return LARGEST_DEFAULT_BYTES if total_bytes is None else min(LARGEST_DEFAULT_BYTES, total_bytes // _PART_OF_MEMORY)


class Holder(Protocol):
    """Keeps bytes of one request, or of one call's answers. Only the memory sets its count."""

    held_bytes: int


class Holding:
    """A holder that is nothing else."""

    __slots__ = ("held_bytes",)

    def __init__(self) -> None:
        self.held_bytes = 0


class MemoryFull(ServeError):
    """RESOURCE_EXHAUSTED: there is no room for a request, or for an answer."""

    def __init__(self, text: str, fits_never: bool = False) -> None:
        super().__init__(StatusCode.RESOURCE_EXHAUSTED, text)
        self.fits_never = fits_never
        """It is a request that alone is larger than the limit."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a memory holds, and what it has refused since its beginning: the columns of its table."""

    request_bytes: int = 0
    answer_bytes: int = 0
    unfinished_bytes: int = 0
    """Of requests, those that are half received."""
    step_bytes: int = 0
    """Of answers, those between the steps of ensembles."""
    refused_requests: int = 0
    refused_answers: int = 0


_COLUMNS = len(fields(MemoryUse))


def table_bytes(processes: int) -> int:
    return 8 * _COLUMNS * processes


class RequestMemory:
    """Callable from any thread: the event loop receives the bodies of HTTP requests, and sends their answers."""

    def __init__(self, limit_bytes: int = LARGEST_DEFAULT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        # Taken and let go of by name: `with` takes twice as long, and a request has four such steps. To let go of it is
        # on x86 the fence between the addition to the own row and the reading of the sums; elsewhere two processes that
        # add at the same moment may both be taken.
        self._lock = threading.Lock()
        self.share(memoryview(bytearray(table_bytes(1))), 0)

    def share(self, table: memoryview, row: int) -> None:
        """Count in this row of a table (`table_bytes`) from now on; nothing has been counted before."""
        self._table = words = table.cast("Q")
        rows = self._rows = len(words) // _COLUMNS
        self._own = range(row, len(words), rows)
        self._requests, self._answers, self._unfinished, self._steps, self._refused, self._refused_answers = self._own
        self._all_used = words[: 2 * rows]
        self._all_answers, self._all_unfinished = words[rows : 2 * rows], words[2 * rows : 3 * rows]
        self._free_rows = [other for other in range(rows) if other != row]

    @property
    def share_bytes(self) -> int:
        """Of the limit, where each front end is to have as much; the server alone has all."""
        return self.limit_bytes // max(self._rows - 1, 1)

    def add_front_end(self) -> int:
        """The row for one more."""
        return self._free_rows.pop()

    def forget_front_end(self, row: int) -> None:
        """It has ended; what it has refused stays counted."""
        table = self._table
        with self._lock:
            for place, own in zip(range(row, len(table), self._rows), self._own, strict=True):
                if own in (self._refused, self._refused_answers):
                    table[own] += table[place]
                table[place] = 0
        self._free_rows.append(row)

    @property
    def request_bytes(self) -> int:
        """Of this process, as is the next."""
        return self._table[self._requests]

    @property
    def answer_bytes(self) -> int:
        return self._table[self._answers]

    @property
    def used_bytes(self) -> int:
        """Of all processes."""
        return sum(self._all_used)

    def use(self) -> MemoryUse:
        """Of all processes, also what those have refused that have ended."""
        rows = self._rows
        return MemoryUse(*(sum(self._table[begin : begin + rows]) for begin in range(0, len(self._table), rows)))

    def admit(self, holder: Holder, nbytes: int) -> None:
        """So many more bytes of a request have come. Raises: MemoryFull: there is no room for them; nothing has been
        noted."""
        # Written out here and below, without a call: every request of gRPC comes by.
        self._lock.acquire()
        self._table[self._requests] += nbytes
        holder.held_bytes += nbytes
        self._lock.release()
        used = sum(self._all_used)
        if used > self.limit_bytes:
            self._take_back(self._refused, holder, nbytes, self._requests)
            raise self._full("request", holder.held_bytes + nbytes, used - nbytes)

    def release(self, holder: Holder) -> None:
        """The request has ended: what is noted of it is held no more."""
        self._add(holder, -_ALL, self._requests)

    def admit_part(self, holder: Holder, nbytes: int) -> None:
        """So many more bytes have come of a request that is not whole yet; `release_part` gives them back. Raises:
        MemoryFull: there is no room for them; nothing has been noted."""
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
            f"requests that have not come whole may take {readable_size(share)} together, half of the server's memory"
            f" for requests ({_FLAG}), and {readable_size(asked)} have come of this one; send fewer or"
            " smaller requests at once, and try again later",
            fits_never=asked > share,
        )

    def release_part(self, holder: Holder, nbytes: int = _ALL) -> None:
        """So many bytes that `admit_part` has noted are held no more, at most those that are; all = it has ended."""
        self._add(holder, -nbytes, self._requests, self._unfinished)

    def admit_answer(self, holder: Holder, nbytes: int) -> None:
        """So many bytes more wait to be sent. Raises: MemoryFull: there is no room for them; nothing has been noted."""
        self._add(holder, nbytes, self._answers)
        used = sum(self._all_answers)
        if used > self.limit_bytes:
            self._take_back(self._refused_answers, holder, nbytes, self._answers)
            raise self._full("answer", nbytes, used - nbytes)

    def exchange(self, holder: Holder, nbytes: int) -> None:
        """All that is noted of a request is given back for its answer of so many bytes, which waits to be sent. Raises:
        MemoryFull: there is no room for the answer; nothing is noted any more."""
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
        """So many bytes have been sent, at most those that are noted; all = also what never will be."""
        self._lock.acquire()
        sent = min(nbytes, holder.held_bytes)
        self._table[self._answers] -= sent
        holder.held_bytes -= sent
        self._lock.release()

    def admit_step(self, holder: Holder, nbytes: int) -> None:
        """So many bytes more lie between the steps of an ensemble; fewer, where a step made less than it had read. Only
        the server runs ensembles. Raises: MemoryFull: there is no room for them; nothing has been noted."""
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
        """As `release_answer`, of what `admit_step` has noted."""
        self._add(holder, -nbytes, self._answers, self._steps)

    def _add(self, holder: Holder, nbytes: int, place: int, part: int | None = None) -> None:
        """Where they are fewer, at most those that are noted."""
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
