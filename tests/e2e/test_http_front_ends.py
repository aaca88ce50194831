"""HTTP served by front-end processes: state that all of them share. The tests of test_http.py run with front ends,
too."""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.front_ends import MOST_REQUESTS, clients_of
from support.gated_models import gate_of
from support.http_requests import ask
from support.metrics import port_of, scrape
from support.server import RocserveProcess
from support.trace_file import read_entries
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

CLIENTS = 16
BODY = {"inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


@pytest.fixture
def server(front_ends_server: RocserveProcess) -> RocserveProcess:
    return front_ends_server


def infer(server: RocserveProcess, model: str = "m", **more: Any) -> tuple[int, Any]:
    """Infer on a new connection, and so through a random front end."""
    return ask(server, "POST", f"/v2/models/{model}/infer", {**BODY, **more})


def test_all_serve(server: RocserveProcess) -> None:
    clients: list[http.client.HTTPConnection] = []

    def have_all() -> bool:
        """Whether each front end has a connection; the kernel chooses by chance."""
        for _ in range(CLIENTS):
            clients.append(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS))
            clients[-1].request("GET", "/v2/models/m")
            assert clients[-1].getresponse().read().startswith(b'{"name":"m"')
        return all(clients_of(front_end, server.http_port) for front_end in server.front_ends())

    wait_until(have_all, "a connection of each front end")
    for client in clients:
        client.close()
    assert "HTTP is served by 2 processes, as --front-ends says" in server.log_text
    assert server.log_text.count("Started HTTPService") == 1


def test_what_one_has_changed_all_know(server: RocserveProcess) -> None:
    for turn in range(5):
        assert ask(server, "POST", "/v2/repository/models/m/unload")[0] == 200
        for _ in range(CLIENTS):
            status, answer = infer(server)
            assert (status, answer["error"][:31]) == (404, "Request for unknown model: 'm' ")
            assert ask(server, "POST", "/v2/models/m/generate", {"X": [1, 2]})[0] == 404
        # Alternately with and without batching, which changes what a body without shapes means.
        batch_size = 8 if turn % 2 else 0
        dims = "[2]" if batch_size else "[-1, 2]"
        config = (
            f'{{"platform": "onnx_onnxv1", "max_batch_size": {batch_size},'
            f' "input": [{{"name": "X", "data_type": "TYPE_FP32", "dims": {dims}}}],'
            f' "output": [{{"name": "Y", "data_type": "TYPE_FP32", "dims": {dims}}}]}}'
        )
        loaded = ask(server, "POST", "/v2/repository/models/m/load", {"parameters": {"config": config}})
        assert loaded[0] == 200, loaded
        for _ in range(CLIENTS):
            assert infer(server)[1]["outputs"][0]["data"] == [2.0, 3.0]
            status, answer = ask(server, "POST", "/v2/models/m/generate", {"X": [1, 2]})
            assert (status, answer["Y"]) == (200, [2.0, 3.0])


def test_what_is_restricted_is_so_by_protocol(server: RocserveProcess) -> None:
    path = "/v2/systemsharedmemory/status"
    for _ in range(4):
        assert ask(server, "GET", path) == (403, {"error": "This API is restricted, expecting header 'key'"})
        assert ask(server, "GET", path, headers={"Key": "word"})[0] == 200
        assert ask(server, "GET", "/v2/logging")[0] == 200
    with server.client() as client, pytest.raises(InferenceServerException, match="This protocol is restricted"):
        client.get_log_settings()


def test_a_client_s_requests_are_counted_over_all(server: RocserveProcess) -> None:
    refusals = 8
    count = MOST_REQUESTS + refusals
    gate_of(server).unlink(missing_ok=True)
    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(infer, server, "gated") for _ in range(count)]
        try:
            wait_until(lambda: sum(one.done() for one in asked) == refusals, "the refusals")
        finally:
            gate_of(server).touch()
        answers = [one.result() for one in asked]
    refused = [answer for status, answer in answers if status == 429]
    assert len(refused) == refusals
    assert all("the most for one client (--max-requests-per-client)" in answer["error"] for answer in refused)
    assert infer(server, "gated")[0] == 200


def test_the_log_and_traces_tell_of_requests(server: RocserveProcess, tmp_path: Path) -> None:
    assert ask(server, "POST", "/v2/logging", {"log_verbose_level": 1})[0] == 200
    file = Path(ask(server, "GET", "/v2/trace/setting")[1]["trace_file"])
    before = len(read_entries(file))
    assert ask(server, "POST", "/v2/trace/setting", {"trace_rate": "1"})[0] == 200
    try:
        for number in range(CLIENTS):
            assert infer(server, id=f"seen-{number}")[0] == 200
            ask(server, "POST", "/v2/models/m/infer", {"id": f"refused-{number}", "inputs": [{}]})
        for what in ("seen", "refused"):
            wait_until(
                lambda what=what: all(f"{what}-{number}" in server.log_text for number in range(CLIENTS)),
                f"all ids of requests that are {what}",
            )
        wait_until(lambda: "HTTP_RECV_START" in str(read_entries(file)[before:]), "a trace")
        assert "GRPC" not in str(read_entries(file)[before:])
    finally:
        ask(server, "POST", "/v2/logging", {"log_verbose_level": 0})
        ask(server, "POST", "/v2/trace/setting", {"trace_rate": "0"})


def test_memory_of_requests_is_counted_in_all(server: RocserveProcess) -> None:
    """A front end reports the memory that it holds: here half a body."""
    port = port_of(server)

    def requests() -> float:
        return float(scrape(port)['rocserve_request_memory_bytes{kind="request"}'])

    client = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)
    client.putrequest("POST", "/v2/models/m/infer")
    client.putheader("Content-Length", "2000000")
    client.endheaders(bytes(1_000_000))
    wait_until(lambda: requests() >= 1_000_000, "a report of the front end")
    client.close()
    wait_until(lambda: requests() == 0, "the report that the client has gone")
