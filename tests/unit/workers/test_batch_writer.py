"""Messages of a batch to a worker, and the places of its inputs; a batch's requests taken apart in the worker, and
their results put together."""

from __future__ import annotations

import gc
import struct
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.instance_peer import Peer, done
from support.outputs import tensors_of
from support.waiting import PATIENCE_SECONDS, wait_until
from support.workers import add_sub_inputs, batch_input, members_of, on_plane

from rocserve.backends.base import Batch
from rocserve.backends.request_model import Answer, ModelResponse
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, invalid_argument, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import (
    InferRequest,
    InputHead,
    Member,
    RequestForm,
    RequestHead,
    RequestLayout,
    client_parameters,
)
from rocserve.core.sequences import SequenceTag
from rocserve.core.tensor_places import PlacedTensors, ScatteredTensors, padded
from rocserve.core.tensors import Tensor, TensorHead, tensor_from_numpy
from rocserve.links.details import NO_DETAILS, read_details, write_details
from rocserve.links.texts import REMEMBERED
from rocserve.plane.heap import COPIED_AT_ONCE, SHARES, Heap, HeapFull, HeapReader, SharedHeap, Slot
from rocserve.plane.loop import PlaneLoop
from rocserve.workers import worker_end
from rocserve.workers.batch_inputs import BatchGatherer, request_inputs, split_sample
from rocserve.workers.instance import WorkerGone
from rocserve.workers.result_writer import answer_results
from rocserve.workers.results import BatchOutcome
from rocserve.workers.worker_end import ReceivedBatch


def test_a_batch_says_whether_its_requests_run_one_by_one(peer: Peer) -> None:
    for grouped in (True, False):
        peer.submit(members_of(add_sub_inputs(), ("SUM",), (1,)), grouped)
        assert peer.take().is_grouped is grouped


def test_inputs_for_which_there_is_no_room(plane: PlaneLoop) -> None:
    peer = Peer(plane, 1 << 16)
    peer.send()
    large = [batch_input("A", np.zeros((1, 1 << 14), np.int32)), batch_input("B", np.zeros((1, 1), np.int32))]
    with pytest.raises(HeapFull, match="no room for") as caught:
        peer.send(large)
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    # Layouts that were new to the worker in it are sent again.
    batch = [peer.take(), peer.execute()][1]
    peer.finish(batch, peer.result(bytes(64)))
    assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
    assert peer.outcomes[0].error is None
    peer.end()


def test_a_batch_that_cannot_be_written_defines_no_layout(peer: Peer) -> None:
    """Its new layouts are sent with the next batch that has them."""
    good, bad = (members_of([batch_input(name, np.zeros((1, 2), np.int32))], ("SUM",), (1,))[0] for name in "AB")
    with pytest.raises(ServeError, match="needs 8 bytes, got 3"):
        peer.submit([good, (bad[0], [b"123"], 0, b"")])
    peer.submit([bad, good])
    assert [one.form.layout.inputs[0].name for one in peer.take().requests] == ["B", "A"]


def test_layouts_beyond_all_that_are_remembered(peer: Peer) -> None:
    for turn in range(2):
        for width in range(REMEMBERED + 20):
            batch = peer.execute([batch_input("A", np.full((1, width + 1), turn, np.int32))])
            (data,) = request_inputs(batch.requests[0], peer.end_of_worker.files)
            assert batch.requests[0].form.layout.inputs[0].shape == (1, width + 1)
            peer.finish(batch, peer.result(bytes(data), TensorHead("SUM", DataType.INT32, (1, width + 1))))
            assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
            assert peer.outcomes[0].error is None
            assert tensors_of(peer.outcomes[0].outputs_of(0))[0].numpy().tolist() == [[turn] * (width + 1)]
            peer.release()
    assert len(peer.instance._writer._forms) <= REMEMBERED
    assert len(peer.instance.results.layouts._places) <= REMEMBERED
    assert len(peer.end_of_worker._forms) <= REMEMBERED


def of_another_front_end(member: Member) -> Member:
    """Requests whose heads, and all that is computed from them, are separate objects."""
    form, *others = member
    return (RequestForm(form.layout), *others)


def test_requests_of_equal_layouts_are_of_one_form_to_the_worker(peer: Peer) -> None:
    """The worker gathers requests of one form directly into its engine's memory."""
    (member,) = members_of(add_sub_inputs(), ("SUM",), (1,))
    for members in ([member, of_another_front_end(member)], [of_another_front_end(member)]):
        peer.submit(members)
    forms = {request.form for _ in range(2) for request in peer.take().requests}
    assert [form.layout for form in forms] == [member[0].layout]
    assert len(peer.end_of_worker._forms) == 1


def test_requests_of_several_sizes_are_gathered_in_the_engines_memory(peer: Peer) -> None:
    memory = {name: memoryview(bytearray(1 << 12)) for name in "AB"}
    asked: list[int] = []
    gatherer = BatchGatherer(
        peer.end_of_worker, ModelConfig("m", max_batch_size=8), lambda rows, _: asked.append(rows) or memory, False
    )
    rows = [np.full((count, 16), count, np.int32) for count in (1, 3, 2)]
    members = [
        item for one in rows for item in members_of([batch_input(name, one) for name in "AB"], ("SUM",), (len(one),))
    ]
    peer.submit(members)
    batch = gatherer.batch(peer.take().requests)
    assert (asked, batch.request_sizes) == ([6], (1, 3, 2))
    for name in "AB":
        memory[name][:4] = b"\1\0\0\1"
        values = batch.inputs[name].numpy()
        assert values[0, 0] == (1 << 24) + 1
        assert values[1:].tolist() == np.concatenate(rows)[1:].tolist()


def test_the_first_batch_of_a_lane_may_have_no_values(peer: Peer) -> None:
    """It was gathered in read-only memory, until a batch with values had come."""
    gatherer = BatchGatherer(peer.end_of_worker, ModelConfig("m"), lambda rows, _: {}, False)
    batch = gatherer.batch(peer.execute([batch_input("A", np.zeros((0, 3), np.int32))]).requests)
    assert batch.inputs["A"].numpy().shape == (0, 3)


def test_batches_of_all_sizes_are_gathered_in_the_same_memory(peer: Peer) -> None:
    """Each size had its own memory, which stayed: 64 requests kept memory for 2,080."""
    gatherer = BatchGatherer(peer.end_of_worker, ModelConfig("m", max_batch_size=64), lambda rows, _: {}, False)
    tracemalloc.start()
    try:
        for count in (*range(2, 17), *range(16, 1, -1)):
            rows = np.arange(count * 16384, dtype=np.int32).reshape(count, -1)
            members = [
                one
                for row in rows[:, None]
                for one in members_of([batch_input("A", row), batch_input("B", row[:, :1] + 1)], ("SUM",), (1,))
            ]
            peer.submit(members)
            received = peer.take()
            batch = gatherer.batch(received.requests)
            assert batch is gatherer.batch(received.requests)
            for name, expected in (("A", rows), ("B", rows[:, :1] + 1)):
                np.testing.assert_array_equal(batch.inputs[name].numpy(), expected)
            peer.finish(received, *[peer.result(bytes(4))] * count)
            assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
            peer.release()
        del rows, members, received, batch, expected
        assert tracemalloc.get_traced_memory()[0] < 2 * 16 * 65536
    finally:
        tracemalloc.stop()


def test_a_layout_that_the_worker_has_forgotten_is_sent_again(peer: Peer) -> None:
    """Also if its forms were different objects each time."""
    (one,) = members_of([batch_input("A", np.zeros((1, 1), np.int32))], ("SUM",), (1,))
    for width in range(2, REMEMBERED + 200):
        (wide,) = members_of([batch_input("A", np.zeros((1, width), np.int32))], ("SUM",), (1,))
        members = [of_another_front_end(wide), of_another_front_end(one)]
        peer.submit(members)
        batch = peer.take()
        assert [request.form.layout for request in batch.requests] == [wide[0].layout, one[0].layout]
        peer.finish(batch, *[peer.result(bytes(4))] * 2)
        assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
        peer.release()
    assert len(peer.instance._writer._texts) <= REMEMBERED


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
    (data,) = request_inputs(first.requests[0], peer.end_of_worker.files)
    assert data == large[0][1][0]
    assert [*map(bytes, request_inputs(second.requests[0], peer.end_of_worker.files))] == [*map(bytes, small[0][1])]


def test_inputs_that_lie_in_a_share_of_the_heap_are_named_and_kept_until_the_worker_reports(peer: Peer) -> None:
    """Next to inputs that are copied; and inputs in another version's heap are not named."""
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
    peer.submit(members)
    batch = peer.take()
    assert [request.place == place for request, place in zip(batch.requests, places, strict=True)] == [True, False]
    for request in batch.requests:
        a, b = request_inputs(request, peer.end_of_worker.files)
        assert [bytes(a), bytes(b)] == [bytes(data) for data in members_of(add_sub_inputs(), ("SUM",), (1,))[0][1]]
        heap = peer.end_of_worker.inputs
        assert heap.view(request.details_place, request.details_bytes) == b"details"
    del members, placed, share, shares
    gc.collect()
    assert held() is not None
    peer.end_of_worker.fail(batch, (batch.taken_ns, batch.taken_ns), unavailable("no"))
    assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
    wait_until(lambda: held() is None, "the inputs to be let go")


class NextStep:
    """A request to an ensemble's step: its input WIDE lies in the heap of the worker before."""

    def __init__(self, number: int = 0) -> None:
        self.heap = Heap("the worker before", 1 << 20)
        self.reader = HeapReader(self.heap.open_for_reading())
        self.arrays = [np.arange(2) + number, np.full((2, 40), number, np.float32), np.arange(3, dtype=np.int8)]
        self.heads = tuple(
            TensorHead(name, datatype, array.shape)
            for name, datatype, array in zip(
                ("N", "WIDE", "M"), (DataType.INT64, DataType.FP32, DataType.INT8), self.arrays, strict=True
            )
        )
        place, view = self.heap.allocate(self.arrays[1].nbytes)
        view[:] = self.data[1]
        self.slot = Slot(self.heap.free, place, self.reader)
        form = RequestForm(RequestLayout(self.heads, ("SUM",), 2))
        elsewhere = {1: (self.reader, place)}
        self.member: Member = (form, ScatteredTensors(self.data, elsewhere, self.slot), number, b"details")

    @property
    def data(self) -> list[bytes]:
        return [array.tobytes() for array in self.arrays]

    def write_again(self) -> bytes:
        """Change the tensor, as no worker does, to show where it is read."""
        view = self.heap.view(self.slot.offset, self.arrays[1].nbytes)
        view[:] = changed = np.full((2, 40), -1, np.float32).tobytes()
        return changed


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("sees_requests", [False, True])
def test_an_input_is_read_in_the_heap_of_the_step_before(plane: PlaneLoop, sees_requests: bool, is_ours: bool) -> None:
    """But not by a Python model of the user's."""
    peer = Peer(plane, 1 << 24, (lambda call, opened: None) if sees_requests else None, is_ours)
    near, far = members_of(add_sub_inputs(), ("SUM",), (1,))[0], NextStep(7)
    peer.submit([near, far.member, near])
    batch, files = peer.take(), peer.end_of_worker.files
    expected = far.data
    if is_ours or not sees_requests:
        expected[1] = far.write_again()
    for request, data in zip(batch.requests, (near[1], expected, near[1]), strict=True):
        assert [*map(bytes, request_inputs(request, files))] == [*map(bytes, data)]
    second = batch.requests[1]
    assert second.number == 7
    assert bytes(files[0].view(second.details_place, second.details_bytes)) == b"details"
    peer.end()
    peer.end_of_worker.close()


@pytest.mark.parametrize("reads_files", [False, True])
def test_requests_with_inputs_in_the_heap_of_the_step_before_are_joined(peer: Peer, reads_files: bool) -> None:
    first, second = NextStep(1), NextStep(2)
    peer.submit([first.member, second.member])
    batch = peer.take()
    config = ModelConfig("m", max_batch_size=8)
    gatherer = BatchGatherer(peer.end_of_worker, config, lambda rows, sizes: {}, reads_files)
    for requests, steps in ((batch.requests, (first, second)), (batch.requests[:1], (first,))):
        joined = gatherer.batch(requests)
        for index, head in enumerate(first.heads):
            expected = np.concatenate([one.arrays[index] for one in steps])
            np.testing.assert_array_equal(joined.inputs[head.name].numpy(), expected)
    # The last batch has one request, whose input is read in place if the model reads files.
    first.write_again()
    assert (joined.inputs["WIDE"].numpy()[0, 0] == -1) is np.bool_(reads_files)


def test_the_heap_of_the_step_before_keeps_an_input_until_the_batch_is_done(peer: Peer) -> None:
    step = NextStep()
    held = weakref.ref(step.slot)
    peer.submit([step.member])
    batch = peer.take()
    del step
    gc.collect()
    assert held() is not None
    peer.end_of_worker.fail(batch, (batch.taken_ns, batch.taken_ns), unavailable("no"))
    assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
    wait_until(lambda: held() is None, "the input to be released")


def test_a_worker_that_ends_while_inputs_are_copied_has_not_had_them(peer: Peer) -> None:
    def send_and_end() -> None:
        peer.instance.execute(False, large_members(), peer.on_outcome)
        peer.instance.end(unavailable("it is over"))

    on_plane(peer.plane, send_and_end)
    assert isinstance(peer.outcomes[0].error, WorkerGone)


def test_an_answer_to_a_batch_that_is_still_being_copied(peer: Peer) -> None:
    peer.finish(peer.execute(), peer.result(bytes(64)))
    assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)

    def send_and_answer() -> None:
        peer.instance.execute(False, large_members(), peer.on_outcome)
        peer.end_of_worker.post(done(ReceivedBatch(2, False, (), 0), 0, 0))
        peer.instance.take_mail()

    on_plane(peer.plane, send_and_answer)
    assert peer.broken == ["it sent an invalid message: an answer to batch 2, which is not in flight"]


def batch_of(inputs: dict[str, Tensor], sizes: tuple[int, ...]) -> Batch:
    return Batch(inputs, ("OUT",), sizes)


def test_each_request_of_a_sample_gets_its_rows() -> None:
    numbers = np.arange(12, dtype=np.int16).reshape(6, 2)
    words = np.array([[b"a"], [b""], [b"ccc"], [b"d"], [b"ee"], [b"f"]], dtype=object)
    inputs = {"N": tensor_from_numpy("N", numbers), "W": tensor_from_numpy("W", words)}
    requests = split_sample(batch_of(inputs, (1, 3, 2)))
    assert [request["N"].numpy().tolist() for request in requests] == [
        numbers[:1].tolist(),
        numbers[1:4].tolist(),
        numbers[4:].tolist(),
    ]
    assert [request["W"].numpy().ravel().tolist() for request in requests] == [
        [b"a"],
        [b"", b"ccc", b"d"],
        [b"ee", b"f"],
    ]
    requests[0]["N"].numpy()[:] = 99
    assert numbers[0].tolist() == [0, 1]


def test_a_request_alone_keeps_its_shape() -> None:
    (request,) = split_sample(batch_of({"N": tensor_from_numpy("N", np.zeros((4, 5), np.float64))}, (1,)))
    assert request["N"].shape == (4, 5)


def test_details_travel() -> None:
    head = RequestHead("m", "", (InputHead("X", "INT8", (1,)),), parameters={"mine": "x", "priority": 1})
    written = [
        write_details(InferRequest(head, "id \N{SNOWMAN}", [])),
        write_details(InferRequest(head, "", [], sequence=SequenceTag(2**64 - 1, ends=True))),
        write_details(InferRequest(head, "r", [], sequence=SequenceTag("thread \N{SNOWMAN}", starts=True))),
    ]
    assert [read_details(data)[:4] for data in written] == [
        ("id \N{SNOWMAN}", 0, 0, ""),
        ("", 2**64 - 1, 2, ""),
        ("r", "thread \N{SNOWMAN}", 1, ""),
    ]
    assert write_details(InferRequest(head, "", [])) == b""
    assert read_details(b"") == NO_DETAILS
    assert client_parameters(head) == {"mine": "x"}


@pytest.mark.parametrize("end", [3, 15, 18, -1])
def test_damaged_details_are_refused(end: int) -> None:
    written = write_details(InferRequest(RequestHead("m", "", ()), "identity", []))
    with pytest.raises(ValueError, match=r"the (names in the )?details of a request"):
        read_details(written[:end])


def test_an_id_that_is_longer_than_its_details_is_refused() -> None:
    with pytest.raises(ValueError, match="end at byte 55 of 33"):
        read_details(struct.pack("<QBIIII", 0, 0, 30, 0, 0, 0) + b"identity")


@pytest.fixture
def both(plane: PlaneLoop) -> Iterator[Peer]:
    """An instance of a model that sees each request separately."""
    peer = Peer(plane, 1 << 24, lambda call, opened: None)
    yield peer
    peer.end()
    peer.end_of_worker.close()


def answered(peer: Peer, answers: Sequence[Answer | None]) -> BatchOutcome:
    """What the server reads of these answers to a batch."""
    form = RequestForm(RequestLayout((TensorHead("N", DataType.INT32, (1,)),), ("N",), 1))
    peer.submit([(form, [memoryview(bytes(4))], 0, b"") for _ in answers])
    batch, end = peer.take(), peer.end_of_worker
    end.finish(batch, (batch.taken_ns, batch.taken_ns), answer_results(end.sender, answers))
    assert peer.arrived.acquire(timeout=PATIENCE_SECONDS)
    return peer.outcomes[-1]


def test_inputs_and_details_of_requests_side_by_side(both: Peer) -> None:
    heads = (TensorHead("N", DataType.INT64, (2,)), TensorHead("M", DataType.INT8, (3,)))
    words = (*heads, TensorHead("W", DataType.BYTES, (2,)))
    head = RequestHead("m", "", ())
    members, expected = [], []
    for number, form in enumerate(RequestForm(RequestLayout(one, ("A",), 1)) for one in (heads, words)):
        text = tensor_from_numpy("W", np.array([b"x" * 1000, b""], dtype=object))
        data = [np.full(2, number, np.int64).tobytes(), b"abc", bytes(text.data)][: 2 + number]
        details = write_details(InferRequest(head, f"id{number}", []))
        members.append((form, [memoryview(one) for one in data], number, details))
        expected.append((data, f"id{number}"))
    both.submit(members)
    batch = both.take()
    heap = both.end_of_worker.inputs
    for request, (data, name) in zip(batch.requests, expected, strict=True):
        assert [bytes(part) for part in request_inputs(request, both.end_of_worker.files)] == data
        assert read_details(bytes(heap.view(request.details_place, request.details_bytes))).request_id == name
    assert [request.number for request in batch.requests] == [0, 1]


def test_large_layouts_are_of_one_batch_each(both: Peer) -> None:
    """A client may send thousands of different layouts."""
    heads = (TensorHead("N", DataType.INT64, (1,)),)
    large = RequestForm(RequestLayout(heads, ("A",), 1, parameters={f"p{number}": number for number in range(5000)}))
    small = RequestForm(RequestLayout(heads, ("A",), 1))
    for _ in range(2):
        both.submit([(form, [bytes(8)], 0, b"") for form in (large, small, large)])
        batch = both.take()
        layouts = [request.form.layout for request in batch.requests]
        assert layouts == [large.layout, small.layout, large.layout]
        assert list(both.instance._writer._forms) == [small]
        assert len(both.end_of_worker._forms) == 1


def test_results_travel_through_shared_memory(both: Peer) -> None:
    for length in (2, 50_000, 2):
        values = np.arange(length, dtype=np.float32)
        words = tensor_from_numpy("W", np.array([b"x" * length], dtype=object))
        outcome = answered(
            both,
            [
                ModelResponse([tensor_from_numpy("N", values), words], {"k": 1}),
                None,
                invalid_argument("no"),
                ModelResponse([]),
                ModelResponse([tensor_from_numpy("N", values * 2)]),
                ModelResponse([tensor_from_numpy("N", values * 3)]),
                ModelResponse([]),
                ModelResponse([]),
            ],
        )
        assert outcome.open == {1}
        assert {index: error.text for index, error in outcome.failures.items()} == {2: "no"}
        assert outcome.parameters == {0: {"k": 1}}
        outputs = [tensors_of(outcome.outputs_of(index)) for index in range(8)]
        assert [len(tensors) for tensors in outputs] == [2, 0, 0, 0, 1, 1, 0, 0]
        assert np.array_equal(outputs[4][0].numpy(), values * 2)
        assert np.array_equal(outputs[5][0].numpy(), values * 3)
        assert outputs[0][1].numpy().tolist() == [b"x" * length]
        del outcome
        both.release()


def test_a_result_of_more_than_may_be_unread_waits_for_large_ones_only(
    both: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small results before it, which the server has read, may wait there to be released together."""
    monkeypatch.setattr(worker_end, "_MOST_UNREAD_BYTES", 1 << 20)
    large = np.arange(1 << 19, dtype=np.float32)

    def comes_back(values: np.ndarray) -> bool:
        outcome = answered(both, [ModelResponse([tensor_from_numpy("N", values)])])
        return np.array_equal(tensors_of(outcome.outputs_of(0))[0].numpy(), values)

    with ThreadPoolExecutor() as threads:
        for values in (large[:4], large, large[:4], large):
            assert threads.submit(comes_back, values).result(timeout=PATIENCE_SECONDS)
            both.release()
        assert comes_back(large)
        waiting = threads.submit(comes_back, large)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)
        both.release()
        assert waiting.result(timeout=PATIENCE_SECONDS)


def test_room_for_a_batch_that_runs_is_not_waited_for_by_the_one_before(
    both: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_end, "_MOST_UNREAD_BYTES", 1 << 20)
    nbytes = 3 << 19
    with ThreadPoolExecutor() as threads:
        rooms = [threads.submit(both.end_of_worker.reserve, nbytes).result(timeout=PATIENCE_SECONDS) for _ in range(2)]
        assert rooms[0][0] != rooms[1][0]
        answers = [ModelResponse([tensor_from_numpy("N", np.zeros(nbytes // 4, np.float32))])]
        outcome = threads.submit(answered, both, answers).result(timeout=PATIENCE_SECONDS)
        assert len(tensors_of(outcome.outputs_of(0))) == 1
    for place, _ in rooms:
        both.end_of_worker.give_up(place)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            ModelResponse([Tensor("N", DataType.INT32, (4,), bytes(12))]),
            "output 'N' of shape [4] needs 16 bytes, got 12",
        ),
        (
            ModelResponse([], {"k": "x" * (1 << 20)}),
            "names, shapes and parameters together take 1048584 bytes, at most 1048576 can be sent",
        ),
    ],
)
def test_a_response_that_cannot_be_sent_fails_its_request(both: Peer, bad: ModelResponse, text: str) -> None:
    outcome = answered(both, [bad, ModelResponse([tensor_from_numpy("N", np.zeros(3, np.int32))])])
    assert (outcome.failures[0].code, outcome.failures[0].text) == (StatusCode.INTERNAL, text)
    assert len(tensors_of(outcome.outputs_of(1))) == 1


def test_damaged_strings_of_a_sample_are_refused() -> None:
    """This engine reads its input from a file."""
    words = tensor_from_numpy("W", np.array([[b"a"], [b"b"]], dtype=object))
    damaged = Tensor("W", words.datatype, (2, 1), bytes(words.data)[:-1])
    with pytest.raises(ServeError, match="incomplete string data"):
        split_sample(batch_of({"W": damaged}, (1, 1)))
