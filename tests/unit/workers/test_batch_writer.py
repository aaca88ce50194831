"""Messages of a batch to a worker, and where its inputs lie."""

from __future__ import annotations

import functools
import gc
import weakref

import numpy as np
import pytest
from support.instance_peer import Peer, done
from support.outputs import tensors_of
from support.waiting import wait_until
from support.workers import add_sub_inputs, batch_input, members_of, on_plane

from rocserve.core.datatypes import DataType
from rocserve.core.errors import StatusCode, unavailable
from rocserve.core.request_form import Member
from rocserve.core.tensor_places import PlacedTensors, padded
from rocserve.core.tensors import TensorHead
from rocserve.plane.heap import COPIED_AT_ONCE, SHARES, Heap, HeapFull, SharedHeap
from rocserve.plane.loop import PlaneLoop
from rocserve.workers.batch_inputs import request_inputs
from rocserve.workers.entries import ENTRY, REMEMBERED_LAYOUTS, RESULTS
from rocserve.workers.instance import WorkerGone
from rocserve.workers.worker_end import ReceivedBatch


def test_a_batch_says_whether_its_requests_run_one_by_one(peer: Peer) -> None:
    for grouped in (True, False):
        members = members_of(add_sub_inputs(), ("SUM",), (1,))
        on_plane(
            peer.plane,
            lambda members=members, grouped=grouped: peer.instance.execute(  # type: ignore[misc]
                grouped, members, peer.on_outcome
            ),
        )
        assert peer.take().is_grouped is grouped


def test_inputs_for_which_there_is_no_room(plane: PlaneLoop) -> None:
    peer = Peer(plane, 1 << 16)
    peer.send()
    large = [batch_input("A", np.zeros((1, 1 << 14), np.int32)), batch_input("B", np.zeros((1, 1), np.int32))]
    with pytest.raises(HeapFull, match="no room for") as caught:
        peer.send(large)
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    # What was new to the worker in it is sent again.
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
    assert len(peer.instance.results.layouts._places) <= 2 * REMEMBERED_LAYOUTS
    assert len(peer.end_of_worker._forms) <= 2 * REMEMBERED_LAYOUTS


def large_members() -> list[Member]:
    return members_of([batch_input("A", np.arange(2 * COPIED_AT_ONCE, dtype=np.int32).reshape(1, -1))], ("SUM",), (1,))


def test_large_inputs_are_copied_in_steps_and_batches_keep_their_order(peer: Peer) -> None:
    large, small = large_members(), members_of(add_sub_inputs(), ("SUM",), (1,))
    posted: list[int] = []

    def send() -> None:
        for members in (large, small):
            peer.instance.execute(False, members, peer.on_outcome)
            posted.append(peer.instance._work.posted)

    on_plane(peer.plane, send)
    assert posted == [0, 0]
    first, second = peer.take(), peer.take()
    (data,) = request_inputs(first.requests[0], peer.end_of_worker.inputs)
    assert data == large[0][1][0]
    assert [*map(bytes, request_inputs(second.requests[0], peer.end_of_worker.inputs))] == [*map(bytes, small[0][1])]


def test_inputs_that_lie_in_a_share_of_the_heap_are_named_and_kept_until_the_worker_reports(peer: Peer) -> None:
    """Beside others, which are copied; and those of another version's heap are others."""
    elsewhere = SharedHeap("elsewhere", 1 << 20)
    members, places, shares = [], [], []
    for heap in (peer.inputs, elsewhere):
        ((form, data, _, _),) = members_of(add_sub_inputs(), ("SUM",), (1,))
        share = on_plane(peer.plane, heap.lend)
        slot, view = Heap.of_file(heap.open_for_writing(), share.number, SHARES).place(form.places.end)
        view[:] = b"".join(padded(data))
        placed = PlacedTensors(heap.reader.view, form.places.end, form.places, heap, slot.offset, (share, slot))
        members.append((form, placed, 0, b"details"))
        shares.append(share)
        places.append(slot.offset)
    held = weakref.ref(shares[0])
    on_plane(peer.plane, functools.partial(peer.instance.execute, False, [*members], peer.on_outcome))
    batch = peer.take()
    assert [request.place == place for request, place in zip(batch.requests, places, strict=True)] == [True, False]
    for request in batch.requests:
        a, b = request_inputs(request, peer.end_of_worker.inputs)
        assert [bytes(a), bytes(b)] == [bytes(data) for data in members_of(add_sub_inputs(), ("SUM",), (1,))[0][1]]
        heap = peer.end_of_worker.inputs
        assert heap.view(request.details_place, request.details_bytes) == b"details"
    del members, placed, share, shares
    gc.collect()
    assert held() is not None
    peer.end_of_worker.fail(batch, (batch.taken_ns, batch.taken_ns), unavailable("no"))
    assert peer.arrived.acquire(timeout=10)
    wait_until(lambda: held() is None, "the inputs to be let go")


def test_a_worker_that_ends_while_inputs_are_copied_has_not_had_them(peer: Peer) -> None:
    def send_and_end() -> None:
        peer.instance.execute(False, large_members(), peer.on_outcome)
        peer.instance.end(unavailable("it is over"))

    on_plane(peer.plane, send_and_end)
    assert isinstance(peer.outcomes[0].error, WorkerGone)


def test_an_answer_to_a_batch_that_is_still_being_copied(peer: Peer) -> None:
    peer.finish(peer.execute(), peer.result(bytes(64)))
    assert peer.arrived.acquire(timeout=5)

    def send_and_answer() -> None:
        peer.instance.execute(False, large_members(), peer.on_outcome)
        peer.end_of_worker.post(done(ReceivedBatch(2, False, (), 0)) + ENTRY.pack(RESULTS, 0, 0, 0, 0, 0, 0))
        peer.instance.take_mail()

    on_plane(peer.plane, send_and_answer)
    assert peer.broken == ["it sent what cannot be read: an answer to batch 2, which it does not have"]
