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
from support.server import RocserveProcess
from support.waiting import wait_until

SETTLE = "--repository-settle-secs=0.1"
_TAKEN = re.compile(
    r"failed to read model folder '[^']*\bm'|failed to load 'm' version 1|successfully loaded 'm' version 1"
)

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


def reason(server: RocserveProcess) -> str:
    client = server.client()
    (row,) = client.get_model_repository_index().models
    client.close()
    assert row.state == "READY", row
    return str(row.reason)


def write_and_wait(server: RocserveProcess, path: Path, content: bytes) -> None:
    """Write in place, as an editor or a full disk would, and wait until the server has read the folder."""
    taken = len(_TAKEN.findall(server.log_text))
    path.write_bytes(content)
    wait_until(lambda: len(_TAKEN.findall(server.log_text)) > taken, f"the server's word on {path.name}")


def write_python_model(repository: Path) -> Path:
    drop(repository, "m", SCRIPT, 'backend: "python"' + TENSORS)
    (repository / "m" / "names.txt").write_text("no\nyes\n")
    return repository / "m"


def write_onnx_model(repository: Path) -> Path:
    folder = drop(repository, "m", add_constant(1.0), 'platform: "onnx_onnxv1"' + TENSORS)
    (folder / "names.txt").write_text("no\nyes\n")
    return folder


@pytest.mark.parametrize("write", [write_python_model, write_onnx_model])
def test_a_configuration_that_is_cut_takes_nothing_away(serve, repository: Path, write) -> None:
    folder = write(repository)
    path = folder / "config.pbtxt"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    server = serve(repository, SETTLE)
    with ConstantLoad(server.address, "m", {1.0, 2.0}, threads=2, pause_seconds=0.01) as load:
        load.wait_until_answered_by(1.0)
        for count in range(len(lines) - 1, 0, -1):
            write_and_wait(server, path, b"".join(lines[:count]))
            load.wait_until_answered_by(1.0, times=5)
            # Settings that clients do not see may be removed on purpose: here the dynamic batcher, at the end of the
            # file.
            is_explained = count < len(lines) - 1
            wait_until(lambda expected=is_explained: bool(reason(server)) == expected, f"the word on {count} lines")
        path.write_bytes(b"")
        time.sleep(1.0)
        assert reason(server)
        assert load.answered[2.0] == 0
        # After the repair the server serves it at once.
        if write is write_python_model:
            write_and_wait(server, path, whole.replace(b'"1"', b'"2"'))
        else:
            path.write_bytes(whole)
            write_and_wait(server, folder / "1" / "model.onnx", add_constant(2.0))
        load.wait_until_answered_by(2.0)
    assert load.failures == []
    assert load.wrong == []
    wait_until(lambda: reason(server) == "", "the end of the failure")


def test_other_files_that_are_emptied_take_nothing_away(serve, repository: Path) -> None:
    folder = write_python_model(repository)
    server = serve(repository, SETTLE)
    kept = {name: (folder / name).read_bytes() for name in ("names.txt", "1/model.py")}
    expected = {"names.txt": "lost 2 of the 2 labels of output 'Y'", "1/model.py": "TritonPythonModel"}
    with ConstantLoad(server.address, "m", {1.0}, threads=2, pause_seconds=0.01) as load:
        load.wait_until_answered_by(1.0)
        for name, content in kept.items():
            write_and_wait(server, folder / name, b"")
            wait_until(lambda text=expected[name]: text in reason(server), f"the reason of {name}")
            (folder / name).write_bytes(content)
            wait_until(lambda: reason(server) == "", "the end of the failure")
        load.wait_until_answered_by(1.0, times=5)
    assert load.failures == []
    assert load.wrong == []


def test_a_pipeline_that_is_cut_takes_nothing_away(serve, repository: Path) -> None:
    shutil.copytree(Path(__file__).parents[2] / "model_repository" / "digits_preprocess", repository / "m")
    config = repository / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace('"digits_preprocess"', '"m"'))
    server = serve(repository, SETTLE)
    path = repository / "m" / "1" / "pipeline.json"
    whole = path.read_bytes()
    json.loads(whole)
    for size in (0, len(whole) // 2):
        write_and_wait(server, path, whole[:size])
        wait_until(lambda: "pipeline.json" in reason(server), "the failure")
        assert server.client().is_model_ready("m", "1")
    path.write_bytes(whole)
    wait_until(lambda: reason(server) == "", "the end of the failure")
