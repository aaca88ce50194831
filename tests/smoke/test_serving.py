"""One real server for what must never break: answers, a model that is added while the server runs, and a worker that
dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from support.infer_inputs import infer_input
from support.load import ConstantLoad
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.processes import has_ended
from support.server import RocserveProcess
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    drop(folder, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    return folder


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with RocserveProcess([models], log=log) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def load(server: RocserveProcess) -> Iterator[ConstantLoad]:
    """Eight clients of model m, whose versions add 1 and 2."""
    with ConstantLoad(server.address, "m", {1.0, 2.0}) as load:
        load.wait_until_answered_by(1.0)
        yield load
    assert load.wrong == []


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def test_a_batch_is_answered(server: RocserveProcess, protocol) -> None:
    address = server.address if protocol is tritonclient.grpc else server.http_address
    client = protocol.InferenceServerClient(address)
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    answer = client.infer("m", [infer_input("X", values, protocol)], request_id="seven")
    assert answer.as_numpy("Y").tolist() == (values + 1).tolist()
    response = answer.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "seven"
    wrong = infer_input("X", np.zeros((8, 3), np.float32), protocol)
    with pytest.raises(InferenceServerException, match=r"unexpected shape for input 'X' for model 'm'"):
        client.infer("m", [wrong])
    client.close()


def test_a_worker_that_is_killed_takes_only_its_requests_along(server: RocserveProcess, load: ConstantLoad) -> None:
    (worker,) = server.workers("m")
    worker.kill()
    wait_until(lambda: has_ended(worker.pid), "the worker's end")
    load.wait_until_answered_by(1.0, times=100)
    assert len(load.failures) <= 8
    assert all(status == "StatusCode.UNAVAILABLE" and "signal 9" in text for status, text in load.failures)


def test_a_version_that_is_dropped_takes_over_without_a_failure(
    server: RocserveProcess, models: Path, load: ConstantLoad
) -> None:
    drop(models, "m", add_constant(2.0), version=2)
    load.wait_until_answered_by(2.0, times=100)
    # A partial model harms nothing, and its reason says why it is not served.
    drop(models, "m", add_constant(3.0)[:40], version=3)

    def is_reported() -> bool:
        rows = server.client().get_model_repository_index().models
        return any((row.version, row.state) == ("3", "UNAVAILABLE") and row.reason for row in rows)

    wait_until(is_reported, "the reason of version 3")
    load.wait_until_answered_by(2.0, times=100)
    assert load.failures == []


def test_the_server_ends_in_order(server: RocserveProcess) -> None:
    """The last test of this server."""
    family = server.family()
    assert server.terminate() == 0
    wait_until(lambda: all(has_ended(process.pid) for process in family), "the end of all processes")
