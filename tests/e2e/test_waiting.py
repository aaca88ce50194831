"""Waiting requests: their timeout, their client, their turn."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import drop, slow_sum
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS
from tritonclient.utils import InferenceServerException

CONFIG = """
max_batch_size: 64
input { name: "X" data_type: TYPE_FP32 dims: [ 256 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 256 ] }
"""


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory) -> RocserveProcess:
    folder = tmp_path_factory.mktemp("waiting")
    repository: Path = folder / "repository"
    drop(repository, "slow", slow_sum(4000), CONFIG)
    return start(repository)


def rows(count: int = 64) -> triton.InferInput:
    return infer_input("X", np.ones((count, 256), np.float32))


def executed(server: RocserveProcess, model: str) -> int:
    return server.client().get_inference_statistics(model).model_stats[0].execution_count


class Busy:
    """Keeps a model busy with one request after another until the block ends."""

    def __init__(self, server: RocserveProcess, model: str) -> None:
        self._client = server.client()
        self._model = model
        self._stopping = threading.Event()
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answered = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._running.wait(PATIENCE_SECONDS)
        time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._running.set()
            self._client.infer(self._model, [rows()])
            self.answered += 1


def test_a_request_whose_client_no_longer_waits_never_runs(server):
    client = server.client()
    client.is_server_live()
    before = executed(server, "slow")
    with pytest.raises(InferenceServerException) as caught, Busy(server, "slow") as busy:
        client.infer("slow", [rows()], client_timeout=0.01)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    time.sleep(0.5)
    assert executed(server, "slow") - before == busy.answered


def test_cancelled_requests_never_run(server):
    client = server.client()
    client.is_server_live()
    before = executed(server, "slow")
    cancelled = 20
    with Busy(server, "slow") as busy:
        waiting = [client.async_infer("slow", [rows()], lambda result, error: None) for _ in range(cancelled)]
        time.sleep(0.05)
        for call in waiting:
            call.cancel()
    time.sleep(0.5)
    # One or two may have begun before they were cancelled.
    assert executed(server, "slow") - before - busy.answered < cancelled / 2
