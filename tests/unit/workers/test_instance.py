"""An instance from its first batch to its end, and its memory; and an instance whose worker sends invalid messages: it
is broken once, with the reason."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

import numpy as np
import pytest
from support.instance_peer import HEAD, Peer, done
from support.outputs import tensors_of
from support.waiting import PATIENCE_SECONDS, until, wait_until
from support.workers import add_sub_inputs, batch_input, execute, members_of, on_plane, open_descriptors

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, internal
from rocserve.core.tensors import TensorHead
from rocserve.links.entries import BATCH, CALL, DONE, ENTRY, FAILURE, OPEN, REQUEST, RESPONSE, TEXT, WHOLE
from rocserve.links.opening import SERVER_RINGS, WORK
from rocserve.links.tensors import LONGEST_DETAILS
from rocserve.links.texts import REMEMBERED
from rocserve.plane import trimming
from rocserve.plane.loop import PlaneLoop
from rocserve.workers import worker_end
from rocserve.workers.batch_inputs import request_inputs
from rocserve.workers.instance import WorkerGone
from rocserve.workers.results import BatchOutcome
from rocserve.workers.worker_end import ReceivedBatch, _sleep_ahead


def test_an_answer_by_hand(peer: Peer) -> None:
    batch = peer.execute()
    (request,) = batch.requests
    a, b = request_inputs(request, peer.end_of_worker.files)
    assert np.frombuffer(a, np.int32).tolist() == list(range(16))
    assert a.readonly and np.frombuffer(b, np.int32).tolist() == [3] * 16
    assert request.form.layout.requested_outputs == ("SUM",)
    peer.finish(batch, peer.result(b"\x07\x00\x00\x00" * 16))
    assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
    (tensor,) = tensors_of(peer.outcomes[0].outputs_of(0))
    assert tensor.numpy().tolist() == [[7] * 16]
    assert not peer.outcomes[0].parameters
    times = (peer.outcomes[0].input_end_ns, peer.outcomes[0].output_start_ns)
    assert times == (peer.answered_ns - 2, peer.answered_ns - 1)
    peer.release()


@pytest.mark.parametrize("poll_seconds", [PATIENCE_SECONDS, 0.1, 0.0])
def test_a_worker_polls_where_the_last_batch_came_soon(plane: PlaneLoop, poll_seconds: float) -> None:
    peer = Peer(plane, poll_seconds=poll_seconds)
    word = peer.end_of_worker._sleeper._word  # Odd while the worker sleeps, and each sleep counts two.
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(peer.take() for _ in range(2)), daemon=True)
    thread.start()
    wait_until(lambda: word[0] == 1, "the sleep before the first batch")
    peer.send()
    if poll_seconds < PATIENCE_SECONDS:
        wait_until(lambda: word[0] == 3, "the sleep before the second batch")
    else:
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        begun = time.clock_gettime(clock)
        wait_until(lambda: time.clock_gettime(clock) - begun > 0.05, "the polling thread's CPU time")
        assert word[0] == 2
    peer.send()
    thread.join(PATIENCE_SECONDS)
    assert len(taken) == 2
    peer.end()
    peer.close()


@pytest.mark.parametrize(
    ("waits", "slept"),
    [
        ([0.0002] * 8, [0.00015]),
        ([0.0003, 0.0002] * 4, [0.00015]),
        ([0.0002] * 7 + [0.0005], []),
        ([0.0002] * 7 + [0.0], []),
        ([0.00004] * 8, []),
    ],
)
def test_a_worker_sleeps_for_a_part_of_waits_that_are_alike(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], slept: list[float]
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(time, "sleep", asked.append)
    _sleep_ahead(deque(waits, 8))
    assert asked == pytest.approx(slept)


def test_batches_that_come_in_a_rhythm_are_all_taken(plane: PlaneLoop) -> None:
    peer = Peer(plane, poll_seconds=PATIENCE_SECONDS)
    taken: list[ReceivedBatch] = []
    thread = threading.Thread(target=lambda: taken.extend(peer.take() for _ in range(30)), daemon=True)
    thread.start()
    for count in range(30):
        wait_until(lambda expected=count: len(taken) == expected, "the batch before")
        time.sleep(0.002)
        peer.send()
    thread.join(PATIENCE_SECONDS)
    assert len(taken) == 30
    peer.end()
    peer.close()


def test_each_request_of_a_batch_may_have_outputs_of_another_shape(peer: Peer) -> None:
    """More than the layouts that both ends remember."""
    count = 3 * REMEMBERED
    for _ in range(2):
        batch = peer.execute([batch_input("A", *[np.zeros((1, 1), np.int32)] * count)], (1,) * count)
        peer.finish(
            batch,
            *[
                peer.result(np.arange(width, dtype=np.int32).tobytes(), HEAD._replace(shape=(1, width)))
                for width in range(count)
            ],
        )
        assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
        outcome = peer.outcomes.pop()
        for width in (0, 1, count // 2, count - 1):
            (tensor,) = tensors_of(outcome.outputs_of(width))
            assert tensor.numpy().tolist() == [list(range(width))]
    assert not peer.broken


def test_a_batch_that_failed(peer: Peer) -> None:
    for code, expected in ((StatusCode.NOT_FOUND, StatusCode.NOT_FOUND), (99, StatusCode.INTERNAL)):
        batch = peer.execute()
        text = b"the engine's own words"
        entry = ENTRY.pack(FAILURE, WHOLE, int(code), 0, 1, 2 * ENTRY.size, len(text))
        peer.end_of_worker.post(peer.results_of(batch, entry + text))
        assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
        error = peer.outcomes[-1].error
        assert error is not None and (error.code, error.text) == (expected, "the engine's own words")


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
    assert isinstance(peer.outcomes[1].error, WorkerGone)  # The third was not in the engine yet.
    assert peer.outcomes[2].error is not None and peer.outcomes[2].error.text == "it is over"
    assert tensors_of(peer.outcomes[0].outputs_of(0))[0].shape == (1, 16)
    peer.release()


@pytest.mark.parametrize(("taken", "at_once"), [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (3, 2)])
def test_what_the_worker_had_not_taken_may_run_elsewhere(peer: Peer, taken: int, at_once: int) -> None:
    """Batches that the worker had taken, and that its engine takes concurrently, may have run in part: they fail. The
    worker takes all that is there."""
    peer.instance.batches_at_once = at_once
    for _ in range(taken):
        peer.send()
    if taken:
        peer.take()
    for _ in range(3 - taken):
        peer.send()
    peer.end(internal("killed by signal 9"))
    errors = [outcome.error for outcome in reversed(peer.outcomes)]
    assert len(errors) == 3
    for _ in range(min(taken, at_once)):
        inside = errors.pop(0)
        assert inside is not None and not isinstance(inside, WorkerGone) and inside.text == "killed by signal 9"
    assert all(isinstance(error, WorkerGone) for error in errors)


def _send_group(peer: Peer, size: int = 3) -> None:
    peer.submit(members_of(add_sub_inputs(), ("SUM",), (1,)) * size, is_grouped=True)


def _begin(peer: Peer, group: ReceivedBatch, count: int) -> None:
    """Begin to run so many requests of a group."""
    assert group.is_grouped
    assert len([*islice(peer.end_of_worker.one_by_one(group, group.requests), count)]) == count


def _ends(peer: Peer) -> list[tuple[bool, int | None]]:
    """Of each outcome, in the order of sending: whether its batch may run elsewhere, and how much of it has begun."""
    return [(isinstance(outcome.error, WorkerGone), outcome.begun) for outcome in reversed(peer.outcomes)]


def test_what_waits_behind_a_group_has_not_begun_though_the_engine_takes_two_batches_at_once(peer: Peer) -> None:
    peer.instance.batches_at_once = 2
    _send_group(peer)
    peer.send()
    _begin(peer, peer.take(), 2)
    peer.end()
    assert _ends(peer) == [(False, 2), (True, 0)]


@pytest.mark.parametrize("begins", [0, 1])
def test_a_group_behind_another_has_begun_as_far_as_it_has_itself(peer: Peer, begins: int) -> None:
    peer.instance.batches_at_once = 2
    for _ in range(2):
        _send_group(peer)
    first, second = peer.take(), peer.take()
    _begin(peer, first, 3)
    if begins:
        peer.finish(first, *[peer.result(bytes(64)) for _ in range(3)])
        assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
        peer.outcomes.clear()
        _begin(peer, second, begins)
    peer.end()
    assert [begun for _, begun in _ends(peer)] == ([1] if begins else [3, 0])


def test_a_group_that_ran_and_could_not_be_reported_does_not_run_again(peer: Peer) -> None:
    """The server ended the worker while its ring was full."""
    _send_group(peer)
    group = peer.take()
    _begin(peer, group, 3)
    peer.end_of_worker.post = lambda mail: None  # type: ignore[method-assign]
    peer.finish(group, *[peer.result(bytes(64)) for _ in range(3)])
    peer.end()
    assert _ends(peer) == [(False, 3)]


def test_what_a_worker_took_before_its_invalid_message_does_not_run_again(peer: Peer) -> None:
    """The worker may have run it since: until it is killed, its messages are not read."""
    for _ in range(2):
        peer.send()
    peer.take()
    peer.send()
    peer.end_of_worker.post(ENTRY.pack(CALL, 0, 0, 0, 0, 0, 0))
    assert peer.broken_event.wait(PATIENCE_SECONDS)
    peer.end()
    assert [is_elsewhere for is_elsewhere, _ in _ends(peer)] == [False, False, True]


def test_a_group_that_ran_after_an_invalid_message_does_not_run_again(peer: Peer) -> None:
    for _ in range(3):
        _send_group(peer)
    groups = [peer.take() for _ in range(3)]
    peer.end_of_worker.post(ENTRY.pack(CALL, 0, 0, 0, 0, 0, 0))
    assert peer.broken_event.wait(PATIENCE_SECONDS)
    _begin(peer, groups[0], 3)
    _begin(peer, groups[1], 1)
    peer.end()
    assert [begun for _, begun in _ends(peer)] == [3, 1, 0]


def test_when_the_other_end_is_closed_what_it_did_not_take_may_run_elsewhere(peer: Peer) -> None:
    peer.socket.close()
    assert peer.broken_event.wait(PATIENCE_SECONDS)
    assert peer.broken == ["it closed its socket"]
    for _ in range(5):
        with pytest.raises(WorkerGone):
            peer.send()
    assert peer.instance.closed and not peer.outcomes


def test_what_is_released_after_the_end_is_given_back(plane: PlaneLoop) -> None:
    peer = Peer(plane)
    peer.end()
    peer.close()
    del peer
    before = open_descriptors()
    peer = Peer(plane)
    batch = peer.execute()
    peer.execute()
    peer.finish(batch, peer.result(bytes(64)))
    assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
    tensor = tensors_of(peer.outcomes[0].outputs_of(0))[0]
    peer.end()
    assert bytes(tensor.data) == bytes(64)  # Still there to read.
    peer.release()
    peer.close()
    del tensor, batch, peer
    wait_until(lambda: open_descriptors() <= before, "the end of its files")


def test_a_worker_that_takes_no_batches_is_reported(peer: Peer) -> None:
    for _ in range(SERVER_RINGS[WORK]):
        peer.send()
    with pytest.raises(ServeError, match="the worker of model 'm' does not read its batches") as caught:
        peer.send()
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert not peer.broken


def test_batches_of_many(plane: PlaneLoop) -> None:
    """Two batches at a time against an echo of the first input, each in separate memory."""
    peer = Peer(plane)
    failures: list[object] = []

    def serve() -> None:
        for batch in peer._batches:
            row = bytes(request_inputs(batch.requests[0], peer.end_of_worker.files)[0])
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
            assert done.wait(PATIENCE_SECONDS)

    server = threading.Thread(target=serve)
    users = [threading.Thread(target=use, args=(seed,)) for seed in (10_000, 20_000)]
    for thread in (server, *users):
        thread.start()
    for user in users:
        user.join()
    assert not failures and not peer.instance.pending_answers().batch
    peer.end_of_worker.stop()
    server.join(PATIENCE_SECONDS)
    assert not server.is_alive()
    peer.end()


async def test_memory_of_a_large_batch_is_given_back_when_idle(
    plane: PlaneLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(trimming, "TRIM_PERIOD_SECONDS", 0.05)
    monkeypatch.setattr(worker_end, "_WAKE_SECONDS", 0.05)
    peer = Peer(plane)
    size = 32 << 20
    batch = peer.execute([batch_input("A", np.ones((1, size), np.uint8))])
    peer.finish(batch, peer.result(b"y" * size, TensorHead("SUM", DataType.UINT8, (1, size))))
    assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
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
    # The worker looks again for a while once it has had something to do; the while may pass without it.
    while used()[1] > 4 << 20:
        peer.send()
        with suppress(AssertionError):
            await until(lambda: used()[1] <= 4 << 20, seconds=1.0)
    assert not caplog.records
    peer.end_of_worker.stop()
    waiting.join(PATIENCE_SECONDS)
    assert not waiting.is_alive()
    peer.end()


FAR = 1 << 62
BIG = 1 << 20

Lie = Callable[[Peer, ReceivedBatch], bytes]


def lone_kind(kind: int) -> Lie:
    return lambda peer, batch: ENTRY.pack(kind, 0, 0, 0, 0, 0, 0)


def results_at(place: int, nbytes: int) -> Lie:
    return lambda peer, batch: done(batch, place, nbytes)


def among_results(*fields: int) -> Lie:
    return lambda peer, batch: peer.results_of(batch, ENTRY.pack(*fields))


def times(first: int, second: int, third: int) -> Lie:
    """Nanoseconds from now."""

    def lie(peer: Peer, batch: ReceivedBatch) -> bytes:
        now = time.monotonic_ns()
        return peer.results_of(batch, NO_RESULT, now + first, now + second, now + third)

    return lie


def before_it_was_sent(peer: Peer, batch: ReceivedBatch) -> bytes:
    now = time.monotonic_ns()
    return peer.results_of(batch, NO_RESULT, 1, now - 1, now)


NO_RESULT = ENTRY.pack(FAILURE, WHOLE, 3, 0, 1, 0, 0)


def layout_of(text: bytes) -> Lie:
    return lambda peer, batch: ENTRY.pack(TEXT, 0, 0, 5, 0, *peer.text(text))


def too_many_results(peer: Peer, batch: ReceivedBatch) -> bytes:
    peer.finish(batch, peer.result(bytes(64)), peer.result(bytes(64)))
    return b""


def another_batch(peer: Peer, batch: ReceivedBatch) -> bytes:
    return ENTRY.pack(DONE, 0, 0, 0, batch.id + 1, 0, 0)


MEANINGLESS: dict[str, tuple[Lie, str]] = {
    "no kind": (lone_kind(0), "unexpected message of kind 0"),
    **{
        f"kind {kind}": (lone_kind(kind), f"unexpected message of kind {kind}")
        for kind in (BATCH, REQUEST, RESPONSE, CALL, 99)
    },
    "another batch": (another_batch, "an answer to batch 2, which is not in flight"),
    "times before it was sent": (before_it_was_sent, "times out of order"),
    "times that fall": (times(-1, -2, 0), "times out of order"),
    "times to come": (times(-1, 0, 10**12), "times out of order"),
    "no results": (lambda peer, batch: peer.results_of(batch, b"", entries=0), "results in 0 entries of 1024 bytes"),
    "results elsewhere": (results_at(FAR, 64), "lies outside of its heap"),
    "results beyond their part": (results_at(0, 1 << 33), "lies outside of its heap"),
    "results beyond all": (results_at((1 << 64) - 64, 64), "lies outside of its heap"),
    "results unwritten": (results_at(26 << 32, BIG), "was not written to its end"),
    "too many results": (too_many_results, "results of more than 1 requests"),
    "another kind among results": (among_results(CALL, 0, 0, 0, 1, 0, 0), f"a message of kind {CALL} among"),
    "an open request": (among_results(OPEN, 0, 0, 0, 1, 0, 0), f"a message of kind {OPEN} among"),
    "an unknown layout": (among_results(RESPONSE, 0, 0, 77, 1, 0, 0), "tensors of the undefined layout 77"),
    "a failure elsewhere": (among_results(FAILURE, 0, 3, 0, 1, 1020, 10), "a text of 10 bytes at byte 1020 of 1024"),
    "a failure too long": (
        among_results(FAILURE, 0, 3, 0, 1, 0, LONGEST_DETAILS + 1),
        f"a text of {LONGEST_DETAILS + 1} bytes, expected at most {LONGEST_DETAILS}",
    ),
    "a layout that is none": (layout_of(b"{}"), "expected list, got dict"),
    "a layout of other texts": (layout_of(b"\xff\x00[[["), "decode"),
    "a layout elsewhere": (lambda peer, batch: ENTRY.pack(TEXT, 0, 0, 0, 0, FAR, 10), "lies outside of its heap"),
    "a layout too long": (
        lambda peer, batch: ENTRY.pack(TEXT, 0, 0, 0, 0, 0, 1 << 40),
        "a text of 1099511627776 bytes",
    ),
}


@pytest.mark.parametrize(("lie", "reason"), MEANINGLESS.values(), ids=MEANINGLESS)
def test_nonsense_breaks_the_instance_and_fails_its_batches_once(peer: Peer, lie: Lie, reason: str) -> None:
    batch = peer.execute()
    peer.end_of_worker.post(lie(peer, batch))
    assert peer.broken_event.wait(PATIENCE_SECONDS)
    (reason_given,) = peer.broken
    assert reason_given.startswith("it sent an invalid message: ") and reason in reason_given
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
    assert peer.broken_event.wait(PATIENCE_SECONDS)
    assert peer.broken == [
        f"it sent an invalid message: the other end of a link reports {lie} bytes posted, but 0 were taken"
    ]


def test_a_worker_that_lies_about_what_it_took_is_broken(peer: Peer) -> None:
    reader = peer.end_of_worker._work
    reader._own_words[reader._taken_at] = 1 << 40
    with pytest.raises(WorkerGone):
        peer.send()
    assert peer.broken_event.wait(PATIENCE_SECONDS)
    assert "reports 1099511627776 of 0 bytes taken" in peer.broken[0]
