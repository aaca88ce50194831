"""A request over HTTP, against a small server that adds and subtracts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy
import pytest

from benchmarks.cases import http_cases
from benchmarks.http_request import HEADER_LENGTH, HttpRequestFailed

CASE = http_cases()[0]


class AddSub(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v2/models/http_add_sub/infer":
            self.send_error(404)
            return
        length = int(self.headers[HEADER_LENGTH])
        assert [entry["name"] for entry in json.loads(body[:length])["inputs"]] == ["INPUT0", "INPUT1"]
        left, right = numpy.frombuffer(body[length:], numpy.int32).reshape(2, 1, 16)
        results = {"OUTPUT0": left + right, "OUTPUT1": left - right}
        outputs = [
            {"name": name, "datatype": "INT32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
            for name in results
        ]
        head = json.dumps({"model_name": "http_add_sub", "model_version": "1", "outputs": outputs}).encode()
        answer = head + b"".join(result.tobytes() for result in results.values())
        self.send_response(200)
        self.send_header(HEADER_LENGTH, str(len(head)))
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *values: object) -> None: ...  # noqa: A002


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), AddSub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_outputs_and_their_bytes(address: str) -> None:
    assert CASE.http is not None
    outputs, nbytes = CASE.http.send(address)
    CASE.check(outputs)
    assert nbytes > 128


def test_an_error_is_told(address: str) -> None:
    other = http_cases()[2].http
    assert other is not None
    with pytest.raises(HttpRequestFailed, match="HTTP status 404"):
        other.send(address)


def test_as_h2load_sends_it() -> None:
    assert CASE.http is not None
    call = CASE.http.call
    assert call.path == "/v2/models/http_add_sub/infer"
    assert f"{HEADER_LENGTH}: {CASE.http.headers[HEADER_LENGTH]}" in call.headers
    assert call.options == ("--h1",)
