"""What the page of the HTTP port loads: its files, the overview, live events, OpenAPI; and who may load them."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from support.http_requests import PAGE_CALLS, add_sub_body, ask
from support.models import add_constant, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

import rocserve
from rocserve.frontends.http.routes import ROUTES, find_destination

MODES = pytest.mark.parametrize("front_ends", [0, 2], ids=["one-process", "front-ends"])


def overview(server: RocserveProcess, name: str) -> Any:
    status, answer = ask(server, "GET", "/v2/overview")
    assert status == 200, answer
    return next((model for model in answer["models"] if model["name"] == name), None)


@contextmanager
def events(server: RocserveProcess, **headers: str) -> Iterator[Callable[[], Any]]:
    """A function that waits for the next event."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
    connection.request("GET", "/v2/events", headers={name.replace("_", "-"): text for name, text in headers.items()})
    response = connection.getresponse()
    assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")

    def next_event() -> Any:
        while line := response.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return None

    try:
        yield next_event
    finally:
        response.close()
        connection.close()


def test_files_of_the_page(http_server: RocserveProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", http_server.http_port, timeout=PATIENCE_SECONDS)
    connection.request("GET", "/")
    response = connection.getresponse()
    page = response.read().decode()
    policy = response.headers["Content-Security-Policy"]
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "unsafe" not in policy
    used = set(re.findall(r'(?:src|href)="(/[^"]+)"', page))
    assert used == {"/ui/app.js", "/ui/style.css"}
    for path in [*used, "/ui/try.js"]:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        # Nothing of another origin.
        assert set(re.findall(r"https?://[^/\"]+", text)) <= {"http://www.w3.org"}
    connection.request("HEAD", "/")
    assert connection.getresponse().read() == b""
    connection.close()
    assert ask(http_server, "POST", "/")[0] == 405
    for path in ("/ui/", "/ui/nothing.js", "/ui/..%2fpage.py", "/ui/../page.py", "/index.html"):
        assert ask(http_server, "GET", path)[0] == 404


def test_the_page_is_small() -> None:
    files = (Path(rocserve.__file__).parent / "frontends" / "http" / "page_files").iterdir()
    assert sum(file.stat().st_size for file in files if file.name != "openapi.json") < 120_000


def test_openapi_tells_what_is_served(http_server: RocserveProcess) -> None:
    status, told = ask(http_server, "GET", "/openapi.json")
    assert (status, told["openapi"]) == (200, "3.1.0")
    calls = ("overview", "version-details", "server-state", "page/acts", "load-report", "ensemble-graph", "events")
    own = {"/openapi.json", *(f"/v2/{call}" for call in calls)}
    for path, verbs in told["paths"].items():
        if path not in own:
            for verb in verbs:
                destination = find_destination(re.sub(r"{version}", "1", path).encode())
                assert destination is not None, path
                assert verb.upper() in destination[0].verbs, path
    # Requests with the name of a repository are refused, and those for all regions are listed where they are served.
    described = {re.sub(r"{\w+}", "{}", path) for path in told["paths"]}
    for route in ROUTES:
        urls = [re.sub(r"{\w*}", "{}", re.sub(r"\[[^]]*repository_name}\]|\[/{}\]", "", route.url))]
        if "[/versions" in urls[0]:
            urls = [urls[0].replace("[/versions/{}]", part) for part in ("", "/versions/{}")]
        elif "[" in urls[0]:
            urls = [re.sub("[][]", "", urls[0])]
        assert described.issuperset(urls), route
    infer = told["paths"]["/v2/models/{model}/infer"]["post"]
    assert {"application/x-ndjson", "text/event-stream"} < infer["responses"]["200"]["content"].keys()
    names = {entry["$ref"].rpartition("/")[2] for verbs in told["paths"].values() for one in verbs.values()
             for entry in one.get("parameters", ())}  # fmt: skip
    assert names == set(told["components"]["parameters"])


def test_overview(http_server: RocserveProcess) -> None:
    before = overview(http_server, "add_sub")
    for _ in range(3):
        assert ask(http_server, "POST", "/v2/models/add_sub/infer", add_sub_body())[0] == 200
    body = add_sub_body()
    body["inputs"].pop()
    assert ask(http_server, "POST", "/v2/models/add_sub/infer", body)[0] == 400
    now = overview(http_server, "add_sub")
    assert (now["version"], now["state"], now["devices"]) == ("1", "READY", "cpu")
    assert now["success_count"] - before["success_count"] == 3
    assert [entry["quantile"] for entry in now["latencies_us"]] == [0.5, 0.9, 0.99]
    assert all(entry["value"] > 0 for entry in now["latencies_us"])
    assert sum(now["batches"].values()) - sum(before["batches"].values()) == 3
    assert min(now["worker_memory_bytes"]) > 1_000_000
    assert "expected 2 inputs but got 1" in now["failures"][-1]["text"]
    assert overview(http_server, "patient")["platform"] == "python"
    status, some = ask(http_server, "GET", "/v2/overview?name=patient&name=nothing&name=add_sub")
    assert (status, [model["name"] for model in some["models"]]) == (200, ["add_sub", "patient"])
    too_many = "&".join(f"name={number}" for number in range(201))
    status, answer = ask(http_server, "GET", f"/v2/overview?{too_many}")
    assert (status, answer["error"]) == (400, "expected at most 200 names of models, got 201")


@pytest.fixture(scope="module", params=[0, 2], ids=["one-process", "front-ends"])
def followed(request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server with a model `good`; the last test of it ends it."""
    repository = tmp_path_factory.mktemp("page")
    drop(repository, "good", add_constant(1.0))
    return start(repository, f"--front-ends={request.param}", "--exit-timeout-secs=600")


@pytest.mark.parametrize("followed", [pytest.param(0, id="one-process")], indirect=True)
def test_so_many_streams_of_events(followed: RocserveProcess) -> None:
    connections = [
        http.client.HTTPConnection("127.0.0.1", followed.http_port, timeout=PATIENCE_SECONDS) for _ in range(65)
    ]
    statuses = []
    for connection in connections:
        connection.request("GET", "/v2/events")
        statuses.append(connection.getresponse().status)
    assert statuses == [200] * 64 + [503]
    for connection in connections:
        connection.close()
    wait_until(lambda: ask(followed, "HEAD", "/v2/events")[0] == 200)
    assert ask(followed, "GET", "/v2/overview")[0] == 200


def test_events_as_they_happen_and_a_worker_that_is_started_again(followed: RocserveProcess) -> None:
    (repository,) = followed.repositories
    with events(followed) as next_event:
        while (event := next_event())["state"] != "READY":
            assert (event["name"], event["version"]) == ("good", "1")
        drop(repository, "bad", b"this is no model")
        while (event := next_event())["state"] != "UNAVAILABLE":
            assert event["name"] == "bad"
        assert "model.onnx" in event["reason"] or "onnx" in event["reason"].lower()
        number = event["number"]
        drop(repository, "bad", add_constant(2.0))
        while (event := next_event())["state"] != "READY":
            assert event["name"] == "bad"
        assert overview(followed, "good")["worker_restarts"] == 0
        [worker] = followed.workers("good")
        worker.kill()
        assert next_event()["reason"] == "restarting: worker ended unexpectedly (killed by signal 9)"
        assert next_event()["state"] == "READY"
        assert overview(followed, "good")["state"] == "READY"
        assert overview(followed, "good")["worker_restarts"] == 1
    with events(followed, Last_Event_ID=str(number)) as next_event:
        assert next_event()["number"] == number + 1


RAISES = """
class TritonPythonModel:
    def initialize(self, args):
        open(args["model_repository"] + "/<b>labels</b>.json")

    def execute(self, requests):
        return []
"""
RAISES_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
"""


def report(server: RocserveProcess, **query: str) -> Any:
    status, answer = ask(server, "GET", f"/v2/load-report?{urlencode(query)}")
    assert status == 200, answer
    return answer


def test_what_helps_to_repair_a_failed_load(followed: RocserveProcess) -> None:
    server, (repository,) = followed, followed.repositories
    drop(repository, "raises", RAISES, RAISES_CONFIG)
    drop(repository, "typo", add_constant(1.0), "max_batch_size: 8\nmax_batch_sise: 5\n")
    drop(repository, "kept", add_constant(1.0))
    ensemble = (
        'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32'
        ' dims: 1 } ensemble_scheduling { step { model_name: "raises" model_version: -1 input_map { key: "IN" value:'
        ' "x" } output_map { key: "OUT" value: "y" } } }'
    )
    drop(repository, "chain", None, ensemble)
    states = {"raises": "UNAVAILABLE", "typo": "UNAVAILABLE", "chain": "UNAVAILABLE", "kept": "READY"}
    wait_until(lambda: all((overview(server, name) or {}).get("state") == state for name, state in states.items()))

    raised = report(server, name="raises", version="1")
    assert 'File "raises/1/model.py", line 4, in initialize' in raised["traceback"]
    assert str(repository) not in json.dumps(raised)
    assert "<b>labels</b>.json" in raised["reason"]
    assert (raised["backend"], raised["is_served"], raised["follows_files"]) == ("python", False, True)
    assert raised["attempts"] >= 1
    assert raised["retry_ms"] > raised["failed_ms"] > 0
    assert {file["path"] for file in raised["files"]} >= {"1/model.py", "config.pbtxt"}

    typo = report(server, name="typo", version="")
    assert (typo["config_file"], typo["config_line"], typo["waits_for_files"]) == ("config.pbtxt", 2, True)
    assert typo["config_text"] == "max_batch_size: 8\nmax_batch_sise: 5\n"

    waits = report(server, name="chain", version="1")
    assert (waits["members"], waits["failed_ms"], waits["traceback"]) == (["raises"], 0, "")

    status, graph = ask(server, "GET", "/v2/ensemble-graph?name=chain&version=1&width=500")
    assert (status, [box["title"] for box in graph["boxes"]]) == (200, ["request", "raises", "answer"])
    assert 0 < graph["width"] <= 500
    assert [label["title"] for label in graph["labels"]] == ["x FP32 [1]", "y FP32 [1]"]
    assert ask(server, "GET", "/v2/ensemble-graph?name=kept&version=1")[1]["boxes"] == []
    assert ask(server, "GET", "/v2/ensemble-graph?name=typo")[1]["boxes"] == []
    for query, refused in (
        ("name=nothing", 404),
        ("", 404),
        ("name=chain&version=x", 400),
        ("name=chain&width=-1", 400),
    ):
        assert ask(server, "GET", f"/v2/ensemble-graph?{query}")[0] == refused

    assert not any(file["is_changed"] for file in report(server, name="kept", version="1")["files"])
    (repository / "kept" / "1" / "model.onnx").write_bytes(b"this is no model")
    wait_until(lambda: "newer content failed to load" in overview(server, "kept")["reason"])
    kept = report(server, name="kept", version="1")
    assert (kept["is_served"], "onnx" in kept["reason"].lower()) == (True, True)
    assert {file["path"] for file in kept["files"] if file["is_changed"]} == {"1/model.onnx"}

    for query in ("name=nothing", "", "name=%FF&version=1"):
        assert ask(server, "GET", f"/v2/load-report?{query}")[0] == 404
    assert ask(server, "GET", "/v2/load-report?name=kept&version=x")[0] == 400


def test_acts_need_the_token_and_the_servers_own_page(followed: RocserveProcess) -> None:
    server = followed
    status, told = ask(server, "GET", "/v2/page/acts")
    assert (status, told["is_explicit"], set(told["refusals"].values())) == (200, False, {""})
    own = {"Origin": f"http://{server.http_address}", "X-Rocserve-Token": told["token"]}
    act = {"act": "verbosity", "level": 1}
    for headers in (
        {},
        {**own, "X-Rocserve-Token": "wrong"},
        {**own, "Origin": "http://evil.example"},
        {**own, "Origin": "http://evil.example", "Host": "evil.example"},
        {**own, "X-Forwarded-For": "10.0.0.1"},
    ):
        status, answer = ask(server, "POST", "/v2/page/acts", act, headers=headers)
        assert status == 403, (headers, answer)
    assert ask(server, "GET", "/v2/logging")[1]["log_verbose_level"] == 0
    status, evil = ask(server, "GET", "/v2/page/acts", headers={"Host": "evil.example"})
    assert (status, evil["token"]) == (200, "")
    assert ask(server, "POST", "/v2/page/acts", act, headers=own)[0] == 200
    assert ask(server, "GET", "/v2/logging")[1]["log_verbose_level"] == 1
    assert ask(server, "POST", "/v2/page/acts", {"act": "reload", "name": "good"}, headers=own)[0] == 200
    status, answer = ask(server, "POST", "/v2/page/acts", {"act": "unload", "name": "good"}, headers=own)
    assert (status, answer["error"]) == (503, "explicit model load / unload is not allowed if polling is enabled")
    with events(server) as next_event:
        while not (event := next_event())["act"]:
            pass
    assert (event["act"], event["name"], event["address"]) == ("log verbosity 1", "", "127.0.0.1")


def test_listeners_do_not_delay_the_servers_end(followed: RocserveProcess) -> None:
    with events(followed) as next_event:
        assert next_event() is not None
        assert followed.terminate() == 0
        while next_event() is not None:
            pass


@MODES
def test_what_is_restricted(serve, repository: Path, front_ends: int) -> None:
    drop(repository, "m", add_constant(1.0))
    flags = ("--http-restricted-api=statistics:key=one", "--http-restricted-api=model-repository:other=two")
    server = serve(repository, flags=(*flags, f"--front-ends={front_ends}"))
    server.wait_until_ready()
    assert ask(server, "GET", "/")[0] == 200
    for headers, missing in (({}, "other"), ({"other": "two"}, "key"), ({"other": "two", "key": "no"}, "key")):
        status, answer = ask(server, "GET", "/v2/overview", headers=headers)
        assert (status, answer["error"]) == (403, f"This API is restricted, expecting header '{missing}'")
    assert ask(server, "GET", "/v2/overview", headers={"other": "two", "key": "one"})[0] == 200
    assert ask(server, "GET", "/v2/events")[0] == 403
    assert ask(server, "GET", "/v2/load-report?name=m", headers={"other": "two"})[0] == 403
    assert ask(server, "GET", "/v2/server-state", headers={"other": "two"})[0] == 403
    assert ask(server, "GET", "/v2/server-state", headers={"key": "one"})[0] == 200
    assert ask(server, "GET", "/v2/version-details?name=m", headers={"other": "two"})[0] == 403
    assert ask(server, "GET", "/v2/version-details?name=m", headers={"key": "one"})[0] == 200
    assert ask(server, "GET", "/v2/ensemble-graph?name=m")[0] == 403
    with events(server, other="two") as next_event:
        assert next_event()["name"] == "m"


def test_without_the_page(serve, repository: Path) -> None:
    """test_http_server.py has a server without front ends."""
    server = serve(repository, flags=("--allow-ui=false", "--front-ends=2"))
    for path in PAGE_CALLS:
        assert ask(server, "GET", path)[0] == 404
