"""Connects one instance in a worker to the server: takes batches, and posts results (`links/README.md`)."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import TypeVar

from rocserve.backends.request_model import ModelResponse, Result
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.plain import from_json
from rocserve.core.requests import RequestForm, RequestLayout
from rocserve.core.tensor_places import aligned, padded
from rocserve.core.tensors import Buffer
from rocserve.links import entries
from rocserve.links.entries import BATCH_ENTRY, ENTRY, LONGEST_TEXT, REQUEST, data_start
from rocserve.links.files import ReceivedFiles
from rocserve.links.opening import BACK, POLL_SECONDS, RETURNS, SERVER_RINGS, WORK, WORKER_RINGS, accept
from rocserve.links.rings import ENTRY_BYTES, RingReader
from rocserve.links.tensors import Layout, TensorSender, error_bytes
from rocserve.plane.doorbell import SocketSleeper
from rocserve.plane.freed_memory import WORTH_BYTES, FreedMemory
from rocserve.plane.guarded_mapping import FaultGuard
from rocserve.plane.heap import SHARES, HeapReader, fill

_Request = TypeVar("_Request")

_MOST_UNREAD_BYTES = 256 << 20
"""A worker waits while the server has more bytes than this to read."""
_WAIT_SECONDS = 0.001
"""Time between two checks whether the server has read something."""
_WAKE_SECONDS = 10.0
"""Time between the wake-ups of an idle worker. The second and third return unused memory to the system."""


@dataclass(slots=True)
class ReceivedRequest:
    """A request of a batch. Not frozen, because one is made for each request."""

    form: RequestForm
    number: int
    place: int
    """Place of the inputs in the version's heap, or their offset in `file`."""
    details_place: int
    details_bytes: int
    file: int
    """Number of a client's file or of another worker's heap; 0 = the inputs are in the version's heap."""
    elsewhere: Mapping[int, tuple[int, int]] | None = None
    """The index of an input that lies in another worker's heap -> the heap's number, and the place there. `place` has
    the other inputs."""


@dataclass(slots=True)
class ReceivedBatch:
    """A batch that has arrived on an instance's link."""

    id: int
    is_grouped: bool
    requests: Sequence[ReceivedRequest]
    taken_ns: int


def _sleep_ahead(waits: deque[float]) -> None:
    """Sleep for a part of the next wait, if the last `waits` (seconds) are alike, as a lone client's are: the worker
    then polls only towards the end of a wait, and is awake when the batch comes."""
    shortest = min(waits)
    # With less than 50 us, going to sleep and waking would be most of it.
    if shortest > 50e-6 and max(waits) < 2 * shortest:
        # A client that becomes faster is late by at most this, for one request. A larger part costs answers' time, a
        # smaller one CPU time (benchmarks/results/front_ends.md).
        time.sleep(0.75 * shortest)


def _poll(ring: RingReader, until: float) -> None:
    """Wait for mail without sleeping, until time.monotonic() is `until`."""
    while time.monotonic() < until:
        # Some 50 us. To offer the CPU to others after each poll would slow down the answer that it waits for.
        for _ in range(500):
            if ring.has_mail():
                return
        os.sched_yield()


class ServerGone(ServeError):
    """The server no longer takes results."""

    def __init__(self) -> None:
        super().__init__(StatusCode.UNAVAILABLE, "the server is gone")


RESULT_START = data_start(2)
"""The start of a batch's only result in its slot, after the header and the result's entry."""


@dataclass(slots=True, eq=False)
class OutgoingResult:
    """A result for the server, or several of the same layout."""

    kind: int
    """RESPONSE, FAILURE or OPEN."""
    requests: int = 1
    """Number of requests that the result is for."""
    flags: int = 0
    """WHOLE: one result for all requests of the batch."""
    code: int = 0
    """An error's StatusCode."""
    text_bytes: int = 0
    """Bytes of the details, or of an error's text."""
    nbytes: int = 0
    contents: list[Buffer] = field(default_factory=list)
    """The outputs and details one after the other, each padded to a multiple of 64 bytes (tensor_places.padded)."""
    layout: Layout | None = None
    """The outputs' layout; None = no outputs. Results of the same layout without details differ only in their
    contents."""
    place: int | None = None
    """The slot that already has the result (see `WorkerEnd.reserve`); None = `contents` must still be copied."""

    def is_like(self, layout: Layout) -> bool:
        """Return whether a result of this layout without details differs only in its contents."""
        return self.layout is layout and not self.text_bytes

    def add(self, nbytes: int, contents: Sequence[Buffer]) -> None:
        """Add the next request's result, which has the same layout."""
        self.requests += 1
        self.nbytes += nbytes
        self.contents += contents


@dataclass(eq=False, repr=False)
class WorkerEnd:
    """The worker's end of an instance's link. One thread takes batches; models may answer, and so post, on any
    thread."""

    _connection: socket.socket
    guard: InitVar[FaultGuard]
    is_alone: InitVar[bool] = True
    """No other instance in this process would wait for the GIL while this one polls."""
    freed_memory: FreedMemory | None = None

    def __post_init__(self, guard: FaultGuard, is_alone: bool) -> None:
        """Raises EOFError if the server is gone, ValueError if the first message is invalid."""
        accepted = accept(self._connection, POLL_SECONDS.size, WORKER_RINGS, SERVER_RINGS, most_more=1)
        link = accepted.end
        self.inputs = HeapReader(accepted.servers_heap, SHARES)
        self.back_connection = socket.socket(fileno=accepted.more[0]) if accepted.more else None
        self.back = link.readers[BACK]
        self.back_sleep_word = link.own_sleep_word(1)
        self._note_begun = link.note_begun
        # Re-entrant: a garbage collection may run anywhere and answer a request that its model has dropped.
        self._lock = threading.RLock()
        self._is_wanted = True
        """False = the server is gone, and no further batches are run."""
        (poll_seconds,) = POLL_SECONDS.unpack(accepted.message)
        self._poll_seconds = poll_seconds if is_alone else 0.0
        self._work = link.readers[WORK]
        self._returns = link.readers[RETURNS]
        self._results = link.writers[0]
        self.files = ReceivedFiles(self.inputs, guard)
        self._sleeper = SocketSleeper(link.own_sleep_word(0), self._connection, self.files.take)
        self._ring = accepted.ring
        self._heap = accepted.heap
        self._unread: dict[int, int] = {}
        """Bytes of each slot that the server must still read, by place."""
        self._unread_bytes = 0
        self._referents: dict[int, Sequence[object]] = {}
        """Objects that the references in a slot refer to, by place."""
        self.sender = TensorSender(self.place, self._place_now, self.post, self._lock)
        self._forms: dict[int, RequestForm] = {}

    # Batches

    def batches(
        self, run_started: Callable[[], bool] | None = None, prepare: Callable[[], bool] = bool
    ) -> Iterator[ReceivedBatch]:
        """Yield batches until the server closes the connection, or `stop`. `run_started`: works on batches in flight;
        returns False if there are none, so that waiting is allowed. None = each batch is done when the next is
        requested. `prepare`: works while there are no batches; returns False if it has nothing to do.

        Where the last batch came soon, the next one may, too: the worker polls for it first, because to wake a process
        takes as long as a small model's run."""
        work, is_open, monotonic = self._work, True, time.monotonic
        idle_since, waited = monotonic(), self._poll_seconds
        waits = deque((0.0,) * 8, 8)
        if self._poll_seconds:
            # PR_SET_TIMERSLACK, in nanoseconds: with the kernel's 50 us, short sleeps would end too late.
            ctypes.CDLL(None).prctl(29, 1000)
        while True:
            is_busy = run_started is not None and run_started()
            if waited < self._poll_seconds and not is_busy and not work.has_mail():
                _sleep_ahead(waits)
                _poll(work, idle_since + self._poll_seconds)
            mail = work.take()
            if mail:
                waited = monotonic() - idle_since
                waits.append(waited)
            for kind, flags, _, _, number, place, nbytes in ENTRY.iter_unpack(mail):
                if not self._is_wanted:
                    return
                if kind == entries.FORGET:
                    self._await_file(number)
                    self.files.forget(number)
                    continue
                if kind != entries.BATCH:
                    raise ValueError(f"expected a batch, got a message of kind {kind}")
                yield ReceivedBatch(
                    number, bool(flags & entries.WHOLE), self._requests(place, nbytes), time.monotonic_ns()
                )
            if mail or is_busy:
                idle_since = monotonic()
            elif not is_open:
                return
            elif prepare():
                idle_since = monotonic()
                is_open = self._sleeper.sleep(0.0, work.has_mail)
            else:
                is_open = self._sleep(monotonic() - idle_since)

    def _sleep(self, idle_seconds: float) -> bool:
        """Returns False if the server has closed the connection."""
        # The third wake-up has returned all unused memory, so another is not needed.
        is_worth_trimming = idle_seconds < 3 * _WAKE_SECONDS
        is_open = self._sleeper.sleep(_WAKE_SECONDS if is_worth_trimming else None, self._work.has_mail)
        if is_worth_trimming and idle_seconds > _WAKE_SECONDS / 2 and not self._work.has_mail():
            with self._lock:
                self._take_returns()
                deque(self._heap.trim(), 0)
            if self.freed_memory is not None and self.freed_memory.grown_bytes() >= WORTH_BYTES:
                for _ in self.freed_memory.give_back():
                    if self._work.has_mail():
                        break
        return is_open

    def _requests(self, place: int, nbytes: int) -> list[ReceivedRequest]:
        requests: list[ReceivedRequest] = []
        forms, inputs = self._forms, self.inputs
        start, table = place + data_start(nbytes // ENTRY_BYTES), inputs.view(place, nbytes)
        elsewhere: dict[int, tuple[int, int]] = {}
        for kind, flags, count, text, number, at, more, more_bytes in BATCH_ENTRY.iter_unpack(table):
            if kind == REQUEST:
                if not flags:
                    requests.append(ReceivedRequest(forms[text], number, start + at, start + more, more_bytes, 0))
                elif flags == entries.PLACED:
                    requests.append(ReceivedRequest(forms[text], number, at, start + more, more_bytes, 0))
                else:
                    self._await_file(number)
                    requests.append(ReceivedRequest(forms[text], 0, at, start + more, more_bytes, number))
                if elsewhere:
                    requests[-1].elsewhere, elsewhere = elsewhere, {}
            elif kind == entries.INPUT:
                self._await_file(number)
                elsewhere[count] = (number, at)
            elif kind == entries.TEXT:
                forms[text] = RequestForm(from_json(RequestLayout, bytes(inputs.view(start + more, more_bytes))))
            else:
                raise ValueError(f"a message of kind {kind} among the requests of a batch")
        forms.pop(0, None)
        return requests

    def _await_file(self, number: int) -> None:
        """Wait for a file or heap, which the server sends before it names its number. Raises ServerGone or OSError."""
        while number not in self.files:
            if not self.files.take(self._connection, flags=0):
                raise ServerGone

    def one_by_one(self, group: ReceivedBatch, requests: Iterable[_Request]) -> Iterator[_Request]:
        """Yield the requests of a group, each when it begins to run: if it ends the worker, those after it may run
        elsewhere."""
        for count, request in enumerate(requests, 1):
            self._note_begun(group.id, count)
            yield request

    def stop(self, is_wanted: bool = True) -> None:
        """End `batches` after the batches already posted; if not `is_wanted`, after the running batch, whose results
        are not sent. Safe on any thread."""
        self._is_wanted = is_wanted
        with suppress(OSError):  # The server has closed the connection.
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Release all memory and sockets shared with the server, after `stop`."""
        self.files.clear()
        self.inputs.close()
        self._heap.close()
        self._connection.close()
        if self.back_connection is not None:
            self.back_connection.close()

    # Results

    def place(self, nbytes: int) -> tuple[int, memoryview]:
        """Allocate a slot; waits while too much is unread by the server. Raises HeapFull or ServerGone."""
        with self._lock:
            self._await_reader()
            return self._place_now(nbytes)

    def _place_now(self, nbytes: int) -> tuple[int, memoryview]:
        """Allocate a slot without waiting. Raises HeapFull."""
        with self._lock:
            place, view = self._heap.allocate(nbytes)
            self._unread[place] = nbytes
            self._unread_bytes += nbytes
            return place, view

    def _await_reader(self) -> None:
        """Raises ServerGone."""
        while self._is_wanted:
            # With fewer bytes, the check costs more than it gains: some 80 small slots are freed together.
            if (self._unread_bytes >= 16 << 10 or self._referents) and self._returns.has_mail():
                self._take_returns()
            # The wait does not go on to 0 bytes, because the server keeps a few small slots and returns them together.
            if self._unread_bytes < _MOST_UNREAD_BYTES:
                return
            time.sleep(_WAIT_SECONDS)
        raise ServerGone

    def give_up(self, place: int) -> None:
        """Free a slot of `reserve` that is not sent."""
        with self._lock:
            self._heap.free(place)

    def _take_returns(self) -> None:
        for place in entries.returned_places(self._returns.take()):
            self._unread_bytes -= self._unread.pop(place, 0)
            self._referents.pop(place, None)
            self._heap.free(place)

    def post(self, mail: bytes) -> None:
        """Post entries. Waits while the ring is full."""
        with self._lock:
            count = len(mail) // ENTRY_BYTES
            while self._results.room < count:
                if not self._is_wanted:
                    return
                self._ring()
                time.sleep(_WAIT_SECONDS)
            self._results.post(mail)
            self._ring()

    def respond(self, number: int, answer: Result | None, final: bool) -> None:
        """Post a response to the request of that number. Raises ServeError as TensorSender.put."""
        message, place = self.sender.answer(number, answer, final)
        if isinstance(answer, ModelResponse) and answer.slot is not None:
            with self._lock:
                self._referents[place] = (answer.slot,)
        self.sender.post(message)

    def reserve(self, nbytes: int) -> tuple[int, memoryview]:
        """Reserve a slot for a batch's only result of `nbytes`. Never waits, and the slot counts as unread only when it
        is sent, so that batches are sent in their order. Raises HeapFull."""
        with self._lock:
            if self._returns.has_mail():
                self._take_returns()
            place, view = self._heap.allocate(RESULT_START + nbytes)
        return place, view[RESULT_START:]

    def finish(
        self,
        batch: ReceivedBatch,
        times: tuple[int, int],
        results: Sequence[OutgoingResult],
        kept: Sequence[object] = (),
    ) -> None:
        """Post results. `times`: time.monotonic_ns() when inputs were ready and the engine ended. `kept`: see
        BatchResult."""
        count = len(results)
        begin = end = data_start(1 + count)
        pieces: list[Buffer] = []
        for one in results:
            pieces += one.contents
            end += one.nbytes
        place = results[0].place
        if place is None:
            place, view = self.place(end)
            fill(view[begin:], pieces)
        else:
            with self._lock:
                self._await_reader()
                self._unread[place] = end
                self._unread_bytes += end
            view = self._heap.view(place, begin)
        if kept:
            self._referents[place] = kept
        with self._lock:
            # All results are read together, so none of their layouts may take the number of another.
            for one in results:
                if one.layout is not None:
                    one.layout.pins += 1
            try:
                for index, one in enumerate(results, 1):
                    text = 0 if one.layout is None else self.sender.number(one.layout)
                    fields = (one.kind, one.flags, one.code, text, one.requests, begin, one.text_bytes)
                    ENTRY.pack_into(view, index * ENTRY_BYTES, *fields)
                    begin += one.nbytes
                entries.RESULTS_HEADER.pack_into(view, 0, count, *times, time.monotonic_ns())
                self.post(ENTRY.pack(entries.DONE, 0, 0, 0, batch.id, place, end))
            finally:
                for one in results:
                    if one.layout is not None:
                        one.layout.pins -= 1

    def fail(self, batch: ReceivedBatch, times: tuple[int, int], error: ServeError) -> None:
        self.finish(batch, times, [error_result(error, entries.WHOLE, len(batch.requests))])


def error_text(error: BaseException) -> str:
    """Return an exception's text; if it is empty, or for KeyError and SystemExit, also the exception's name."""
    text = str(error).strip()
    if isinstance(error, KeyError | SystemExit) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:LONGEST_TEXT]


def error_result(error: ServeError, flags: int = 0, requests: int = 1) -> OutgoingResult:
    """Return an error as a result. `flags`, `requests`: see OutgoingResult."""
    text = error_bytes(error)
    return OutgoingResult(
        entries.FAILURE, requests, flags, int(error.code), len(text), aligned(len(text)), padded((text,))
    )
