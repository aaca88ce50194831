"""Connects the server to one instance of a model in a worker: sends batches, and takes their results. Inputs lie in a
heap of the model version, outputs in the instance's heap; `links/README.md` defines the messages. All calls come on the
data plane's thread, unless a docstring says otherwise."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.model_config import NO_LIMITS, InstanceRateLimiter
from rocserve.core.requests import Member
from rocserve.core.steps import Steps
from rocserve.links import entries
from rocserve.links.entries import ENTRY, LONGEST_TEXT, post_returns
from rocserve.links.files import PassedFiles
from rocserve.links.opening import POLL_SECONDS, RETURNS, SERVER_RINGS, WORK, WORKER_RINGS, offer
from rocserve.links.rings import LinkBroken, RingReader, RingWriter
from rocserve.plane.doorbell import SocketRinger, drain_rings
from rocserve.plane.heap import Heap, SharedHeap, Slot, copy_in_steps
from rocserve.plane.loop import Alarm, PlaneLoop
from rocserve.plane.trimming import Trimmer
from rocserve.workers.batch_writer import BatchWriter, SentBatch
from rocserve.workers.results import BatchOutcome, ResultReader


class WorkerGone(ServeError):
    """The worker has ended before it ran any request of the batch, so the batch may run elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__(StatusCode.UNAVAILABLE, text)


@dataclass(frozen=True, slots=True)
class PendingAnswers:
    """A snapshot of the answers that an instance must still give."""

    batch: int = 0
    """Number of the batch that must be answered first; 0 = none."""
    open_requests: int = 0
    open_calls: int = 0
    messages: int = 0
    """Messages so far that were not results of batches."""


@dataclass(eq=False, repr=False)
class Instance:
    """Sends batches to one instance, and reads its messages. May be made on any thread."""

    sees_requests: ClassVar[bool] = False
    """See RequestInstance."""

    _model_name: str
    _mail: InstanceMail
    inputs: SharedHeap
    """The version's heap, which its workers map for reading."""
    _on_broken: Callable[[Instance, str], None]
    """Called at most once, if the worker closes its socket, sends invalid messages or reads none. The owner then ends
    the worker and calls `end`."""
    _log: logging.Logger
    device: int | None = None
    """The GPU's number; None = CPU."""
    rate_limiter: InstanceRateLimiter = NO_LIMITS
    """The resources that the instance needs while it runs a batch, and its priority."""
    name: str = ""
    """Triton's name, <group>_<instance>."""
    is_ours: bool = False
    """The server itself has written the model's code."""

    def __post_init__(self) -> None:
        self.plane = self._mail.plane
        self.closed = self.has_ended = self.has_answered = self._is_listening = False
        self.batches_at_once = 1
        """Batches that the engine may run at the same time; further ones wait in the worker."""
        self._goes_on_unread = False
        """The worker may have run, and answered, all batches that it has taken: its messages were no longer read."""
        self._gone_text = f"the worker of model '{self._model_name}' has ended"
        self._sent: dict[int, SentBatch] = {}
        """By id, in the order of sending, which is also the order of running."""
        self._unposted: deque[SentBatch] = deque()
        """Batches that wait for the copy of their inputs, or after such a batch, because they may use its layouts."""
        self._places_to_return: list[int] = []
        self._files_to_forget: deque[int] = deque()
        self._forget_again = Alarm(self.plane)
        self._attach()
        self._files = PassedFiles(self._socket, self._file_gone)
        # A model that brings its own code must see nothing of a client's memory except the tensors of its requests.
        files = None if self.sees_requests else self._files
        self._writer = BatchWriter(self.inputs, files, self._files if self.is_ours else files)

    def _attach(self) -> None:
        """Make the memory and sockets that both ends share, and send the worker its part through the socket."""
        # The worker's end is closed by the owner, who passes it on.
        self._socket, self.peer = socket.socketpair()
        back: tuple[socket.socket, ...] = socket.socketpair() if self.sees_requests else ()
        self._link, self._reader = offer(
            self._socket,
            POLL_SECONDS.pack(self._mail.poll_seconds),
            f"rocserve:{self._model_name}",
            self.inputs,
            self.plane,
            SERVER_RINGS,
            WORKER_RINGS,
            [one.fileno() for one in back[1:]],
        )
        self.results = ResultReader(self._reader)
        self._work, self._returns = self._link.writers[WORK], self._link.writers[RETURNS]
        self.inbox = self._link.readers[0]
        self._ring = SocketRinger(self._link.other_sleep_word(0), self._socket).ring
        self._back_sockets = back[:1]
        for one in back[1:]:
            one.close()

    def open(self) -> None:
        """Begin to listen. From any thread."""
        if not self._is_listening:
            self._is_listening = True
            self.plane.register(self._socket.fileno(), self._on_ring)

    @property
    def takes_batches(self) -> bool:
        return self._is_listening and not self.closed

    # Batches

    def execute(self, is_grouped: bool, members: Sequence[Member], on_outcome: Callable[[BatchOutcome], None]) -> None:
        """Write a batch's inputs where the worker reads them, and start the batch. `is_grouped`: its requests run one
        by one. Raises WorkerGone if the instance no longer takes batches, ServeError (UNAVAILABLE) if the worker does
        not read its batches, and as BatchWriter.write."""
        try:
            has_place = self._work.reserve()
        except LinkBroken as error:
            has_place = False
            self._break_off_for(error)
        if self.closed:
            raise WorkerGone(self._gone_text)
        if not has_place:
            raise unavailable(f"the worker of model '{self._model_name}' does not read its batches")
        try:
            batch = self._writer.write(members, is_grouped, on_outcome)
        except BaseException:
            self._work.give_up_reserved()
            raise
        self._sent[batch.id] = batch
        self._mail.answering[self] = self.inbox
        self._unposted.append(batch)
        if batch.large:
            self.plane.work_off(self._write_large(batch))
        else:
            self._post_written()

    def _write_large(self, batch: SentBatch) -> Steps[None]:
        for begin, part in batch.large:
            yield from copy_in_steps(batch.view, begin, part)
        batch.large = ()
        self._post_written()

    def _post_written(self) -> None:
        unposted, work = self._unposted, self._work
        if self.has_ended:
            return
        while unposted and not unposted[0].large:
            batch = unposted.popleft()
            work.post_reserved(batch.entry)
            batch.posted = work.posted
        self._post_forgotten()
        self._ring()

    def _post_forgotten(self) -> None:
        """Tell the worker which files it may release: no batch in flight reads them."""
        files, work = self._files_to_forget, self._work
        # Half of the ring is kept for batches: a worker may be busy while hundreds of files are forgotten.
        while files and self.room(work) > SERVER_RINGS[WORK] // 2:
            work.post(ENTRY.pack(entries.FORGET, 0, 0, 0, files.popleft(), 0, 0))
        if files:
            # Seconds. Until then the files cost only memory.
            self._forget_again.set(time.monotonic() + 0.1, self._post_written)

    def room(self, ring: RingWriter) -> int:
        """Return how many entries may be posted; 0 if the worker's counters are invalid, which ends the link."""
        try:
            return ring.room
        except LinkBroken as error:
            self._break_off_for(error)
            return 0

    def _file_gone(self, number: int) -> None:
        """Tell the worker to release a file that the server no longer holds. From any thread."""

        def forget() -> None:
            self._files_to_forget.append(number)
            self._post_written()

        self.plane.call_soon(forget)

    # Messages from the worker

    def _on_ring(self) -> None:
        is_open = drain_rings(self._socket)
        # Messages that the worker posted before its end are still there.
        self.take_mail()
        if not is_open:
            self.break_off("it closed its socket", goes_on=False)

    @property
    def must_answer(self) -> bool:
        return bool(self._sent)

    def take_mail(self) -> None:
        if not self._is_listening:
            return
        try:
            for kind, flags, count, text, number, place, nbytes in ENTRY.iter_unpack(self.inbox.take()):
                if kind == entries.DONE:
                    self._take_done(number, place, nbytes)
                elif kind == entries.TEXT:
                    self.results.layouts.define(text, place, nbytes)
                    self.return_place(place)
                else:
                    self._take_other(kind, flags, count, text, number, place, nbytes)
            # Returns wait for room in a ring, which a worker empties whenever it needs memory.
            if len(self._places_to_return) > 1 << 16:
                raise ValueError(f"{len(self._places_to_return)} returned slots wait for room, expected at most 65536")
        except (ValueError, LinkBroken) as error:
            self._break_off_for(error)

    def _take_other(self, kind: int, flags: int, count: int, text: int, number: int, place: int, nbytes: int) -> None:
        raise ValueError(f"unexpected message of kind {kind}")

    def _take_done(self, batch_id: int, place: int, nbytes: int) -> None:
        """Handle the end of a batch, whose results are in a slot of `nbytes`."""
        batch = self._sent.get(batch_id)
        if batch is None or not batch.posted:
            raise ValueError(f"an answer to batch {batch_id}, which is not in flight")
        outcome = self.results.read_batch(place, nbytes, batch.sizes, self.sees_requests)
        began, ended = outcome.input_end_ns, outcome.output_start_ns
        if not batch.sent_ns <= began <= ended <= outcome.compute_end_ns <= time.monotonic_ns():
            raise ValueError("times out of order")
        outcome.slot = self.slot(place)
        del self._sent[batch_id]
        self._mail.trimmer.trim_later(self.inputs)
        self.has_answered = True
        self.call_guarded(batch.on_outcome, outcome)

    def slot(self, place: int) -> Slot:
        """Return a slot of the worker's heap, which goes back to the worker when the Slot object is deleted."""
        return Slot(self.return_place, place, self._reader, self._reader.remains)

    def call_guarded(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back, and log an exception."""
        try:
            callback(*arguments)
        except Exception:
            self._log.exception("an answer of model '%s' could not be handled", self._model_name)

    # Returns of slots

    def return_place(self, place: int) -> None:
        """Return a slot to the worker after it was read. Small slots are returned in groups: the worker has others."""
        self._places_to_return.append(place)
        # 15 places are five full messages.
        if place >= self._reader.pages_from or len(self._places_to_return) >= 15:
            # Posted at the end of a poll.
            self._mail.returning[self] = None

    def post_returned_places(self) -> None:
        if self._places_to_return and not self.has_ended and self.room(self._returns):
            post_returns(self._returns, self._places_to_return)

    # Called by the AnswerWatch, from any thread

    def pending_answers(self) -> PendingAnswers:
        return PendingAnswers(next(iter(list(self._sent)), 0))

    def has_unread(self) -> bool:
        return not self.has_ended and self.inbox.has_mail()

    # The end

    def _break_off_for(self, error: Exception) -> None:
        self.break_off(f"it sent an invalid message: {str(error)[:LONGEST_TEXT]}")

    def break_off(self, reason: str, goes_on: bool = True) -> None:
        """Stop talking to a worker that sends invalid messages, reads none, or has closed its socket. `goes_on`: until
        it is killed, it may run batches."""
        self.closed = self.has_ended = True
        if self._stop_listening():
            self._goes_on_unread = goes_on
            self._on_broken(self, reason)

    def _stop_listening(self) -> bool:
        """Returns whether the instance was listening."""
        listening, self._is_listening = self._is_listening, False
        if listening:
            self.plane.unregister(self._socket.fileno())
            self._mail.forget(self)
        return listening

    def stop_taking(self) -> None:
        """Refuse new batches; those in flight go on. From any thread."""
        self.closed = True

    def end(self, error: ServeError) -> None:
        """Finish after the worker has ended. Batches that it has answered are reported as usual. Batches that were in
        the engine fail with `error`, of a group only what had begun; later batches fail with WorkerGone. The last batch
        is reported first, so that the requests of all can return to the front of a queue in their order. Memory is
        freed as outcomes are released."""
        self.take_mail()
        self._stop_listening()
        self.closed = self.has_ended = True
        self._socket.close()
        self.peer.close()
        self._files.close()
        for one in self._back_sockets:
            one.close()
        sent, self._sent = self._sent, {}
        group, begun = self._link.others_begun()
        now = time.monotonic_ns()
        ended: list[tuple[SentBatch, BatchOutcome]] = []
        # The worker begins and answers batches in their order, so only the first ones can have been in the engine, and
        # none after a group, which runs alone.
        may_be_inside = self.batches_at_once
        for batch in sent.values():
            is_taken = batch.posted > 0 and self._work.is_taken(batch.posted)
            was_inside = is_taken and (may_be_inside > 0 or self._goes_on_unread)
            may_be_inside = 0 if batch.is_grouped else may_be_inside - 1
            outcome = BatchOutcome(error if was_inside else WorkerGone(self._gone_text), (now, now, now))
            # If a later group has begun, this one has run.
            outcome.begun = begun if batch.id == group else len(batch.sizes) if group > batch.id else 0
            ended.append((batch, outcome))
        for batch, outcome in reversed(ended):
            self.call_guarded(batch.on_outcome, outcome)
        self._end_exchanges(error)
        self._reader.close(is_last=True)

    def _end_exchanges(self, error: ServeError) -> None:
        """Called when all batches have ended, before the worker's heap is closed."""


class InstanceMail:
    """Polls the instances' messages, as a plane.loop.Source. A worker rings its socket when the loop sleeps."""

    wake_descriptor: int | None = None
    longest_sleep_seconds = math.inf
    idle_polls = 1

    def __init__(self, plane: PlaneLoop, poll_seconds: float = 0.0) -> None:
        """`poll_seconds`: how long a worker may poll for its next batch."""
        self.poll_seconds = poll_seconds
        self.plane = plane
        self.answering: dict[Instance, RingReader] = {}
        """Instances that must answer, with the rings that they post to."""
        self._rarely_sending: dict[Instance, RingReader] = {}
        """Instances that may send at any time, but seldom do."""
        self._polls = 0
        self.returning: dict[Instance, None] = {}
        self.trimmer = Trimmer(plane)

    def listen(self, instance: Instance) -> None:
        """Also poll an instance that may send at any time: it does not ring while the loop is awake."""
        self._rarely_sending[instance] = instance.inbox

    def forget(self, instance: Instance) -> None:
        self.answering.pop(instance, None)
        self._rarely_sending.pop(instance, None)
        self.returning.pop(instance, None)

    def poll(self) -> bool:
        busy = False
        self._polls += 1
        # Rarely, so that hundreds of instances stay cheap; a message waits little.
        if self._rarely_sending and not self._polls % 32:
            self._poll_rarely_sending()
        answered: list[Instance] = []
        for instance, inbox in self.answering.items():
            if inbox.other_words[inbox.posted_at] != inbox.taken:
                answered.append(instance)
        for instance in answered:
            busy = True
            instance.take_mail()
            if not instance.must_answer:
                self.answering.pop(instance, None)
        if self.returning:
            returning, self.returning = self.returning, {}
            for instance in returning:
                instance.post_returned_places()
        return busy

    def has_mail(self) -> bool:
        if self._rarely_sending:
            self._poll_rarely_sending()
        # A loop instead of any(), because it runs before each sleep.
        for inbox in self.answering.values():  # noqa: SIM110
            if inbox.has_mail():
                return True
        return False

    def _poll_rarely_sending(self) -> None:
        for instance in [instance for instance, inbox in self._rarely_sending.items() if inbox.has_mail()]:
            self.answering[instance] = instance.inbox

    def close_heap(self, heap: Heap) -> None:
        """Close a heap after the calls that the data plane already has. From any thread."""

        def close() -> None:
            self.trimmer.forget(heap)
            heap.close()

        self.plane.call_soon(close)
