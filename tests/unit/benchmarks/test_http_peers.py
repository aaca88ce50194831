"""The group http_peers: the requests to each server, and the measurement of a small server that adds and subtracts, and
can fail."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest
from support.measuring import measured

from benchmarks.cases import http_cases
from benchmarks.contenders import ServedContender
from benchmarks.http_peers import HTTP_PEERS, INPUTS, http_peer_cases
from benchmarks.http_request import HEADER_LENGTH, HttpRequestFailed, plain_json_request
from benchmarks.probe import WrongAnswer
from benchmarks.server_process import ServerProcess

CASE = http_peer_cases()[0]
REQUEST = plain_json_request("/add_sub", INPUTS)
SERVER = """\
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class AddSub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(b"ready")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pairs = list(zip(asked["INPUT0"][0], asked["INPUT1"][0], strict=True))
        off = int(Path(sys.argv[2]).read_text())
        sums, differences = [left + right + off for left, right in pairs], [left - right for left, right in pairs]
        self.answer(json.dumps({"OUTPUT0": [sums], "OUTPUT1": [differences]}).encode())

    def log_message(self, format, *values): ...


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), AddSub).serve_forever()
"""


@pytest.fixture
def contender(tmp_path: Path) -> Iterator[ServedContender]:
    (tmp_path / "off").write_text("0")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as kept:
        # Nobody else can take the port, and the server can: it reuses addresses too, and this socket does not listen.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        command = [sys.executable, str(tmp_path / "server.py"), str(port), str(tmp_path / "off")]
        with ServerProcess("small", command, None, tmp_path / "log", http_port=port, ready_path="/health") as server:
            yield ServedContender(server, tmp_path, REQUEST)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load (nghttp2-client) is not installed")
def test_only_right_answers_are_measured(contender: ServedContender, tmp_path: Path) -> None:
    assert measured(contender, CASE).rate > 0
    (tmp_path / "off").write_text("1")
    with pytest.raises(WrongAnswer, match="small answered wrongly"):
        contender.measure(CASE, seconds=0.5)


def test_all_servers_are_asked_for_the_same_tensors() -> None:
    numbers = {name: array.ravel().tolist() for name, array in INPUTS.items()}
    for peer in HTTP_PEERS:
        asked = json.loads(peer.request.body)
        if "inputs" in asked:
            assert {entry["name"]: entry["data"] for entry in asked["inputs"]} == numbers
            assert [(entry["datatype"], entry["shape"]) for entry in asked["inputs"]] == [("INT32", [1, 16])] * 2
        else:
            assert {name: rows[0] for name, rows in asked.items()} == numbers


def test_answers_of_both_forms_are_read() -> None:
    left, right = INPUTS.values()
    results = {"OUTPUT0": left + right, "OUTPUT1": left - right}
    v2 = {
        "outputs": [
            {"name": name, "datatype": "INT32", "shape": [1, 16], "data": array.ravel().tolist()}
            for name, array in results.items()
        ]
    }
    plain = {name: array.tolist() for name, array in results.items()}
    for peer in HTTP_PEERS:
        CASE.check(peer.request.read(json.dumps(v2 if "/v2/" in peer.request.path else plain).encode(), {}))


def test_the_commands_of_all_peers_have_their_port_and_folder(tmp_path: Path) -> None:
    servers = [peer.server(1234, tmp_path) for peer in HTTP_PEERS]
    assert {server.http_address for server in servers} == {"127.0.0.1:1234"}
    assert {server.log_file.parent for server in servers} == {tmp_path}
    assert len({server.name for server in servers}) == len(servers)


REQUEST_CASE = http_cases()[0]


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
    assert REQUEST_CASE.http is not None
    outputs, nbytes = REQUEST_CASE.http.send(address)
    REQUEST_CASE.check(outputs)
    assert nbytes > 128


def test_an_http_error_is_raised_with_its_status(address: str) -> None:
    other = http_cases()[2].http
    assert other is not None
    with pytest.raises(HttpRequestFailed, match="HTTP status 404"):
        other.send(address)


def test_as_h2load_sends_it() -> None:
    assert REQUEST_CASE.http is not None
    call = REQUEST_CASE.http.call
    assert call.path == "/v2/models/http_add_sub/infer"
    assert f"{HEADER_LENGTH}: {REQUEST_CASE.http.headers[HEADER_LENGTH]}" in call.headers
    assert call.options == ("--h1",)
