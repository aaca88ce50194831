"""The fallback transport: plain grpc.aio.

It runs on an event loop and a thread of its own, so that it behaves as the reactor does: handlers are called on the
transport's thread, answers come from any thread, and what else the process does on its loop delays no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import grpc
import grpc.aio

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.credentials import server_credentials
from rocserve.frontends.grpc.received_bytes import received_bytes
from rocserve.frontends.grpc.stream_flow import StreamFlow
from rocserve.frontends.grpc.transport import (
    LINGER_SECONDS,
    NO_MESSAGE,
    SERVER_EXITING,
    Metadata,
    Route,
    Routes,
    StreamReceiver,
    StreamRoute,
    TransportOptions,
    UnaryRoute,
    binding_error,
    certificate_files,
    channel_arguments,
    status_text,
    too_many_calls,
    unknown_method,
)
from rocserve.frontends.grpc.unfinished import CHECK_SECONDS, WaitingCalls
from rocserve.frontends.grpc.unfinished_bytes import UnfinishedBytes
from rocserve.observability.failures import RequestFailures

_GRPC_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_Context = Any
_Method = Callable[[Any, _Context], Awaitable[bytes | None]]


class AioTransport:
    """A gRPC server on grpc.aio. See `Transport`."""

    def __init__(
        self, options: TransportOptions, routes: Routes, log: logging.Logger, memory: RequestMemory | None = None
    ) -> None:
        """`memory`: what unfinished messages and answers that clients do not read count against; None = the latter
        alone, against one of its own."""
        self.options = options
        self.memory = memory or RequestMemory()
        self._counts_unfinished = memory is not None
        self.failures = RequestFailures(log)
        self._log = log
        self.live: set[_Call] = set()
        self.sending: dict[asyncio.Task[Any], float] = {}
        """Tasks of calls with an answer that their clients have not taken yet, and until when they have for it."""
        self.waiting = WaitingCalls(options.waiting, time.monotonic(), log)
        self.watch_lock = threading.Lock()
        self._end_lock = threading.Lock()
        self._routes = routes
        self._server: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="grpc-aio", daemon=True)

    def start(self) -> int:
        self._thread.start()
        try:
            return asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        except BaseException:
            self._end()
            raise

    def stop(self, grace_seconds: float) -> None:
        if not self._thread.is_alive():
            return
        # The other of two that stop it may end the loop first.
        with contextlib.suppress(CancelledError):
            asyncio.run_coroutine_threadsafe(self._stop(grace_seconds), self._loop).result()
        self._end()

    def give_up_unread(self) -> None:
        now = time.monotonic()
        for task in [task for task, until in list(self.sending.items()) if until < now]:
            self.call_soon(task.cancel)

    def begin_sending(self, nbytes: int) -> asyncio.Task[Any]:
        """The task that runs this is to send so many bytes; it leaves `sending` when it has."""
        task = asyncio.current_task()
        assert task is not None
        self.sending[task] = time.monotonic() + self.options.write_seconds(nbytes)
        return task

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """On the transport's thread, at once if this is it; dropped when the transport has stopped."""
        if threading.get_ident() == self._thread.ident:
            callback(*arguments)
            return
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    def _end(self) -> None:
        with self._end_lock:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
        self.live.clear()

    async def _stop(self, grace_seconds: float) -> None:
        stopping = asyncio.ensure_future(self._server.stop(grace_seconds))
        idle_checks = 0
        while not stopping.done():
            # Their requests would be refused when they are whole.
            self.waiting.end_unary(ServeError(StatusCode.UNAVAILABLE, SERVER_EXITING))
            idle_checks = 0 if self.live or self.sending else idle_checks + 1
            if idle_checks * CHECK_SECONDS > LINGER_SECONDS:
                # The core would wait 20 seconds for clients that do not answer its last ping.
                await self._server.stop(None)
            await asyncio.wait((stopping,), timeout=CHECK_SECONDS)

    async def _check_waiting(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                self.waiting.check(time.monotonic())
            except Exception as error:
                self.failures.report("calls that wait for their clients could not be checked", error)

    async def _serve(self) -> int:
        files = certificate_files(self.options)
        credentials = None if files is None else server_credentials(files, self._log)
        self._server = grpc.aio.server(options=channel_arguments(self.options))
        self._server.add_generic_rpc_handlers((_Methods(self, self._routes),))
        try:
            if credentials is None:
                port: int = self._server.add_insecure_port(self.options.target)
            else:
                port = self._server.add_secure_port(self.options.target, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise binding_error(self.options)
        if self._counts_unfinished:
            self.waiting.unfinished = UnfinishedBytes(
                self.memory, partial(received_bytes, port), time.monotonic(), self._log
            )
        await self._server.start()
        self._checks = asyncio.create_task(self._check_waiting())
        return port


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Which coroutine serves which method."""

    def __init__(self, transport: AioTransport, routes: Routes) -> None:
        self._transport = transport
        self._handlers = {name: self._handler(name, route) for name, route in routes.items()}

    def _handler(self, name: str, route: Route) -> object:
        if isinstance(route, UnaryRoute):
            # As a stream, so that the call is known before its message has come whole.
            return grpc.stream_stream_rpc_method_handler(self._unary(name, route))
        return grpc.stream_stream_rpc_method_handler(self._stream(name, route))

    def service(self, handler_call_details: Any) -> object:
        transport = self._transport
        waiting = len(transport.waiting)
        if waiting >= transport.waiting.check_from:
            transport.waiting.check(time.monotonic())
        if len(transport.live) - waiting >= transport.options.max_concurrent_calls:
            return _refusal(StatusCode.UNAVAILABLE, too_many_calls(transport.options.max_concurrent_calls))
        name = handler_call_details.method
        handler = self._handlers.get(name)
        return handler or _refusal(StatusCode.UNIMPLEMENTED, unknown_method(name))

    def _unary(self, name: str, route: UnaryRoute) -> _Method:
        async def serve(messages: object, context: _Context) -> None:
            await _UnaryCall(self._transport, name, context).run(route)

        return serve

    def _stream(self, name: str, route: StreamRoute) -> _Method:
        async def serve(messages: object, context: _Context) -> None:
            await _StreamCall(self._transport, name, context).run(route)

        return serve


def _refusal(code: StatusCode, text: str) -> object:
    async def refuse(messages: object, context: _Context) -> None:
        await context.abort(_GRPC_STATUS[code], text)

    return grpc.stream_stream_rpc_method_handler(refuse)


class _Call:
    """What unary calls and streams share."""

    def __init__(self, transport: AioTransport, method: str, context: _Context) -> None:
        self.method = method
        self._transport = transport
        self._context = context

    @property
    def metadata(self) -> Metadata:
        metadata: Metadata = self._context.invocation_metadata()
        return metadata

    @property
    def deadline(self) -> float | None:
        remaining: float | None = self._context.time_remaining()
        return None if remaining is None else time.monotonic() + remaining

    @property
    def peer(self) -> str:
        peer: str = self._context.peer()
        return peer

    async def _set_status(self, code: StatusCode, text: str, trailing_metadata: Metadata) -> None:
        if trailing_metadata:
            self._context.set_trailing_metadata(tuple(trailing_metadata))
        if code is not StatusCode.OK:
            await self._context.abort(_GRPC_STATUS[int(code)], status_text(text))


class _UnaryCall(_Call):
    is_stream = False

    def __init__(self, transport: AioTransport, method: str, context: _Context) -> None:
        super().__init__(transport, method, context)
        self.message = b""
        self._reading: asyncio.Task[object] | None = None
        self._answered = asyncio.Event()
        self._answer: tuple[bytes, StatusCode, str, Metadata] = (b"", StatusCode.OK, "", ())
        self._watchers: list[Callable[[], None]] = []
        self._gone = False
        self.held_bytes = 0

    async def run(self, route: UnaryRoute) -> None:
        self._transport.live.add(self)
        try:
            await self._receive(route)
            await self._answered.wait()
        except asyncio.CancelledError:
            self._cancel()
            raise
        message, code, text, trailing_metadata = self._answer
        try:
            self._hold(message)
        except ServeError as error:
            code, text = error.code, error.text
        if code is StatusCode.OK:
            await self._context.write(message)
        await self._set_status(code, text, trailing_metadata)

    async def _receive(self, route: UnaryRoute) -> None:
        waiting = self._transport.waiting
        waiting.begin(self)
        self._reading = asyncio.current_task()
        try:
            message = await self._context.read()
        except asyncio.CancelledError:
            if self._answered.is_set() and self._reading is not None and not self._reading.uncancel():
                return
            raise
        finally:
            since = waiting.since.pop(self, None)
            self._reading = None
        try:
            if message is grpc.aio.EOF:
                raise ServeError(StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
            self.message = message
            if waiting.counts_bytes:
                waiting.came_whole(self, since, len(message))
            route.handler(self)
        except Exception as error:
            told = self._transport.failures.error_of(self.method, error)
            self.fail(told.code, told.text)

    def end(self, error: ServeError) -> None:
        """See WaitingCall."""
        self.fail(error.code, error.text)
        if self._reading is not None:
            self._reading.cancel()

    def _hold(self, message: bytes) -> None:
        """Until grpc.aio has sent the answer, which it does at the end of this very task."""
        transport = self._transport
        transport.memory.admit_answer(self, len(message))
        transport.begin_sending(len(message)).add_done_callback(self._on_sent)

    def _on_sent(self, task: asyncio.Task[Any]) -> None:
        self._transport.sending.pop(task, None)
        self._transport.memory.release_answer(self)

    def reply(self, message: bytes, trailing_metadata: Metadata = ()) -> None:
        if not isinstance(message, bytes):
            raise TypeError(f"a message must be bytes, got {type(message).__name__}")
        self._end(message, StatusCode.OK, "", trailing_metadata)

    def fail(self, code: StatusCode, text: str, trailing_metadata: Metadata = ()) -> None:
        self._end(b"", code, text, trailing_metadata)

    def _end(self, message: bytes, code: StatusCode, text: str, trailing_metadata: Metadata) -> None:
        try:
            self._transport.live.remove(self)
        except KeyError:
            return
        with self._transport.watch_lock:
            # The watchers know the request, which knows this call.
            self._watchers = []
        self._answer = (message, code, text, trailing_metadata)
        self._transport.call_soon(self._answered.set)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        with self._transport.watch_lock:
            if not self._gone:
                self._watchers.append(callback)
                return
        callback()

    def _cancel(self) -> None:
        with self._transport.watch_lock:
            try:
                self._transport.live.remove(self)
            except KeyError:
                return
            self._gone = True
            watchers, self._watchers = self._watchers, []
        for callback in watchers:
            try:
                callback()
            except Exception as error:
                self._transport.failures.report(f"{self.method}: a cancellation could not be passed on", error)


class _StreamCall(_Call):
    is_stream = True

    def __init__(self, transport: AioTransport, method: str, context: _Context) -> None:
        super().__init__(transport, method, context)
        self._lock = threading.Lock()
        self._flow = StreamFlow(transport.options, transport.memory)
        self._receiver: StreamReceiver | None = None
        self._status: tuple[StatusCode, str, Metadata] | None = None
        self._to_send = asyncio.Event()
        self._may_read = asyncio.Event()

    async def run(self, route: StreamRoute) -> None:
        """Read in a task beside, write in this one until the status has gone."""
        self._transport.live.add(self)
        self._transport.waiting.open_stream(self)
        reader: asyncio.Task[None] | None = None
        try:
            try:
                self._receiver = receiver = route.handler(self)
            except Exception as error:
                told = self._transport.failures.error_of(self.method, error)
                self.finish(told.code, told.text)
            else:
                reader = asyncio.create_task(self._read(receiver))
            await self._write()
        except grpc.aio.AbortError:
            raise
        except BaseException:
            self._cancel(StatusCode.CANCELLED, "")
            raise
        finally:
            self._transport.live.discard(self)
            self._transport.waiting.close_stream(self)
            self._receiver = None
            if reader is not None:
                reader.cancel()

    def end(self, error: ServeError) -> None:
        """See WaitingCall. What waits to be sent is dropped: the client may not read."""
        self._cancel(error.code, error.text)
        self._transport.call_soon(self._to_send.set)

    def _cancel(self, code: StatusCode, text: str) -> None:
        with self._lock:
            ended = self._status is not None
            self._status = self._status or (code, text, ())
            self._flow.drop()
            receiver, self._receiver = self._receiver, None
        if ended or receiver is None:
            return
        try:
            receiver.on_cancel()
        except Exception as error:
            self._transport.failures.report(f"{self.method}: a cancellation could not be passed on", error)

    # Receiving

    def request_next(self) -> None:
        with self._lock:
            self._flow.answered()
            if self._flow.is_idle and self._status is None:
                self._transport.waiting.begin(self)
        self._transport.call_soon(self._may_read.set)

    async def _read(self, receiver: StreamReceiver) -> None:
        try:
            while self._status is None:
                if not self._flow.may_read():
                    self._may_read.clear()
                    if not self._flow.may_read():
                        await self._may_read.wait()
                    continue
                message = await self._context.read()
                if self._status is not None:
                    return
                if message is grpc.aio.EOF:
                    receiver.on_half_close()
                    return
                with self._lock:
                    self._flow.received()
                    self._transport.waiting.remove(self)
                    if self._transport.waiting.counts_bytes:
                        self._transport.waiting.came_whole(self, None, len(message))
                receiver.on_message(message)
        except grpc.aio.BaseError:
            # The call has failed below us; run() hears of it too.
            return
        except Exception as error:
            self.end(self._transport.failures.error_of(self.method, error))

    # Sending

    def send(self, message: bytes) -> None:
        if not isinstance(message, bytes):
            raise TypeError(f"a message must be bytes, got {type(message).__name__}")
        with self._lock:
            if self._status is not None:
                return
            try:
                self._flow.queue(message)
            except ServeError as error:
                # grpc.aio cannot cancel with a status, so the client learns it when it reads again.
                self._status = (error.code, error.text, ())
        self._transport.call_soon(self._to_send.set)

    def finish(self, code: StatusCode, text: str, trailing_metadata: Metadata = ()) -> None:
        with self._lock:
            if self._status is None:
                self._status = (code, text, trailing_metadata)
                self._transport.waiting.close_stream(self)
        self._transport.call_soon(self._to_send.set)

    async def _write(self) -> None:
        while True:
            with self._lock:
                message = self._flow.next()
                status = self._status
            if message is not None:
                self._may_read.set()
                task = self._transport.begin_sending(len(message))
                try:
                    await self._context.write(message)
                finally:
                    self._transport.sending.pop(task, None)
                with self._lock:
                    self._flow.sent()
            elif status is not None:
                await self._set_status(*status)
                return
            else:
                self._to_send.clear()
                # Looked at again: another thread may have queued between the look and the clearing.
                if self._flow.is_empty() and self._status is None:
                    await self._to_send.wait()
