"""Waiting requests whose clients leave."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.gated_models import drop_gated, waiting
from support.infer_inputs import infer_input
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("waiting") / "repository"


@pytest.fixture(scope="module")
def gate(repository: Path) -> Path:
    return drop_gated(repository)


@pytest.fixture(scope="module")
def server(start: Start, repository: Path, gate: Path) -> RocserveProcess:
    return start(repository)


@pytest.fixture
def client(server: RocserveProcess, gate: Path) -> Iterator[triton.InferenceServerClient]:
    """A client; the model's requests wait."""
    gate.unlink(missing_ok=True)
    with server.client() as client:
        yield client
        gate.touch()


class Asked:
    """Requests that have been sent at the same time."""

    def __init__(self, client: triton.InferenceServerClient, count: int) -> None:
        self.errors: queue.Queue[InferenceServerException | None] = queue.Queue()
        self.calls = [
            client.async_infer("gated", rows(), lambda result, error: self.errors.put(error)) for _ in range(count)
        ]

    def outcomes(self) -> list[InferenceServerException | None]:
        return [self.errors.get(timeout=PATIENCE_SECONDS) for _ in self.calls]


def rows() -> list[triton.InferInput]:
    return [infer_input("X", np.ones((1, 2), np.float32))]


def statistics(client: triton.InferenceServerClient) -> service_pb2.ModelStatistics:
    return client.get_inference_statistics("gated").model_stats[0]


def executions_once_all_ran(client: triton.InferenceServerClient, gate: Path) -> int:
    """Open the gate; return how often the model has run, when a last request has been answered."""
    gate.touch()
    client.infer("gated", rows())
    return int(statistics(client).execution_count)


def test_a_request_whose_client_no_longer_waits_never_runs(
    server: RocserveProcess, client: triton.InferenceServerClient, gate: Path
) -> None:
    before = statistics(client)
    asked = Asked(client, 2)
    wait_until(lambda: waiting(server) == 1, "one that runs, and one that waits")

    def is_late_there() -> bool:
        with pytest.raises(InferenceServerException) as caught:
            client.infer("gated", rows(), client_timeout=0.01)
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        return statistics(client).inference_stats.fail.count > before.inference_stats.fail.count

    # On a slow machine it is late before the server has it.
    wait_until(is_late_there, "a request that the server has given up")
    wait_until(lambda: waiting(server) == 1, "the end of all that are late")
    assert executions_once_all_ran(client, gate) - before.execution_count == 3
    assert asked.outcomes() == [None, None]


def test_cancelled_requests_never_run(
    server: RocserveProcess, client: triton.InferenceServerClient, gate: Path
) -> None:
    before = statistics(client)
    asked = Asked(client, 21)
    wait_until(lambda: waiting(server) == 20, "one that runs, and those that wait")
    for call in asked.calls:
        call.cancel()
    assert None not in asked.outcomes()
    wait_until(lambda: waiting(server) == 0, "the end of all that have been cancelled")
    # The one that ran when it was cancelled, and the last one.
    assert executions_once_all_ran(client, gate) - before.execution_count <= 2
