"""Tensors on a GPU that Python models pass to each other: in calls, in responses of decoupled models, in ensembles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.models import drop
from support.pytorch import TorchFiles
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.installed import has_file
from rocserve_client import Client

HAS_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"

CONFIG = """
backend: "python"
max_batch_size: %s
instance_group { kind: KIND_GPU gpus: [ 0 ] }
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
output { name: "where" data_type: TYPE_STRING dims: 1 }
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "%s" } }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"

HEAD = """
import numpy as np
import torch
import triton_python_backend_utils as pb_utils


def place(tensor):
    return "cpu" if tensor.is_cpu() else "gpu"


def said(words, rows):
    text = np.array([" ".join(words)] * rows, np.object_)
    return pb_utils.Tensor("where", text.reshape(-1, 1) if len(WHERE) == 2 else text[:1])


def response(y, words):
    y = pb_utils.Tensor.from_dlpack("y", y.contiguous())
    return pb_utils.InferenceResponse([said(words, y.shape()[0]), y])


def call(model, x, **more):
    x = pb_utils.Tensor.from_dlpack("x", x)
    return pb_utils.InferenceRequest("", 0, [x], more.pop("outputs", ["y", "where"]), model, **more)


def output(response, name="y"):
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, name)


def words(response):
    return output(response, "where").as_numpy().reshape(-1)[0].decode()


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, pb_utils.get_input_tensor_by_name(request, "x")) for request in requests]
"""
ADDS = """
    def answer(self, request, x):
        return response(torch.from_dlpack(x).cuda() + 1, [place(x)])
"""
CALLS = """
    def answer(self, request, x):
        given = torch.from_dlpack(x).cuda() * 2
        kind = pb_utils.TRITONSERVER_MEMORY_%s
        answer = call("%s", given, preferred_memory=pb_utils.PreferredMemory(kind, 0)).exec()
        y = output(answer)
        return response(torch.from_dlpack(y).cuda(), [words(answer), place(y)])
"""
NETWORK = """
    def answer(self, request, x):
        y = output(call("network", torch.from_dlpack(x).cuda(), outputs=["scores"]).exec(), "scores")
        scores = torch.from_dlpack(y)
        return response(torch.nn.functional.pad(scores, (0, 1)), [place(y)])
"""
STREAMS = """
    def answer(self, request, x):
        sender, given = request.get_response_sender(), torch.from_dlpack(x).cuda()
        for number in range(5):
            sender.send(response(given * number, [place(x)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def execute(self, requests):
        for request in requests:
            self.answer(request, pb_utils.get_input_tensor_by_name(request, "x"))
"""
GATHERS = """
    def answer(self, request, x):
        found, seen = [], []
        for each in call("streams", torch.from_dlpack(x).cuda()).exec(decoupled=True):
            if each.output_tensors():
                found.append(output(each))
                seen += [words(each), place(found[-1])]
        # They are its own: all are read at the end.
        weighed = [(1 + place) * torch.from_dlpack(y) for place, y in enumerate(found)]
        return response(sum(weighed), sorted(set(seen)))
"""
ENSEMBLE = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
output { name: "where" data_type: TYPE_STRING dims: 1 }
model_transaction_policy { decoupled: true }
ensemble_scheduling {
  step { model_name: "streams" model_version: -1 input_map { key: "x" value: "x" }
         output_map { key: "y" value: "between" } }
  step { model_name: "adds_alone" model_version: -1 input_map { key: "x" value: "between" }
         output_map { key: "y" value: "y" } output_map { key: "where" value: "where" } }
}
"""


@pytest.fixture(scope="module")
def client(torch_files: TorchFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    if not has_file("torch", ("lib/libtorch_hip.so", "lib/libtorch_cuda.so")):
        pytest.skip("no GPU here that PyTorch can use")
    if subprocess.run([sys.executable, "-c", HAS_GPU], check=False).returncode:
        pytest.skip("no GPU here that PyTorch can use")
    folder = tmp_path_factory.mktemp("models-tensors")
    repository = folder / "repository"

    def python(name: str, code: str, rows: int = 0, forced: str = "no", more: str = "") -> None:
        head = HEAD.replace("WHERE", repr((1,) * (1 + bool(rows))))
        drop(repository, name, (head + code).encode(), CONFIG % (rows, forced) + more, filename="model.py")

    python("adds", ADDS, 8)
    python("adds_alone", ADDS)
    python("adds_by_host", ADDS, 8, "yes")
    python("streams", STREAMS, more=DECOUPLED)
    python("gathers", GATHERS)
    for called in ("adds", "adds_by_host"):
        python(f"calls_{called}", CALLS % ("GPU", called), 8)
    python("calls_alone", CALLS % ("GPU", "adds_alone"))
    python("wants_host", CALLS % ("CPU", "adds"), 8)
    python("calls_nobody", CALLS % ("GPU", "nobody"), 8)
    python("calls_network", NETWORK, 8)
    config = "max_batch_size: 8\ninstance_group { kind: KIND_GPU gpus: [ 0 ] }"
    drop(repository, "network", torch_files.data("classifier"), config, filename="model.pt2")
    drop(repository, "chain", None, ENSEMBLE)
    with RocserveProcess([repository], log=Path(folder, "server.log")) as server:
        with Client(server.address) as client:
            for model in sorted(path.name for path in repository.iterdir()):
                client.wait_until_ready(PATIENCE_SECONDS, model=model)
            yield client
        assert server.terminate() == 0


@pytest.mark.parametrize(
    ("model", "rows", "where"),
    [
        ("calls_adds", 3, "gpu gpu"),
        ("calls_alone", 0, "gpu gpu"),
        ("wants_host", 3, "gpu cpu"),
        ("calls_adds_by_host", 3, "cpu cpu"),
    ],
)
def test_tensors_of_a_call_stay_on_the_gpu_where_both_models_take_them_there(
    client: Client, model: str, rows: int, where: str
) -> None:
    def ask(turn: int) -> None:
        x = np.arange(4 * max(rows, 1), dtype=np.float32).reshape((rows, 4) if rows else 4) + turn
        answer = client.infer(model, {"x": x})
        np.testing.assert_array_equal(answer["y"], 2 * x + 1)
        assert set(answer["where"].reshape(-1).tolist()) == {where.encode()}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(60)))


def test_a_network_takes_and_gives_a_calls_tensors_on_the_gpu(client: Client, torch_files: TorchFiles) -> None:
    inputs, expected = torch_files.values("classifier")
    for rows in (1, 2, 4):
        answer = client.infer("calls_network", {"x": inputs["x"][:rows]})
        np.testing.assert_allclose(answer["y"][:, :3], expected["scores"][:rows], atol=1e-4)
        assert set(answer["where"].reshape(-1).tolist()) == {b"gpu"}


def test_responses_of_a_decoupled_model_stay_on_the_gpu(client: Client) -> None:
    def ask(turn: int) -> None:
        x = np.arange(4, dtype=np.float32) + turn
        answer = client.infer("gathers", {"x": x})
        np.testing.assert_array_equal(answer["y"], sum((1 + number) * number for number in range(5)) * x)
        assert answer["where"].tolist() == [b"gpu"]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(20)))


def test_responses_of_a_decoupled_member_stay_on_the_gpu(client: Client) -> None:
    x = np.arange(4, dtype=np.float32)
    for _ in range(5):
        with client.stream() as stream:
            stream.send("chain", {"x": x})
            stream.close_sending()
            answers = list(stream)
        assert len(answers) == 5
        for number, answer in enumerate(answers):
            np.testing.assert_array_equal(answer["y"], number * x + 1)
            assert answer["where"].tolist() == [b"gpu"]


def test_a_call_of_a_model_that_is_not_there_fails_as_one_by_the_host_does(client: Client) -> None:
    with pytest.raises(Exception, match="unknown model: 'nobody'"):
        client.infer("calls_nobody", {"x": np.zeros((1, 4), np.float32)})
