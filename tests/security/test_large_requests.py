"""One HTTP client sends requests that take long to read; another client's small requests are answered meanwhile. How
long they wait is measured in benchmarks/stall_cases.py."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.http_requests import add_sub_body, ask, sums
from support.models import add_sub, answering, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS

SCRIPT = answering("X", "COUNT", "np.array([x.size])")
CONFIG = """
backend: "python"
input { name: "X" data_type: %s dims: [ -1 ] }
output { name: "COUNT" data_type: TYPE_INT64 dims: [ 1 ] }
"""


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    folder = tmp_path_factory.mktemp("large")
    repository: Path = folder / "repository"
    drop(repository, "add_sub", add_sub(4))
    drop(repository, "numbers", SCRIPT, CONFIG % "TYPE_INT32")
    drop(repository, "texts", SCRIPT, CONFIG % "TYPE_STRING")
    return start(repository, "--model-control-mode=explicit", "--load-model=*")


def tensor(datatype: str, element: bytes, count: int) -> bytes:
    head = b'{"inputs":[{"name":"X","datatype":"%b","shape":[%d],"data":[' % (datatype.encode(), count)
    return head + b",".join([element] * count) + b"]}]}"


def binary(datatype: str, count: int, nbytes: int) -> tuple[bytes, Mapping[str, str]]:
    entry = {"name": "X", "datatype": datatype, "shape": [count], "parameters": {"binary_data_size": nbytes}}
    head = json.dumps({"inputs": [entry]}).encode()
    return head + bytes(nbytes), {"Inference-Header-Content-Length": str(len(head))}


def parameters() -> bytes:
    return b"{%b}" % b",".join(b'"p%d":%d' % (number, number) for number in range(200_000))


Case = tuple[str, bytes, Mapping[str, str], int, str]
"""Path, body, headers; the status and a part of the answer."""
CASES: Mapping[str, Callable[[], Case]] = {
    "numbers": lambda: ("models/numbers/infer", tensor("INT32", b"123456789", 1_000_000), {}, 200, "1000000"),
    "texts": lambda: ("models/texts/infer", tensor("BYTES", b'""', 250_000), {}, 200, "250000"),
    "texts in binary form": lambda: ("models/texts/infer", *binary("BYTES", 250_000, 1_000_000), 200, "250000"),
    "a huge tensor": lambda: ("models/numbers/infer", *binary("INT32", 16 << 20, 64 << 20), 200, str(16 << 20)),
    "lists": lambda: ("models/numbers/infer", tensor("INT32", b"[]", 1_000_000), {}, 500, "Shape does not match"),
    "dimensions": lambda: (
        "models/numbers/infer",
        b'{"inputs":[{"name":"X","datatype":"INT32","data":[1],"shape":[%b]}]}' % b",".join([b"1"] * 2_000_000),
        {},
        400,
        "16384 inputs, outputs, dimensions and parameters together, got 2000001",
    ),
    "parameters": lambda: (
        "models/numbers/infer",
        b'{"inputs":[],"parameters":%b}' % parameters(),
        {},
        400,
        "16384 inputs, outputs, dimensions and parameters together, got 200000",
    ),
    "parameters of generate": lambda: ("models/numbers/generate", parameters(), {}, 400, "got 200000"),
    "nesting": lambda: ("models/numbers/infer", b'{"inputs":' + b"[" * 20_000_000, {}, 400, "nesting depth exceeds"),
    "a load request": lambda: (
        "repository/models/m/load",
        b'{"parameters":[%b]}' % b",".join([b"[]"] * 1_000_000),
        {},
        500,
        "non-object",
    ),
    "a form of nearly boundaries": lambda: (
        "models/texts/infer",
        b'--b\r\nContent-Disposition: form-data; name="X"\r\n\r\n%b\r\n--b--' % (b"\r\n--" * (15 << 20)),
        {"Content-Type": "multipart/form-data; boundary=b"},
        200,
        "[1]",
    ),
    "a bomb": lambda: (
        "models/numbers/infer",
        gzip.compress(bytes(300 << 20), 1),
        {"Content-Encoding": "gzip"},
        400,
        "Decompressed data size exceeds",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_small_requests_are_answered_beside_a_large_one(server: RocserveProcess, case: str) -> None:
    path, body, headers, status, text = CASES[case]()
    answers: list[tuple[int, str]] = []

    def ask_much() -> None:
        found, answer = ask(server, "POST", f"/v2/{path}", body, headers, timeout=PATIENCE_SECONDS)
        answers.append((found, json.dumps(answer)))

    small = json.dumps(add_sub_body()).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
    thread = threading.Thread(target=ask_much)
    thread.start()
    while thread.is_alive():
        connection.request("POST", "/v2/models/add_sub/infer", small)
        assert sums(json.loads(connection.getresponse().read())) == [6, 7, 8, 9]
        time.sleep(0.005)
    connection.close()
    [(found, answer)] = answers
    assert (found, text in answer) == (status, True), answer[:300]
