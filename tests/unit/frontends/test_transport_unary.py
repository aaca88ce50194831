"""Unary calls."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.errors import ServeError, StatusCode
from rocserve.frontends.grpc.transport import UnaryCall, UnaryRoute
from rocserve.plane.loop import PlaneLoop

UNARY = "/test.Service/Unary"


def one(handler: Callable[[UnaryCall], None]) -> dict[str, UnaryRoute]:
    return {UNARY: UnaryRoute(handler)}


def echo(call: UnaryCall) -> None:
    call.reply(call.message)


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000, 20_000_000])
def test_a_message_comes_back_whole(serve: Any, size: int) -> None:
    message = (bytes(range(256)) * (size // 256 + 1))[:size]
    assert serve(one(echo)).unary()(message, timeout=PATIENCE_SECONDS) == message


def test_method_and_peer_are_known(serve: Any) -> None:
    served = serve(one(lambda call: call.reply(f"{call.method} {call.peer}".encode())))
    method, peer = served.unary()(b"", timeout=PATIENCE_SECONDS).decode().split(" ")
    assert method == UNARY
    assert peer.startswith("ipv4:127.0.0.1:")


def test_metadata_goes_in(serve: Any) -> None:
    seen: list[tuple[str, str | bytes]] = []

    def handle(call: UnaryCall) -> None:
        seen.extend((key, value) for key, value in call.metadata)
        call.reply(b"")

    serve(one(handle)).unary()(
        b"", timeout=PATIENCE_SECONDS, metadata=(("question", "text"), ("question-bin", b"\xff\x00\x01"))
    )
    assert ("question", "text") in seen
    assert ("question-bin", b"\xff\x00\x01") in seen


@pytest.mark.parametrize("code", [code for code in StatusCode if code is not StatusCode.OK])
def test_an_error_reaches_the_client_with_code_and_text(serve: Any, code: StatusCode) -> None:
    unary = serve(one(lambda call: call.reply_error(ServeError(code, "so nicht: 50 % ä\n")))).unary()
    with pytest.raises(grpc.RpcError) as raised:
        unary(b"", timeout=PATIENCE_SECONDS)
    assert raised.value.code().value[0] == code
    assert raised.value.details() == "so nicht: 50 % ä\n"


def test_an_endless_error_text_is_cut_to_what_clients_accept(serve: Any) -> None:
    unary = serve(one(lambda call: call.reply_error(ServeError(StatusCode.NOT_FOUND, "ä" * 100_000)))).unary()
    with pytest.raises(grpc.RpcError) as raised:
        unary(b"", timeout=PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details().startswith("ääää")
    assert raised.value.details().endswith(" ...")


def test_a_method_that_is_not_there_is_unimplemented(serve: Any) -> None:
    served = serve(one(echo))
    with pytest.raises(grpc.RpcError) as raised:
        served.unary("/test.Service/Missing")(b"", timeout=PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "/test.Service/Missing" in raised.value.details()
    with pytest.raises(grpc.RpcError) as raised:
        list(served.stream("/test.Service/Missing")(iter([b"x"]), timeout=PATIENCE_SECONDS))
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_handler_that_raises_is_internal_and_logged_and_the_server_goes_on(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(call: UnaryCall) -> None:
        if call.message == b"bad":
            raise LookupError("the drawer is empty")
        call.reply(b"fine")

    unary = serve(one(handle)).unary()
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.RpcError) as raised:
        unary(b"bad", timeout=PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert raised.value.details() == "LookupError: the drawer is empty"
    assert any(record.exc_info and UNARY in record.getMessage() for record in caplog.records)
    assert unary(b"good", timeout=PATIENCE_SECONDS) == b"fine"


def test_an_answer_that_is_not_bytes_is_an_error_of_the_handler(serve: Any) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        serve(one(lambda call: call.reply("text"))).unary()(b"", timeout=PATIENCE_SECONDS)  # type: ignore[arg-type]
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert "TypeError" in raised.value.details()


def test_answers_may_come_later(serve: Any, plane: PlaneLoop) -> None:
    with ThreadPoolExecutor(4) as pool:
        unary = serve(one(lambda call: pool.submit(plane.call_soon, partial(echo, call)) and None)).unary()
        futures = [unary.future(str(number).encode(), timeout=PATIENCE_SECONDS) for number in range(300)]
        assert [int(future.result()) for future in futures] == list(range(300))


def test_only_the_first_of_several_answers_counts(serve: Any) -> None:
    def handle(call: UnaryCall) -> None:
        call.reply(b"first")
        call.reply(b"second")
        call.reply_error(ServeError(StatusCode.INTERNAL, "third"))

    unary = serve(one(handle)).unary()
    assert [unary(b"", timeout=PATIENCE_SECONDS) for _ in range(20)] == [b"first"] * 20


def test_without_a_timeout_there_is_no_deadline(serve: Any) -> None:
    assert serve(one(lambda call: call.reply(str(call.deadline).encode()))).unary()(b"") == b"None"


def test_the_deadline_of_a_call_is_the_clients_and_ends_it(serve: Any) -> None:
    deadlines: list[tuple[float | None, float]] = []
    passed = threading.Event()

    def handle(call: UnaryCall) -> None:
        deadlines.append((call.deadline, time.monotonic()))
        call.watch_cancellation(passed.set)

    served = serve(one(handle))
    timeout = 0.5
    begun = time.monotonic()
    # On a busy machine the call may not arrive in time.
    while not deadlines:
        timeout *= 2
        with pytest.raises(grpc.RpcError) as raised:
            served.unary()(b"", timeout=timeout)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    deadline, seen = deadlines[0]
    assert deadline is not None and begun + 0.9 <= deadline <= seen + timeout + 0.1
    assert passed.wait(PATIENCE_SECONDS)
    wait_until(lambda: not served.transport.calls.live)


def test_a_cancelled_call_calls_every_watcher_and_its_answer_is_dropped(serve: Any) -> None:
    calls: list[UnaryCall] = []
    told: list[str] = []

    def handle(call: UnaryCall) -> None:
        call.watch_cancellation(lambda: told.append("first"))
        call.watch_cancellation(lambda: told.append("second"))
        calls.append(call)

    served = serve(one(handle))
    future = served.unary().future(b"", timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(calls) == 1)
    future.cancel()
    wait_until(lambda: told == ["first", "second"])
    served.do(lambda: calls[0].watch_cancellation(lambda: told.append("late")))
    assert told == ["first", "second", "late"]
    error = ServeError(StatusCode.INTERNAL, "too late")
    served.do(lambda: calls[0].reply(b"too late"), lambda: calls[0].reply_error(error))
    assert not served.transport.calls.live


def test_a_watcher_may_be_added_later(serve: Any) -> None:
    calls: list[UnaryCall] = []
    told = threading.Event()
    served = serve(one(calls.append))
    future = served.unary().future(b"", timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(calls) == 1)
    served.do(lambda: calls[0].watch_cancellation(told.set))
    future.cancel()
    assert told.wait(PATIENCE_SECONDS)


def test_a_call_that_is_answered_was_not_cancelled(serve: Any) -> None:
    told: list[str] = []

    def handle(call: UnaryCall) -> None:
        call.watch_cancellation(lambda: told.append("cancelled"))
        call.reply(b"done")
        call.watch_cancellation(lambda: told.append("after the end"))

    served = serve(one(handle))
    unary = served.unary()
    assert [unary(b"", timeout=PATIENCE_SECONDS) for _ in range(50)] == [b"done"] * 50
    for channel in served.channels:
        channel.close()
    served.transport.stop(5)
    assert told == []


def test_a_watcher_that_raises_harms_nobody(serve: Any) -> None:
    held, told = threading.Event(), threading.Event()

    def fault() -> None:
        raise RuntimeError("watcher")

    def handle(call: UnaryCall) -> None:
        if call.message:
            call.reply(call.message)
            return
        call.watch_cancellation(fault)
        call.watch_cancellation(told.set)
        held.set()

    unary = serve(one(handle)).unary()
    future = unary.future(b"", timeout=PATIENCE_SECONDS)
    assert held.wait(PATIENCE_SECONDS)
    future.cancel()
    assert told.wait(PATIENCE_SECONDS)
    assert unary(b"on", timeout=PATIENCE_SECONDS) == b"on"


def test_an_answer_over_the_limit_is_refused_and_the_server_goes_on(serve: Any) -> None:
    unary = serve(one(lambda call: call.reply(bytes(int(call.message)))), max_message_bytes=1000).unary()
    with pytest.raises(grpc.RpcError) as raised:
        unary(b"1001", timeout=PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert unary(b"1000", timeout=PATIENCE_SECONDS) == bytes(1000)


def test_calls_above_the_bound_are_refused_at_once(serve: Any) -> None:
    held: list[UnaryCall] = []
    served = serve(one(held.append), max_concurrent_calls=2)
    unary = served.unary()
    futures = [unary.future(b"", timeout=PATIENCE_SECONDS) for _ in range(2)]
    wait_until(lambda: len(held) == 2)
    with pytest.raises(grpc.RpcError) as raised:
        unary(b"", timeout=PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "2 calls in flight" in raised.value.details()
    served.do(*(partial(call.reply, b"") for call in held))
    assert [future.result() for future in futures] == [b"", b""]
    third = unary.future(b"", timeout=PATIENCE_SECONDS)
    wait_until(lambda: len(held) == 3)
    served.do(lambda: held[2].reply(b"third"))
    assert third.result() == b"third"
