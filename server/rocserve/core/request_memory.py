"""Bounds the memory of requests: what is half received, what waits or runs, and answers that are not yet read.

Whoever keeps bytes of a request or of an answer is a holder. What a holder gives back is what the memory has noted for
it, so that nothing is given back twice, however many ways a request has to end.

What is half received has half of the limit: clients that never finish a request must not keep whole ones out, those
that come in one piece at least.

Answers have a count of their own beside that of requests: requests that fill the memory must not keep those from being
answered that were taken before. What goes from step to step of an ensemble counts there too, and has half of it:
what is on its way must not keep back what has arrived. All together are therefore at most twice the limit.

A front end that is a process of its own has a share of the limit, and tells the server what it uses of it: that counts
in the server's memory too.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from rocserve.core.byte_sizes import readable_size
from rocserve.core.errors import ServeError, StatusCode

LARGEST_DEFAULT_BYTES = 8 << 30
"""What a server takes for itself at most unless it is told to: from there on more memory only makes longer queues."""
_PART_OF_MEMORY = 4
"""The server is left this part of the memory for requests unless it is told otherwise: as much again may go to answers,
and half is for models."""


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
    """What a memory holds, and what it has refused since its beginning."""

    request_bytes: int = 0
    answer_bytes: int = 0
    refused_requests: int = 0
    refused_answers: int = 0

    def plus(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(
            self.request_bytes + other.request_bytes,
            self.answer_bytes + other.answer_bytes,
            self.refused_requests + other.refused_requests,
            self.refused_answers + other.refused_answers,
        )


class RequestMemory:
    """Callable from any thread: the event loop receives the bodies of HTTP requests, and sends their answers."""

    def __init__(self, limit_bytes: int = LARGEST_DEFAULT_BYTES, shares: int = 1) -> None:
        """`shares`: of so many memories that have the limit together, this is one."""
        self._flag = "--max-request-memory" if shares == 1 else f"--max-request-memory, shared by {shares} front ends"
        self.limit_bytes = limit_bytes // shares
        self.request_bytes = 0
        self.unfinished_bytes = 0
        """Of the former, those that are half received."""
        self.answer_bytes = 0
        self.step_bytes = 0
        """Of the former, those between the steps of ensembles."""
        self.refused_requests = 0
        self.refused_answers = 0
        self._front_ends: dict[Hashable, MemoryUse] = {}
        self._ended_front_ends = MemoryUse()
        self._front_end_bytes = 0
        # Taken and let go of by name: `with` takes twice as long, and a request has four such steps.
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self.request_bytes + self.answer_bytes + self._front_end_bytes

    def own_use(self) -> MemoryUse:
        """Without front ends that are other processes."""
        return MemoryUse(self.request_bytes, self.answer_bytes, self.refused_requests, self.refused_answers)

    def use(self) -> MemoryUse:
        """With all front ends, also what those have refused that have ended."""
        total = self.own_use().plus(self._ended_front_ends)
        for use in list(self._front_ends.values()):
            total = total.plus(use)
        return total

    def note_front_end(self, front_end: Hashable, use: MemoryUse) -> None:
        """What a front end uses of its share by now."""
        self._front_ends[front_end] = use
        self._count_front_ends()

    def forget_front_end(self, front_end: Hashable) -> None:
        """It has ended."""
        use = self._front_ends.pop(front_end, MemoryUse())
        self._ended_front_ends = self._ended_front_ends.plus(
            MemoryUse(refused_requests=use.refused_requests, refused_answers=use.refused_answers)
        )
        self._count_front_ends()

    def _count_front_ends(self) -> None:
        self._front_end_bytes = sum(use.request_bytes + use.answer_bytes for use in self._front_ends.values())

    def admit(self, holder: Holder, nbytes: int) -> None:
        """So many more bytes of a request have come.

        Raises:
            MemoryFull: there is no room for them; nothing has been noted.
        """
        self._lock.acquire()
        try:
            request_bytes = self.request_bytes + nbytes
            if request_bytes + self.answer_bytes + self._front_end_bytes <= self.limit_bytes:
                self.request_bytes = request_bytes
                holder.held_bytes += nbytes
                return
            self.refused_requests += 1
            used = self.used_bytes
            asked = holder.held_bytes + nbytes
        finally:
            self._lock.release()
        raise self._full("request", asked, used)

    def release(self, holder: Holder, nbytes: int | None = None) -> None:
        """So many bytes are held no more, at most those that are noted; None = all, the request has ended."""
        self._lock.acquire()
        try:
            given = holder.held_bytes if nbytes is None else min(nbytes, holder.held_bytes)
            self.request_bytes -= given
            holder.held_bytes -= given
        finally:
            self._lock.release()

    def admit_part(self, holder: Holder, nbytes: int) -> None:
        """So many more bytes have come of a request that is not whole yet; `release_part` gives them back.

        Raises:
            MemoryFull: there is no room for them; nothing has been noted.
        """
        share = self.limit_bytes // 2
        with self._lock:
            unfinished, used = self.unfinished_bytes + nbytes, self.used_bytes
            if unfinished <= share and used + nbytes <= self.limit_bytes:
                self.unfinished_bytes = unfinished
                self.request_bytes += nbytes
                holder.held_bytes += nbytes
                return
            self.refused_requests += 1
            asked = holder.held_bytes + nbytes
        if unfinished <= share:
            raise self._full("request", asked, used)
        raise MemoryFull(
            f"requests that have not come whole may take {readable_size(share)} together, half of the server's memory"
            f" for requests ({self._flag}), and {readable_size(asked)} have come of this one; send fewer or"
            " smaller requests at once, and try again later",
            fits_never=asked > share,
        )

    def release_part(self, holder: Holder, nbytes: int | None = None) -> None:
        """As `release`, of what `admit_part` has noted."""
        with self._lock:
            given = holder.held_bytes if nbytes is None else min(nbytes, holder.held_bytes)
            self.unfinished_bytes -= given
            self.request_bytes -= given
            holder.held_bytes -= given

    def admit_answer(self, holder: Holder, nbytes: int) -> None:
        """So many bytes more wait to be sent.

        Raises:
            MemoryFull: there is no room for them; nothing has been noted.
        """
        self._lock.acquire()
        try:
            answer_bytes = self.answer_bytes + nbytes
            if answer_bytes <= self.limit_bytes:
                self.answer_bytes = answer_bytes
                holder.held_bytes += nbytes
                return
            self.refused_answers += 1
            used = self.answer_bytes
        finally:
            self._lock.release()
        raise self._full("answer", nbytes, used)

    def release_answer(self, holder: Holder, nbytes: int | None = None) -> None:
        """So many bytes have been sent, at most those that are noted; None = all, or they never will be."""
        self._lock.acquire()
        try:
            given = holder.held_bytes if nbytes is None else min(nbytes, holder.held_bytes)
            self.answer_bytes -= given
            holder.held_bytes -= given
        finally:
            self._lock.release()

    def admit_step(self, holder: Holder, nbytes: int) -> None:
        """So many bytes more lie between the steps of an ensemble; fewer, where a step made less than it had read.

        Raises:
            MemoryFull: there is no room for them; nothing has been noted.
        """
        share = self.limit_bytes // 2
        with self._lock:
            step_bytes, answer_bytes = self.step_bytes + nbytes, self.answer_bytes + nbytes
            if nbytes <= 0 or (step_bytes <= share and answer_bytes <= self.limit_bytes):
                self.step_bytes, self.answer_bytes = step_bytes, answer_bytes
                holder.held_bytes += nbytes
                return
            self.refused_answers += 1
            used = self.answer_bytes
        if step_bytes <= share:
            raise self._full("answer", nbytes, used)
        raise MemoryFull(
            f"tensors between the steps of ensembles may take {readable_size(share)} together, half of the server's"
            f" memory for requests ({self._flag}), and {readable_size(nbytes)} more are needed; send fewer or"
            " smaller requests at once, and try again later"
        )

    def release_step(self, holder: Holder, nbytes: int | None = None) -> None:
        """As `release_answer`, of what `admit_step` has noted."""
        with self._lock:
            given = holder.held_bytes if nbytes is None else min(nbytes, holder.held_bytes)
            self.step_bytes -= given
            self.answer_bytes -= given
            holder.held_bytes -= given

    def _full(self, what: str, nbytes: int, used: int) -> MemoryFull:
        limit = readable_size(self.limit_bytes)
        if nbytes > self.limit_bytes:
            remedy = "send smaller requests" if what == "request" else "ask for fewer or smaller outputs"
            return MemoryFull(
                f"this {what} takes {readable_size(nbytes)} of memory, more than the {limit} that the server has for"
                f" all {what}s ({self._flag}); {remedy}, or have the limit raised",
                fits_never=what == "request",
            )
        held_by = "requests and answers" if what == "request" else "answers that are not read yet or within ensembles"
        return MemoryFull(
            f"the server's memory for requests is full: {readable_size(used)} of {limit} ({self._flag}) are in"
            f" use by {held_by}, and this {what} needs {readable_size(nbytes)}; send fewer or smaller requests at once,"
            " and try again later"
        )
