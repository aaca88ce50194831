"""A channel whose other end is the test: faults that no right worker would make, and memory."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.workers import LOG, BatchInput, add_sub_inputs, batch_input, execute, open_descriptors, until

from rocserve.core.datatypes import DataType
from rocserve.core.errors import unavailable
from rocserve.core.plain import to_json
from rocserve.workers import channel as channel_module
from rocserve.workers.batch_outcome import BatchOutcome
from rocserve.workers.channel import SLOTS, Channel, WorkerGone
from rocserve.workers.completion import CompletionThread
from rocserve.workers.memory import LARGEST
from rocserve.workers.messages import ResultLayout, TensorHead
from rocserve.workers.wire import EXECUTE, EXECUTED, HEADER, pack_tail


class Peer:
    """The worker's end, by hand."""

    def __init__(self, completion: CompletionThread) -> None:
        self.completion = completion
        self.broken: list[str] = []
        self.broken_event = threading.Event()
        self.channel = Channel("m", completion, self._on_broken, LOG)
        self.socket = self.channel.take_peer()
        _, (self.memory,), _, _ = socket.recv_fds(self.socket, 100, 10)
        self.channel.open()
        self.outcomes: list[BatchOutcome] = []
        self.arrived = threading.Semaphore(0)

    def _on_broken(self, channel: Channel, reason: str) -> None:
        assert channel is self.channel
        self.broken.append(reason)
        self.broken_event.set()

    def on_outcome(self, outcome: BatchOutcome) -> None:
        self.outcomes.append(outcome)
        self.arrived.release()

    def execute(self, inputs: list[BatchInput] | None = None) -> tuple[int, int]:
        """Start a batch; its slot and id as the worker sees them."""
        execute(self.channel, inputs or add_sub_inputs(), ("SUM",), (1,), self.on_outcome)
        kind, slot, batch_id, *_ = HEADER.unpack_from(self.socket.recv(200_000))
        assert kind == EXECUTE
        return slot, batch_id

    def answer(self, slot: int, batch_id: int, numbers: tuple[int, ...], head: TensorHead) -> None:
        tail = pack_tail(numbers, to_json(ResultLayout((head,))))
        self.answered_ns = time.monotonic_ns()
        times = (self.answered_ns - 2, self.answered_ns - 1, self.answered_ns)
        self.socket.send(HEADER.pack(EXECUTED, slot, batch_id, *times) + tail)

    def end(self) -> None:
        done = threading.Event()
        self.completion.call_soon(lambda: self.channel.end(unavailable("it is over")))
        self.completion.call_soon(done.set)
        assert done.wait(5)


@pytest.fixture
def peer(completion: CompletionThread) -> Iterator[Peer]:
    peer = Peer(completion)
    yield peer
    peer.end()
    peer.socket.close()
    os.close(peer.memory)


def output_of(slot: int) -> int:
    """Where a slot's output memory begins in the file."""
    return (2 * slot + 1) * LARGEST


FIRST = SLOTS - 1
"""The slot of the first batch."""
HEAD = TensorHead("SUM", DataType.INT32, (1, 16))


def test_an_answer_by_hand(peer: Peer) -> None:
    slot, batch_id = peer.execute()
    os.pwrite(peer.memory, b"\x07\x00\x00\x00" * 16, output_of(slot) + 64)
    peer.answer(slot, batch_id, (64, 64), HEAD)
    assert peer.arrived.acquire(timeout=5)
    (tensor,) = peer.outcomes[0].outputs_of(0)
    assert tensor.numpy().tolist() == [[7] * 16]
    times = (peer.outcomes[0].input_end_ns, peer.outcomes[0].compute_end_ns)
    assert times == (peer.answered_ns - 2, peer.answered_ns)
    peer.outcomes[0].release()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"x",
        b"x" * 100,
        HEADER.pack(EXECUTED, SLOTS, 1, 0, 0, 0) + pack_tail((), b"{}"),
        HEADER.pack(EXECUTED, FIRST, 999, 0, 0, 0) + pack_tail((), b"{}"),
        HEADER.pack(EXECUTED, FIRST, 1, 0, 0, 0) + b"\xff\xff\xff\xff",
        HEADER.pack(EXECUTED, FIRST, 1, 0, 0, 0) + pack_tail((1 << 40, 64), to_json(ResultLayout((HEAD,)))),
        HEADER.pack(EXECUTED, FIRST, 1, 0, 0, 0) + pack_tail(((1 << 64) - 64, 64), to_json(ResultLayout((HEAD,)))),
        HEADER.pack(EXECUTE, FIRST, 1, 0, 0, 0) + pack_tail((), b"{}"),
        HEADER.pack(99, FIRST, 1, 0, 0, 0) + pack_tail((), b"{}"),
    ],
)
def test_nonsense_breaks_the_channel_and_fails_its_batches_once(peer: Peer, message: bytes) -> None:
    assert peer.execute() == (FIRST, 1)
    peer.socket.send(message)
    assert peer.broken_event.wait(5)
    assert len(peer.broken) == 1
    assert not peer.outcomes
    with pytest.raises(WorkerGone):
        peer.execute()
    peer.end()
    assert [outcome.error.text for outcome in peer.outcomes if outcome.error] == ["it is over"]
    peer.end()
    assert len(peer.outcomes) == 1
    peer.outcomes[0].release()


def test_an_answer_just_before_the_end_counts(peer: Peer) -> None:
    first = peer.execute()
    peer.execute()
    peer.execute()
    peer.completion.unregister(peer.channel._socket.fileno())  # As if it were late.
    peer.answer(*first, (0, 64), HEAD)
    peer.socket.close()
    peer.end()
    assert [outcome.error is None for outcome in peer.outcomes] == [True, False, False]
    assert peer.outcomes[1].error is not None and peer.outcomes[1].error.text == "it is over"
    assert isinstance(peer.outcomes[2].error, WorkerGone)  # It was not in the engine yet.
    assert peer.outcomes[0].outputs_of(0)[0].shape == (1, 16)
    for outcome in peer.outcomes:
        outcome.release()
    peer.socket = socket.socket()


def test_execute_when_the_other_end_is_closed(peer: Peer) -> None:
    peer.completion.unregister(peer.channel._socket.fileno())
    peer.socket.close()
    for _ in range(5):
        with pytest.raises(WorkerGone):
            execute(peer.channel, add_sub_inputs(), ("SUM",), (1,), peer.on_outcome)
    assert peer.channel.free_slots == SLOTS and not peer.outcomes
    peer.socket = socket.socket()


def test_what_is_released_after_the_end_is_given_back(completion: CompletionThread) -> None:
    before = open_descriptors()
    peer = Peer(completion)
    slot, batch_id = peer.execute()
    peer.execute()
    peer.answer(slot, batch_id, (0, 64), HEAD)
    assert peer.arrived.acquire(timeout=5)
    tensor = peer.outcomes[0].outputs_of(0)[0]
    peer.end()
    assert bytes(tensor.data) == bytes(64)  # Still there to read.
    for outcome in peer.outcomes:
        outcome.release()
    peer.socket.close()
    os.close(peer.memory)
    del tensor, peer, outcome
    assert open_descriptors() <= before


def test_batches_from_many_threads(completion: CompletionThread) -> None:
    """Two threads, each with one batch at a time, against an echo of the input memory's first row."""
    peer = Peer(completion)
    failures: list[object] = []

    def serve() -> None:
        while data := peer.socket.recv(200_000):
            _, slot, batch_id, *_ = HEADER.unpack_from(data)
            row = os.pread(peer.memory, 64, 2 * slot * LARGEST)
            os.pwrite(peer.memory, row, output_of(slot))
            peer.answer(slot, batch_id, (0, 64), HEAD)

    def use(seed: int) -> None:
        for number in range(500):
            done = threading.Event()
            value = seed + number

            def on_outcome(outcome: BatchOutcome, value: int = value, done: threading.Event = done) -> None:
                rows = outcome.outputs_of(0)[0].numpy()
                if outcome.error or not (rows == value).all():
                    failures.append((value, outcome.error))
                outcome.release()
                done.set()

            inputs = [batch_input("A", np.full((1, 16), value, np.int32))]
            execute(peer.channel, inputs, ("SUM",), (1,), on_outcome)
            assert done.wait(5)

    server = threading.Thread(target=serve)
    users = [threading.Thread(target=use, args=(seed,)) for seed in (10_000, 20_000)]
    for thread in (server, *users):
        thread.start()
    for user in users:
        user.join()
    assert not failures and peer.channel.free_slots == SLOTS
    peer.end()
    server.join(5)
    assert not server.is_alive()


async def test_memory_of_a_large_batch_is_given_back_when_idle(
    completion: CompletionThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(channel_module, "TRIM_PERIOD_SECONDS", 0.05)
    peer = Peer(completion)
    size = 32 << 20
    slot, batch_id = peer.execute([batch_input("A", np.ones((1, size), np.uint8))])
    os.pwrite(peer.memory, b"y" * size, output_of(slot))
    peer.answer(slot, batch_id, (0, size), TensorHead("SUM", DataType.UINT8, (1, size)))
    assert peer.arrived.acquire(timeout=5)

    def used() -> int:
        return os.fstat(peer.memory).st_blocks * 512

    assert used() >= 2 * size
    tensor = peer.outcomes[0].outputs_of(0)[0]
    threading.Event().wait(0.3)
    assert used() >= 2 * size and bytes(tensor.data[-1:]) == b"y"  # Still being read.
    peer.outcomes[0].release()
    await until(lambda: used() <= 4 << 20)
    assert not caplog.records
    peer.end()
