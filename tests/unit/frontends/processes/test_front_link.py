"""A front end's link between two loops: requests, answers, clients that leave, ends that close."""

from __future__ import annotations

import gc
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from support.front_link import TOGETHER, Client, Ends, request_of
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, invalid_argument, unavailable
from rocserve.core.parameters import ParameterValue
from rocserve.core.request_memory import MemoryFull, RequestMemory
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import LARGE_RESPONSE, InferResponse
from rocserve.core.sequences import SequenceTag
from rocserve.core.tensor_places import PlacedTensors
from rocserve.core.tensors import Buffer, Tensor
from rocserve.frontends.grpc.transport import StreamReceiver, full_name
from rocserve.frontends.processes import answers
from rocserve.frontends.processes.forwarding import Forwarding
from rocserve.frontends.processes.link_end import LARGEST_SHARED
from rocserve.links import entries
from rocserve.links.texts import REMEMBERED
from rocserve.plane import heap, loop, trimming
from rocserve.plane.heap import COPIED_AT_ONCE, HeapFull, SharedHeap, Slot
from rocserve.services.inference import RequestOrigin


def test_requests_and_answers_travel_whole(ends: Ends) -> None:
    arrays = [np.arange(5, dtype=np.int32), np.arange(600_000, dtype=np.int32), np.zeros(0, np.int32)]
    request = request_of("echo", *arrays, sequence=SequenceTag("s", True, False))
    client = ends.ask(request)
    assert client.ended.wait(PATIENCE_SECONDS)
    (response,) = client.responses
    assert response.id == "r"
    assert response.parameters == {"p": True, "q": 1.5}
    for tensor, array in zip(response.outputs, arrays, strict=True):
        assert tensor.numpy().tolist() == array.tolist()


def test_equal_heads_of_several_front_ends_are_one_object(ends: Ends) -> None:
    other = Ends(ends.link._known_heads)
    for one in (ends, other):
        for name in ("never", "echo"):
            client = one.ask(request_of(name, np.arange(5, dtype=np.int32)))
        assert client.ended.wait(PATIENCE_SECONDS)
    other.close()
    first, second = (one.service.requests[0].head for one in (ends, other))
    assert first is second
    assert first.model_name == "never"


def test_calls_that_the_front_end_has_checked_have_routes_of_their_own(ends: Ends) -> None:
    def call() -> None:
        forwarding = Forwarding(RequestMemory(), ends.remote.end, ends.remote.exchanges)
        for is_checked in (False, True):
            forwarding.begin("/a/B", b"message", print, print, is_checked=is_checked)
        ends.remote.end.post_entry(entries.WORKED, 1_500_000)

    ends.front.call_soon(call)
    wait_until(lambda: len(ends.calls) == len(ends.checked_calls) == 1)
    wait_until(lambda: ends.worked == [1_500_000])


def test_calls_travel_whole_and_small_ones_do_not_wait_for_large_ones(ends: Ends) -> None:
    large = bytes(range(256)) * (1 << 19)

    def call() -> None:
        forwarding, metadata = (
            Forwarding(RequestMemory(), ends.remote.end, ends.remote.exchanges),
            [("a", "1"), ("b-bin", b"\xff")],
        )
        for message in (large, b"", b"bad"):
            answers: list[bytes | ServeError] = []
            heard.append(answers)
            forwarding.begin("/a/B", message, answers.append, answers.append, metadata, "ipv4:127.0.0.1:1")
        ends.remote.end.post_text(entries.LISTENING, "why \N{SNOWMAN}".encode(), count=98)

    heard: list[list[bytes | ServeError]] = []
    ends.front.call_soon(call)
    wait_until(lambda: len(ends.calls) == 3)
    assert ends.listening == [(98, "why \N{SNOWMAN}")]
    assert [bytes(one.message) for one in ends.calls] == [b"", b"bad", large]
    assert ends.calls[0].metadata == [("a", "1"), ("b-bin", b"\xff")]
    assert ends.calls[0].peer == "ipv4:127.0.0.1:1"

    def answer() -> None:
        first, second, last = ends.calls
        last.reply(large)
        last.reply(b"after its end")
        second.reply_error(invalid_argument("no"))
        first.reply(b"")
        ends.link.post(entries.STOP, 1500)

    ends.server.call_soon(answer)
    wait_until(lambda: ends.to_front == [(entries.STOP, 1500)])
    first, second, (third,) = heard
    assert (first, second) == ([large], [b""])
    assert isinstance(third, ServeError) and (third.code, third.text) == (StatusCode.INVALID_ARGUMENT, "no")
    assert not ends.remote.exchanges.asked and not ends.link.answers.exchanges.received
    ends.calls.clear()
    wait_until(lambda: not _slots_of_calls(ends))


class WatchingClient:
    """A stream of a front end's client."""

    method = full_name("Watch")
    metadata = ()
    peer = ""

    def send(self, message: bytes) -> None:
        raise AssertionError("nobody answers")

    def reply_error(self, error: ServeError) -> None:
        raise error

    def request_next(self) -> None:
        """It has sent all its messages."""


def test_a_client_that_asks_twice_in_one_stream_watches_once(ends: Ends) -> None:
    """As without front-end processes, the last request counts; nothing of it is left when the client leaves."""
    forwarding = Forwarding(RequestMemory(), ends.remote.end, ends.remote.exchanges)
    route = forwarding.routes()[WatchingClient.method]

    def ask() -> None:
        receiver = route.handler(WatchingClient())
        for message in (b"1", b"2", b"3"):
            receiver.on_message(message)
        receivers.append(receiver)

    receivers: list[StreamReceiver] = []
    ends.front.call_soon(ask)
    wait_until(lambda: receivers)
    wait_until(lambda: [watch.asked for watch in ends.watches] == [b"3"], "the last question alone")
    ends.front.call_soon(receivers[0].on_cancel)
    wait_until(lambda: not ends.watches, "the end of the watch")


def _slots_of_calls(ends: Ends) -> object:
    """The slots that the front end holds, after it has taken what was returned."""
    ends.front.call_soon(ends.remote.end.take_returns)
    return ends.remote.end._slots


@pytest.mark.parametrize("inputs", [(), (InputHead("I", "INT32", (0,), {}),)], ids=["no tensors", "an empty tensor"])
def test_nothing_travels_too(ends: Ends, inputs: tuple[InputHead, ...]) -> None:
    """The second time the head is not announced again either."""
    for _ in range(2):
        client = ends.ask(InferRequest(RequestHead("echo", "", inputs, (), {}), "", [b"" for _ in inputs]))
        assert client.ended.wait(PATIENCE_SECONDS)
        (response,) = client.responses
        assert [bytes(data) for data in response.data] == [b"" for _ in inputs]


@pytest.mark.parametrize("request_id", ["", "r"])
@pytest.mark.parametrize("sent", [6, 5])
def test_tensors_of_other_sizes_than_their_heads_say_travel_too(ends: Ends, request_id: str, sent: int) -> None:
    request = request_of("never", np.arange(6, dtype=np.int32), id=request_id)
    request.data = [request.data[0][: 4 * sent]]
    ends.ask(request)
    wait_until(lambda: ends.service.requests)
    (arrived,) = ends.service.requests
    assert (arrived.id, [bytes(data) for data in arrived.data]) == (
        request_id,
        [np.arange(sent, dtype=np.int32).tobytes()],
    )


def test_thousands_at_once_are_all_answered_and_leave_nothing(ends: Ends) -> None:
    clients = [ends.ask(request_of("echo", np.full(7, i, np.int32))) for i in range(6000)]
    for i, client in enumerate(clients):
        assert client.ended.wait(PATIENCE_SECONDS)
        assert client.responses[0].outputs[0].numpy().tolist() == [i] * 7
    gc.collect()

    def is_given_back() -> bool:
        # They are returned with the next messages, or when the heaps are trimmed.
        ends.front.call_soon(ends.remote.end.take_returns)
        ends.server.call_soon(ends.link._end.take_returns)
        return not ends.remote.end._slots and not ends.link._end._slots

    wait_until(is_given_back, "the return of memory")


def test_errors_many_answers_and_ends(ends: Ends) -> None:
    failed, many = (
        ends.ask(request_of("fail")),
        ends.ask(request_of("many", np.arange(3, dtype=np.int32), in_turn=True)),
    )
    assert failed.ended.wait(PATIENCE_SECONDS)
    assert (failed.errors[0].code, failed.errors[0].text) == (StatusCode.INVALID_ARGUMENT, "no \N{SNOWMAN}")
    assert many.ended.wait(PATIENCE_SECONDS)
    assert many.many
    assert len(many.responses) == 3
    single = ends.ask(request_of("many", np.arange(3, dtype=np.int32)))
    time.sleep(0.1)
    assert not single.responses


@pytest.mark.parametrize("is_refusal", [True, False])
@pytest.mark.parametrize("make", [MemoryFull, unavailable])
def test_failures_travel_whole(ends: Ends, make: Callable[[str], ServeError], is_refusal: bool) -> None:
    error = ends.service.failure = make("no room for a \N{SNOWMAN}")
    error.retry_seconds, error.is_overload = 0.25, is_refusal
    client = ends.ask(request_of("fail" if is_refusal else "never"))
    if not is_refusal:
        # The model has the request.
        wait_until(lambda: ends.service.requests)
        ends.server.call_soon(lambda: ends.service.requests[0].exchange.send(error))
    assert client.ended.wait(PATIENCE_SECONDS)
    (arrived,) = client.errors
    assert (type(arrived), arrived.code, arrived.text) == (type(error), error.code, error.text)
    assert (arrived.retry_seconds, arrived.is_refusal, arrived.is_overload) == (0.25, is_refusal, is_refusal)


def test_large_heads_are_of_one_request_each(ends: Ends) -> None:
    """A client may send thousands of different heads."""
    for value in range(3):
        parameters = {f"p{number}": value for number in range(5000)}
        head = RequestHead("echo", "", (InputHead("I", "INT32", (1,), {}),), (), parameters)
        client = ends.ask(InferRequest(head, "r", [np.int32(value).tobytes()]))
        assert client.ended.wait(PATIENCE_SECONDS)
        assert client.responses[0].parameters == parameters
    assert not ends.remote._heads
    assert not ends.link._heads


def test_equal_parameters_of_answers_are_sent_once(ends: Ends) -> None:
    """Each answer of an ensemble has parameters."""
    values: tuple[ParameterValue, ...] = (1, True, 1.0, "1", 0.0, -0.0)
    for _ in range(2):
        for value in values:
            head = RequestHead("echo", "", (InputHead("I", "INT32", (1,), {}),), (), {"p": value})
            client = ends.ask(InferRequest(head, "r", [np.int32(1).tobytes()]))
            assert client.ended.wait(PATIENCE_SECONDS)
            assert repr(client.responses[0].parameters) == repr({"p": value})
    assert ends.link.answers._sent_heads.sent == len(ends.remote._answer_heads) == len(values)


def test_many_parameters_of_an_answer_are_remembered_by_neither_end(ends: Ends) -> None:
    for value in range(3):
        parameters = {f"p{number}": value for number in range(5000)}
        head = RequestHead("echo", "", (InputHead("I", "INT32", (1,), {}),), (), parameters)
        assert ends.ask(InferRequest(head, "r", [np.int32(value).tobytes()])).ended.wait(PATIENCE_SECONDS)
    assert not ends.link.answers._answer_heads
    assert not ends.remote._answer_heads


def test_times_of_an_answer_are_remembered_by_neither_end(ends: Ends) -> None:
    """No other answer has the same, and heads that many answers share would be forgotten for them."""
    head = RequestHead("echo", "", (InputHead("I", "INT32", (1,), {}),), (), {"timing_total_ns": 7, "p": True})
    client = ends.ask(InferRequest(head, "r", [np.int32(1).tobytes()]))
    assert client.ended.wait(PATIENCE_SECONDS)
    assert client.responses[0].parameters == {"timing_total_ns": 7, "p": True}
    assert not ends.link.answers._answer_heads
    assert not ends.remote._answer_heads


def test_a_head_that_had_no_room_is_sent_with_the_next_answer(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    place_in_turn, is_full = ends.link._end.place_in_turn, [True]

    def place(pieces: Sequence[Buffer], nbytes: int) -> int:
        if is_full:
            is_full.clear()
            raise HeapFull(nbytes, 0)
        return place_in_turn(pieces, nbytes)

    monkeypatch.setattr(ends.link._end, "place_in_turn", place)
    refused, answered = (ends.ask(request_of("echo", np.arange(3, dtype=np.int32))) for _ in range(2))
    assert refused.ended.wait(PATIENCE_SECONDS)
    assert answered.ended.wait(PATIENCE_SECONDS)
    assert [error.code for error in refused.errors] == [StatusCode.RESOURCE_EXHAUSTED]
    assert [response.outputs[0].numpy().tolist() for response in answered.responses] == [[0, 1, 2]]


def test_a_fault_of_the_server_is_one_requests_own(ends: Ends) -> None:
    broken, other = ends.ask(request_of("break")), ends.ask(request_of("echo"))
    assert broken.ended.wait(PATIENCE_SECONDS)
    assert (broken.errors[0].code, broken.errors[0].text) == (
        StatusCode.INTERNAL,
        "ValueError: a fault of the server's own",
    )
    assert other.ended.wait(PATIENCE_SECONDS)
    assert ends.reasons == []


@pytest.mark.parametrize(
    ("deadline", "known"), [(None, None), (1e12, None), (float("inf"), None), (5e5, 5e5), (-1.0, 1e-9)]
)
def test_deadlines_travel_as_far_as_somebody_may_live_to_see_them(
    ends: Ends, deadline: float | None, known: float | None
) -> None:
    ends.ask(request_of("never", deadline=deadline))
    wait_until(lambda: ends.service.requests)
    assert ends.service.requests[0].deadline == known


def test_when_the_front_goes_its_requests_are_cancelled(ends: Ends) -> None:
    ends.ask(request_of("never"))
    wait_until(lambda: ends.service.requests)
    ends.connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: ends.reasons)
    assert ends.reasons == ["it closed its link"]
    ends.server.call_soon(ends.link.close)
    assert ends.service.left.wait(PATIENCE_SECONDS)
    assert ends.server_gone.wait(PATIENCE_SECONDS)


def test_origins_and_refusals_come_when_they_are_asked_for(ends: Ends) -> None:
    assert ends.ask(request_of("echo")).ended.wait(PATIENCE_SECONDS)
    assert ends.service.origins[-1].address == ""
    ends.server.call_soon(lambda: ends.link.post(entries.ORIGINS, last=True))
    ends.server.call_soon(lambda: ends.link.post(entries.EXIT))
    wait_until(lambda: ends.to_front == [(entries.EXIT, 0)])
    assert ends.ask(request_of("echo")).ended.wait(PATIENCE_SECONDS)
    assert ends.service.origins[-1] == RequestOrigin("GRPC", (1, 2), {"a": "b"}, "10.0.0.1")
    ends.front.call_soon(lambda: ends.remote.refuse(invalid_argument("bad é"), lambda: "id7"))
    wait_until(lambda: ends.service.refusals)
    error, request_id = ends.service.refusals[0]
    assert (error.code, error.text, request_id) == (StatusCode.INVALID_ARGUMENT, "bad é", "id7")


LARGE = np.arange(1_000_000, dtype=np.int32)


def test_small_requests_do_not_wait_for_the_inputs_of_a_large_one(ends: Ends, pause: threading.Event) -> None:
    large = ends.ask(request_of("echo", np.arange(3, dtype=np.int32), LARGE, np.arange(4, dtype=np.int32)))
    for index in range(3):
        small = ends.ask(request_of("echo", np.arange(index, dtype=np.int32)))
        assert small.ended.wait(PATIENCE_SECONDS)
    assert not large.ended.is_set()
    pause.set()
    assert large.ended.wait(PATIENCE_SECONDS)
    assert [tensor.numpy().size for tensor in large.responses[0].outputs] == [3, LARGE.size, 4]
    assert (large.responses[0].outputs[1].numpy() == LARGE).all()


def test_little_is_copied_in_a_step(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def note(view: memoryview, start: int, data: Buffer) -> None:
        copied.append(len(data))
        heap_module_copy(view, start, data)

    heap_module_copy = heap.copy_bytes
    monkeypatch.setattr(heap, "copy_bytes", note)
    many = [np.full(50_000, number, np.int32) for number in range(20)]
    ends.ask(request_of("never", *many, LARGE))
    wait_until(lambda: ends.service.requests)
    (arrived,) = ends.service.requests
    assert [bytes(data) for data in arrived.data] == [array.tobytes() for array in (*many, LARGE)]
    assert max(copied) <= COPIED_AT_ONCE
    at_once = itertools.takewhile(lambda end: end <= COPIED_AT_ONCE, itertools.accumulate(copied))
    assert len([*at_once]) == 5, "of many that are small, as many as fit go at once, and the others one a step"


def test_a_sequence_keeps_its_order_while_a_large_request_of_it_is_copied(ends: Ends, pause: threading.Event) -> None:
    ends.ask(request_of("never", LARGE, id="first", sequence=SequenceTag("s", True, False)))
    for name, array in (("second", np.arange(3, dtype=np.int32)), ("third", LARGE), ("fourth", LARGE[:1])):
        ends.ask(request_of("never", array, id=name, sequence=SequenceTag("s", False, False)))
    ends.ask(request_of("never", LARGE[:1], id="other", sequence=SequenceTag("t", True, False)))
    wait_until(lambda: ends.service.requests)
    pause.set()
    wait_until(lambda: len(ends.service.requests) == 5)
    assert [request.id for request in ends.service.requests] == ["other", "first", "second", "third", "fourth"]
    wait_until(lambda: not ends.remote._order.held)


def test_heads_are_forgotten_while_a_large_request_is_copied(ends: Ends, pause: threading.Event) -> None:
    large = ends.ask(request_of("echo", LARGE))
    few = np.arange(1, dtype=np.int32)
    clients = [ends.ask(request_of(f"echo {number}", few)) for number in range(3 * REMEMBERED)]
    assert all(client.ended.wait(PATIENCE_SECONDS) for client in clients)
    pause.set()
    assert large.ended.wait(PATIENCE_SECONDS)
    assert (large.responses[0].outputs[0].numpy() == LARGE).all()
    assert not ends.reasons


@cache
def head_of(shape: tuple[int, ...]) -> RequestHead:
    """The same object each time: heads are compared by identity, not by their contents."""
    return RequestHead("never", "", (InputHead("I", "INT32", shape, {}),), (), {})


def asked_and_held(ends: Ends, array: np.ndarray, **fields: object) -> InferRequest:
    """A request that is never answered, as it arrived."""
    request = InferRequest(head_of(array.shape), data=[memoryview(array.tobytes())], **{"id": "", **fields})  # type: ignore[arg-type]
    ends.ask(request)
    wait_until(lambda: ends.service.requests)
    return ends.service.requests.pop()


def test_inputs_lie_where_the_workers_that_get_them_read_them(ends: Ends) -> None:
    heap = ends.service.heap = SharedHeap("version", 1 << 24)
    array = np.arange(100_000, dtype=np.int32)
    # The server answers with the place for the rest.
    assert not isinstance(asked_and_held(ends, array).data, PlacedTensors)
    for fields in ({"id": ""}, {"id": "r", "sequence": SequenceTag(7, True, False)}):
        arrived = asked_and_held(ends, array, **fields)
        assert isinstance(arrived.data, PlacedTensors)
        assert arrived.data.heap is heap
        assert bytes(heap.reader.view(arrived.data.offset, array.nbytes)) == array.tobytes()
        assert (arrived.id, arrived.sequence) == (fields["id"], fields.get("sequence"))


def test_a_share_of_a_version_that_has_gone_is_used_no_more(ends: Ends) -> None:
    heap = ends.service.heap = SharedHeap("version", 1 << 24)
    array = np.arange(100, dtype=np.int32)
    asked_and_held(ends, array)
    held = asked_and_held(ends, array)
    assert isinstance(held.data, PlacedTensors)
    ends.service.heap = None
    ends.server.call_soon(heap.close)
    # Messages under way are still read; then nothing is left on either side.
    wait_until(lambda: not ends.link._shares and len(ends.remote.end.heaps) == 1, "the end of the share")
    assert not isinstance(asked_and_held(ends, array).data, PlacedTensors)
    assert [bytes(one) for one in held.data] == [array.tobytes()]


def test_a_share_of_a_version_that_goes_is_kept_while_a_request_is_copied_into_it(
    ends: Ends, pause: threading.Event
) -> None:
    heap = ends.service.heap = SharedHeap("version", 1 << 24)
    pause.set()
    asked_and_held(ends, LARGE)
    pause.clear()
    ends.ask(InferRequest(head_of(LARGE.shape), "", [memoryview(LARGE.tobytes())]))
    wait_until(lambda: ends.remote._copies.total() == 1, "the beginning of its copy")
    ends.service.heap = None
    ends.server.call_soon(heap.close)
    wait_until(lambda: ends.remote._ending_heaps, "the end of the heap")
    # The requests go to another server.
    few = np.arange(100, dtype=np.int32)
    assert not isinstance(asked_and_held(ends, few).data, PlacedTensors)
    pause.set()
    wait_until(lambda: ends.service.requests)
    arrived = ends.service.requests.pop()
    assert isinstance(arrived.data, PlacedTensors)
    assert [bytes(data) for data in arrived.data] == [LARGE.tobytes()]
    wait_until(lambda: not ends.link._shares and len(ends.remote.end.heaps) == 1, "the end of the share")
    wait_until(lambda: not ends.remote._ending_heaps)


def test_the_share_of_a_front_end_that_has_died_is_kept_until_nobody_reads_it(ends: Ends) -> None:
    heap = ends.service.heap = SharedHeap("version", 1 << 24)
    array = np.arange(100, dtype=np.int32)
    asked_and_held(ends, array)
    held = asked_and_held(ends, array)
    assert isinstance(held.data, PlacedTensors)
    free = len(heap._free_shares)
    ends.server.call_soon(ends.link.close)
    wait_until(lambda: not ends.link._shares, "the link's end")
    gc.collect()
    assert len(heap._free_shares) == free
    assert [bytes(one) for one in held.data] == [array.tobytes()]
    del held

    def is_free_again() -> bool:
        # The loop's thread may be just letting it go.
        gc.collect()
        return len(heap._free_shares) == free + 1

    wait_until(is_free_again)


def asked_for_outputs(ends: Ends) -> Client:
    """A worker's outputs, which are not released while the client has its response."""
    arrays = [np.arange(100_000, dtype=np.int32), np.arange(3, dtype=np.int32), np.zeros(0, np.int32)]
    client = ends.ask(request_of("placed", *arrays))
    assert client.ended.wait(PATIENCE_SECONDS)
    (response,) = client.responses
    assert [tensor.numpy().tolist() for tensor in response.outputs] == [array.tolist() for array in arrays]
    return client


def test_outputs_are_read_where_a_worker_has_left_them(ends: Ends) -> None:
    clients = [asked_for_outputs(ends) for _ in range(3)]
    assert len(ends.remote._output_heaps) == 1
    assert ends.service.returned == []
    for number, client in enumerate(clients, 1):
        ends.front.call_soon(client.responses.clear)
        wait_until(lambda number=number: len(ends.service.returned) == number, what="a place that is returned")
    wait_until(lambda: not ends.link._end._slots)


def test_the_servers_own_memory_is_kept_while_a_client_has_its_response(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trimming the heaps takes all that was returned anyway.
    monkeypatch.setattr(trimming, "TRIM_PERIOD_SECONDS", 3600.0)
    client = ends.ask(request_of("echo", np.arange(100_000, dtype=np.int32)))
    assert client.ended.wait(PATIENCE_SECONDS)

    def kept() -> int:
        ends.server.wake()
        return len(ends.link._end._slots)

    wait_until(lambda: kept() == 1, "the return of the answer's head")
    ends.front.call_soon(client.responses.clear)
    wait_until(lambda: not kept(), "the return of the outputs")


@pytest.mark.parametrize("length", [5, 50_000])
def test_answers_of_a_batch_come_together_and_its_memory_goes_back(
    ends: Ends, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trimming the heaps takes all that was returned anyway.
    monkeypatch.setattr(trimming, "TRIM_PERIOD_SECONDS", 3600.0)
    arrays = [np.arange(i, i + length, dtype=np.int32) for i in range(2 * TOGETHER)]
    for of_batch in (arrays[:TOGETHER], arrays[TOGETHER:]):
        clients = [
            ends.ask(request_of("together", array, -array[:3], id=f"r{index}")) for index, array in enumerate(of_batch)
        ]
        for index, (client, array) in enumerate(zip(clients, of_batch, strict=True)):
            assert client.ended.wait(PATIENCE_SECONDS)
            (response,) = client.responses
            assert response.id == f"r{index}" and response.head.model_name == "together"
            assert [tensor.numpy().tolist() for tensor in response.outputs] == [array.tolist(), (-array[:3]).tolist()]
        # The answers may come before the server notes it.
        wait_until(lambda: ends.service.went_together is not None)
        assert ends.service.went_together
        del client, response
        # On the front end's loop, like a real one's clients: it informs the server before it sleeps.
        while clients:
            ends.front.call_soon(clients.pop().responses.clear)
    is_small = length * TOGETHER * 4 <= LARGEST_SHARED

    def are_back() -> bool:
        if is_small:
            # The server is not woken for little; it takes it when it is awake.
            ends.server.wake()
        return len(ends.service.returned) == 2

    wait_until(are_back, what="the places that are returned")
    wait_until(lambda: not ends.link.answers.exchanges.received and not ends.link._end._slots)


def test_answers_of_a_batch_of_a_worker_that_has_ended_do_not_go_together(ends: Ends) -> None:
    """Its heap cannot be passed to the front end any more."""
    ends.service.reader.close()
    clients = [ends.ask(request_of("together", np.arange(3, dtype=np.int32))) for _ in range(TOGETHER)]
    wait_until(lambda: ends.service.went_together is False)
    assert not any(client.responses for client in clients)
    assert len(ends.link.answers.exchanges.received) == TOGETHER


def test_a_batch_of_more_requests_than_a_message_counts_does_not_go_together(ends: Ends) -> None:
    head = InferResponse.of("m", "1", "", [Tensor("O", DataType.INT32, (1,), bytes(4))]).head
    slot = Slot(ends.service.returned.append, 0, ends.service.reader)
    taken = []

    def answer() -> None:
        for count in (answers._MOST_TOGETHER + 1, answers._MOST_TOGETHER):
            taken.append(ends.link.answers.answer_together(head, slot, 4, [0, 0] * count))

    ends.server.call_soon(answer)
    wait_until(lambda: len(taken) == 2)
    assert taken == [False, True]


def test_outputs_of_a_worker_that_has_ended(ends: Ends) -> None:
    client = asked_for_outputs(ends)
    ends.server.call_soon(ends.service.reader.close)
    wait_until(lambda: not ends.remote._output_heaps, what="the front's end of it")
    ends.front.call_soon(client.responses.clear)
    wait_until(lambda: ends.service.returned, what="a place that is returned")
    # The rest is sent through the server's own heap.
    response = InferResponse.of("m", "1", "r", ())
    assert not ends.link.answers.output_heaps and ends.link.answers._outputs_in_heap(response) is None


def test_a_front_end_that_dies_holds_no_outputs(ends: Ends) -> None:
    client = asked_for_outputs(ends)
    ends.server.call_soon(ends.link.close)
    wait_until(lambda: ends.service.returned, what="a place that is returned")
    wait_until(lambda: not ends.service.reader.on_closed)
    assert client.responses


def test_a_large_answer_is_copied_while_others_are_answered(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_STEPS_SECONDS", 0.0)
    arrays = [np.arange(LARGE_RESPONSE // 4, dtype=np.int32), np.arange(3, dtype=np.int32)]
    client = ends.ask(request_of("large", *arrays))
    small = ends.ask(request_of("echo", arrays[1]))
    assert small.ended.wait(PATIENCE_SECONDS) and client.ended.wait(PATIENCE_SECONDS)
    (response,) = client.responses
    assert response.is_large
    assert [bytes(data) for data in response.data] == [array.tobytes() for array in arrays]
