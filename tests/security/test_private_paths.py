"""No error that a client gets shows a folder of the server's machine; the log shows them all."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
INITIALISES = """
from pathlib import Path


class TritonPythonModel:
    def initialize(self, args):
        open(Path(__file__).parents[2] / "absent folder" / "weights.bin")

    def execute(self, requests):
        return []
"""
EXECUTES = """
class TritonPythonModel:
    def execute(self, requests):
        open("%s")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("private")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RocserveProcess]:
    repository = folder / "repository"
    drop(repository, "net", add_constant(1))
    for name, script in {
        "initialises": INITIALISES,
        "executes": EXECUTES % (folder / "key.pem"),
    }.items():
        drop(repository, name, script, CONFIG)
    named = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/opt/private/python" } }'
    drop(repository, "environment", "", CONFIG + named)
    (repository / "link").mkdir()
    (repository / "link" / "1").symlink_to(folder)
    (repository / "config").mkdir()
    (repository / "config" / "config.pbtxt").mkdir()
    with RocserveProcess([repository], log=folder / "log") as running:
        client = running.client()
        wait_until(lambda: client.is_model_ready("executes") and client.is_model_ready("net"))
        wait_until(lambda: "absent folder" in running.log_text and "/opt/private" in running.log_text)
        yield running


def message(ask: Callable[[], object]) -> str:
    with pytest.raises(InferenceServerException) as raised:
        ask()
    text: str = raised.value.message()
    return text


def tensor() -> list[triton.InferInput]:
    return [infer_input("IN", np.ones(1, np.float32))]


def test_the_index_shows_no_folder(server: RocserveProcess, folder: Path) -> None:
    def reasons() -> dict[str, str]:
        return {row.name: row.reason for row in server.client().get_model_repository_index().models}

    rows: dict[str, str] = {}

    def are_told() -> bool:
        # While a load is tried again, its row has no reason.
        rows.update(reasons())
        return "absent folder/weights.bin" in rows["initialises"] and "python" in rows["environment"]

    wait_until(are_told, "the reasons")
    assert "(1/model.py, line 7, in initialize)" in rows["initialises"], "the model's author finds the line"
    assert "there is no Python at .../python" in rows["environment"]
    for name, reason in rows.items():
        assert str(folder) not in reason, name
        assert "/opt" not in reason, name
    assert str(folder / "repository" / "absent folder" / "weights.bin") in server.log_text
    assert "/opt/private/python" in server.log_text
    assert "Traceback" in server.log_text


def test_answers_of_models_show_no_folder(server: RocserveProcess, folder: Path) -> None:
    client = server.client()
    told = "FileNotFoundError: [Errno 2] No such file or directory: '.../key.pem'"
    assert told in message(lambda: client.infer("executes", tensor()))
    answers: list[str] = []
    client.start_stream(lambda result, error: answers.append(str(error)))
    client.async_stream_infer("executes", tensor())
    wait_until(lambda: answers)
    client.stop_stream()
    assert told in answers[0]
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
    for path, asked in (("infer", body), ("generate", {"IN": 1.0}), ("generate_stream", {"IN": 1.0})):
        with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_SECONDS)) as connection:
            connection.request("POST", f"/v2/models/executes/{path}", json.dumps(asked))
            answer = connection.getresponse().read().decode()
        assert told in answer, path
    for answer in answers:
        assert str(folder) not in answer


def test_refused_loads_show_no_folder(server: RocserveProcess, folder: Path) -> None:
    flags = ("--model-control-mode=explicit",)
    with RocserveProcess([folder / "repository"], *flags, log=folder / "explicit.log") as running:
        client = running.client()
        for name in ("initialises", "environment", "link", "config"):
            assert str(folder) not in message(lambda name=name: client.load_model(name)), name
        rows = {row.name: row.reason for row in client.get_model_repository_index().models}
        assert not [name for name, reason in rows.items() if str(folder) in reason]
