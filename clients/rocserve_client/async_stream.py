"""Sends requests and receives answers on a stream, for asyncio, and translates grpc.aio's errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, Unpack

import grpc.aio

from rocserve.core.errors import StatusCode
from rocserve_client.errors import CLOSED, CLOSED_FOR_REQUESTS, Cancelled, error_from_grpc, error_with
from rocserve_client.messages import Inputs, Outputs, RequestOptions, decode_stream_response, encode_infer_request
from rocserve_client.results import InferResult


@contextmanager
def grpc_errors() -> Iterator[None]:
    """Translate what grpc.aio raises in a `with` block to this package's exceptions."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_grpc(error) from error
    except grpc.aio.UsageError as error:
        raise Cancelled(CLOSED) from error
    except asyncio.CancelledError as error:
        # grpc.aio also raises this if the stream or channel of a call has been closed. Then nobody has cancelled the
        # task, and the task must not end as cancelled.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Cancelled(CLOSED) from error


class AsyncStream:
    """As `Stream`: one task may send while another receives, and a failed request does not end the stream."""

    def __init__(self, method: Any, timeout: float | None, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        with grpc_errors():
            self._call = method(timeout=timeout, metadata=metadata)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def send(
        self, model: str, inputs: Inputs, outputs: Outputs = None, **options: Unpack[RequestOptions]
    ) -> None:
        """Send a request; waits only while the connection accepts no more data. Raises RocserveError if the stream is
        broken, and Cancelled if it is closed for requests."""
        request = encode_infer_request(model, inputs, outputs, options)
        try:
            with grpc_errors():
                await self._call.write(request)
        except asyncio.InvalidStateError as error:
            # grpc.aio raises this if sending is closed, and also, without the status, if the stream ended before this
            # call.
            if not self._call.done():
                raise Cancelled(CLOSED_FOR_REQUESTS) from error
            status = StatusCode((await self._call.code()).value[0])
            if status is StatusCode.OK:
                raise Cancelled(CLOSED_FOR_REQUESTS) from error
            raise error_with(status, await self._call.details() or "the stream has ended") from error

    async def close_sending(self) -> None:
        """Send no more requests: the server will end the stream after its last answer."""
        await self._call.done_writing()

    async def receive(self) -> InferResult:
        """Return the next answer. Raises RocserveError if its request or the stream failed, EOFError at the end."""
        with grpc_errors():
            message = await self._call.read()
        if message is grpc.aio.EOF:
            raise EOFError("the stream has ended")
        return decode_stream_response(message)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferResult:
        try:
            return await self.receive()
        except EOFError:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """End the stream immediately, and drop requests and answers that are on their way."""
        self._call.cancel()
