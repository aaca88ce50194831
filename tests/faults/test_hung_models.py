"""Models that hang: while they load, in a version that is replaced, in a batch. Other models do not wait for them."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.metrics import FLAGS as METRICS
from support.metrics import port_of, scrape
from support.models import drop
from support.processes import wait_until_ended
from support.repository_index import models_of
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""

HANGS_AT_IMPORT = """
import time

print("about to wait for a licence", flush=True)
time.sleep(600)
"""

# -1 stays in `execute` for ever; other values are answered with the content of the file `constant` next to the model.
STAYS = """
import pathlib
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.constant = CONSTANT
        self.folder = pathlib.Path(__file__).parents[3]

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if value[0] < 0:
                (self.folder / f"inside{value[0]}").touch()
                while True:
                    time.sleep(1)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value + self.constant)]))
        return responses
"""


@pytest.fixture(scope="module")
def lasting_server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    repository = tmp_path_factory.mktemp("hung") / "repository"
    drop_model(repository, "good", stays(1))
    limits = ("--drain-timeout-secs=0.5", "--load-timeout-secs=600")
    return start(repository, *limits, "--repository-settle-secs=0.1", *METRICS)


@pytest.fixture
def server(lasting_server: RocserveProcess) -> Iterator[RocserveProcess]:
    """Serves `good`, and what a test drops, which is taken away at its end."""
    yield lasting_server
    dropped = [path for path in lasting_server.repositories[0].iterdir() if path.name != "good"]
    for path in dropped:
        shutil.rmtree(path)
    wait_until(lambda: len(lasting_server.workers()) == 1, "the end of the test's models")


@pytest.fixture(scope="module")
def limited_server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server that kills workers after five seconds without an answer, and those of `m` after a hang alone."""
    repository = tmp_path_factory.mktemp("limited") / "repository"
    drop_model(repository, "m", stays(1), limit("request_timeout_secs", 0))
    drop_model(repository, "streams", STREAMS, "model_transaction_policy { decoupled: true }")
    drop_model(repository, "calls", CALLS)
    return start(repository, "--hang-timeout-secs=5", "--request-timeout-secs=5")


def drop_model(repository: Path, name: str, model: str, more: str = "") -> None:
    drop(repository, name, model, CONFIG + more)


def limit(name: str, seconds: float | str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{seconds}" }} }}'


def stays(constant: int) -> str:
    return STAYS.replace("CONSTANT", str(constant))


def ask(client: triton.InferenceServerClient, model: str, value: int) -> int:
    return int(client.infer(model, [infer_input("IN", np.array([value], np.int32))]).as_numpy("OUT")[0])


class Asking:
    """A request on a separate thread, and its outcome."""

    def __init__(self, server: RocserveProcess, model: str, value: int) -> None:
        self._outcome = ""
        self._thread = threading.Thread(target=self._ask, args=(server, model, value), daemon=True)
        self._thread.start()

    def _ask(self, server: RocserveProcess, model: str, value: int) -> None:
        try:
            self._outcome = str(ask(server.client(), model, value))
        except InferenceServerException as error:
            self._outcome = str(error)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> str:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the request was not answered"
        return self._outcome


def test_a_replaced_version_that_hangs_is_killed(server: RocserveProcess):
    repository, client = server.repositories[0], server.client()
    drop_model(repository, "m", stays(0))
    wait_until(lambda: client.is_model_ready("m"), "the model")
    for swap in range(1, 4):
        inside = repository.parent / f"inside-{swap}"
        hanging = Asking(server, "m", -swap)
        wait_until(inside.exists, "the request in the model")
        waiting = Asking(server, "m", 1000)
        wait_until(lambda: pending(server) == 1, "the request that waits")
        drop_model(repository, "m", stays(swap))
        outcomes = (hanging.outcome(), waiting.outcome())
        for text in outcomes:
            assert "model 'm' version 1 was unloaded and had not answered within 0.5 s (--drain-timeout-secs)" in text
            assert "UNAVAILABLE" in text
        assert ask(client, "m", 10) == 10 + swap
    wait_until(lambda: len(server.workers("m")) == 1, "the end of the replaced workers")
    assert server.log_text.count("its workers are killed") == 3


def pending(server: RocserveProcess) -> int:
    """The requests that wait for an instance."""
    metrics = scrape(port_of(server))
    return sum(int(value) for name, value in metrics.items() if name.startswith("nv_inference_pending_request_count"))


def test_loads_that_hang_end_with_the_reason(server: RocserveProcess):
    repository = server.repositories[0]
    drop_model(repository, "hangs", HANGS_AT_IMPORT, limit("load_timeout_secs", 1))
    # On a busy machine the limit may end the first loads before they write this.
    expected = (
        r"Unavailable: the worker did not load within 1 s \(load_timeout_secs\) and was ended; it last wrote: about to"
        r" wait for a licence \(failed (once|\w+ times), next try in "
    )

    def is_told() -> bool:
        state, reason = models_of(server).get("hangs", ("", ""))
        return state == "UNAVAILABLE" and re.match(expected, reason) is not None

    wait_until(is_told, "the end of the load")
    wait_until(lambda: not server.workers("hangs"), "the worker's end")
    drop_model(repository, "hangs", stays(2), limit("load_timeout_secs", "soon"))
    text = "parameter 'load_timeout_secs': expected a number of seconds, 0 for no limit, got 'soon'"
    wait_until(lambda: text in models_of(server)["hangs"][1], "the refusal")
    assert ask(server.client(), "good", 1) == 2


def test_four_loads_that_hang_keep_no_good_model_waiting(server: RocserveProcess):
    repository = server.repositories[0]
    for number in range(4):
        drop_model(repository, f"hangs{number}", HANGS_AT_IMPORT)
    wait_until(lambda: all(server.workers(f"hangs{number}") for number in range(4)), "the loads")
    drop_model(repository, "later", stays(1))
    client = server.client()
    wait_until(lambda: client.is_model_ready("later"), "the good model")
    assert [models_of(server)[f"hangs{number}"][0] for number in range(4)] == ["LOADING"] * 4
    assert re.match(r"loading for \d+", models_of(server)["hangs0"][1])


FLOODS_ITS_LOG = """
while True:
    print("x" * 1000)
"""


def test_a_flood_of_log_lines_fills_no_disk_and_keeps_nobody_waiting(server: RocserveProcess):
    for number in range(2):
        drop_model(server.repositories[0], f"floods{number}", FLOODS_ITS_LOG)
    wait_until(lambda: server.log_text.count("lines dropped: the model writes too fast") >= 4, "the count of lines")
    before, began = len(server.log_text), time.monotonic()
    for value in range(100):
        assert ask(server.client(), "good", value) == value + 1
    time.sleep(1)
    grown = len(server.log_text) - before
    # Each may write 32 KiB a second, after the first 256 KiB.
    assert grown < 2 * (256 + 64 * (time.monotonic() - began)) * 1024


def test_a_batch_that_is_not_answered_in_time_ends_its_worker(server: RocserveProcess):
    drop_model(server.repositories[0], "timed", stays(1), limit("request_timeout_secs", 3))
    wait_until(lambda: models_of(server).get("timed") == ("READY", ""), "the model")
    before = {model: server.workers(model) for model in ("timed", "good")}

    def is_told_before_the_end() -> bool:
        hanging, waiting, rows = Asking(server, "timed", -9), Asking(server, "timed", 5), set[tuple[str, str]]()
        while not hanging.is_over:
            rows.add(models_of(server)["timed"])
            assert ask(server.client(), "good", 1) == 2
        text = hanging.outcome()
        assert "StatusCode.UNAVAILABLE" in text
        assert (
            "worker of model 'timed' version 1 was killed: it had not answered for 3 s (request_timeout_secs); the"
            " request was in it; the model is being restarted" in text
        )
        # Requests that had not begun wait for the new worker.
        assert waiting.outcome() == "6"
        return any(state == "READY" and "1 of 1 instances has not answered for" in reason for state, reason in rows)

    # The index has the reason for half of the timeout, and on a busy machine nobody may read it then.
    wait_until(is_told_before_the_end, "the reason in the index")
    # An instance may answer a moment before the server has recorded all of them as ready.
    wait_until(lambda: models_of(server)["timed"] == ("READY", ""), "the end of the reason")
    assert server.workers("good") == before["good"]
    assert server.workers("timed") != before["timed"]


def test_a_stopped_worker_is_killed_once_it_owes_an_answer(limited_server: RocserveProcess):
    server, client = limited_server, limited_server.client()
    (worker,) = server.workers("m")
    worker.suspend()
    # Nobody sends it a request.
    time.sleep(6)
    assert worker.is_running()
    # It has not taken its request, which the next worker answers.
    assert Asking(server, "m", 5).outcome() == "6"
    text = "worker of model 'm' version 1 was killed: its process was stopped for 5 s (hang_timeout_secs)"
    assert text in server.log_text
    wait_until_ended([worker])
    assert ask(client, "m", 5) == 6


STREAMS = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(14):
                time.sleep(0.5)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

CALLS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="streams", requested_output_names=["OUT"], inputs=request.inputs()
            )
            last = [response for response in call.exec(decoupled=True) if response.output_tensors()][-1]
            responses.append(pb_utils.InferenceResponse(last.output_tensors()))
        return responses
"""


def test_who_streams_and_who_waits_for_a_call_is_not_hung(limited_server: RocserveProcess):
    """A batch of seven seconds, with a limit of five seconds without an answer, and half a second between answers."""
    server = limited_server
    before = [server.workers(model) for model in ("streams", "calls")]
    assert ask(server.client(), "calls", 1) == 13
    assert [server.workers(model) for model in ("streams", "calls")] == before
