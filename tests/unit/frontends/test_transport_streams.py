"""Streams: order, ends, flow control."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.errors import ServeError, StatusCode
from rocserve.frontends.grpc.transport import StreamCall, StreamRoute
from rocserve.plane.loop import PlaneLoop

STREAM = "/test.Service/Stream"


class Receiver:
    """Records its events; echoes messages immediately unless told otherwise."""

    def __init__(self, call: StreamCall, answers: bool = True) -> None:
        self.call = call
        self.answers = answers
        self.messages: list[bytes] = []
        self.events: list[str] = []

    def on_message(self, message: bytes) -> None:
        self.messages.append(message)
        if self.answers:
            self.call.send(message)
            self.call.request_next()

    def on_half_close(self) -> None:
        self.events.append("half-close")
        self.call.finish(StatusCode.OK, "")

    def on_cancel(self) -> None:
        self.events.append("cancel")


class Patient(Receiver):
    """Leaves the stream open at the half-close, like a stream with unanswered messages."""

    def on_half_close(self) -> None:
        self.events.append("half-close")


class Receivers:
    """A handler that keeps the receivers that it makes."""

    def __init__(self, answers: bool = True, kind: type[Receiver] = Receiver) -> None:
        self.all: list[Receiver] = []
        self._answers = answers
        self._kind = kind

    def __call__(self, call: StreamCall) -> Receiver:
        self.all.append(self._kind(call, self._answers))
        return self.all[-1]


def one(handler: Callable[[StreamCall], Any]) -> dict[str, StreamRoute]:
    return {STREAM: StreamRoute(handler)}


def held_open(messages: list[bytes], until: threading.Event) -> Iterator[bytes]:
    yield from messages
    until.wait(PATIENCE_SECONDS)


def test_messages_are_answered_in_order(serve: Any) -> None:
    receivers = Receivers()
    messages = [str(number).encode() for number in range(500)]
    rpc = serve(one(receivers)).stream()(iter(messages), timeout=PATIENCE_SECONDS)
    assert list(rpc) == messages
    assert rpc.code() is grpc.StatusCode.OK
    assert receivers.all[0].events == ["half-close"]


async def test_the_asyncio_client_streams_both_ways(serve: Any) -> None:
    served = serve(one(Receivers()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        rpc = channel.stream_stream(STREAM)(timeout=PATIENCE_SECONDS)
        for number in range(20):
            await rpc.write(str(number).encode())
            assert await rpc.read() == str(number).encode()
        await rpc.done_writing()
        assert await rpc.read() is grpc.aio.EOF


def test_an_answer_comes_before_the_next_message_is_sent(serve: Any) -> None:
    answered = threading.Semaphore(1)

    def alternating() -> Iterator[bytes]:
        for number in range(10):
            assert answered.acquire(timeout=PATIENCE_SECONDS)
            yield str(number).encode()

    seen = []
    for message in serve(one(Receivers())).stream()(alternating(), timeout=PATIENCE_SECONDS):
        seen.append(int(message))
        answered.release()
    assert seen == list(range(10))


def test_one_message_in_many_out(serve: Any) -> None:
    class Counter(Receiver):
        def on_message(self, message: bytes) -> None:
            for number in range(int(message)):
                self.call.send(str(number).encode())
            self.call.finish(StatusCode.OK, "")

        def on_half_close(self) -> None:
            pass

    rpc = serve(one(Counter)).channel().unary_stream(STREAM)(b"300", timeout=PATIENCE_SECONDS)
    assert [int(message) for message in rpc] == list(range(300))


def test_a_stream_without_any_message_ends(serve: Any) -> None:
    assert list(serve(one(Receivers())).stream()(iter([]), timeout=PATIENCE_SECONDS)) == []


def test_answers_and_the_end_may_come_later(serve: Any, plane: PlaneLoop) -> None:
    class Later(Receiver):
        def on_message(self, message: bytes) -> None:
            plane.call_soon(partial(super().on_message, message))

        def on_half_close(self) -> None:
            plane.call_soon(super().on_half_close)

    messages = [str(number).encode() for number in range(300)]
    assert list(serve(one(Later)).stream()(iter(messages), timeout=PATIENCE_SECONDS)) == messages


def test_an_error_comes_after_what_was_queued_and_ends_the_stream(serve: Any) -> None:
    class Failing(Receiver):
        def on_message(self, message: bytes) -> None:
            for _ in range(50):
                self.call.send(bytes(10_000))
            self.call.finish(StatusCode.NOT_FOUND, "nothing more")
            self.call.finish(StatusCode.INTERNAL, "second end")
            self.call.send(b"after the end")

    rpc = serve(one(Failing)).stream()(iter([b"go"]), timeout=PATIENCE_SECONDS)
    received = []
    with pytest.raises(grpc.RpcError) as raised:
        for message in rpc:
            received.append(message)
    assert received == [bytes(10_000)] * 50
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == "nothing more"


@pytest.mark.parametrize("place", ["open", "message", "half-close"])
def test_a_handler_that_raises_ends_its_own_stream_only(serve: Any, place: str) -> None:
    class Raising(Receiver):
        def on_message(self, message: bytes) -> None:
            if place == "message" and message == b"bad":
                raise LookupError("message")
            super().on_message(message)

        def on_half_close(self) -> None:
            if place == "half-close" and self.messages == [b"bad"]:
                raise LookupError("half-close")
            super().on_half_close()

    opened = 0

    def handle(call: StreamCall) -> Receiver:
        nonlocal opened
        opened += 1
        if place == "open" and opened == 1:
            raise LookupError("open")
        return Raising(call)

    served = serve(one(handle))
    with pytest.raises(grpc.RpcError) as raised:
        list(served.stream()(iter([b"bad"]), timeout=PATIENCE_SECONDS))
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert raised.value.details() == f"LookupError: {place}"
    assert list(served.stream()(iter([b"good"]), timeout=PATIENCE_SECONDS)) == [b"good"]
    wait_until(lambda: not served.transport.calls.live and not served.transport.calls.sending)


def test_a_cancelled_stream_calls_back_once_and_drops_what_is_sent(serve: Any) -> None:
    receivers = Receivers(kind=Patient)
    done = threading.Event()
    served = serve(one(receivers))
    rpc = served.stream()(held_open([b"one"], done), timeout=PATIENCE_SECONDS)
    assert next(rpc) == b"one"
    rpc.cancel()
    receiver = receivers.all[0]
    wait_until(lambda: "cancel" in receiver.events)
    call = receiver.call
    served.do(lambda: call.send(b"too late"), call.request_next, lambda: call.finish(StatusCode.OK, ""))
    done.set()
    wait_until(lambda: not served.transport.calls.live)
    time.sleep(0.1)
    assert receiver.events.count("cancel") == 1


def test_the_deadline_of_a_stream_is_known_and_ends_it(serve: Any) -> None:
    deadlines: list[tuple[float | None, float]] = []
    receivers = Receivers(kind=Patient)

    def handle(call: StreamCall) -> Receiver:
        deadlines.append((call.deadline, time.monotonic()))
        return receivers(call)

    done = threading.Event()
    stream, timeout = serve(one(handle)).stream(), 0.5
    begun = time.monotonic()
    # On a busy machine the call may not arrive in time.
    while not deadlines:
        timeout *= 2
        with pytest.raises(grpc.RpcError) as raised:
            list(stream(held_open([b"one"], done), timeout=timeout))
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    done.set()
    deadline, seen = deadlines[0]
    assert deadline is not None and begun + 0.9 <= deadline <= seen + timeout + 0.1
    wait_until(lambda: "cancel" in receivers.all[0].events)


def test_no_more_is_read_than_may_be_unanswered(serve: Any) -> None:
    receivers = Receivers(answers=False)
    messages = [str(number).encode() for number in range(12)]
    served = serve(one(receivers), stream_unanswered_limit=4)
    rpc = served.stream()(iter(messages), timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(receivers.all) == 1 and len(receivers.all[0].messages) == 4)
    receiver = receivers.all[0]
    time.sleep(0.3)
    assert len(receiver.messages) == 4
    served.do(receiver.call.request_next, receiver.call.request_next)
    wait_until(lambda: len(receiver.messages) == 6)
    time.sleep(0.2)
    assert len(receiver.messages) == 6
    for answered in range(2, len(messages)):
        wait_until(lambda count=answered: len(receiver.messages) > count)
        served.do(receiver.call.request_next)
    wait_until(lambda: receiver.messages == messages and receiver.events == ["half-close"])
    assert list(rpc) == []


@pytest.mark.long
def test_a_flood_from_a_client_that_does_not_read_is_bounded(serve: Any) -> None:
    message, count, backlog = bytes(65_536), 1500, 1 << 20
    receivers = Receivers()
    served = serve(one(receivers), stream_backlog_bytes=backlog)
    # Otherwise the client's windows grow with the speed of the machine.
    channel = served.channel(("grpc.http2.bdp_probe", 0))
    rpc = channel.stream_stream(STREAM)(iter([message] * count), timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(receivers.all) == 1 and len(receivers.all[0].messages) > 10)
    received, before = receivers.all[0].messages, -1
    while len(received) != before:
        before = len(received)
        time.sleep(0.5)
    # What the server holds, and the answers in the client's own window, of 64 KiB.
    assert len(received) * len(message) < backlog + (1 << 20)
    assert sum(map(len, rpc)) == count * len(message)
    assert len(received) == count


def test_a_client_that_never_reads_a_flood_of_answers_loses_its_stream(serve: Any) -> None:
    done = threading.Event()
    receivers = Receivers(answers=False)
    served = serve(one(receivers), stream_backlog_limit_bytes=1 << 20)
    rpc = served.stream()(held_open([b"go"], done), timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(receivers.all) == 1 and len(receivers.all[0].messages) == 1)
    for _ in range(2000):
        served.do(lambda: receivers.all[0].call.send(bytes(65_536)))
    with pytest.raises(grpc.RpcError) as raised:
        list(rpc)
    done.set()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "does not read" in raised.value.details()
    wait_until(lambda: not served.transport.calls.live)


def test_streams_may_be_ended_while_and_after_the_transport_ends(serve: Any, plane: PlaneLoop) -> None:
    receivers = Receivers(kind=Patient)
    served = serve({STREAM: StreamRoute(receivers)}, stream_backlog_limit_bytes=1000)
    method, may_close, is_over = served.stream(), threading.Event(), threading.Event()

    def silence() -> Iterator[bytes]:
        may_close.wait(PATIENCE_SECONDS)
        yield from ()

    calls = [method(silence()) for _ in range(10)]
    wait_until(lambda: len(receivers.all) == len(calls))
    error, ended = ServeError(StatusCode.RESOURCE_EXHAUSTED, "ended"), threading.Semaphore(0)

    def end_them() -> None:
        ended.release()
        for receiver in receivers.all:
            receiver.call.send(bytes(2000))
            receiver.call.end_waiting(error)  # type: ignore[attr-defined]
        if not is_over.is_set():
            plane.call_at(time.monotonic() + 0.001, end_them)

    plane.call_soon(end_them)
    for during in (lambda: None, lambda: served.transport.stop(0)):
        during()
        for _ in range(10):
            assert ended.acquire(timeout=PATIENCE_SECONDS)
    is_over.set()
    may_close.set()
    with pytest.raises(grpc.RpcError):
        list(calls[0])
