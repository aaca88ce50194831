"""HTTP requests whose deadline passes: the client gets an error in time, a queued request is not run, and nothing of it
is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.http_requests import ask
from support.metrics import FLAGS, port_of, scrape
from support.models import drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

SLOW = """
import pathlib
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path(__file__).parents[3]

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            with open(FOLDER / "executed", "a") as file:
                file.write("x")
            end = time.monotonic() + pb_utils.get_input_tensor_by_name(request, "SECONDS").as_numpy()[0]
            while time.monotonic() < end and not request.is_cancelled() and not (FOLDER / "released").exists():
                time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("DONE", np.ones(1, np.int32))]) for _ in requests]
"""
CONFIG = """
backend: "python"
input { name: "SECONDS" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "DONE" data_type: TYPE_INT32 dims: [ 1 ] }
"""


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    folder = tmp_path_factory.mktemp("deadlines")
    repository: Path = folder / "repository"
    drop(repository, "slow", SLOW, CONFIG)
    return start(repository, *FLAGS)


def infer(server: RocserveProcess, seconds: float, **headers: str) -> tuple[int, Any]:
    body = {"inputs": [{"name": "SECONDS", "shape": [1], "datatype": "FP32", "data": [seconds]}]}
    return ask(server, "POST", "/v2/models/slow/infer", body, {k.replace("_", "-"): v for k, v in headers.items()})


def counted(server: RocserveProcess, metric: str) -> int:
    return sum(int(value) for name, value in scrape(port_of(server)).items() if name.startswith(metric))


def executed(server: RocserveProcess) -> int:
    """How many requests the model has begun."""
    file = server.repositories[0].parent / "executed"
    return len(file.read_text()) if file.exists() else 0


LONG = 10 * PATIENCE_SECONDS
"""Seconds of a request that ends only by its cancellation, or by the file `released`."""
OVERDUE = 504, {"error": "Deadline Exceeded"}


@pytest.mark.parametrize("header", ["x_request_timeout_ms", "x_envoy_expected_rq_timeout_ms"])
def test_a_request_that_runs_is_answered_at_its_deadline_and_cancelled(server: RocserveProcess, header: str) -> None:
    assert infer(server, LONG, **{header: "300"}) == OVERDUE
    # The model has received the cancellation, and is free for the next request.
    assert infer(server, 0.0)[0] == 200
    wait_until(lambda: counted(server, "rocserve_request_memory_bytes") == 0, "a free memory")


def test_requests_that_wait_do_not_run_after_their_deadline(server: RocserveProcess) -> None:
    before = executed(server)
    running = threading.Thread(target=infer, args=(server, LONG))
    running.start()
    wait_until(lambda: executed(server) > before, "the first request in the model")
    answers: list[tuple[int, Any]] = []

    def wait() -> None:
        answers.append(infer(server, 0.0, x_request_timeout_ms="200"))

    waiting = [threading.Thread(target=wait) for _ in range(5)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert answers == [OVERDUE] * 5
    assert running.is_alive()
    released = server.repositories[0].parent / "released"
    released.touch()
    running.join()
    released.unlink()
    assert infer(server, 0.0)[0] == 200
    assert executed(server) == before + 2


def test_the_server_s_own_limit_holds_for_all(serve: Callable[..., RocserveProcess], repository: Path) -> None:
    drop(repository, "slow", SLOW, CONFIG)
    server = serve(repository, "--http-request-timeout-secs=2")
    began = time.monotonic()
    assert infer(server, LONG) == OVERDUE
    assert time.monotonic() - began > 2
    assert infer(server, LONG, x_request_timeout_ms=str(int(1000 * LONG))) == OVERDUE


def test_generate_and_its_stream_have_deadlines_too(server: RocserveProcess) -> None:
    for what in ("generate", "generate_stream"):
        headers = {"X-Request-Timeout-Ms": "200"}
        assert ask(server, "POST", f"/v2/models/slow/{what}", {"SECONDS": LONG}, headers)[0] == 504
        assert ask(server, "POST", f"/v2/models/slow/{what}", {"SECONDS": 0.0})[0] == 200


def test_a_header_that_is_no_number_is_refused(server: RocserveProcess) -> None:
    text = "X-Request-Timeout-Ms: expected a whole number of milliseconds from 1 on, got 'soon'"
    assert infer(server, 0.0, x_request_timeout_ms="soon") == (400, {"error": text})
