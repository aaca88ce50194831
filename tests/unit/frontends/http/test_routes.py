"""The routes of URLs; and timeouts from headers and settings."""

from __future__ import annotations

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.frontends.http.inference import request_timeout
from rocserve.frontends.http.routes import GENERATE, GENERATE_STREAM, INFER, Route, find_destination, parse_message


@pytest.mark.parametrize(
    ("path", "method", "fields"),
    [
        ("/v2/models/a%20b%2Fc/ready", "ModelReady", {"name": "a b/c", "version": ""}),
        ("/v2/models/m/config", "ModelConfig", {"name": "m", "version": ""}),
        ("/v2/models/stats", "ModelStatistics", {}),
        ("/v2/models/stats/stats", "ModelStatistics", {"name": "stats", "version": ""}),
        ("/v2/repository/r/index", "RepositoryIndex", {}),
        ("/v2/repository/r/models/m/unload", "RepositoryModelUnload", {"model_name": "m", "repository_name": "r"}),
        ("/v2/systemsharedmemory/region/r%C3%A9/register", "SystemSharedMemoryRegister", {"name": "ré"}),
        ("/v2/hardware", "HasHardware", {}),
        ("/v2/workers/migraphx/load", "WorkerLoad", {"name": "migraphx"}),
        ("/v2/repository/models/m/versions/2/unload", "ModelUnload", {"name": "m", "version": "2"}),
    ],
)
def test_methods(path: str, method: str, fields: dict[str, str]) -> None:
    destination = find_destination(path.encode())
    assert destination is not None
    assert (destination[0].method, destination[1]) == (method, fields)
    destination[0].request(destination[1], None)


@pytest.mark.parametrize(
    ("what", "route"), [("infer", INFER), ("generate", GENERATE), ("generate_stream", GENERATE_STREAM)]
)
def test_inference(what: str, route: Route) -> None:
    destination = find_destination(f"/v2/models/m/versions/2/{what}?a=b".encode())
    assert destination == (route, {"name": "m", "version": "2"})


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v2/",
        "/v2/models/m/",
        "/v2/models/m/versions/1/trace/setting",
        "/v2/repository/models/m",
        "/v2/systemsharedmemory",
        "/v2/health/live/",
    ],
)
def test_nothing_there(path: str) -> None:
    assert find_destination(path.encode()) is None


@pytest.mark.parametrize("call", ["load", "unload"])
@pytest.mark.parametrize("version", ["2", '"2"'])
def test_one_version_is_a_number_or_text(call: str, version: str) -> None:
    destination = find_destination(f"/v2/repository/models/m/{call}".encode())
    assert destination is not None
    message = destination[0].request(destination[1], f'{{"parameters": {{"version": {version}}}}}'.encode())
    assert dict(message.parameters)["version"].string_param == "2"


@pytest.mark.parametrize("call", ["load", "unload"])
@pytest.mark.parametrize("version", ["true", "2.5", "[2]", "null"])
def test_other_versions_are_refused(call: str, version: str) -> None:
    destination = find_destination(f"/v2/repository/models/m/{call}".encode())
    assert destination is not None
    with pytest.raises(ServeError, match="expected parameter 'version' as a number") as caught:
        destination[0].request(destination[1], f'{{"parameters": {{"version": {version}}}}}'.encode())
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    assert caught.value.text.endswith(f"got {version}")


@pytest.mark.parametrize("call", ["load", "unload"])
def test_a_version_outside_of_the_parameters_is_refused(call: str) -> None:
    """Without it the request would be one for all versions."""
    with pytest.raises(ServeError, match=r'expected \{"parameters": \{"version": \.\.\.\}\}') as caught:
        parse_message(f"/v2/repository/models/m/{call}".encode(), b'{"version": 1}')
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


def test_an_unknown_parameter_of_an_unload_reaches_the_method_which_refuses_it() -> None:
    destination = find_destination(b"/v2/repository/models/m/unload")
    assert destination is not None
    message = destination[0].request(destination[1], b'{"parameters": {"versions": 1}}')
    assert [*message.parameters] == ["versions"]


@pytest.mark.parametrize("name", [b"file:\\ud800", b"file:\xff"])
def test_a_file_whose_name_is_no_utf_8_is_refused(name: bytes) -> None:
    with pytest.raises(ServeError, match="Invalid encoding in string") as caught:
        parse_message(b"/v2/repository/models/m/load", b'{"parameters":{"%b":"AAAA"}}' % name)
    assert caught.value.code is StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("timeout_seconds", "headers", "seconds"),
    [
        (0.0, {}, None),
        (5.0, {}, 5.0),
        (0.0, {"X-Request-Timeout-Ms": "1500"}, 1.5),
        (0.0, {"X-Envoy-Expected-Rq-Timeout-Ms": "15000"}, 15.0),
        (5.0, {"X-Request-Timeout-Ms": "9000", "X-Envoy-Expected-Rq-Timeout-Ms": "15000"}, 5.0),
        (5.0, {"X-Request-Timeout-Ms": "9000", "X-Envoy-Expected-Rq-Timeout-Ms": "3000"}, 3.0),
    ],
)
def test_the_shortest_counts(timeout_seconds: float, headers: dict[str, str], seconds: float | None) -> None:
    assert request_timeout({name.lower(): value for name, value in headers.items()}, timeout_seconds) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1s", "\u0661", "9" * 30])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ServeError, match="expected a whole number of milliseconds from 1 on, got") as refused:
        request_timeout({"x-request-timeout-ms": text}, 0.0)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
