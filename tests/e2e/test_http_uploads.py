"""Images over HTTP as people send them: base64 in JSON, files in forms; and scripts of other origins."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.http_requests import add_sub_body, ask, sums
from support.models import add_sub, drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

RAW = bytes(range(256))
INFER = "/v2/models/types/infer"
BOUNDARY = "----rocserve--boundary"


def form(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="photo.jpg"\r\n'.encode()
        + b"Content-Type: image/jpeg\r\n\r\n"
        + content
        + b"\r\n"
        for name, content in parts
    ) + (f"--{BOUNDARY}--\r\n".encode())


def post_form(server: RocserveProcess, body: bytes, model: str = "types") -> tuple[int, Any]:
    kind = {"Content-Type": f'multipart/form-data; boundary="{BOUNDARY}"'}
    return ask(server, "POST", f"/v2/models/{model}/infer", body, kind)


def infer_bytes(server: RocserveProcess, data: list[Any], datatype: str = "BYTES", **more: Any) -> tuple[int, Any]:
    width = 256 if datatype == "UINT8" else len(data)
    entry = {"name": f"INPUT_{datatype}", "datatype": datatype, "shape": [1, width], "data": data, **more}
    return ask(server, "POST", INFER, {"inputs": [entry], "outputs": [{"name": f"OUTPUT_{datatype}"}]})


def test_base64(http_server: RocserveProcess) -> None:
    encoded = base64.b64encode("é\0".encode()).decode()
    status, answer = infer_bytes(http_server, [{"b64": encoded}, "plain"])
    assert (status, answer["outputs"][0]["data"]) == (200, ["é\0", "plain"])
    status, answer = infer_bytes(http_server, [encoded, encoded], parameters={"content_type": "base64"})
    assert (status, answer["outputs"][0]["data"]) == (200, ["é\0", "é\0"])
    status, answer = infer_bytes(http_server, [{"b64": base64.b64encode(RAW).decode()}], "UINT8")
    assert (status, answer["outputs"][0]["data"]) == (200, list(RAW))


def test_base64_of_an_image_that_is_parsed_elsewhere(http_server: RocserveProcess) -> None:
    """JSON of more than 256 KiB."""
    encoded = base64.b64encode(b"x" * 600_000).decode()
    status, answer = infer_bytes(http_server, [{"b64": encoded}])
    assert (status, answer["outputs"][0]["data"]) == (200, ["x" * 600_000])


@pytest.mark.parametrize(
    ("element", "text"),
    [
        ({"b64": "no base64!"}, "input 'INPUT_BYTES' has an element that is not base64"),
        ({"b64": "QQ"}, "input 'INPUT_BYTES' has an element that is not base64: Incorrect padding"),
        ({"b64": 1}, "input 'INPUT_BYTES': expected base64 as a text, or as {\"b64\": text}"),
        ({"b64": "QQ==", "more": 1}, "input 'INPUT_BYTES': expected base64 as a text"),
        ({}, "input 'INPUT_BYTES': expected base64 as a text"),
    ],
)
def test_what_is_no_base64(http_server: RocserveProcess, element: Any, text: str) -> None:
    status, answer = infer_bytes(http_server, [element])
    assert (status, answer["error"].startswith(text)) == (400, True), answer


def test_base64_of_generate(http_server: RocserveProcess) -> None:
    status, answer = ask(http_server, "POST", "/v2/models/types/generate", {"INPUT_BYTES": {"b64": "YWI="}})
    assert (status, answer["OUTPUT_BYTES"]) == (200, "ab")


def test_a_form_of_files(http_server: RocserveProcess) -> None:
    content = b"one\r\n--\r\n" + BOUNDARY.encode()
    body = form(("INPUT_BYTES", content), ("INPUT_BYTES", b""), ("INPUT_INT32", b"\1\0\0\0"), ("INPUT_INT32", bytes(4)))
    status, answer = post_form(http_server, body)
    assert status == 200, answer
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert outputs["OUTPUT_BYTES"]["data"] == [content.decode(), ""]
    assert outputs["OUTPUT_BYTES"]["shape"] == [2, 1]


def test_a_form_for_the_only_input(http_server: RocserveProcess) -> None:
    """`curl -F file=@photo.jpg`."""
    status, answer = post_form(http_server, form(("file", b"\0\0\x80\x3f")), "seen")
    assert (status, answer["model_name"]) == (200, "seen")
    large = b"\0" * 400_000
    status, answer = post_form(http_server, form(("file", large)), "seen")
    assert (status, answer["model_name"]) == (200, "seen")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (form(("nothing", b"")), "unexpected inference input 'nothing' for model 'types'"),
        (b"", "for the boundary in Content-Type: it ends within a part"),
        (form(("INPUT_BYTES", b"a"))[:-8], "it ends within a part"),
        (f"--{BOUNDARY}\r\nContent-Disposition: form-data\r\n\r\n\r\n--{BOUNDARY}--".encode(), "part 1 has no name"),
        (f"--{BOUNDARY}\r\n{'x' * 9000}\r\n\r\n\r\n--{BOUNDARY}--".encode(), "part 1 has no head of at most 8190"),
    ],
)
def test_forms_that_are_none(http_server: RocserveProcess, body: bytes, text: str) -> None:
    status, answer = post_form(http_server, body)
    assert (status, text in answer["error"]) == (400, True), answer


def test_bounds_of_forms(http_server: RocserveProcess) -> None:
    status, answer = post_form(http_server, form(("INPUT_BYTES", bytes(1_000_000))))
    assert (status, "exceeds the maximum allowed input size of 1000000 bytes" in answer["error"]) == (400, True)
    many = f"\r\n--{BOUNDARY}\r\nContent-Disposition:;name=a\r\n\r\n" * 16_500
    status, answer = post_form(http_server, many.encode())
    assert (status, "16384" in answer["error"]) == (400, True), answer
    status, answer = ask(http_server, "POST", INFER, b"x", {"Content-Type": "multipart/form-data"})
    assert (status, "expected a boundary" in answer["error"]) == (400, True)


def _answer(
    server: RocserveProcess, verb: str, path: str, body: bytes = b"", **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
    connection.request(verb, path, body or None, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


@pytest.mark.parametrize("front_ends", [0, 2])
def test_scripts_of_other_origins(serve: Callable[..., RocserveProcess], tmp_path: Path, front_ends: int) -> None:
    drop(tmp_path / "models", "add_sub", add_sub(4))
    mine = "https://app.example.com"
    server = serve(
        tmp_path / "models", flags=(f"--http-cors-origins={mine},http://localhost:3000", f"--front-ends={front_ends}")
    )
    server.wait_until_ready()
    path = "/v2/models/add_sub/infer"
    asked = _answer(server, "OPTIONS", path, Origin=mine, Access_Control_Request_Method="POST")
    assert asked.status == 200
    assert asked.headers["Access-Control-Allow-Origin"] == mine
    assert "POST" in asked.headers["Access-Control-Allow-Methods"]
    # Browsers do not take the star for Authorization.
    assert asked.headers["Access-Control-Allow-Headers"] == "*, Authorization"
    answered = _answer(server, "POST", path, json.dumps(add_sub_body()).encode(), Origin=mine)
    assert (answered.status, answered.headers["Access-Control-Allow-Origin"]) == (200, mine)
    assert answered.headers["Vary"] == "Origin"
    refused = _answer(server, "POST", path, b"{", Origin="http://localhost:3000")
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (500, "http://localhost:3000")
    for origin in ("https://evil.example.com", "https://app.example.com.evil.com", "null"):
        asked = _answer(server, "OPTIONS", path, Origin=origin, Access_Control_Request_Method="POST")
        assert (asked.status, asked.headers["Access-Control-Allow-Origin"]) == (405, None)
    # An admin call stays an admin call.
    assert _answer(server, "POST", "/v2/repository/models/add_sub/load", Origin=mine).status == 403


@pytest.mark.parametrize(
    ("verb", "path", "allowed"),
    [
        ("GET", INFER, "POST"),
        ("GET", "/v2/models/add_sub/generate", "POST"),
        ("POST", "/v2/health/ready", "GET, HEAD"),
        ("DELETE", "/v2/logging", "GET, POST"),
        ("POST", "/", "GET, HEAD"),
    ],
)
def test_the_answer_to_a_wrong_method_allows_the_right_ones(
    http_server: RocserveProcess, verb: str, path: str, allowed: str
) -> None:
    answer = _answer(http_server, verb, path)
    assert (answer.status, answer.headers["Allow"]) == (405, allowed)


def test_no_other_origin_by_default(http_server: RocserveProcess) -> None:
    asked = _answer(http_server, "OPTIONS", INFER, Origin="http://a.b", Access_Control_Request_Method="POST")
    assert (asked.status, asked.headers["Access-Control-Allow-Origin"]) == (405, None)
    assert sums(ask(http_server, "POST", "/v2/models/add_sub/infer", add_sub_body())[1]) == [6, 7, 8, 9]
