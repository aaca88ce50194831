"""An instance whose other end is the test: faults that no right worker would make, and memory."""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.outputs import tensors_of
from support.waiting import until, wait_until
from support.workers import (
    LOG,
    BatchInput,
    add_sub_inputs,
    batch_input,
    execute,
    mail_of,
    members_of,
    on_plane,
    open_descriptors,
)

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument, unavailable
from rocserve.core.plain import to_json
from rocserve.core.request_form import BatchForm, Member
from rocserve.core.tensor_places import PlacedTensors, padded
from rocserve.core.tensors import TensorHead
from rocserve.plane import trimming
from rocserve.plane.heap import COPIED_AT_ONCE, Heap, HeapFull
from rocserve.plane.loop import PlaneLoop
from rocserve.plane.shared_heap import SHARES, SharedHeap
from rocserve.workers import worker_end
from rocserve.workers.batch_inputs import details_of, request_inputs
from rocserve.workers.entries import (
    BATCH,
    CALL,
    DONE,
    EACH,
    ENTRY,
    ERROR,
    FAILED,
    LONGEST_TEXT_BYTES,
    ONCE,
    OPEN,
    REMEMBERED_LAYOUTS,
    REQUEST,
    RESPONSE,
    RESULT,
    RESULT_LAYOUT,
    RESULTS,
    RETURN,
    SERVER_RINGS,
    WORK,
    numbers,
)
from rocserve.workers.instance import SLOTS, Instance, WorkerGone
from rocserve.workers.messages import RequestFailure, ResultLayout
from rocserve.workers.results import BatchOutcome
from rocserve.workers.worker_end import OutgoingResult, ReceivedBatch, WorkerEnd, error_result

HEAD = TensorHead("SUM", DataType.INT32, (1, 16))
LAYOUT = to_json(ResultLayout((HEAD,)))


class Peer:
    """The worker's end, by hand."""

    def __init__(self, plane: PlaneLoop, heap_bytes: int = 1 << 30) -> None:
        self.plane = plane
        self.broken: list[str] = []
        self.broken_event = threading.Event()
        self.inputs = SharedHeap("test", heap_bytes)
        self.mail = mail_of(plane)
        self.instance = Instance("m", self.mail, self.inputs, self._on_broken, LOG)
        self.socket = self.instance.take_peer()
        self.end_of_worker = WorkerEnd(self.socket)
        self.instance.open()
        self._batches = self.end_of_worker.batches()
        self.outcomes: list[BatchOutcome] = []
        self.arrived = threading.Semaphore(0)

    def _on_broken(self, instance: Instance, reason: str) -> None:
        assert instance is self.instance
        self.broken.append(reason)
        self.broken_event.set()

    def on_outcome(self, outcome: BatchOutcome) -> None:
        self.outcomes.append(outcome)
        self.arrived.release()

    def send(self, inputs: list[BatchInput] | None = None, sizes: tuple[int, ...] = (1,)) -> None:
        execute(self.instance, inputs or add_sub_inputs(), ("SUM",), sizes, self.on_outcome)

    def take(self) -> ReceivedBatch:
        return next(self._batches)

    def execute(self, inputs: list[BatchInput] | None = None, sizes: tuple[int, ...] = (1,)) -> ReceivedBatch:
        """Start a batch, and take it."""
        self.send(inputs, sizes)
        return self.take()

    def text(self, data: bytes) -> tuple[int, int]:
        return self.end_of_worker.text_place(data), len(data)

    def result(self, data: bytes, head: TensorHead = HEAD) -> OutgoingResult:
        """A result of one output."""
        number = self.end_of_worker.layout_number(to_json(ResultLayout((head,))))
        contents = padded([numbers(2).pack(64, len(data)), data])
        return OutgoingResult(0, 0, number, 2, sum(map(len, contents)), contents)

    def finish(self, batch: ReceivedBatch, *results: OutgoingResult, each: bool = False) -> None:
        self.answered_ns = time.monotonic_ns()
        self.end_of_worker.finish(batch, (self.answered_ns - 2, self.answered_ns - 1), results, each)

    def results_of(self, batch: ReceivedBatch, *entries: bytes, flags: int = 0, more: bytes = b"") -> bytes:
        """The entries that finish a batch. `more`: what lies behind the table, at byte 1024 of the slot."""
        table = b"".join(entries)
        place, nbytes = self.text(table.ljust(1024, b"\0") + more)
        return done(batch) + ENTRY.pack(RESULTS, flags, 0, 0, place, len(table) // ENTRY.size, nbytes)

    def end(self, error: ServeError | None = None) -> None:
        on_plane(self.plane, lambda: self.instance.end(error or unavailable("it is over")))

    def release(self) -> None:
        """Nobody has the outputs any more."""
        on_plane(self.plane, self.outcomes.clear)

    def close(self) -> None:
        """As the ends of both processes would."""
        for heap in (self.inputs, self.end_of_worker.inputs, self.end_of_worker._heap):
            heap.close()


def done(batch: ReceivedBatch, *times: int) -> bytes:
    now = time.monotonic_ns()
    return ENTRY.pack(DONE, 0, 0, batch.id, *(times or (now - 2, now - 1, now)))


@pytest.fixture
def peer(plane: PlaneLoop) -> Iterator[Peer]:
    peer = Peer(plane)
    yield peer
    peer.end()


def test_an_answer_by_hand(peer: Peer) -> None:
    batch = peer.execute()
    (request,) = batch.requests
    a, b = request_inputs(request, peer.end_of_worker.inputs)
    assert np.frombuffer(a, np.int32).tolist() == list(range(16))
    assert a.readonly and np.frombuffer(b, np.int32).tolist() == [3] * 16
    assert request.form.layout.requested_outputs == ("SUM",)
    peer.finish(batch, peer.result(b"\x07\x00\x00\x00" * 16))
    assert peer.arrived.acquire(timeout=5)
    (tensor,) = tensors_of(peer.outcomes[0].outputs_of(0))
    assert tensor.numpy().tolist() == [[7] * 16]
    assert not peer.outcomes[0].parameters
    times = (peer.outcomes[0].input_end_ns, peer.outcomes[0].output_start_ns)
    assert times == (peer.answered_ns - 2, peer.answered_ns - 1)
    peer.release()


def test_a_batch_that_failed(peer: Peer) -> None:
    for code, expected in ((StatusCode.NOT_FOUND, StatusCode.NOT_FOUND), (99, StatusCode.INTERNAL)):
        batch = peer.execute()
        place, nbytes = peer.text(b"the engine's own words")
        peer.end_of_worker.post(done(batch) + ENTRY.pack(FAILED, 0, int(code), 0, place, nbytes, 0))
        assert peer.arrived.acquire(timeout=5)
        error = peer.outcomes[-1].error
        assert error is not None and (error.code, error.text) == (expected, "the engine's own words")


def test_one_of_the_requests_failed(peer: Peer) -> None:
    rows = np.zeros((1, 16), np.int32)
    batch = peer.execute([batch_input("A", rows, rows), batch_input("B", rows, rows)], (1, 1))
    failed = error_result(invalid_argument("not this one"))
    peer.finish(batch, failed, peer.result(b"\x01\x00\x00\x00" * 16), each=True)
    assert peer.arrived.acquire(timeout=5)
    assert {index: error.text for index, error in peer.outcomes[0].failures.items()} == {0: "not this one"}
    assert tensors_of(peer.outcomes[0].outputs_of(1))[0].numpy().tolist() == [[1] * 16]
    peer.release()


FAR = 1 << 62
BIG = 1 << 20

Lie = Callable[[Peer, ReceivedBatch], bytes]


def lone_kind(kind: int) -> Lie:
    return lambda peer, batch: ENTRY.pack(kind, 0, 0, 0, 0, 0, 0)


def behind_done(*fields: int) -> Lie:
    return lambda peer, batch: done(batch) + ENTRY.pack(*fields)


def among_results(*fields: int, flags: int = 0) -> Lie:
    return lambda peer, batch: peer.results_of(batch, ENTRY.pack(*fields), flags=flags)


def times(first: int, second: int, third: int) -> Lie:
    """Nanoseconds from now."""

    def lie(peer: Peer, batch: ReceivedBatch) -> bytes:
        now = time.monotonic_ns()
        return done(batch, now + first, now + second, now + third) + ENTRY.pack(RESULTS, 0, 0, 0, 0, 0, 0)

    return lie


def result_of(numbers_of_it: tuple[int, ...], head: TensorHead = HEAD, told: tuple[RequestFailure, ...] = ()) -> Lie:
    def lie(peer: Peer, batch: ReceivedBatch) -> bytes:
        text = to_json(ResultLayout((head,), told))
        return peer.results_of(
            batch,
            ENTRY.pack(RESULT_LAYOUT, ONCE, 0, 0, 1024, len(text), 0),
            ENTRY.pack(RESULT, 0, 0, 0, 0, 2048, len(numbers_of_it)),
            more=text.ljust(1024, b"\0") + numbers(len(numbers_of_it)).pack(*numbers_of_it).ljust(1024, b"\0"),
        )

    return lie


def told_layout(*entries: tuple[int, ...]) -> Lie:
    """What follows a layout that makes sense."""

    def lie(peer: Peer, batch: ReceivedBatch) -> bytes:
        layout = ENTRY.pack(RESULT_LAYOUT, ONCE, 0, 0, 1024, len(LAYOUT), 0)
        return peer.results_of(batch, layout, *[ENTRY.pack(*entry) for entry in entries], more=LAYOUT)

    return lie


def layout_of(text: bytes) -> Lie:
    return lambda peer, batch: peer.end_of_worker.layout_entry(text, 5, 0)


def too_many_results(peer: Peer, batch: ReceivedBatch) -> bytes:
    peer.finish(batch, peer.result(bytes(64)), peer.result(bytes(64)))
    return b""


def another_batch(peer: Peer, batch: ReceivedBatch) -> bytes:
    return ENTRY.pack(DONE, 0, 0, batch.id + 1, 1, 2, 3) + ENTRY.pack(RESULTS, 0, 0, 0, 0, 0, 0)


MEANINGLESS: dict[str, tuple[Lie, str]] = {
    "no kind": (lone_kind(0), "a message of kind 0, which it may not send here"),
    "unknown kind": (lone_kind(99), "a message of kind 99"),
    "a batch": (lone_kind(BATCH), "a message of kind 1"),
    "a request": (lone_kind(REQUEST), "a message of kind 3"),
    "results of nothing": (lone_kind(RESULTS), "a message of kind 17"),
    "a result of nothing": (lone_kind(RESULT), "a message of kind 20"),
    "a response": (lone_kind(RESPONSE), "a message of kind 21, which it may not send here"),
    "a call": (lone_kind(CALL), "a message of kind 22, which it may not send here"),
    "another batch": (another_batch, "an answer to batch 2, which it does not have"),
    "nothing behind": (lambda peer, batch: done(batch), "a batch is done, and a message of kind 0 follows"),
    "another message behind": (behind_done(RETURN, 0, 0, 0, 0, 0, 0), "a message of kind 6 follows"),
    "times before it was sent": (times(-(10**9), -1, 0), "times that are not in their order"),
    "times that fall": (times(-1, -2, 0), "times that are not in their order"),
    "times to come": (times(-1, 0, 10**12), "times that are not in their order"),
    "no results": (behind_done(RESULTS, 0, 0, 0, 0, 0, 0), "results in 0 entries"),
    "countless results": (
        behind_done(RESULTS, 0, 0, 0, 0, 1 << 40, 1 << 30),
        "results in 1099511627776 entries of 1073741824 bytes",
    ),
    "results elsewhere": (behind_done(RESULTS, 0, 0, 0, FAR, 1, 32), "lies outside of its heap"),
    "results beyond their part": (behind_done(RESULTS, 0, 0, 0, 0, 1, 1 << 33), "lies outside of its heap"),
    "results beyond all": (behind_done(RESULTS, 0, 0, 0, (1 << 64) - 64, 1, 64), "lies outside of its heap"),
    "results unwritten": (behind_done(RESULTS, 0, 0, 0, 26 << 32, 1, BIG), "was not written to its end"),
    "too many results": (too_many_results, "a message of kind 20 among the results of 1 requests"),
    "too few results": (told_layout(), "results of 0 requests where there are 1"),
    "another kind among results": (among_results(RESPONSE, 0, 0, 0, 0, 0, 0), "a message of kind 21 among the results"),
    "an open request": (among_results(RESULT, OPEN, 0, 0, 1, 0, 0, flags=EACH), "a message of kind 20 among"),
    "an error for all": (among_results(RESULT, ERROR, 3, 0, 0, 0, 4), "a message of kind 20 among the results"),
    "a layout never told": (among_results(RESULT, 0, 0, 77, 0, 0, 2), "a result of layout 77, which it has not told"),
    "a result elsewhere": (told_layout((RESULT, 0, 0, 0, 0, FAR, 2)), "a result with 2 numbers in"),
    "countless numbers": (told_layout((RESULT, 0, 0, 0, 0, 0, 1 << 50)), f"a result with {1 << 50} numbers"),
    "a failed request's text elsewhere": (
        among_results(RESULT, ERROR, 3, 0, 1, FAR, 4, flags=EACH),
        f"a text of 4 bytes at byte {FAR} of 1024",
    ),
    "a failed request's text beyond": (
        among_results(RESULT, ERROR, 3, 0, 1, 1000, 25, flags=EACH),
        "a text of 25 bytes at byte 1000 of 1024",
    ),
    "a result's layout elsewhere": (
        among_results(RESULT_LAYOUT, ONCE, 0, 0, FAR, 4, 0),
        f"a text of 4 bytes at byte {FAR} of 1024",
    ),
    "a result's layout that is none": (among_results(RESULT_LAYOUT, ONCE, 0, 0, 0, 4, 0), ""),
    "too few numbers": (result_of((0,)), "1 numbers for 1 outputs"),
    "an output of another size": (result_of((64, 60)), "output 'SUM' of shape [1, 16] has 60 bytes"),
    "an output far away": (result_of((1 << 40, 64)), "at byte 2048 of 3072"),
    "an output beyond all": (result_of(((1 << 64) - 64, 64)), "at byte 2048 of 3072"),
    "an output that begins too late": (result_of((1000, 64)), "a result of 1064 bytes at byte 2048 of 3072"),
    "a failure of no request": (
        result_of((64, 64), HEAD, (RequestFailure(1, 3, "x"),)),
        "a failure of request 1 of 1",
    ),
    "a failure elsewhere": (behind_done(FAILED, 0, 3, 0, FAR, 10, 0), "lies outside of its heap"),
    "a failure too long": (
        behind_done(FAILED, 0, 3, 0, 0, LONGEST_TEXT_BYTES + 1, 0),
        f"a text of {LONGEST_TEXT_BYTES + 1} bytes, expected at most {LONGEST_TEXT_BYTES}",
    ),
    "a layout that is none": (layout_of(b"{}"), "ResultLayout"),
    "a layout of other texts": (layout_of(b"\xff\x00[[["), ""),
    "a layout elsewhere": (
        lambda peer, batch: ENTRY.pack(RESULT_LAYOUT, ONCE, 0, 0, FAR, 10, 0),
        "lies outside of its heap",
    ),
    "a layout too long": (
        lambda peer, batch: ENTRY.pack(RESULT_LAYOUT, 0, 0, 0, 0, 1 << 40, 0),
        "a text of 1099511627776 bytes",
    ),
}


@pytest.mark.parametrize(("lie", "reason"), MEANINGLESS.values(), ids=MEANINGLESS)
def test_nonsense_breaks_the_instance_and_fails_its_batches_once(peer: Peer, lie: Lie, reason: str) -> None:
    batch = peer.execute()
    peer.end_of_worker.post(lie(peer, batch))
    assert peer.broken_event.wait(5)
    (told,) = peer.broken
    assert told.startswith("it sent what cannot be read: ") and reason in told
    assert not peer.outcomes
    with pytest.raises(WorkerGone):
        peer.send()
    peer.end()
    assert [outcome.error.text for outcome in peer.outcomes if outcome.error] == ["it is over"]
    peer.end()
    assert len(peer.outcomes) == 1
    peer.release()


@pytest.mark.parametrize("lie", [31, 1 << 63])
def test_a_worker_that_lies_about_what_it_posted_is_broken(peer: Peer, lie: int) -> None:
    writer = peer.end_of_worker._results
    peer.execute()
    writer._own_words[writer._posted_at] = lie
    peer.end_of_worker._ring()
    peer.socket.send(b"!")
    assert peer.broken_event.wait(5)
    assert peer.broken == [f"it sent what cannot be read: the other end of a link says {lie} bytes where 0 were taken"]


def test_a_worker_that_lies_about_what_it_took_is_broken(peer: Peer) -> None:
    reader = peer.end_of_worker._work
    reader._own_words[reader._taken_at] = 1 << 40
    with pytest.raises(WorkerGone):
        peer.send()
    assert peer.broken_event.wait(5)
    assert "has taken 1099511627776 of 0 bytes" in peer.broken[0]


def test_an_answer_just_before_the_end_counts(peer: Peer) -> None:
    first = peer.execute()
    peer.execute()
    peer.execute()
    peer.plane.unregister(peer.instance._socket.fileno())  # As if it were late.
    on_plane(peer.plane, lambda: peer.mail.forget(peer.instance))
    peer.finish(first, peer.result(bytes(64)))
    peer.socket.close()
    peer.end()
    assert [outcome.error is None for outcome in peer.outcomes] == [True, False, False]
    assert peer.outcomes[1].error is not None and peer.outcomes[1].error.text == "it is over"
    assert isinstance(peer.outcomes[2].error, WorkerGone)  # It was not in the engine yet.
    assert tensors_of(peer.outcomes[0].outputs_of(0))[0].shape == (1, 16)
    peer.release()


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_what_the_worker_had_not_taken_may_run_elsewhere(peer: Peer, taken: int) -> None:
    """The one that it had taken may have run in part: it fails. It takes all that is there at once."""
    for _ in range(taken):
        peer.send()
    if taken:
        peer.take()
    for _ in range(3 - taken):
        peer.send()
    peer.end(internal("killed by signal 9"))
    errors = [outcome.error for outcome in peer.outcomes]
    assert len(errors) == 3
    if taken:
        first = errors.pop(0)
        assert first is not None and not isinstance(first, WorkerGone) and first.text == "killed by signal 9"
    assert all(isinstance(error, WorkerGone) for error in errors)


def test_when_the_other_end_is_closed_what_it_did_not_take_may_run_elsewhere(peer: Peer) -> None:
    peer.socket.close()
    assert peer.broken_event.wait(5)
    assert peer.broken == ["it closed its socket"]
    for _ in range(5):
        with pytest.raises(WorkerGone):
            peer.send()
    assert peer.instance.free_slots == 0 and not peer.outcomes


def test_what_is_released_after_the_end_is_given_back(plane: PlaneLoop) -> None:
    peer = Peer(plane)
    peer.end()
    peer.close()
    del peer
    gc.collect()  # The peer and its instance know each other.
    before = open_descriptors()
    peer = Peer(plane)
    batch = peer.execute()
    peer.execute()
    peer.finish(batch, peer.result(bytes(64)))
    assert peer.arrived.acquire(timeout=5)
    tensor = tensors_of(peer.outcomes[0].outputs_of(0))[0]
    peer.end()
    assert bytes(tensor.data) == bytes(64)  # Still there to read.
    peer.release()
    peer.close()
    del tensor, batch, peer
    gc.collect()
    assert open_descriptors() <= before


def test_a_worker_that_takes_no_batches_is_told_of(peer: Peer) -> None:
    for _ in range(SERVER_RINGS[WORK]):
        peer.send()
    with pytest.raises(ServeError, match="the worker of model 'm' does not read its batches") as caught:
        peer.send()
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert not peer.broken


def test_inputs_for_which_there_is_no_room(plane: PlaneLoop) -> None:
    peer = Peer(plane, 1 << 16)
    peer.send()
    large = [batch_input("A", np.zeros((1, 1 << 14), np.int32)), batch_input("B", np.zeros((1, 1), np.int32))]
    with pytest.raises(HeapFull, match="no room for") as caught:
        peer.send(large)
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    # What was new to the worker in it is told again.
    batch = [peer.take(), peer.execute()][1]
    peer.finish(batch, peer.result(bytes(64)))
    assert peer.arrived.acquire(timeout=5)
    assert peer.outcomes[0].error is None
    peer.end()


def test_layouts_beyond_all_that_are_remembered(peer: Peer) -> None:
    for turn in range(2):
        for width in range(REMEMBERED_LAYOUTS + 20):
            batch = peer.execute([batch_input("A", np.full((1, width + 1), turn, np.int32))])
            (data,) = request_inputs(batch.requests[0], peer.end_of_worker.inputs)
            assert batch.requests[0].form.layout.inputs[0].shape == (1, width + 1)
            peer.finish(batch, peer.result(bytes(data), TensorHead("SUM", DataType.INT32, (1, width + 1))))
            assert peer.arrived.acquire(timeout=5)
            assert peer.outcomes[0].error is None
            assert tensors_of(peer.outcomes[0].outputs_of(0))[0].numpy().tolist() == [[turn] * (width + 1)]
            peer.release()
    assert len(peer.instance._writer._forms) <= REMEMBERED_LAYOUTS
    assert len(peer.instance._results._layouts) <= 2 * REMEMBERED_LAYOUTS
    assert len(peer.end_of_worker._forms) <= 2 * REMEMBERED_LAYOUTS


def test_batches_of_many(plane: PlaneLoop) -> None:
    """Two batches at a time against an echo of the first input, each on memory of its own."""
    peer = Peer(plane)
    failures: list[object] = []

    def serve() -> None:
        for batch in peer._batches:
            row = bytes(request_inputs(batch.requests[0], peer.end_of_worker.inputs)[0])
            peer.finish(batch, peer.result(row))

    def use(seed: int) -> None:
        for number in range(500):
            done = threading.Event()
            value = seed + number

            def on_outcome(outcome: BatchOutcome, value: int = value, done: threading.Event = done) -> None:
                rows = tensors_of(outcome.outputs_of(0))[0].numpy()
                if outcome.error or not (rows == value).all():
                    failures.append((value, outcome.error))
                done.set()

            inputs = [batch_input("A", np.full((1, 16), value, np.int32))]
            execute(peer.instance, inputs, ("SUM",), (1,), on_outcome)
            assert done.wait(5)

    server = threading.Thread(target=serve)
    users = [threading.Thread(target=use, args=(seed,)) for seed in (10_000, 20_000)]
    for thread in (server, *users):
        thread.start()
    for user in users:
        user.join()
    assert not failures and peer.instance.free_slots == SLOTS
    peer.end_of_worker.stop()
    server.join(5)
    assert not server.is_alive()
    peer.end()


async def test_memory_of_a_large_batch_is_given_back_when_idle(
    plane: PlaneLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(trimming, "TRIM_PERIOD_SECONDS", 0.05)
    monkeypatch.setattr(worker_end, "_TRIM_SECONDS", 0.05)
    peer = Peer(plane)
    size = 32 << 20
    batch = peer.execute([batch_input("A", np.ones((1, size), np.uint8))])
    peer.finish(batch, peer.result(b"y" * size, TensorHead("SUM", DataType.UINT8, (1, size))))
    assert peer.arrived.acquire(timeout=5)
    # The worker waits for its next batch meanwhile.
    waiting = threading.Thread(target=lambda: list(peer._batches), daemon=True)
    waiting.start()

    def used() -> list[int]:
        files = [peer.inputs._descriptor, peer.end_of_worker._heap._descriptor]
        return [os.fstat(file).st_blocks * 512 for file in files]

    tensor = tensors_of(peer.outcomes[0].outputs_of(0))[0]
    await until(lambda: used()[0] <= 4 << 20)
    threading.Event().wait(0.3)
    assert used()[1] >= size and bytes(tensor.data[-1:]) == b"y"  # Still being read.
    peer.release()
    # It looks again once it has had something to do.
    peer.send()
    await until(lambda: used()[1] <= 4 << 20)
    assert not caplog.records
    peer.end_of_worker.stop()
    waiting.join(5)
    assert not waiting.is_alive()
    peer.end()


def test_a_batch_says_whether_its_requests_run_one_by_one(peer: Peer) -> None:
    for grouped in (True, False):
        members = members_of(add_sub_inputs(), ("SUM",), (1,))
        on_plane(
            peer.plane,
            lambda members=members, grouped=grouped: peer.instance.execute(  # type: ignore[misc]
                BatchForm(None, grouped), members, peer.on_outcome
            ),
        )
        assert peer.take().is_grouped is grouped


def large_members() -> list[Member]:
    return members_of([batch_input("A", np.arange(2 * COPIED_AT_ONCE, dtype=np.int32).reshape(1, -1))], ("SUM",), (1,))


def test_large_inputs_are_copied_in_steps_and_batches_keep_their_order(peer: Peer) -> None:
    large, small = large_members(), members_of(add_sub_inputs(), ("SUM",), (1,))
    posted: list[int] = []

    def send() -> None:
        for members in (large, small):
            peer.instance.execute(BatchForm(), members, peer.on_outcome)
            posted.append(peer.instance._work.posted)

    on_plane(peer.plane, send)
    assert posted == [0, 0]
    first, second = peer.take(), peer.take()
    (data,) = request_inputs(first.requests[0], peer.end_of_worker.inputs)
    assert data == large[0][1][0]
    assert [*map(bytes, request_inputs(second.requests[0], peer.end_of_worker.inputs))] == [*map(bytes, small[0][1])]


def test_inputs_that_lie_in_a_share_of_the_heap_are_told_of_and_kept_until_the_worker_reports(peer: Peer) -> None:
    """Beside others, which are copied; and those of another version's heap are others."""
    elsewhere = SharedHeap("elsewhere", 1 << 20)
    members, places, shares = [], [], []
    for heap in (peer.inputs, elsewhere):
        ((form, data, _, _),) = members_of(add_sub_inputs(), ("SUM",), (1,))
        share = on_plane(peer.plane, heap.lend)
        slot, view = Heap.of_file(heap.open_for_writing(), share.number, SHARES).place(form.places.end)
        view[:] = b"".join(padded(data))
        placed = PlacedTensors(view, form.places, heap, slot.offset, (share, slot))
        members.append((form, placed, 0, b"details"))
        shares.append(share)
        places.append(slot.offset)
    held = weakref.ref(shares[0])
    on_plane(peer.plane, functools.partial(peer.instance.execute, BatchForm(), [*members], peer.on_outcome))
    batch = peer.take()
    assert [request.place == place for request, place in zip(batch.requests, places, strict=True)] == [True, False]
    for request in batch.requests:
        a, b = request_inputs(request, peer.end_of_worker.inputs)
        assert [bytes(a), bytes(b)] == [bytes(data) for data in members_of(add_sub_inputs(), ("SUM",), (1,))[0][1]]
        assert details_of(request, peer.end_of_worker.inputs) == b"details"
    del members, placed, share, shares
    gc.collect()
    assert held() is not None
    peer.end_of_worker.fail(batch, (batch.taken_ns, batch.taken_ns), unavailable("no"))
    assert peer.arrived.acquire(timeout=10)
    wait_until(lambda: held() is None, "the inputs to be let go")


def test_a_worker_that_ends_while_inputs_are_copied_has_not_had_them(peer: Peer) -> None:
    def send_and_end() -> None:
        peer.instance.execute(BatchForm(), large_members(), peer.on_outcome)
        peer.instance.end(unavailable("it is over"))

    on_plane(peer.plane, send_and_end)
    assert isinstance(peer.outcomes[0].error, WorkerGone)


def test_an_answer_to_a_batch_that_is_still_being_copied(peer: Peer) -> None:
    peer.finish(peer.execute(), peer.result(bytes(64)))
    assert peer.arrived.acquire(timeout=5)

    def send_and_answer() -> None:
        peer.instance.execute(BatchForm(), large_members(), peer.on_outcome)
        peer.end_of_worker.post(done(ReceivedBatch(2, False, (), 0)) + ENTRY.pack(RESULTS, 0, 0, 0, 0, 0, 0))
        peer.instance.take_mail()

    on_plane(peer.plane, send_and_answer)
    assert peer.broken == ["it sent what cannot be read: an answer to batch 2, which it does not have"]
