"""Files of a served model that are cut in place, at every line: the old version goes on answering, and the index shows
the reason."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from support.load import ConstantLoad
from support.models import add_constant, drop
from support.repository_index import models_of
from support.server import RocserveProcess, Start
from support.waiting import wait_until

_TAKEN = r"failed to read model folder '[^']*\b{0}'|failed to load '{0}' version 1|successfully loaded '{0}' version 1"

TENSORS = """
parameters { key: "add" value { string_value: "1" } }
input {
  name: "X"
  data_type: TYPE_FP32
  dims: [ 2 ]
}
output {
  name: "Y"
  data_type: TYPE_FP32
  dims: [ 2 ]
  label_filename: "names.txt"
}
max_batch_size: 8
dynamic_batching { }
"""
SCRIPT = """
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.constant = float(json.loads(args["model_config"])["parameters"]["add"]["string_value"])

    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", value + self.constant)]) for value in values]
"""


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """Serves a model for each test."""
    repository = tmp_path_factory.mktemp("cut") / "repository"
    for name in ("python", "emptied"):
        drop(repository, name, SCRIPT, 'backend: "python"' + TENSORS)
    drop(repository, "onnx", add_constant(1.0), 'platform: "onnx_onnxv1"' + TENSORS)
    for folder in repository.iterdir():
        (folder / "names.txt").write_text("no\nyes\n")
    shutil.copytree(Path(__file__).parents[2] / "model_repository" / "digits_preprocess", repository / "pipeline")
    config = repository / "pipeline" / "config.pbtxt"
    config.write_text(config.read_text().replace('"digits_preprocess"', '"pipeline"'))
    return start(repository, "--repository-settle-secs=0.1")


def reason(server: RocserveProcess, model: str) -> str:
    state, text = models_of(server)[model]
    assert state == "READY", text
    return text


def write_and_wait(server: RocserveProcess, model: str, path: Path, content: bytes) -> None:
    """Write in place, as an editor or a full disk would, and wait until the server has read the folder."""
    words = re.compile(_TAKEN.format(model))
    taken = len(words.findall(server.log_text))
    path.write_bytes(content)
    wait_until(lambda: len(words.findall(server.log_text)) > taken, f"the server's word on {path.name}")


@pytest.mark.parametrize("model", ["python", "onnx"])
def test_a_configuration_that_is_cut_takes_nothing_away(server: RocserveProcess, model: str) -> None:
    folder = server.repositories[0] / model
    path = folder / "config.pbtxt"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    with ConstantLoad(server.address, model, {1.0, 2.0}, threads=2, pause_seconds=0.05) as load:
        load.wait_until_answered_by(1.0)
        for count in range(len(lines) - 1, 0, -1):
            write_and_wait(server, model, path, b"".join(lines[:count]))
            load.wait_until_answered_by(1.0, times=5)
            # Settings that clients do not see may be removed on purpose: here the dynamic batcher, at the end of the
            # file.
            is_explained = count < len(lines) - 1
            wait_until(lambda due=is_explained: bool(reason(server, model)) == due, f"the word on {count} lines")
        path.write_bytes(b"")
        time.sleep(1.0)
        assert reason(server, model)
        assert load.answered[2.0] == 0
        # After the repair the server serves it at once.
        if model == "python":
            write_and_wait(server, model, path, whole.replace(b'"1"', b'"2"'))
        else:
            path.write_bytes(whole)
            write_and_wait(server, model, folder / "1" / "model.onnx", add_constant(2.0))
        load.wait_until_answered_by(2.0)
    assert load.failures == []
    assert load.wrong == []
    wait_until(lambda: reason(server, model) == "", "the end of the failure")


def test_other_files_that_are_emptied_take_nothing_away(server: RocserveProcess) -> None:
    folder = server.repositories[0] / "emptied"
    kept = {name: (folder / name).read_bytes() for name in ("names.txt", "1/model.py")}
    expected = {"names.txt": "lost 2 of the 2 labels of output 'Y'", "1/model.py": "TritonPythonModel"}
    with ConstantLoad(server.address, "emptied", {1.0}, threads=2, pause_seconds=0.05) as load:
        load.wait_until_answered_by(1.0)
        for name, content in kept.items():
            write_and_wait(server, "emptied", folder / name, b"")
            wait_until(lambda text=expected[name]: text in reason(server, "emptied"), f"the reason of {name}")
            (folder / name).write_bytes(content)
            wait_until(lambda: reason(server, "emptied") == "", "the end of the failure")
        load.wait_until_answered_by(1.0, times=5)
    assert load.failures == []
    assert load.wrong == []


def test_a_pipeline_that_is_cut_takes_nothing_away(server: RocserveProcess) -> None:
    path = server.repositories[0] / "pipeline" / "1" / "pipeline.json"
    whole = path.read_bytes()
    json.loads(whole)
    for size in (0, len(whole) // 2):
        write_and_wait(server, "pipeline", path, whole[:size])
        wait_until(lambda: "pipeline.json" in reason(server, "pipeline"), "the failure")
        assert server.client().is_model_ready("pipeline", "1")
    path.write_bytes(whole)
    wait_until(lambda: reason(server, "pipeline") == "", "the end of the failure")
