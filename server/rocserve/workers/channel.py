"""The server's end of one instance: batches go out, outcomes come back."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.model_config import NO_LIMITS, InstanceRateLimiter
from rocserve.core.plain import from_json
from rocserve.core.tensors import Buffer
from rocserve.workers.answer_watch import Owed
from rocserve.workers.batch_inputs import InputLayout
from rocserve.workers.batch_outcome import BatchOutcome, Slot
from rocserve.workers.batch_outputs import OutputLayouts
from rocserve.workers.completion import CompletionThread, TimerHandle
from rocserve.workers.conversation import Conversation
from rocserve.workers.memory import Arena, ArenaFile
from rocserve.workers.messages import BatchFailure
from rocserve.workers.request_outputs import RequestOutputLayouts
from rocserve.workers.wire import (
    ATTACH,
    EXECUTE,
    EXECUTE_FAILED,
    EXECUTED,
    HEADER,
    LONGEST_TEXT,
    MAXIMUM_DATAGRAM,
    status_code,
    unpack_tail,
)

SLOTS = 4
"""Batches that a channel holds: one in the engine, one whose outputs are still being read, the others ahead of time."""

_KEPT_BYTES = 1024 * 1024
"""Of each slot's memory, never trimmed."""
TRIM_PERIOD_SECONDS = 10.0


class WorkerGone(ServeError):
    """The worker has ended; nothing of the batch ran, so it may be queued elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__(StatusCode.UNAVAILABLE, text)


class Channel:
    """One instance of a model in a worker.

    `execute` may be called from any thread as long as there is a free slot for each caller. Outcomes come on the
    completion thread, exactly one for each batch that was taken.
    """

    def __init__(
        self,
        model_name: str,
        completion: CompletionThread,
        on_broken: Callable[[Channel, str], None],
        log: logging.Logger,
        conversation: Conversation | None = None,
        device: int | None = None,
        rate_limiter: InstanceRateLimiter = NO_LIMITS,
    ) -> None:
        """`on_broken` is called on the completion thread, at most once, when the worker's end is gone or talks
        nonsense; its owner then sees to the worker's end and calls `end`.

        `conversation`: of a model that sees each request for itself; the channel opens and ends it.
        `device`: the number of the GPU that the instance is on, None on the CPU."""
        self._model_name = model_name
        self.device = device
        self.rate_limiter = rate_limiter
        """What the instance holds while it runs, for those who limit it."""
        self._completion = completion
        self._on_broken = on_broken
        self._log = log
        self._lock = threading.Lock()
        """Guards `closed`, which slots hold a batch, and the socket; held for no longer than one send."""
        self.closed = False
        self.has_answered = False
        """Whether a batch of it has come back."""
        self._gone_text = f"the worker of model '{model_name}' has ended"
        memory = ArenaFile.create(f"rocserve:{model_name}", 2 * SLOTS)
        self._slots = [Slot(index, memory) for index in range(SLOTS)]
        self._free = list(self._slots)
        self.conversation = conversation
        self._outputs = OutputLayouts() if conversation is None else RequestOutputLayouts()
        self._buffer = completion.receive_buffer
        self._last_batch_id = 0
        self._listening = False
        self._ended = False
        self._trim_timer: TimerHandle | None = None
        self._socket, self._peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, self._peer):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAXIMUM_DATAGRAM)
        descriptors = [memory.descriptor]
        if conversation is not None:
            descriptors.append(conversation.peer.fileno())
        socket.send_fds(self._socket, [HEADER.pack(ATTACH, SLOTS, 0, 0, 0, 0)], descriptors)
        if conversation is not None:
            conversation.peer.close()
            conversation.listen(self._break)

    @property
    def free_slots(self) -> int:
        """How many batches it can take now."""
        return 0 if self.closed else len(self._free)

    def take_peer(self) -> socket.socket:
        """The worker's end of the socket, for the one who hands it over and closes it."""
        return self._peer

    def open(self) -> None:
        """Begin to listen for outcomes."""
        self._listening = True
        self._completion.register(self._socket.fileno(), self.on_readable)

    def execute(
        self,
        layout: InputLayout,
        requests: Sequence[Sequence[Buffer]],
        on_outcome: Callable[[BatchOutcome], None],
    ) -> None:
        """Copy a batch to the worker and start it.

        Args:
            requests: for each request its part of each input, in the layout's order. Views of bytes.

        Raises:
            WorkerGone: the worker has ended and nothing ran.
            ServeError: INTERNAL, the inputs are not what their shapes say.
        """
        with self._lock:
            if self.closed:
                raise WorkerGone(self._gone_text)
            slot = self._free.pop()
        try:
            tail = layout.write(slot.input_arena, requests)
        except BaseException:
            self.put_back(slot)
            raise
        slot.request_sizes = layout.request_sizes
        slot.cuts = layout.cuts
        self._send(slot, tail, on_outcome)
        if slot.input_arena.peak > _KEPT_BYTES and self._trim_timer is None:
            self._trim_later()

    def _send(self, slot: Slot, tail: bytes, on_outcome: Callable[[BatchOutcome], None]) -> None:
        with self._lock:
            if not self.closed:
                self._last_batch_id = slot.batch_id = self._last_batch_id + 1
                slot.on_outcome = on_outcome
                slot.sent_ns = time.monotonic_ns()
                self._completion.awaited.add(self)
                message = HEADER.pack(EXECUTE, slot.index, slot.batch_id, 0, 0, 0) + tail
                try:
                    # All models' requests go through this thread: it never waits for a worker to read.
                    self._socket.send(message, socket.MSG_DONTWAIT)
                    return
                except BlockingIOError:
                    refusal = unavailable(f"the worker of model '{self._model_name}' does not read its batches")
                    self._last_batch_id -= 1
                except OSError:
                    # The worker's end is closed; the completion thread will find that out for itself.
                    refusal = WorkerGone(self._gone_text)
                slot.on_outcome = None
            else:
                refusal = WorkerGone(self._gone_text)
        self.put_back(slot)
        raise refusal

    def put_back(self, slot: Slot) -> None:
        """See SlotOwner."""
        self._free.append(slot)
        if self._ended:
            self._close_free_slots()

    # On the completion thread

    def on_readable(self) -> None:
        """Take one message from the worker."""
        size = self._receive()
        if size is None:
            return
        if size == 0:
            self._break("it closed its channel")
            return
        try:
            outcome, on_outcome = self._read(size)
        except ValueError as error:
            self._break(f"it sent what cannot be read: {str(error)[:LONGEST_TEXT]}")
            return
        on_outcome(outcome)

    def _receive(self) -> int | None:
        """The size of the message now in the buffer; 0 = the worker's end is closed, None = nothing is there."""
        try:
            return self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            # After a reset, what the worker had sent before its end is still there to read.
            return None
        except OSError:
            return 0

    def _read(self, size: int) -> tuple[BatchOutcome, Callable[[BatchOutcome], None]]:
        """Raises: ValueError."""
        if size < HEADER.size:
            raise ValueError(f"a message of {size} bytes")
        kind, index, batch_id, input_end, output_start, compute_end = HEADER.unpack_from(self._buffer)
        slot = self._slots[index] if index < SLOTS else None
        if slot is None or slot.batch_id != batch_id or slot.on_outcome is None:
            raise ValueError(f"an answer to batch {batch_id} in slot {index}, where it is not")
        tail = bytes(self._buffer[HEADER.size : size])
        if not slot.sent_ns <= input_end <= output_start <= compute_end <= time.monotonic_ns():
            raise ValueError("times that are not in their order")
        times = (input_end, output_start, compute_end)
        if kind == EXECUTED:
            layout = self._outputs.of(tail, slot.request_sizes, slot.cuts)
            arena = slot.output_arena
            if layout.end > arena.peak:
                self._cover(arena, layout.end)
            outcome = BatchOutcome(self, slot, None, times, layout, arena.view)
        elif kind == EXECUTE_FAILED:
            failure = from_json(BatchFailure, unpack_tail(tail)[1])
            outcome = BatchOutcome(self, slot, ServeError(status_code(failure.code), failure.text), times)
        else:
            raise ValueError(f"a message of kind {kind}")
        self.has_answered = True
        on_outcome, slot.on_outcome = slot.on_outcome, None
        if batch_id == self._last_batch_id:
            self._completion.awaited.discard(self)
        return outcome, on_outcome

    def _cover(self, arena: Arena, nbytes: int) -> None:
        arena.cover(nbytes)
        if nbytes > _KEPT_BYTES and self._trim_timer is None:
            self._trim_later()

    def _break(self, reason: str) -> None:
        with self._lock:
            self.closed = True
        self._completion.awaited.discard(self)
        if self._stop_listening():
            self._on_broken(self, reason)

    def _stop_listening(self) -> bool:
        """Whether it was listening until now."""
        if self._listening:
            self._listening = False
            self._completion.unregister(self._socket.fileno())
            return True
        return False

    # Its watch

    def owed(self) -> Owed:
        """See answer_watch.Instance."""
        first = min((slot.batch_id for slot in self._slots if slot.on_outcome is not None), default=0)
        conversation = self.conversation
        if conversation is None:
            return Owed(first)
        return Owed(first, conversation.open_requests, conversation.open_calls, conversation.said)

    def has_unread(self) -> bool:
        """See answer_watch.Instance."""
        with self._lock:
            if self.closed:
                return False
            readable = select.poll()
            readable.register(self._socket, select.POLLIN)
            return bool(readable.poll(0)) or (self.conversation is not None and self.conversation.has_unread())

    # The end

    def stop_taking(self) -> None:
        """Refuse new batches; those in hand go on. From any thread."""
        with self._lock:
            self.closed = True

    def end(self, error: ServeError) -> None:
        """On the completion thread, once the worker has ended: the batches that it had answered are reported as
        they are, the one that was in the engine with `error`, those behind it with WorkerGone. All that the channel
        holds is given back as its outcomes are released. What is open on the conversation gets `error` as well."""
        lost = error
        self._drain()
        if self.conversation is not None:
            self.conversation.drain()
        self._stop_listening()
        with self._lock:
            self.closed = True
            self._socket.close()
        self._completion.awaited.discard(self)
        # The worker runs batches in their order and answers one before it begins the next, so only the first that is
        # left can have been in the engine.
        for slot in sorted(self._slots, key=lambda slot: slot.batch_id):
            on_outcome, slot.on_outcome = slot.on_outcome, None
            if on_outcome is not None:
                now = time.monotonic_ns()
                self._report(on_outcome, BatchOutcome(self, slot, error, (now, now, now)))
                error = WorkerGone(self._gone_text)
        if self.conversation is not None:
            self.conversation.end(lost)
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        self._ended = True
        self._close_free_slots()

    def _drain(self) -> None:
        # A first answer may be a reset, the last is the end; between them one message a slot at most.
        for _ in range(SLOTS + 2):
            size = self._receive() if self._listening else 0
            if size == 0:
                return
            if size is not None:
                try:
                    outcome, on_outcome = self._read(size)
                except ValueError:
                    return
                self._report(on_outcome, outcome)

    def _report(self, on_outcome: Callable[[BatchOutcome], None], outcome: BatchOutcome) -> None:
        try:
            on_outcome(outcome)
        except Exception:
            self._log.exception("the outcome of a batch of model '%s' could not be handled", self._model_name)

    def _close_free_slots(self) -> None:
        while True:
            try:
                slot = self._free.pop()
            except IndexError:
                return
            slot.close()

    # Memory

    def _trim_later(self) -> None:
        self._trim_timer = self._completion.call_about(time.monotonic() + TRIM_PERIOD_SECONDS, self._trim)

    def _trim(self) -> None:
        """Give back what none of the last period's batches used. A busy slot waits for the next period."""
        self._trim_timer = None
        with self._lock:
            if self.closed:
                return
            for slot in self._free:
                slot.input_arena.trim(_KEPT_BYTES)
                slot.output_arena.trim(_KEPT_BYTES)
            again = len(self._free) < SLOTS or any(
                max(slot.input_arena.untrimmed, slot.output_arena.untrimmed) > _KEPT_BYTES for slot in self._slots
            )
        if again:
            self._trim_later()
