"""An instance whose worker says what no right worker would: it is broken with the reason, once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support.instance_peer import Peer, done

from rocserve.workers.entries import (
    BATCH,
    CALL,
    DONE,
    ENTRY,
    ERROR,
    LAYOUT,
    LONGEST_TEXT_BYTES,
    OPEN,
    REQUEST,
    RESPONSE,
    RESULT,
    RESULTS,
    RETURN,
)
from rocserve.workers.instance import WorkerGone
from rocserve.workers.worker_end import ReceivedBatch

FAR = 1 << 62
BIG = 1 << 20

Lie = Callable[[Peer, ReceivedBatch], bytes]


def lone_kind(kind: int) -> Lie:
    return lambda peer, batch: ENTRY.pack(kind, 0, 0, 0, 0, 0, 0)


def behind_done(*fields: int) -> Lie:
    return lambda peer, batch: done(batch) + ENTRY.pack(*fields)


def among_results(*fields: int) -> Lie:
    return lambda peer, batch: peer.results_of(batch, ENTRY.pack(*fields))


def times(first: int, second: int, third: int) -> Lie:
    """Nanoseconds from now."""

    def lie(peer: Peer, batch: ReceivedBatch) -> bytes:
        now = time.monotonic_ns()
        return done(batch, now + first, now + second, now + third) + ENTRY.pack(RESULTS, 0, 0, 0, 0, 0, 0)

    return lie


def layout_of(text: bytes) -> Lie:
    return lambda peer, batch: ENTRY.pack(LAYOUT, 0, 0, 5, *peer.text(text), 0)


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
    "a result of nothing": (lone_kind(RESULT), "a message of kind 18"),
    "a response": (lone_kind(RESPONSE), "a message of kind 4, which it may not send here"),
    "a call": (lone_kind(CALL), "a message of kind 19, which it may not send here"),
    "another batch": (another_batch, "an answer to batch 2, which it does not have"),
    "nothing behind": (lambda peer, batch: done(batch), "a batch is done, and a message of kind 0 follows"),
    "another message behind": (behind_done(RETURN, 0, 0, 0, 0, 0, 0), "a message of kind 6 follows"),
    "times before it was sent": (times(-(10**9), -1, 0), "times that are not in their order"),
    "times that fall": (times(-1, -2, 0), "times that are not in their order"),
    "times to come": (times(-1, 0, 10**12), "times that are not in their order"),
    "no results": (behind_done(RESULTS, 0, 0, 0, 0, 0, 0), "results in 0 entries"),
    "results elsewhere": (behind_done(RESULTS, 0, 0, 0, FAR, 1, 32), "lies outside of its heap"),
    "results beyond their part": (behind_done(RESULTS, 0, 0, 0, 0, 1, 1 << 33), "lies outside of its heap"),
    "results beyond all": (behind_done(RESULTS, 0, 0, 0, (1 << 64) - 64, 1, 64), "lies outside of its heap"),
    "results unwritten": (behind_done(RESULTS, 0, 0, 0, 26 << 32, 1, BIG), "was not written to its end"),
    "too many results": (too_many_results, "a message of kind 18 among the results of 1 requests"),
    "another kind among results": (among_results(RESPONSE, 0, 0, 0, 0, 0, 0), "a message of kind 4 among the results"),
    "an open request": (among_results(RESULT, OPEN, 0, 0, 1, 0, 0), "a message of kind 18 among"),
    "an unknown layout": (
        among_results(RESULT, 0, 0, 77, 0, 0, 0),
        "tensors of layout 77, which it has not defined",
    ),
    "a failure elsewhere": (among_results(RESULT, ERROR, 3, 0, 0, 1020, 10), "a text of 10 bytes at byte 1020 of 1024"),
    "a failure too long": (
        among_results(RESULT, ERROR, 3, 0, 0, 0, LONGEST_TEXT_BYTES + 1),
        f"a text of {LONGEST_TEXT_BYTES + 1} bytes, expected at most {LONGEST_TEXT_BYTES}",
    ),
    "a layout that is none": (layout_of(b"{}"), "expected list, got dict"),
    "a layout of other texts": (layout_of(b"\xff\x00[[["), "decode"),
    "a layout elsewhere": (lambda peer, batch: ENTRY.pack(LAYOUT, 0, 0, 0, FAR, 10, 0), "lies outside of its heap"),
    "a layout too long": (
        lambda peer, batch: ENTRY.pack(LAYOUT, 0, 0, 0, 0, 1 << 40, 0),
        "a text of 1099511627776 bytes",
    ),
}


@pytest.mark.parametrize(("lie", "reason"), MEANINGLESS.values(), ids=MEANINGLESS)
def test_nonsense_breaks_the_instance_and_fails_its_batches_once(peer: Peer, lie: Lie, reason: str) -> None:
    batch = peer.execute()
    peer.end_of_worker.post(lie(peer, batch))
    assert peer.broken_event.wait(5)
    (reason_given,) = peer.broken
    assert reason_given.startswith("it sent what cannot be read: ") and reason in reason_given
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
