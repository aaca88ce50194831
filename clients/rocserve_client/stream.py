"""Sends requests and receives answers on a stream, blocking."""

from __future__ import annotations

import queue
from typing import Any, Self, Unpack

import grpc

from rocserve_client.errors import CLOSED, CLOSED_FOR_REQUESTS, Cancelled, error_from_grpc
from rocserve_client.messages import Inputs, Outputs, RequestOptions, decode_stream_response, encode_infer_request
from rocserve_client.results import InferResult


class Stream:
    """A stream: `send` sends requests; iteration or `receive` returns answers.

    One thread may send while another receives. A failed request raises a RocserveError in place of its answer, and the
    stream continues: iterate again, or call `receive` again. A broken stream raises at every receive.

    Answers come in the order of the requests, except those of decoupled models, which come as the model sends them, any
    number per request. Tell them apart by `request_id`, and set `mark_last` to know which is the last.
    """

    def __init__(self, method: Any, timeout: float | None, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_closed = False
        try:
            self._answers = method(iter(self._requests.get, None), timeout=timeout, metadata=metadata)
        except ValueError as error:
            raise Cancelled(CLOSED) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, model: str, inputs: Inputs, outputs: Outputs = None, **options: Unpack[RequestOptions]) -> None:
        """Send a request without waiting; the arguments are those of `Client.infer`. Raises Cancelled if the stream is
        closed, or closed for requests, because gRPC would not read the request."""
        if self._is_closed:
            raise Cancelled(CLOSED_FOR_REQUESTS)
        self._requests.put(encode_infer_request(model, inputs, outputs, options))

    def close_sending(self) -> None:
        """Send no more requests: the server will end the stream after its last answer."""
        self._is_closed = True
        self._requests.put(None)

    def receive(self) -> InferResult:
        """Return the next answer. Raises RocserveError if its request or the stream failed, EOFError at the end."""
        try:
            return next(self)
        except StopIteration:
            raise EOFError("the stream has ended") from None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> InferResult:
        try:
            message = next(self._answers)
        except grpc.RpcError as error:
            raise error_from_grpc(error) from error
        return decode_stream_response(message)

    def close(self) -> None:
        """End the stream immediately, and drop requests and answers that are on their way."""
        self.close_sending()
        self._answers.cancel()
