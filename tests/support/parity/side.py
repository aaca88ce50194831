"""One of the two servers, asked by raw gRPC and plain HTTP, so that malformed requests arrive as they are."""

from __future__ import annotations

import gzip
import http.client
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

import grpc

from support.parity.exchange import GRPC_SERVICE, Exchange, Outcome
from support.parity.normal_form import plain_values, stream_answer, unary_answer

ANSWER_SECONDS = 30.0
_MESSAGE_BYTES = 1 << 28
_COMPARED_HEADERS = ("content-type", "content-encoding", "inference-header-content-length")
_GONE = ("failed to connect to all addresses", "Socket closed", "Connection reset", "Deadline Exceeded")
_OPTIONS = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
]


class Side:
    """A running server and its ports; a context manager that closes the connection. A server that ends, or does not
    answer in time, is an AssertionError."""

    def __init__(self, name: str, grpc_address: str, http_port: int) -> None:
        self.name = name
        self.http_port = http_port
        self._channel = grpc.insecure_channel(grpc_address, options=_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def take(self, exchange: Exchange) -> list[Outcome]:
        return exchange.ask(self)

    def unary(self, path: str, message: bytes) -> Outcome:
        call = self._channel.unary_unary(path, request_serializer=None, response_deserializer=None)
        try:
            data = call(message, timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return self._refusal(error)
        return Outcome("OK", answer=unary_answer(path, data))

    def stream(self, messages: Sequence[bytes]) -> Outcome:
        call = self._channel.stream_stream(
            f"{GRPC_SERVICE}ModelStreamInfer", request_serializer=None, response_deserializer=None
        )
        responses = call(iter(messages), timeout=ANSWER_SECONDS)
        answers: list[Any] = []
        try:
            for data in responses:
                answers.append(stream_answer(data))
        except grpc.RpcError as error:
            return replace(self._refusal(error), answer=answers)
        return Outcome("OK", answer=answers)

    def _refusal(self, error: Any) -> Outcome:
        """An error's code and text. Triton's texts end in line breaks and spaces here and there."""
        text = (error.details() or "").rstrip()
        if any(sign in text for sign in _GONE):
            raise AssertionError(f"{self.name} gives no answer: {text}")
        return Outcome(error.code().name, text)

    def http(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Outcome:
        """Answers of several events (server-sent events) stay one text; JSON and binary parts are read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, body or None, dict(headers))
            response = connection.getresponse()
            data = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"{self.name} gives no answer: {error!r}") from None
        finally:
            connection.close()
        kept = {name: found[name] for name in _COMPARED_HEADERS if name in found}
        return _http_outcome(str(response.status), kept, data)


def _http_outcome(status: str, headers: Mapping[str, str], data: bytes) -> Outcome:
    encoding = headers.get("content-encoding")
    if encoding == "gzip":
        data = gzip.decompress(data)
    elif encoding == "deflate":
        data = zlib.decompress(data)
    length = int(headers.get("inference-header-content-length", len(data)))
    text = data[:length].decode(errors="replace")
    answer: Any = text
    with suppress(ValueError):
        answer = plain_values(json.loads(text))
    # The length of the JSON depends on its spaces, which say nothing.
    shown = {name: value for name, value in headers.items() if name != "inference-header-content-length"}
    return Outcome(status, answer={"headers": shown, "body": answer, "binary": data[length:]})
