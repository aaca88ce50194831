"""Inputs in a client's file, or in another worker's heap: what a worker reads in place, and for how long it may."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from support.instance_peer import Peer
from support.shared_memory import GUARD, SharedFile, shared_file
from support.waiting import PATIENCE_SECONDS, until, wait_until
from support.workers import BatchInput, Workshop, batch_input, members_of, on_plane, open_descriptors, pids, run_add_sub

from rocserve.core.datatypes import DataType
from rocserve.core.errors import StatusCode, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Member
from rocserve.core.tensor_places import PlacedTensors
from rocserve.links.files import PassedFiles
from rocserve.links.opening import SERVER_RINGS, WORK
from rocserve.plane.guarded_mapping import GuardedFile
from rocserve.plane.heap import Heap, HeapReader, Slot
from rocserve.plane.loop import PlaneLoop
from rocserve.scheduling.instances import MOST_AHEAD
from rocserve.workers.batch_inputs import BatchGatherer, request_inputs
from rocserve.workers.results import BatchOutcome
from rocserve.workers.worker_end import ReceivedBatch, ServerGone

COUNT = 2048
"""Elements of an input: so many that reading them in place is cheaper than copying."""
BEGIN = 4096
"""Offset of the inputs in the file."""
KINDS = {DataType.FP32: np.float32, DataType.INT32: np.int32}


@pytest.fixture
def peer(plane: PlaneLoop) -> Iterator[Peer]:
    peer = Peer(plane)
    yield peer
    peer.end()
    peer.close()


@pytest.fixture
def file() -> Iterator[SharedFile]:
    with shared_file(1 << 16, "given") as made:
        yield made


def opened(file: SharedFile) -> GuardedFile:
    descriptor = os.open(file.path, os.O_RDWR)
    return GuardedFile(GUARD, descriptor, file.path.stat().st_size, to_write=True)


def inputs_of(datatype: DataType) -> list[BatchInput]:
    return [batch_input("A", np.zeros((1, COUNT), KINDS[datatype]))]


def in_file(file: GuardedFile, datatype: DataType = DataType.FP32) -> Member:
    """A request whose one input lies in a file."""
    ((form, _, _, _),) = members_of(inputs_of(datatype), ("SUM",), (1,))
    return form, PlacedTensors(file.view, form.places.end, form.places, file, BEGIN, file), 0, b""


def execute(peer: Peer, *members: Member) -> ReceivedBatch:
    peer.submit(members)
    return peer.take()


def end(peer: Peer, batch: ReceivedBatch) -> None:
    peer.end_of_worker.fail(batch, (batch.taken_ns, batch.taken_ns), unavailable("no"))
    assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
    # The plane's thread releases the batch and its file after it has reported the outcome.
    on_plane(peer.plane, lambda: None)


def seen(peer: Peer, batch: ReceivedBatch) -> bytes:
    """The first bytes of its request's input, as the worker reads them."""
    (request,) = batch.requests
    (data,) = request_inputs(request, peer.end_of_worker.files)
    assert len(data) == 4 * COUNT
    return bytes(data[:4])


def test_an_input_is_read_where_it_lies_and_cannot_be_written(peer: Peer, file: SharedFile) -> None:
    batch = execute(peer, in_file(opened(file)))
    file.put(BEGIN, b"abcd")
    assert seen(peer, batch) == b"abcd"
    (request,) = batch.requests
    assert request_inputs(request, peer.end_of_worker.files)[0].readonly
    end(peer, batch)


def test_a_file_is_given_once_and_let_go_of_when_nobody_holds_it(peer: Peer, file: SharedFile) -> None:
    first, second = opened(file), opened(file)
    for held in (first, second, first):
        batch = execute(peer, in_file(held))
        assert batch.requests[0].file == (1 if held is first else 2)
        end(peer, batch)
    assert sorted(peer.end_of_worker.files) == [0, 1, 2]
    del first, held
    gc.collect()
    batch = execute(peer, in_file(second))
    assert sorted(peer.end_of_worker.files) == [0, 2]
    assert seen(peer, batch) == bytes(4)
    end(peer, batch)


def test_a_file_stays_for_its_batch_when_it_is_let_go_of_meanwhile(peer: Peer, file: SharedFile) -> None:
    file.put(BEGIN, b"abcd")
    held = opened(file)
    batch = execute(peer, in_file(held))
    del held
    gc.collect()
    assert 1 in peer.end_of_worker.files
    assert seen(peer, batch) == b"abcd"
    end(peer, batch)
    del batch
    with shared_file(1 << 16, "next") as other:
        end(peer, execute(peer, in_file(opened(other))))
    assert sorted(peer.end_of_worker.files) == [0, 2]


def test_an_input_is_read_in_another_workers_heap_for_as_long_as_somebody_holds_it(peer: Peer) -> None:
    heap = Heap("other", 1 << 20)
    reader = HeapReader(heap.open_for_reading())
    ((form, _, _, _),) = members_of(inputs_of(DataType.FP32), ("SUM",), (1,))
    offset, view = heap.allocate(form.places.end)
    returned: list[int] = []
    slot = Slot(returned.append, offset, reader)
    data = PlacedTensors(reader.view, form.places.end, form.places, reader, offset, slot)
    view[:4] = b"abcd"
    batch = execute(peer, (form, data, 0, b""))
    del data, slot
    assert batch.requests[0].file == 1
    assert seen(peer, batch) == b"abcd"
    assert returned == []
    end(peer, batch)
    peer.release()
    assert returned == [offset]
    reader.close()
    del reader, batch
    gc.collect()
    end(peer, execute(peer, *members_of(inputs_of(DataType.FP32), ("SUM",), (1,))))
    assert sorted(peer.end_of_worker.files) == [0]
    assert sum("memfd:other" in target for _, target in open_descriptors()) == 1, "its owner's alone"


def test_an_input_in_a_heap_that_has_been_let_go_of_is_copied(peer: Peer) -> None:
    heap = Heap("other", 1 << 20)
    reader = HeapReader(heap.open_for_reading())
    ((form, _, _, _),) = members_of(inputs_of(DataType.FP32), ("SUM",), (1,))
    offset, view = heap.allocate(form.places.end)
    view[:4] = b"abcd"
    block = reader.view(offset, form.places.end)
    reader.close()
    data = PlacedTensors(lambda *_: block, form.places.end, form.places, reader, offset, None)
    batch = execute(peer, (form, data, 0, b""))
    assert (batch.requests[0].file, seen(peer, batch)) == (0, b"abcd")
    end(peer, batch)


def test_a_file_that_no_batch_names_is_forgotten(peer: Peer, file: SharedFile) -> None:
    held = opened(file)
    assert on_plane(peer.plane, partial(peer.instance._files.number, held)) == 1
    del held
    gc.collect()
    with shared_file(1 << 16, "next") as other:
        end(peer, execute(peer, in_file(opened(other))))
    assert sorted(peer.end_of_worker.files) == [0, 2]


def test_a_busy_worker_gets_its_batches_however_many_files_are_forgotten_meanwhile(
    peer: Peer, file: SharedFile
) -> None:
    """And it forgets all of them in the end, without a further batch."""
    count = SERVER_RINGS[WORK] + 12
    held = [opened(file) for _ in range(count)]
    end(peer, execute(peer, *[in_file(one) for one in held]))
    assert len(peer.end_of_worker.files) == 1 + count
    busy = execute(peer, in_file(held[0]))
    held.clear()
    gc.collect()
    on_plane(peer.plane, lambda: None)
    waiting = inputs_of(DataType.INT32)
    for _ in range(MOST_AHEAD):
        peer.submit(members_of(waiting, ("SUM",), (1,)))
    end(peer, busy)
    del busy
    for _ in range(MOST_AHEAD):
        end(peer, peer.take())
    idle = threading.Thread(target=lambda: list(peer._batches))
    idle.start()
    wait_until(lambda: list(peer.end_of_worker.files) == [0], "the end of all files")
    peer.end_of_worker.stop()
    idle.join(PATIENCE_SECONDS)


def test_a_worker_that_may_open_no_more_files_fails(peer: Peer, file: SharedFile) -> None:
    peer.submit([in_file(opened(file))])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="a client's file was lost"):
            peer.take()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_worker_that_has_lost_a_file_ends_and_another_runs_the_next_batch(
    workshop: Workshop, file: SharedFile
) -> None:
    group = await workshop.serving()
    (pid,) = pids(group)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
    ended: asyncio.Future[BatchOutcome] = asyncio.get_running_loop().create_future()
    (instance,), member = group.instances, in_file(opened(file))

    def on_outcome(outcome: BatchOutcome) -> None:
        ended.get_loop().call_soon_threadsafe(ended.set_result, outcome)

    on_plane(workshop.plane, lambda: instance.execute(False, [member], on_outcome))
    error = (await ended).error
    assert error is not None and error.code is StatusCode.UNAVAILABLE
    await until(lambda: workshop.events.recoveries == 1)
    assert pids(group) != [pid]
    assert (await run_add_sub(group.instances[0])).error is None


def test_a_worker_does_not_wait_for_a_file_when_its_server_is_gone(peer: Peer) -> None:
    peer.end_of_worker.stop()
    with pytest.raises(ServerGone):
        peer.end_of_worker._await_file(1)


def test_a_file_that_cannot_be_given_has_its_inputs_copied(
    peer: Peer, file: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.put(BEGIN, b"abcd")
    monkeypatch.setattr("rocserve.links.files._MOST_FILES", 1)
    first, second = opened(file), opened(file)
    for held, number in ((first, 1), (second, 0)):
        batch = execute(peer, in_file(held))
        assert (batch.requests[0].file, seen(peer, batch)) == (number, b"abcd")
        end(peer, batch)
    here, _there = socket.socketpair()
    with pytest.raises(BlockingIOError):
        while True:
            here.send(b"!", socket.MSG_DONTWAIT)
    assert PassedFiles(here, lambda number: None).number(first) == 0


@pytest.mark.parametrize(
    ("datatype", "reads_files", "is_seen"),
    [(DataType.FP32, True, True), (DataType.FP32, False, False), (DataType.INT32, True, False)],
)
def test_a_model_sees_the_file_itself_where_that_is_safe(
    peer: Peer, file: SharedFile, datatype: DataType, reads_files: bool, is_seen: bool
) -> None:
    gatherer = BatchGatherer(peer.end_of_worker, ModelConfig("m", max_batch_size=8), lambda rows, _: {}, reads_files)
    received = execute(peer, in_file(opened(file), datatype))
    batch = gatherer.batch(received.requests)
    file.put(BEGIN, b"abcd")
    assert bytes(batch.inputs["A"].data[:4]) == (b"abcd" if is_seen else bytes(4))
    end(peer, received)


def test_a_batch_of_several_is_gathered_from_files_and_the_heap(peer: Peer, file: SharedFile) -> None:
    file.put(BEGIN, b"abcd")
    gatherer = BatchGatherer(peer.end_of_worker, ModelConfig("m", max_batch_size=8), lambda rows, _: {}, True)
    lying = in_file(opened(file))
    received = execute(peer, lying, (lying[0], [b"wxyz" * COUNT], 0, b""))
    data = bytes(gatherer.batch(received.requests).inputs["A"].data)
    assert (data[:4], data[4 * COUNT : 4 * COUNT + 4], len(data)) == (b"abcd", b"wxyz", 8 * COUNT)
    end(peer, received)


def test_a_file_that_is_cut_is_whole_again_when_it_is(peer: Peer, file: SharedFile) -> None:
    held = opened(file)
    for cut, content in ((0, bytes(4)), (1 << 16, b"abcd")):
        file.cut(cut)
        if cut:
            file.put(BEGIN, content)
        batch = execute(peer, in_file(held))
        assert seen(peer, batch) == content
        end(peer, batch)
