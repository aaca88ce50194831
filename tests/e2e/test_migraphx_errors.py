"""Checks what operators and clients see on a server of MIGraphX's failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support import migraphx_models
from support.migraphx_cases import onnx_cases, program_cases, rebuilt_case, slow, tensorflow_cases
from support.migraphx_error_texts import INDEX_TEXTS, RESPONSE_TEXTS, Text, index_text, log_text, response_text
from support.migraphx_serving import Array, ask, compiled_together, config, expected, index_entry, place, wait_for_state
from support.processes import has_ended
from support.server import RocserveProcess
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

from rocserve.cli import main

MLP = migraphx_models.mlp()
INPUTS = migraphx_models.random_inputs(MLP, 2)
SCORES = expected(MLP, INPUTS)["scores"]
REBUILT = "another version of MIGraphX, with the ONNX file beside it"
CRASHING = "flipped bytes that crash MIGraphX"
SLOW = "a compile that takes minutes or hours"

WITHOUT_A_SERVER = {"the same, loaded again", "another GPU architecture", "a GPU that MIGraphX does not find"}
"""The first is tested below, the others need a GPU; tests/unit/backends/migraphx/test_documented_errors.py has them."""


def rows(count: int, width: int = 16) -> Mapping[str, Array]:
    return {"x": np.zeros((count, width), np.float32)}


REQUESTS: dict[str, tuple[str, Mapping[str, Array]]] = {
    "a missing input": ("mlp", {}),
    "an input too many": ("mlp", {**rows(1), "z": np.zeros((1, 16), np.float32)}),
    "an input of another shape": ("mlp", rows(1, 15)),
    "an input of another datatype": ("mlp", {"x": np.zeros((1, 16), np.float64)}),
    "a batch above the range of a dynamic program": ("dynamic", rows(9)),
    "a batch of 0": ("dynamic", rows(0)),
    "values that crash MIGraphX (an index that is out of range)": ("picking", {"index": np.array([[99]])}),
    "a model that cannot be served": ("empty", rows(1)),
}


@dataclass(frozen=True, slots=True)
class Served:
    server: RocserveProcess
    client: triton.InferenceServerClient
    names: Mapping[str, str]
    """The models of the cases, all of which have been loaded or have failed."""
    wrong_answers: int


@pytest.fixture(scope="module")
def served(migraphx_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Loads a model for each case, while two good ones answer."""
    repository = tmp_path_factory.mktemp("repository")
    folder = tmp_path_factory.mktemp("programs")
    program, ranging = compiled_together(migraphx_root, folder, (MLP, 1), (MLP, (1, 8)))
    cases = {**onnx_cases(), **tensorflow_cases(), **program_cases(program), REBUILT: rebuilt_case(program)}
    names = {case: f"case_{number}" for number, case in enumerate(cases)}
    for case, model in cases.items():
        model.place(repository, names[case])
    place(repository, "mlp", "model.onnx", MLP, config(4, batch_sizes="4"))
    place(repository, "dynamic", "model.mxr", ranging, config(8, "migraphx_mxr"))
    place(repository, "picking", "model.onnx", migraphx_models.picking(), config(1))
    place(repository, "slow", "model.onnx", slow(), config(1, load_check="off"))
    folder = tmp_path_factory.mktemp("server")
    # Explicit mode: a failed load is not retried.
    flags = ("--model-control-mode=explicit", f"--migraphx-root={migraphx_root}", f"--cache-directory={folder}/cache")
    with RocserveProcess([repository], *flags, log=folder / "server.log") as server, ThreadPoolExecutor(50) as pool:
        client = server.client()
        list(pool.map(client.load_model, ("mlp", "dynamic", "picking")))
        loads = [pool.submit(load, client, name) for name in names.values()]
        wrong = 0
        while wait(loads, 0.1).not_done:
            wrong += not answers(client)
        yield Served(server, client, names, wrong)


def load(client: triton.InferenceServerClient, name: str) -> None:
    """Load the model; the index shows the outcome."""
    with suppress(InferenceServerException):
        client.load_model(name)


def answers(client: triton.InferenceServerClient) -> bool:
    """Whether the good model answers correctly."""
    return np.allclose(ask(client, "mlp", INPUTS)["scores"], SCORES, atol=1e-4)


STATUSES = ("Invalid argument", "Unavailable", "Unsupported", "Internal")
"""What the index puts before a reason."""
INDEX = [case for case in INDEX_TEXTS if case not in {*WITHOUT_A_SERVER, SLOW}]


@pytest.mark.parametrize("case", INDEX)
def test_the_index_says_why(served: Served, case: str) -> None:
    state, reason = index_entry(served.client, served.names[case])
    assert state == "UNAVAILABLE"
    expected_text = index_text(case)
    status, _, message = reason.partition(": ")
    assert status in STATUSES
    assert expected_text.fits(message), f"expected:\n{expected_text.text}\ngot:\n{message}"


def test_every_model_of_the_cases_has_a_text(served: Served) -> None:
    assert served.names.keys() - {REBUILT} == set(INDEX)


@pytest.mark.parametrize("case", RESPONSE_TEXTS)
def test_the_response_says_why(served: Served, case: str) -> None:
    model, inputs = REQUESTS[case]
    model = served.names["a file of 0 bytes"] if model == "empty" else model
    with pytest.raises(InferenceServerException) as refused:
        ask(served.client, model, inputs)
    code = str(refused.value.status()).removeprefix("StatusCode.")
    message = f"{code} {refused.value.message().removeprefix('[request id: <id_unknown>] ')}"
    expected_text = response_text(case)
    assert expected_text.fits(message), f"expected:\n{expected_text.text}\ngot:\n{message}"


def test_the_status_says_the_same(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--once", "--url", served.server.address]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for case in ("a file of 0 bytes", "calibration samples for another name"):
        reason = index_entry(served.client, served.names[case])[1]
        (line,) = (line for line in lines if line.startswith(f"{served.names[case]} 1 UNAVAILABLE"))
        assert line.endswith(f" {reason}")


def test_a_worker_that_a_request_has_crashed_is_back(served: Served) -> None:
    def is_right() -> bool:
        """The index may have the old worker's state for a moment."""
        with suppress(InferenceServerException):
            return ask(served.client, "picking", {"index": np.array([[1]])})["y"].tolist() == [[3, 4]]
        return False

    wait_until(is_right, "another worker's answer")
    wait_until(lambda: index_entry(served.client, "picking") == ("READY", ""), "the end of the reason")
    wait_until(lambda: "Assertion `in_index >= 0" in served.server.log_text, "the worker's last line in the log")


def test_good_models_answered_all_the_while(served: Served) -> None:
    assert served.wrong_answers == 0
    assert answers(served.client)


def test_a_program_of_another_version_is_rebuilt_and_the_log_says_so(served: Served) -> None:
    assert wait_for_state(served.client, served.names[REBUILT], "READY") == ""
    found = ask(served.client, served.names[REBUILT], {"x": INPUTS["x"][:1]})["scores"]
    np.testing.assert_allclose(found, SCORES[:1], atol=1e-4)
    wait_until(lambda: is_logged(served.server, log_text(REBUILT)), "the line in the log")


def test_a_program_that_crashed_is_not_tried_again(served: Served) -> None:
    load(served.client, served.names[CRASHING])
    status, _, message = index_entry(served.client, served.names[CRASHING])[1].partition(": ")
    assert status in STATUSES
    assert index_text("the same, loaded again").fits(message), message


def test_the_log_says_it_once_and_without_tracebacks(served: Served) -> None:
    log = served.server.log_text
    assert "Traceback" not in log
    for case in INDEX:
        name = served.names[case]
        errors = [line for line in log.splitlines() if line.startswith("E") and f"'{name}'" in line]
        assert all(f"] failed to load '{name}' version 1: " in line for line in errors), errors
        # The crashing model's reason: it is loaded twice.
        assert len(errors) == (2 if case == CRASHING else 1), errors


def test_a_slow_compile_says_what_it_is_at_and_ends_with_a_server_that_is_killed(served: Served) -> None:
    """The last test of this server."""

    def is_told() -> bool:
        return index_text(SLOW).fits(index_entry(served.client, "slow")[1])

    with ThreadPoolExecutor(1) as pool:
        slow_load = pool.submit(served.client.load_model, "slow")
        try:
            wait_until(is_told, "the reason while it compiles")
            assert index_entry(served.client, "slow")[0] == "LOADING"
            wait_until(lambda: is_logged(served.server, log_text(SLOW)), "the line in the log")
            assert answers(served.client)
            assert served.server.workers("compiling")
            processes = served.server.family()
        finally:
            # The load ends with its server.
            served.server.kill()
        wait_until(lambda: all(has_ended(process.pid) for process in processes), "the end of all of them")
        with pytest.raises(InferenceServerException):
            slow_load.result()


def is_logged(server: RocserveProcess, logged: Text) -> bool:
    """Whether a line of the log ends with it."""
    return any(logged.fits(line[line.find(logged.start) :]) for line in server.log_text.splitlines())
