"""Timeouts, orders and limits of models that are busy for a long time."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.metrics import FLAGS, port_of, scrape
from support.paced_models import TENSORS, drop_paced
from support.server import RocserveProcess, Start
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

STUCK_MS = 2000
LIMITED = """
instance_group {
  kind: KIND_CPU count: 1 rate_limiter { resources { name: "R" count: 2 global: true } }
}
"""


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory) -> RocserveProcess:
    repository = tmp_path_factory.mktemp("queueing")
    drop_paced(repository, "plain")
    drop_paced(
        repository,
        "strict",
        "max_batch_size: 1 dynamic_batching { default_queue_policy { default_timeout_microseconds: 100000 } }",
    )
    return start(repository, *FLAGS)


def milliseconds(value: int, model: str) -> triton.InferInput:
    array = np.array([value], np.int32) if model in ("plain", "one", "other") else np.array([[value]], np.int32)
    return infer_input("MS", array)


class Stuck:
    """A model that works on one request for two seconds."""

    def __init__(self, server: RocserveProcess, model: str) -> None:
        self._client = server.client()
        self._model = model
        self.ended = threading.Event()

    def __enter__(self) -> Stuck:
        entry = milliseconds(STUCK_MS, self._model)
        self._client.async_infer(self._model, [entry], lambda result, error: self.ended.set())
        time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.ended.wait(20)


@pytest.mark.parametrize("model", ["strict", "plain"])
def test_a_time_out_is_answered_when_it_passes(server: RocserveProcess, model: str) -> None:
    client = server.client()
    # The server sends requests ahead to such a fast model.
    for _ in range(100):
        client.infer(model, [milliseconds(0, model)])
    with Stuck(server, model) as stuck:
        started = time.monotonic()
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, [milliseconds(0, model)], timeout=100_000)
        seconds = time.monotonic() - started
        assert not stuck.ended.is_set()
    assert caught.value.message() == "Request timeout expired"
    assert 0.1 <= seconds < 1
    assert client.infer(model, [milliseconds(0, model)]).as_numpy("SPAN") is not None


def test_what_waits_is_counted_wherever_it_waits(server: RocserveProcess) -> None:
    def pending() -> int:
        return int(scrape(port_of(server))['nv_inference_pending_request_count{model="plain",version="1"}'])

    client = server.client()
    for _ in range(100):
        client.infer("plain", [milliseconds(0, "plain")])
    assert pending() == 0
    answers: queue.Queue = queue.Queue()
    with Stuck(server, "plain"):
        for _ in range(7):
            client.async_infer("plain", [milliseconds(0, "plain")], lambda result, error: answers.put(error))
        wait_until(lambda: pending() == 7, "seven waiting requests")
    assert [answers.get(timeout=20) for _ in range(7)] == [None] * 7
    assert pending() == 0


def spans(server: RocserveProcess, models: Sequence[str]) -> list[tuple[int, int]]:
    """The run of each of several concurrent requests: its begin and end."""
    answers: queue.Queue = queue.Queue()
    client = server.client()
    for model in models:
        client.async_infer(model, [milliseconds(30, model)], lambda result, error: answers.put((result, error)))
    found = []
    for _ in models:
        result, error = answers.get(timeout=20)
        assert error is None, error
        began, ended = result.as_numpy("SPAN")
        found.append((int(began), int(ended)))
    return sorted(found)


def test_models_that_share_a_resource_run_one_at_a_time(serve, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    limited = TENSORS[: TENSORS.index("instance_group")] + LIMITED
    for name in ("one", "other"):
        drop_paced(repository, name, tensors=limited)
    drop_paced(repository, "greedy", tensors=limited.replace("count: 2", "count: 4"))
    server = serve(repository, flags=("--rate-limit=execution_count", "--rate-limit-resource=r:3"))
    client = server.client()
    wait_until(lambda: client.is_model_ready("one") and client.is_model_ready("other"), "two models")
    found = spans(server, ["one", "other"] * 6)
    for (_, ended), (began, _) in itertools.pairwise(found):
        assert ended <= began
    wait_until(
        lambda: any(entry.state == "UNAVAILABLE" for entry in client.get_model_repository_index().models), "a refusal"
    )
    (refused,) = [entry for entry in client.get_model_repository_index().models if entry.state == "UNAVAILABLE"]
    assert refused.name == "greedy"
    assert (
        'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the'
        " minimum required count is 4" in refused.reason
    )
