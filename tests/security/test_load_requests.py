"""Clients never decide which code or program runs: loads by request, in explicit mode."""

from __future__ import annotations

import ctypes.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS
from tritonclient.utils import InferenceServerException

from rocserve.protocol import grpc_service_pb2 as pb

ONNX = {"platform": "onnx_onnxv1", "max_batch_size": 8}
TENSORS = {
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}],
}
PYTHON = {"backend": "python", **TENSORS}
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
parameters { key: "told" value { string_value: "by the repository" } }
"""
TELLS_PARAMETER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.told = config["parameters"].get("told", {}).get("string_value", "nothing")

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([self.told], dtype=object))])
            for request in requests
        ]
"""
LIBRARY = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { FILE *file = fopen("%s", "w"); if (file) fclose(file); }
"""
ANYTHING = ("--model-control-mode=explicit", "--allow-remote-files=true", "--allow-remote-models=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load-requests")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RocserveProcess]:
    """A server that accepts everything that any server accepts from clients."""
    repository = folder / "repository"
    drop(repository, "net", add_constant(1))
    (repository / "net" / "1" / "model.py").write_text(f"open({str(folder / 'changed')!r}, 'w')\n")
    (repository / "net" / "config.pbtxt").write_text('platform: "onnx_onnxv1" max_batch_size: 8')
    told = drop(repository, "told", TELLS_PARAMETER, CONFIG)
    (told / "1" / "train.py").write_text(f"open({str(folder / 'trained')!r}, 'w')\n")
    with RocserveProcess([repository], *ANYTHING, log=folder / "log") as running:
        client = running.client()
        client.load_model("net")
        client.load_model("told")
        yield running


@pytest.fixture
def client(server: RocserveProcess) -> triton.InferenceServerClient:
    return server.client()


def refusal(client: triton.InferenceServerClient, model: str, config: dict[str, Any], **files: bytes) -> str:
    given = {f"file:{path}": data for path, data in files.items()}
    with pytest.raises(InferenceServerException) as raised:
        client.load_model(model, config=json.dumps(config), files=given or None)
    assert raised.value.status() == "StatusCode.PERMISSION_DENIED", raised.value
    text: str = raised.value.message()
    return text


def told(client: triton.InferenceServerClient) -> str:
    text: str = client.infer("told", [infer_input("IN", np.ones(1, np.float32))]).as_numpy("OUT")[0].decode()
    return text


def library(folder: Path, mark: Path) -> bytes:
    """A shared library that writes a file as soon as it is loaded; without a compiler any other library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        found = ctypes.util.find_library("c")
        assert found is not None
        return next(Path("/").glob(f"*/**/{found}")).read_bytes()
    (folder / "evil.c").write_text(LIBRARY % mark)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "evil.so", folder / "evil.c"], check=True)
    return (folder / "evil.so").read_bytes()


def test_no_shared_library_comes_with_a_request(
    server: RocserveProcess, client: triton.InferenceServerClient, folder: Path
) -> None:
    mark = folder / "library-ran"
    code = library(folder, mark)
    config = {**ONNX, "model_operations": {"op_library_filename": ["evil.so"]}, "parameters": {}}
    for model in ("net", "brought"):
        text = refusal(client, model, config, **{"1/model.onnx": add_constant(1), "evil.so": code})
        assert text.startswith(f"failed to load '{model}', a load request may not set 'model_operations': ")
    assert not mark.exists()
    assert "custom operators" not in server.log_text


def test_no_program_of_the_machine_is_started_by_a_request(
    client: triton.InferenceServerClient, folder: Path, server: RocserveProcess
) -> None:
    mark = folder / "program-ran"
    program = folder / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    named = {"EXECUTION_ENV_PATH": {"string_value": str(program)}}
    text = refusal(client, "told", {**PYTHON, "parameters": named})
    assert "a load request may not set 'parameters['EXECUTION_ENV_PATH']'" in text
    assert not mark.exists()
    assert told(client) == "by the repository"


@pytest.mark.parametrize(
    ("model", "config", "expected"),
    [
        ("net", PYTHON, "models of backend 'python' are only loaded from the repository"),
        ("net", {"platform": "python", **TENSORS}, "models of backend 'python' are only loaded"),
        ("net", {"default_model_filename": "model.py"}, "models of backend 'python' are only loaded"),
        ("net", {**ONNX, "runtime": "libevil.so"}, "may not set 'runtime'"),
        ("net", {**ONNX, "model_operations": {"op_library_filename": ["/lib/x.so"]}}, "may not set 'model_operations'"),
        ("net", {**ONNX, "model_repository_agents": {"agents": [{"name": "evil"}]}}, "'model_repository_agents'"),
        ("net", {**ONNX, "default_model_filename": "../../told/1/model.py"}, "leads out of the model's folder"),
        ("net", {**ONNX, "default_model_filename": "/etc/passwd"}, "leads out of the model's folder"),
        ("net", {**ONNX, "cc_model_filenames": {"gfx90a": "/etc/passwd"}}, "leads out of the model's folder"),
        (
            "net",
            {**ONNX, "parameters": {"session.collect_node_memory_stats_to_file": {"string_value": "/tmp/x"}}},
            "may not set 'parameters['session.collect_node_memory_stats_to_file']'",
        ),
        (
            "net",
            {
                **ONNX,
                "optimization": {
                    "execution_accelerators": {
                        "cpu_execution_accelerator": {"name": "openvino", "parameters": {"cache_dir": "/tmp"}}
                    }
                },
            },
            "may not set 'optimization.execution_accelerators.cpu_execution_accelerator.parameters['cache_dir']'",
        ),
        (
            "net",
            {**ONNX, "output": {"name": "Y", "data_type": "TYPE_FP32", "dims": [2], "label_filename": "1/model.py"}},
            "may not set 'output.label_filename': clients could read that file",
        ),
        (
            "net",
            {
                **ONNX,
                "model_warmup": {
                    "name": "w",
                    "inputs": {"X": {"data_type": "TYPE_FP32", "dims": [2], "input_data_file": "../1/model.py"}},
                },
            },
            "may not set 'model_warmup.inputs.input_data_file'",
        ),
        ("told", {**PYTHON, "default_model_filename": "train.py"}, "may not set 'default_model_filename'"),
        ("told", {**PYTHON, "cc_model_filenames": {"": "train.py"}}, "may not set 'cc_model_filenames'"),
        ("told", {**PYTHON, "parameters": {"told": {"string_value": "x"}}}, "may not set 'parameters['told']'"),
        ("told", {**PYTHON, "parameters": {"script": {"string_value": "x"}}}, "may not set 'parameters['script']'"),
    ],
)
def test_other_ways_in_are_closed(
    client: triton.InferenceServerClient, folder: Path, model: str, config: dict[str, Any], expected: str
) -> None:
    before = client.get_model_repository_index()
    assert expected in refusal(client, model, config)
    assert not (folder / "changed").exists()
    assert not (folder / "trained").exists()
    assert client.get_model_repository_index() == before, "what is refused changes nothing"


@pytest.mark.parametrize(
    ("config", "path", "data", "expected"),
    [
        (PYTHON, "1/model.py", b"", "models of backend 'python' are only loaded from the repository, not from files"),
        ({}, "1/model.py", b"", "models of backend 'python' are only loaded from the repository, not from files"),
        ({"platform": "migraphx_mxr"}, "1/model.mxr", b"", "models of backend 'migraphx' are only loaded from the"),
        (ONNX, "1/model.onnx", b"\x22\x09EPContext", "brings a compiled program (EPContext)"),
    ],
)
def test_files_of_requests_are_data(
    client: triton.InferenceServerClient, config: dict[str, Any], path: str, data: bytes, expected: str
) -> None:
    assert expected in refusal(client, "brought", config, **{path: data})


def test_values_are_a_requests_to_say_and_the_rest_stays_the_repositorys(client: triton.InferenceServerClient) -> None:
    client.load_model("told", config=json.dumps({**PYTHON, "max_batch_size": 0, "instance_group": [{"count": 2}]}))
    config = client.get_model_config("told").config
    assert config.instance_group[0].count == 2
    assert told(client) == "by the repository"
    repeated = {"told": {"string_value": "by the repository"}}
    client.load_model("told", config=json.dumps({**PYTHON, "parameters": repeated}))
    assert told(client) == "by the repository"
    client.load_model(
        "net", config=json.dumps({**ONNX, "parameters": {"intra_op_thread_count": {"string_value": "1"}}})
    )
    client.load_model("net", config=json.dumps(ONNX), files={"file:1/model.onnx": add_constant(5)})
    client.load_model("brought", config=json.dumps(ONNX), files={"file:1/model.onnx": add_constant(5)})
    assert client.is_model_ready("brought")


def test_workers_of_amds_get_no_parameters_that_name_files(server: RocserveProcess, folder: Path) -> None:
    stats = folder / "statistics"
    request = pb.WorkerLoadRequest(name="onnxruntime")
    request.parameters["model"].string_param = "net/1/model.onnx"
    request.parameters["session.collect_node_memory_stats_to_file"].string_param = str(stats)
    with grpc.insecure_channel(server.address) as channel:
        send = channel.unary_unary("/inference.GRPCInferenceService/WorkerLoad")
        endpoint = pb.WorkerLoadResponse.FromString(
            send(request.SerializeToString(), timeout=PATIENCE_SECONDS)
        ).endpoint
    config = server.client().get_model_config(endpoint).config
    assert dict(config.parameters.items()).keys() == {"engine"}
    assert "parameters without effect: session.collect_node_memory_stats_to_file" in server.log_text


def test_files_and_new_models_want_their_flags(plain_server: RocserveProcess, tmp_path: Path) -> None:
    files = {"1/model.onnx": add_constant(2)}
    text = refusal(plain_server.client(), "net", ONNX, **files)
    assert text.endswith("start the server with --allow-remote-files=true")
    flags = ("--model-control-mode=explicit", "--allow-remote-files=true")
    with RocserveProcess(plain_server.repositories, *flags, log=tmp_path / "log") as running:
        client = running.client()
        client.load_model("net", config=json.dumps(ONNX), files={"file:1/model.onnx": files["1/model.onnx"]})
        assert "start the server with --allow-remote-models=true" in refusal(client, "new", ONNX, **files)
        assert {row.name for row in client.get_model_repository_index().models} == {"net", "own"}


def test_the_interpreter_of_the_repository_stays(plain_server: RocserveProcess) -> None:
    """A request that does not name the interpreter must not run the model with another one."""
    client = plain_server.client()
    client.load_model("own", config=json.dumps({**PYTHON, "instance_group": [{"count": 2}]}))
    assert client.is_model_ready("own")


@pytest.fixture(scope="module")
def plain_server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server without a flag that lets requests bring anything. Model `own` loads with its own interpreter only."""
    repository = tmp_path_factory.mktemp("plain") / "repository"
    drop(repository, "net", add_constant(1))
    own = drop(
        repository,
        "own",
        TELLS_PARAMETER.replace("self.told = ", "import os; self.told = os.environ['OWN'] #"),
        CONFIG + 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/python" } }',
    )
    interpreter = own / "python"
    interpreter.write_text(f'#!/bin/sh\nexport OWN=yes\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    return start(repository, "--model-control-mode=explicit")
