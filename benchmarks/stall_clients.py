"""Clients that may be delayed: small requests over gRPC and HTTP, one after another, in a separate process. Usage:
python -m benchmarks.stall_clients GRPC_ADDRESS HTTP_ADDRESS MODEL

Each line of standard input ends a span of time; the answer is a line of JSON with the longest request of the span in
milliseconds, by protocol.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import grpc
import numpy

from benchmarks.cases import infer_request
from benchmarks.http_request import http_request
from benchmarks.load_generator import INFER_PATH

_PAUSE_SECONDS = 0.002
"""The pause between two requests, so that the clients take little CPU time from what is measured."""


class _Client:
    """Sends requests without end, on a separate thread."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._longest = 0.0
        self._asked = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            self._ask()
            with self._changed:
                self._longest = max(self._longest, time.monotonic() - began)
                self._asked += 1
                self._changed.notify()
            time.sleep(_PAUSE_SECONDS)

    def longest_ms(self) -> float:
        """Since the last call, the current request included."""
        with self._changed:
            enough = self._asked + 1
            self._changed.wait_for(lambda: self._asked >= enough)
            longest, self._longest = self._longest, 0.0
        return longest * 1e3


def main(grpc_address: str, http_address: str, model: str) -> None:
    inputs = {"INPUT0": numpy.ones(1, numpy.uint8)}
    message, posted = infer_request(model, inputs), http_request(model, inputs)
    infer = grpc.insecure_channel(grpc_address).unary_unary(INFER_PATH)

    def ask_grpc() -> None:
        # gRPC has given up a connection that was delayed for long.
        with suppress(grpc.RpcError):
            infer(message)

    connection = http.client.HTTPConnection(http_address)

    def ask_http() -> None:
        connection.request("POST", posted.path, posted.body, posted.headers)
        response = connection.getresponse()
        response.read()
        assert response.status == http.HTTPStatus.OK

    clients = {"grpc": _Client(ask_grpc), "http": _Client(ask_http)}
    for _ in sys.stdin:
        print(json.dumps({name: client.longest_ms() for name, client in clients.items()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
