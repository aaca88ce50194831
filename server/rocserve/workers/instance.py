"""The server's end of one instance of a model in a worker: batches go out, what the model says comes back.

Requests' inputs lie in a heap of the model version, outputs in one of the instance's own; `entries.py` has the
messages. All calls are made on the data plane's thread, unless said otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from rocserve.backends.request_model import RESCHEDULED, Answer, ModelCall, ModelResponse, Result
from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument, unavailable
from rocserve.core.model_config import NO_LIMITS, InstanceRateLimiter
from rocserve.core.passed_descriptors import send_with_descriptors
from rocserve.core.request_form import BatchForm, Member, RequestForm
from rocserve.core.tensor_places import PlacedTensors, aligned, padded
from rocserve.core.tensors import Buffer, Tensor
from rocserve.core.trace import Trace
from rocserve.plane import anonymous_file, heap, link
from rocserve.plane.doorbell import SocketRinger, drain_rings
from rocserve.plane.heap import COPIED_AT_ONCE, HeapFull, HeapReader, ReadSlot, Slot, copy_in_steps, fill
from rocserve.plane.link import ENTRY_BYTES, LinkBroken, LinkEnd
from rocserve.plane.loop import TimerHandle
from rocserve.plane.shared_heap import SharedHeap
from rocserve.workers.answer_watch import Owed
from rocserve.workers.call_texts import read_call, write_response
from rocserve.workers.entries import (
    AGAIN,
    ANSWER,
    BACK,
    BATCH,
    CALL,
    CANCELLED,
    DONE,
    EACH,
    ENTRY,
    ERROR,
    FAILED,
    FINAL,
    GROUPED,
    LAYOUT,
    LONGEST_TEXT_BYTES,
    NONE,
    OPEN,
    PLACED,
    REMEMBERED_LAYOUTS,
    REQUEST,
    RESPONSE,
    RESULT,
    RESULT_LAYOUT,
    RESULTS,
    RETURN,
    RETURNS,
    SERVER_RINGS,
    WORK,
    WORKER_RINGS,
    return_entries,
)
from rocserve.workers.instance_mail import InstanceMail
from rocserve.workers.results import BatchOutcome, OutputCuts, ResultReader
from rocserve.workers.wire import ATTACH, LONGEST_TEXT, status_code

SLOTS = 4
"""That an instance holds: one in the engine, one whose outputs are still being read, the others ahead of time."""
HEAP_BYTES = 1 << 32
"""Of slots of one size, in an instance's heap and in a version's; gRPC's messages have half as many at most."""
STALL_SECONDS = 60.0
"""A worker that takes nothing for this long is broken: its model holds Python's lock for good."""
MOST_WAITING = 16384
"""Messages that may wait for a worker to take them."""
MOST_CALLS = 4096
"""That a worker may have under way: they wait in the queues of other models, beside clients' requests."""
_MOST_UNRETURNED = 1 << 16
"""Places that a worker may leave to be taken back; it takes all that there are whenever it needs memory."""
_RETRY_SECONDS = 0.002
"""After a ring was full."""
_MOST_ENTRIES = 1 << 20
"""Of a table: more than any batch has requests."""

OnAnswer = Callable[[Result | None, bool], None]
"""Takes a response, an error or nothing, or that the request is to be sent again; and whether it is the last."""


_Large = tuple[memoryview, Sequence[tuple[int, Buffer]]] | None
"""A slot, and what belongs in it."""


class WorkerGone(ServeError):
    """The worker has ended; nothing of the batch ran, so it may be queued elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__(StatusCode.UNAVAILABLE, text)


class RequestLost(ServeError):
    """The worker has ended, and with it a request that its model had kept open."""


class CallStarter(Protocol):
    """Runs what models call (rocserve.scheduling.model_calls)."""

    def __call__(self, call: ModelCall, opened: OpenCall) -> None:
        """Start a call; it is answered through `opened`, now or later. Never blocks."""


class _SentBatch:
    """A batch that a worker has, or is about to have."""

    __slots__ = ("cuts", "entry", "inputs", "is_written", "on_outcome", "posted", "sent_ns", "sizes", "slot")

    def __init__(
        self,
        on_outcome: Callable[[BatchOutcome], None],
        sizes: tuple[int, ...],
        cuts: OutputCuts | None,
        slot: Slot,
        inputs: Sequence[PlacedTensors],
        entry: bytes,
    ) -> None:
        self.on_outcome = on_outcome
        self.sizes = sizes
        self.cuts = cuts
        self.slot = slot
        """Of its table, and of inputs; the heap has it back when this goes."""
        self.inputs = inputs
        """Those that lie elsewhere in the heap."""
        self.entry = entry
        """What the worker is told."""
        self.is_written = False
        """All of its inputs lie in the slot."""
        self.posted = 0
        """Where the ring of batches was behind it; 0: the worker has not been told."""
        self.sent_ns = time.monotonic_ns()


class Instance:
    """Takes batches for one instance, and what it says of them."""

    def __init__(
        self,
        model_name: str,
        mail: InstanceMail,
        inputs: SharedHeap,
        on_broken: Callable[[Instance, str], None],
        log: logging.Logger,
        start_call: CallStarter | None = None,
        device: int | None = None,
        rate_limiter: InstanceRateLimiter = NO_LIMITS,
    ) -> None:
        """From any thread.

        Args:
            mail: looks after what instances post.
            inputs: the heap of the version, which its workers map to read.
            on_broken: called, at most once, when the worker's end is gone or talks nonsense; its owner then sees to the
                worker's end and calls `end`.
            start_call: runs what the model calls, where it sees each request for itself; None for the other kind.
            device: the number of the GPU that the instance is on, None on the CPU.
            rate_limiter: what the instance holds while it runs, for those who limit it.
        """
        self._model_name = model_name
        self.device = device
        self.rate_limiter = rate_limiter
        self.answers_requests = start_call is not None
        self._mail = mail
        self._plane = mail.plane
        self._inputs = inputs
        self._on_broken = on_broken
        self._log = log
        self._start_call = start_call
        self.closed = False
        """It takes no new batches."""
        self._has_ended = False
        """Nothing more is said to the worker."""
        self.has_answered = False
        """Whether a batch of it has come back."""
        self._gone_text = f"the worker of model '{model_name}' has ended"
        self._listening = False
        self._forms: dict[RequestForm, int] = {}
        self._form_numbers = itertools.count()
        self._sent: dict[int, _SentBatch] = {}
        """In the order of sending, which is that of running."""
        self._unposted: deque[_SentBatch] = deque()
        """Those of them whose inputs, or those of one before them, are still being copied: one may name the forms of
        another."""
        self._batch_ids = itertools.count(1)
        self._numbers = itertools.count(1)
        self._requests: dict[int, OnAnswer] = {}
        self._calls: dict[int, OpenCall] = {}
        self.traces: dict[int, Trace] = {}
        """Of the open requests that are traced, by their numbers: calls that a model makes for them belong to them."""
        self._said = 0
        """How many messages there were beside batches."""
        self._answers: dict[int, Slot] = {}
        """Of calls, that the worker has not read yet."""
        self._to_back: deque[bytes] = deque()
        self._waiting_since = 0.0
        self._to_return: list[int] = []
        self._retry: TimerHandle | None = None
        self._attach(model_name)
        if self.answers_requests:
            # A model may call others while it is warmed up.
            self.open()
            self._plane.call_soon(self._listen)

    def _attach(self, model_name: str) -> None:
        """Make what the two share, and put the worker's part of it on the socket."""
        name = f"rocserve:{model_name}"
        reading = anonymous_file.open_for_reading
        with contextlib.ExitStack() as opened:

            def kept(descriptor: int) -> int:
                opened.callback(os.close, descriptor)
                return descriptor

            own = kept(link.create_file(name, SERVER_RINGS))
            workers = kept(link.create_file(name, WORKER_RINGS))
            outputs = kept(heap.create_file(name, HEAP_BYTES))
            self._socket, self._peer = socket.socketpair()
            back = socket.socketpair() if self.answers_requests else ()
            files = [
                workers,
                kept(reading(own)),
                outputs,
                kept(self._inputs.open_for_reading()),
                kept(reading(self._plane.doorbell.files.sleeps)),
                *(each.fileno() for each in back[1:]),
            ]
            send_with_descriptors(self._socket, ATTACH.pack(self._mail.looks_of_workers), files)
            self._link = LinkEnd(own, SERVER_RINGS, kept(reading(workers)), WORKER_RINGS)
            self._reader = HeapReader(reading(outputs))
        self._results = ResultReader(self._reader)
        for each in back[1:]:
            each.close()
        self._work, self._back, self._returns = (self._link.writers[ring] for ring in (WORK, BACK, RETURNS))
        self.inbox = self._link.readers[0]
        self._ring = SocketRinger(self._link.other_sleep_word(0), self._socket).ring
        self._back_socket = back[0] if back else None
        if self._back_socket is not None:
            self._ring_back = SocketRinger(self._link.other_sleep_word(1), self._back_socket).ring

    @property
    def free_slots(self) -> int:
        """How many batches it can take now."""
        return 0 if self.closed else SLOTS - len(self._sent)

    def take_peer(self) -> socket.socket:
        """The worker's end of the socket, for the one who hands it over and closes it."""
        return self._peer

    def open(self) -> None:
        """Begin to listen. From any thread."""
        if not self._listening:
            self._listening = True
            self._plane.register(self._socket.fileno(), self._on_ring)

    def _listen(self) -> None:
        if self._listening:
            self._mail.listen(self)

    # Batches

    def execute(
        self, form_of_batch: BatchForm, members: Sequence[Member], on_outcome: Callable[[BatchOutcome], None]
    ) -> None:
        """Put a batch's inputs where the worker reads them, and start it.

        Raises:
            WorkerGone: the worker has ended and nothing ran.
            ServeError: INTERNAL, the inputs are not what their shapes say; RESOURCE_EXHAUSTED, no room for them.
        """
        if self.closed:
            raise WorkerGone(self._gone_text)
        try:
            if self._work.room <= len(self._unposted):
                raise unavailable(f"the worker of model '{self._model_name}' does not read its batches")
        except LinkBroken as error:
            self._break(f"it sent what cannot be read: {error}")
            raise WorkerGone(self._gone_text) from None
        slot, entries, placed, large = self._write(members)
        batch_id = next(self._batch_ids) & 0xFFFFFFFF
        sizes = tuple([member[0].layout.rows for member in members])
        flags = GROUPED if form_of_batch.is_grouped else 0
        entry = ENTRY.pack(BATCH, flags, 0, batch_id, slot.offset, entries, 0)
        batch = self._sent[batch_id] = _SentBatch(on_outcome, sizes, form_of_batch.cuts, slot, placed, entry)
        self._mail.expect(self)
        self._unposted.append(batch)
        if large:
            self._plane.work_off(self._write_large(batch, *large))
        else:
            batch.is_written = True
            self._post_written()

    def _write_large(
        self, batch: _SentBatch, view: memoryview, parts: Sequence[tuple[int, Buffer]]
    ) -> Generator[None, None, None]:
        """Copies the parts of a batch's slot a step at a time."""
        for begin, part in parts:
            yield from copy_in_steps(view, begin, part)
        batch.is_written = True
        self._post_written()

    def _post_written(self) -> None:
        unposted, work = self._unposted, self._work
        if self._has_ended:
            return
        while unposted and unposted[0].is_written:
            batch = unposted.popleft()
            work.post(batch.entry)
            batch.posted = work.posted
        self._ring()

    def _write(self, members: Sequence[Member]) -> tuple[Slot, int, Sequence[PlacedTensors], _Large]:
        """The slot of a batch, the entries of its table, inputs that lie elsewhere, and what is still to be copied."""
        forms = self._forms
        fresh = [form for form in {member[0] for member in members} if form not in forms]
        try:
            return self._write_with(fresh, members)
        except BaseException:
            # The worker will not hear of them.
            for form in fresh:
                forms.pop(form, None)
            raise
        finally:
            while len(forms) > REMEMBERED_LAYOUTS:
                del forms[next(iter(forms))]

    def _write_with(
        self, fresh: Sequence[RequestForm], members: Sequence[Member]
    ) -> tuple[Slot, int, Sequence[PlacedTensors], _Large]:
        """`fresh`: the forms that the worker does not know."""
        inputs, forms, pack = self._inputs, self._forms, ENTRY.pack
        count = len(members) + len(fresh)
        table: list[bytes] = []
        pieces: list[Buffer] = []
        placed: list[PlacedTensors] = []
        end = aligned(count * ENTRY_BYTES)
        for form in fresh:
            text = form.text
            if len(text) > LONGEST_TEXT_BYTES:
                raise internal(f"the layout of a request takes {len(text)} bytes, at most {LONGEST_TEXT_BYTES} can be")
            number = forms[form] = next(self._form_numbers)
            table.append(pack(LAYOUT, 0, 0, number, end, len(text), 0))
            pieces += padded((text,))
            end += aligned(len(text))
        for form, data, number, details in members:
            flags, place = 0, end
            if type(data) is PlacedTensors and data.heap is inputs and data.sizes == form.places.sizes:
                flags, place = PLACED, data.offset
                placed.append(data)
            else:
                of_member, nbytes = form.places.pieces(data)
                pieces += of_member
                end += nbytes
            table.append(pack(REQUEST, flags, 0, forms[form], number, place, len(details) | end << 32))
            if details:
                pieces += padded((details,))
                end += aligned(len(details))
        slot, view = inputs.place(end)
        pieces = [*padded((b"".join(table),)), *pieces]
        large = fill(view, pieces, COPIED_AT_ONCE)
        return slot, count, placed, (view, large) if large else None

    # Requests of a model that sees each for itself

    def open_request(self, on_answer: OnAnswer) -> int:
        """The number of a request that is about to be sent to the worker; what the model responds to it comes to
        `on_answer`, until a last answer, `close_request`, or the worker's end."""
        number = next(self._numbers)
        self._requests[number] = on_answer
        return number

    def close_request(self, number: int) -> None:
        """The request has been answered."""
        self._requests.pop(number, None)
        if self.traces:
            self.traces.pop(number, None)

    def cancel(self, number: int) -> None:
        """Tell the model that nobody waits for a request any more."""
        if number in self._requests:
            self._send_back(ENTRY.pack(CANCELLED, 0, 0, 0, number, 0, 0))

    def answer_call(self, number: int, answer: Answer | None, final: bool) -> None:
        """Tensors are copied before it returns."""
        if self._has_ended:
            return
        if final and self._calls.pop(number, None) is None:
            return
        flags = FINAL if final else 0
        if answer is None:
            self._send_back(ENTRY.pack(ANSWER, flags | NONE, 0, number, 0, 0, 0))
            return
        try:
            slot, code, count = write_response(self._inputs, answer)
        except (ValueError, HeapFull) as error:
            fault = internal(f"the answer to a call cannot be sent to the model: {error}")
            slot, code, count = write_response(self._inputs, fault)
        self._answers[slot.offset] = slot
        self._send_back(ENTRY.pack(ANSWER, flags | (ERROR if code else 0), code, number, 0, slot.offset, count))

    def _send_back(self, entry: bytes) -> None:
        if self._has_ended:
            return
        if self._to_back or not self._has_room_back():
            if not self._to_back:
                self._waiting_since = time.monotonic()
            self._to_back.append(entry)
            self._retry_later()
            return
        self._back.post(entry)
        self._ring_back()

    def _has_room_back(self) -> bool:
        try:
            return self._back.room > 0
        except LinkBroken as error:
            self._break(f"it sent what cannot be read: {error}")
            return False

    def _retry_later(self) -> None:
        if self._retry is None and not self._has_ended:
            self._retry = self._plane.call_at(time.monotonic() + _RETRY_SECONDS, self._send_waiting)

    def _send_waiting(self) -> None:
        self._retry = None
        now = time.monotonic()
        while self._to_back and self._has_room_back():
            self._back.post(self._to_back.popleft())
            self._waiting_since = now
        if self._back_socket is not None:
            self._ring_back()
        self.return_places()
        if self._to_back:
            if now - self._waiting_since > STALL_SECONDS or len(self._to_back) > MOST_WAITING:
                self._break(f"it has not taken its answers, {len(self._to_back)} messages wait")
            else:
                self._retry_later()

    # What comes

    def _on_ring(self) -> None:
        if drain_rings(self._socket):
            self.take_mail()
        else:
            # What it had posted before its end is still there.
            self.take_mail()
            self._break("it closed its socket")

    def has_mail(self) -> bool:
        return self._listening and self.inbox.has_mail()

    @property
    def is_expected(self) -> bool:
        """It has something to answer."""
        return bool(self._sent or self._requests or self._calls or self._answers)

    def take_mail(self) -> bool:
        """Handle what has come; whether there was anything."""
        if not self._listening:
            return False
        try:
            entries = self.inbox.take()
            if entries:
                self._handle(entries)
                if len(self._to_return) > _MOST_UNRETURNED:
                    raise ValueError(f"{len(self._to_return)} places, and takes none back")
        except (ValueError, LinkBroken) as error:
            self._break(f"it sent what cannot be read: {str(error)[:LONGEST_TEXT]}")
            return True
        return bool(entries)

    def _handle(self, entries: bytes) -> None:
        """Raises: ValueError."""
        messages = ENTRY.iter_unpack(entries)
        for kind, flags, count, number, a, b, c in messages:
            if kind == DONE:
                self._take_done(number, (a, b, c), next(messages, None))
            elif kind == RESPONSE and self.answers_requests:
                self._take_response(flags, count, number, a, b, c)
            elif kind == RESULT_LAYOUT:
                self._results.define(flags, number, self._results.text(a, b))
                self._give_place(a)
            elif kind == CALL and self._start_call is not None:
                self._open_call(self._start_call, number, b, c)
            elif kind == RETURN:
                for place in (a, b, c)[:count]:
                    self._answers.pop(place, None)
                self._mail.trimmer.trim_later(self._inputs)
            else:
                raise ValueError(f"a message of kind {kind}, which it may not send here")

    def _take_done(self, batch_id: int, times: tuple[int, int, int], following: tuple[int, ...] | None) -> None:
        """A batch has ended; `following` is the entry that tells how."""
        batch = self._sent.get(batch_id)
        if batch is None or not batch.posted:
            raise ValueError(f"an answer to batch {batch_id}, which it does not have")
        if not batch.sent_ns <= times[0] <= times[1] <= times[2] <= time.monotonic_ns():
            raise ValueError("times that are not in their order")
        kind, flags, count, _, place, entries, nbytes = following or (0,) * 7
        if kind == RESULTS:
            outcome = self._read_results(batch, times, bool(flags & EACH), place, entries, nbytes)
        elif kind == FAILED:
            outcome = BatchOutcome(self._error(count, place, entries), times)
            self._give_place(place)
        else:
            raise ValueError(f"a batch is done, and a message of kind {kind} follows")
        del self._sent[batch_id]
        self._mail.trimmer.trim_later(self._inputs)
        self.has_answered = True
        try:
            batch.on_outcome(outcome)
        except Exception:
            self._log_failure()

    def _error(self, code: int, place: int, nbytes: int) -> ServeError:
        return _error(code, self._results.text(place, nbytes))

    def _read_results(
        self, batch: _SentBatch, times: tuple[int, int, int], each: bool, place: int, entries: int, nbytes: int
    ) -> BatchOutcome:
        if not 0 < entries * ENTRY_BYTES <= nbytes:
            raise ValueError(f"results in {entries} entries of {nbytes} bytes")
        view = self._reader.checked(place, nbytes)
        outcome = BatchOutcome(None, times, view)
        all_sizes, results = batch.sizes, self._results
        index = 0
        for kind, flags, code, number, a, b, c in ENTRY.iter_unpack(view[: entries * ENTRY_BYTES]):
            if kind == RESULT_LAYOUT:
                results.define_once(_part(view, a, b))
                continue
            may_be = not flags & (OPEN | ERROR) or (each and (self.answers_requests or not flags & OPEN))
            if kind != RESULT or index >= len(all_sizes) or not may_be:
                raise ValueError(f"a message of kind {kind} among the results of {len(all_sizes)} requests")
            if flags & OPEN:
                outcome.add_open(index)
            elif flags & ERROR:
                outcome.add_failure(index, _error(code, _part(view, b, c)))
            else:
                sizes = all_sizes[index : index + 1] if each else all_sizes
                parts, layout = results.read(view, number, b, c, sizes, None if each else batch.cuts)
                outcome.add(index, b, parts, layout)
            index += 1 if each else len(all_sizes)
        if index != len(all_sizes):
            raise ValueError(f"results of {index} requests where there are {len(all_sizes)}")
        outcome.slot = ReadSlot(self._give_place, place, self._reader)
        return outcome

    def _take_response(self, flags: int, code: int, number: int, request: int, place: int, count: int) -> None:
        self._said += 1
        final = bool(flags & (FINAL | AGAIN))
        on_answer = self._requests.get(request)
        answer: Result | None = None
        if flags & AGAIN:
            answer = RESCHEDULED
        elif flags & ERROR:
            answer = self._error(code, place, count)
            self._give_place(place)
        elif not flags & NONE:
            (heads, contents), layout = self._results.read_at(place, number, count)
            outputs = [Tensor(*head, data) for head, data in zip(heads, contents, strict=True)]
            answer = ModelResponse(outputs, layout.parameters, ReadSlot(self._give_place, place, self._reader))
        if final:
            self.close_request(request)
        if on_answer is not None:
            self._guarded(lambda: on_answer(answer, final))

    def _open_call(self, start_call: CallStarter, number: int, place: int, count: int) -> None:
        if number in self._calls:
            raise ValueError(f"two calls of the number {number}")
        self._said += 1
        call = read_call(self._reader, place, count)
        opened = self._calls[number] = OpenCall(self, number, ReadSlot(self._give_place, place, self._reader))
        if len(self._calls) > MOST_CALLS:
            opened.answer(unavailable(f"the model has {MOST_CALLS} calls under way, and may have no more"), True)
            return
        try:
            start_call(call, opened)
        except Exception as error:
            # A call says what its model likes; what it asks for may not even be a request.
            opened.answer(invalid_argument(f"the call cannot be run: {error}"), True)

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self._log_failure()

    def _log_failure(self) -> None:
        self._log.exception("an answer of model '%s' could not be handled", self._model_name)

    # What has been read

    def _give_place(self, place: int) -> None:
        self._to_return.append(place)
        self._mail.return_later(self)

    def return_places(self) -> None:
        """Tell the worker which of its slots have been read."""
        if self._to_return and not self._has_ended:
            try:
                entries = min(self._returns.room, -(-len(self._to_return) // 3))
            except LinkBroken as error:
                self._break(f"it sent what cannot be read: {error}")
                return
            self._returns.post(return_entries(self._to_return[: 3 * entries]))
            # Before it posts more, the worker takes what is there: the rest follows then.
            del self._to_return[: 3 * entries]

    # Its watch; from any thread

    def owed(self) -> Owed:
        """See answer_watch.Instance."""
        return Owed(next(iter(list(self._sent)), 0), len(self._requests), len(self._calls), self._said)

    def has_unread(self) -> bool:
        """See answer_watch.Instance."""
        return not self._has_ended and self.inbox.has_mail()

    # The end

    def _break(self, reason: str) -> None:
        self.closed = self._has_ended = True
        if self._stop_listening():
            self._on_broken(self, reason)

    def _stop_listening(self) -> bool:
        """Whether it was listening until now."""
        listening, self._listening = self._listening, False
        if listening:
            self._plane.unregister(self._socket.fileno())
            self._mail.forget(self)
        return listening

    def stop_taking(self) -> None:
        """Refuse new batches; those in hand go on. From any thread."""
        self.closed = True

    def end(self, error: ServeError) -> None:
        """Once the worker has ended: the batches that it had answered are reported as they are, the one that was in the
        engine with `error`, those behind it with WorkerGone. Open requests get `error` as well, calls are cancelled;
        all that the instance holds is given back as its outcomes are released."""
        self.take_mail()
        self._stop_listening()
        self.closed = self._has_ended = True
        self._socket.close()
        self._peer.close()
        if self._back_socket is not None:
            self._back_socket.close()
        if self._retry is not None:
            self._retry.cancel()
        sent, self._sent = self._sent, {}
        reason = error
        # It runs batches in their order and answers one before it begins the next: only the first that it has taken can
        # have been in the engine.
        for batch in sent.values():
            now = time.monotonic_ns()
            if not batch.posted or not self._work.is_taken(batch.posted):
                reason = WorkerGone(self._gone_text)
            outcome = BatchOutcome(reason, (now, now, now))
            self._guarded(lambda batch=batch, outcome=outcome: batch.on_outcome(outcome))  # type: ignore[misc]
            reason = WorkerGone(self._gone_text)
        lost = RequestLost(error.code, error.text)
        requests, self._requests = self._requests, {}
        for on_answer in requests.values():
            self._guarded(lambda told=on_answer: told(lost, True))  # type: ignore[misc]
        calls, self._calls = self._calls, {}
        for opened in calls.values():
            self._guarded(opened.cancelled)
        self._answers.clear()
        self._reader.close()


class OpenCall:
    """A call that a model has made, for whoever serves it."""

    def __init__(self, instance: Instance, number: int, slot: ReadSlot) -> None:
        """`slot`: what the call's tensors lie in."""
        self._instance = instance
        self._number = number
        self.slot: ReadSlot | None = slot
        self._is_cancelled = False
        self._on_cancel: list[Callable[[], None]] = []

    def answer(self, answer: Answer | None, final: bool) -> None:
        """Tensors are copied before it returns; after the worker's end it is dropped."""
        self._instance.answer_call(self._number, answer, final)
        if final:
            self.slot = None

    def trace_of(self, request_number: int) -> Trace | None:
        """The trace of the open request of this number, which the model says that the call belongs to."""
        return self._instance.traces.get(request_number)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        """Call back, once, when the worker has ended and nobody waits for the call any more."""
        if self._is_cancelled:
            callback()
        else:
            self._on_cancel.append(callback)

    def cancelled(self) -> None:
        self._is_cancelled = True
        callbacks, self._on_cancel = self._on_cancel, []
        for callback in callbacks:
            callback()


def _part(view: memoryview, start: int, nbytes: int) -> bytes:
    """Bytes of a slot. Raises: ValueError."""
    if nbytes > LONGEST_TEXT_BYTES or start + nbytes > len(view):
        raise ValueError(f"a text of {nbytes} bytes at byte {start} of {len(view)}")
    return bytes(view[start : start + nbytes])


def _error(code: int, text: bytes) -> ServeError:
    return ServeError(status_code(code), text.decode(errors="replace")[:LONGEST_TEXT])
