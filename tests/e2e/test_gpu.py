"""A GPU: clients' shared GPU memory, tensors that stay on the GPU, and memory that an unloaded model frees."""

from __future__ import annotations

import base64
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from support.models import drop, graph
from support.processes import command_of
from support.pytorch import TorchFiles
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

from rocserve.backends.installed import has_file
from rocserve_client import Client

FREE = "import torch; print(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0)"
MIB = 1 << 20
CONFIG = """
max_batch_size: 8
instance_group { kind: %s gpus: [ 0 ] }
"""


def free_bytes() -> int:
    """Free bytes of the first GPU. A separate process asks, because a process that has used a GPU keeps some of its
    memory."""
    if not has_file("torch", ("lib/libtorch_hip.so", "lib/libtorch_cuda.so")):
        return 0
    found = subprocess.run([sys.executable, "-c", FREE], capture_output=True, text=True, check=False)
    return int(found.stdout or 0)


@pytest.fixture(scope="module")
def free_before() -> int:
    free = free_bytes()
    if not free:
        pytest.skip("no GPU here that PyTorch can use")
    return free


@pytest.fixture(scope="module")
def server(
    free_before: int, torch_files: TorchFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("gpu-server")
    repository = folder / "repository"
    drop(repository, "on_gpu", torch_files.data("classifier"), CONFIG % "KIND_GPU", filename="model.pt2")
    drop(repository, "on_cpu", torch_files.data("classifier"), filename="model.pt2")
    flags = ("--allow-client-shm=true", "--model-control-mode=explicit", "--load-model=on_cpu", "--load-model=on_gpu")
    with RocserveProcess([repository], *flags, log=folder / "server.log") as server:
        with Client(server.address) as client:
            for model in ("on_cpu", "on_gpu"):
                client.wait_until_ready(PATIENCE_SECONDS, model=model)
        yield server
        assert server.terminate() == 0


@pytest.fixture(scope="module")
def shared() -> ModuleType:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("no GPU here with cuda-python")
    return importlib.import_module("tritonclient.utils.cuda_shared_memory")


@pytest.fixture
def client(server: RocserveProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client
        client.unregister_cuda_shared_memory()


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(InferenceServerException) as raised:
        call()
    return str(raised.value)


def ask(client: triton.InferenceServerClient, model: str, x: np.ndarray, outputs: int) -> None:
    """Send a request with its input in region "in" and its output "scores" in "out"."""
    given = triton.InferInput("x", x.shape, "FP32")
    given.set_shared_memory("in", x.nbytes)
    wanted = triton.InferRequestedOutput("scores")
    wanted.set_shared_memory("out", outputs)
    client.infer(model, [given], outputs=[wanted])


@pytest.mark.parametrize("model", ["on_cpu", "on_gpu"])
def test_tensors_lie_in_a_clients_memory_on_the_gpu(
    client: triton.InferenceServerClient, shared: ModuleType, torch_files: TorchFiles, model: str
) -> None:
    inputs, expected = torch_files.values("classifier")
    x, scores = inputs["x"][:4], expected["scores"][:4]
    regions = [shared.create_shared_memory_region(name, 4096, 0) for name in ("in", "out")]
    for region, name in zip(regions, ("in", "out"), strict=True):
        client.register_cuda_shared_memory(name, shared.get_raw_handle(region), 0, 4096)
    status = client.get_cuda_shared_memory_status().regions
    assert {name: (one.device_id, one.byte_size) for name, one in status.items()} == {"in": (0, 4096), "out": (0, 4096)}
    assert not client.get_system_shared_memory_status().regions
    for turn in range(3):
        shared.set_shared_memory_region(regions[0], [np.roll(x, turn, axis=0)])
        ask(client, model, x, scores.nbytes)
        given = shared.get_contents_as_numpy(regions[1], np.float32, scores.shape)
        np.testing.assert_allclose(given, np.roll(scores, turn, axis=0), atol=1e-5)
    assert "Invalid offset + byte size for shared memory region: 'out'" in refused(lambda: ask(client, model, x, 5000))
    assert "should be at least 48 bytes to hold the results" in refused(lambda: ask(client, model, x, 8))
    client.unregister_cuda_shared_memory("in")
    assert "Unable to find shared memory region: 'in'" in refused(lambda: ask(client, model, x, scores.nbytes))
    for region in regions:
        shared.destroy_shared_memory_region(region)


def test_what_is_no_memory_of_a_gpu_is_refused(client: triton.InferenceServerClient, shared: ModuleType) -> None:
    region = shared.create_shared_memory_region("r", MIB, 0)
    handle = shared.get_raw_handle(region)
    client.register_cuda_shared_memory("r", handle, 0, MIB)
    register = client.register_cuda_shared_memory
    assert "shared memory region 'r' already in manager" in refused(lambda: register("r", handle, 0, MIB))
    for name, raw, device, nbytes in (
        ("zeros", base64.b64encode(bytes(64)), 0, 64),
        ("short", base64.b64encode(bytes(3)), 0, 64),
        ("other", handle, 99, 64),
        ("empty", handle, 0, 0),
        ("long", handle, 0, 1 << 40),
    ):
        text = refused(lambda: register(name, raw, device, nbytes))  # noqa: B023
        assert f"failed to register CUDA shared memory region: '{name}': failed to open CUDA IPC handle: " in text
    assert list(client.get_cuda_shared_memory_status().regions) == ["r"]
    shared.destroy_shared_memory_region(region)


def test_the_process_that_opens_them_may_die(
    client: triton.InferenceServerClient, shared: ModuleType, server: RocserveProcess, torch_files: TorchFiles
) -> None:
    inputs, expected = torch_files.values("classifier")
    x = inputs["x"][:2]
    regions = [shared.create_shared_memory_region(name, 4096, 0) for name in ("in", "out")]
    shared.set_shared_memory_region(regions[0], [x])

    def register() -> None:
        for region, name in zip(regions, ("in", "out"), strict=True):
            client.register_cuda_shared_memory(name, shared.get_raw_handle(region), 0, 4096)

    register()
    next(process for process in server.family() if "device_memory" in command_of(process)).kill()
    nbytes = expected["scores"][:2].nbytes
    assert "register the region again" in refused(lambda: ask(client, "on_cpu", x, nbytes))
    client.unregister_cuda_shared_memory()
    register()
    ask(client, "on_cpu", x, nbytes)
    given = shared.get_contents_as_numpy(regions[1], np.float32, (2, 3))
    np.testing.assert_allclose(given, expected["scores"][:2], atol=1e-5)


def test_an_unloaded_model_gives_the_gpus_memory_back(server: RocserveProcess, free_before: int) -> None:
    with Client(server.address) as client:
        used = free_before - free_bytes()
        client.unload_model("on_gpu")
        wait_until(lambda: free_before - free_bytes() < used - 200 * MIB)
        for _ in range(3):
            client.load_model("on_gpu")
            client.wait_until_ready(PATIENCE_SECONDS, model="on_gpu")
            client.unload_model("on_gpu")
        wait_until(lambda: free_before - free_bytes() < used - 200 * MIB)


DOUBLE = """
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, "x")).cuda()
            tensors = [
                pb_utils.Tensor.from_dlpack("tensor", 2 * x),
                pb_utils.Tensor.from_dlpack("capsule", torch.utils.dlpack.to_dlpack(3 * x)),
            ]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
DOUBLE_CONFIG = """
backend: "python"
instance_group { kind: KIND_GPU gpus: [ 0 ] }
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "tensor" data_type: TYPE_FP32 dims: -1 }
output { name: "capsule" data_type: TYPE_FP32 dims: -1 }
"""


def test_a_python_model_answers_with_tensors_on_the_gpu(server: RocserveProcess) -> None:
    drop(server.repositories[0], "double", DOUBLE.encode(), DOUBLE_CONFIG, filename="model.py")
    with Client(server.address) as client:
        client.load_model("double")
        client.wait_until_ready(PATIENCE_SECONDS, model="double")
        x = np.arange(5, dtype=np.float32)
        answer = client.infer("double", {"x": x})
        np.testing.assert_array_equal(answer["tensor"], 2 * x)
        np.testing.assert_array_equal(answer["capsule"], 3 * x)


ON_GPU = """
import numpy as np
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    # Adds the number in its name to its input, and reports where that was; the answer is on the GPU.

    def initialize(self, args):
        self.term = float(args["model_name"].rpartition("_")[2])

    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "x")
            x = torch.from_dlpack(given)
            was_on_gpu = np.full((x.shape[0], 1), not given.is_cpu())
            made = pb_utils.Tensor.from_dlpack("y", x.cuda() + self.term)
            assert not made.is_cpu()
            try:
                made.as_numpy()
            except pb_utils.TritonModelException as error:
                assert str(error) == "Tensor is stored in GPU and cannot be converted to NumPy."
            responses.append(pb_utils.InferenceResponse([made, pb_utils.Tensor("on_gpu", was_on_gpu)]))
        return responses
"""
ON_GPU_CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { }
instance_group { kind: KIND_GPU gpus: [ 0 ] }
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
output { name: "on_gpu" data_type: TYPE_BOOL dims: 1 }
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "%s" } }
"""
STEP = """
  step { model_name: "%s" model_version: -1 input_map { key: "x" value: "%s" }
         output_map { key: "%s" value: "%s" } %s }
"""
CHAIN = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "scores" data_type: TYPE_FP32 dims: 3 }
output { name: "on_gpu" data_type: TYPE_BOOL dims: 1 }
ensemble_scheduling { %s }
"""


@pytest.fixture(scope="module")
def chains(server: RocserveProcess, torch_files: TorchFiles) -> Iterator[Client]:
    """Ensembles of a Python model, the network, and another Python model: "on" all on the GPU, "off" with the last one
    on the CPU."""
    repository = server.repositories[0]
    for model, forced in (("by_1", "no"), ("by_100", "no"), ("by_200", "yes")):
        drop(repository, model, ON_GPU.encode(), ON_GPU_CONFIG % forced, filename="model.py")
    reported = 'output_map { key: "on_gpu" value: "on_gpu" }'
    for name, last in (("on", "by_100"), ("off", "by_200")):
        steps = (
            STEP % ("by_1", "x", "y", "added", "")
            + STEP % ("on_gpu", "added", "scores", "network", "")
            + STEP % (last, "network", "y", "scores", reported)
        )
        drop(repository, name, None, CHAIN % steps)
    with Client(server.address) as client:
        for model in ("on_gpu", "by_1", "by_100", "by_200", "on", "off"):
            client.load_model(model)
            client.wait_until_ready(PATIENCE_SECONDS, model=model)
        yield client


@pytest.mark.parametrize(("chain", "term", "stays"), [("on", 100, True), ("off", 200, False)])
def test_tensors_of_an_ensemble_stay_on_the_gpu_where_all_who_read_them_take_them_there(
    chains: Client, torch_files: TorchFiles, chain: str, term: int, stays: bool
) -> None:
    inputs, expected = torch_files.values("classifier")

    def ask(rows: int) -> None:
        answer = chains.infer(chain, {"x": inputs["x"][:rows] - 1})
        np.testing.assert_allclose(answer["scores"], expected["scores"][:rows] + term, atol=1e-4)
        assert answer["on_gpu"].tolist() == [[stays]] * rows

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, [1 + number % 4 for number in range(200)]))


def test_tensors_of_an_ensemble_stay_on_the_gpu_around_onnx_runtime(chains: Client, server: RocserveProcess) -> None:
    providers = {"CUDAExecutionProvider", "ROCMExecutionProvider"}
    if providers.isdisjoint(importlib.import_module("onnxruntime").get_available_providers()):
        pytest.skip("no GPU here that ONNX Runtime can use")
    rows = (TensorProto.FLOAT, ["batch", 4])
    doubling = graph([helper.make_node("Add", ["x", "x"], ["doubled"])], {"x": rows}, {"doubled": rows})
    drop(server.repositories[0], "onnx", doubling, 'platform: "onnxruntime_onnx"' + CONFIG % "KIND_GPU")
    steps = (
        STEP % ("by_1", "x", "y", "added", "")
        + STEP % ("onnx", "added", "doubled", "network", "")
        + STEP % ("by_100", "network", "y", "scores", 'output_map { key: "on_gpu" value: "on_gpu" }')
    )
    drop(server.repositories[0], "around_onnx", None, CHAIN.replace("dims: 3", "dims: 4") % steps)
    for model in ("onnx", "around_onnx"):
        chains.load_model(model)
        chains.wait_until_ready(PATIENCE_SECONDS, model=model)

    def ask(rows: int) -> None:
        x = np.full((rows, 4), rows, np.float32)
        answer = chains.infer("around_onnx", {"x": x})
        assert answer["scores"].tolist() == (2 * (x + 1) + 100).tolist()
        assert answer["on_gpu"].all()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, [1 + number % 4 for number in range(200)]))


def test_a_worker_that_dies_takes_no_other_along(
    chains: Client, server: RocserveProcess, torch_files: TorchFiles
) -> None:
    inputs, expected = torch_files.values("classifier")
    others = {model: _worker(server, model).pid for model in ("on_gpu", "by_100")}
    for _ in range(3):
        before = _worker(server, "by_1")
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(chains.infer, "on", {"x": inputs["x"][:2] - 1}) for _ in range(50)]
            before.kill()
            wait(asked)
        wait_until(lambda: _worker(server, "by_1").pid != before.pid)  # noqa: B023
        # It stays ready for a while, so that one restart is not an outage; the index shows the reason meanwhile.
        wait_until(lambda: not _reason(chains, "by_1"))
        answer = chains.infer("on", {"x": inputs["x"][:2] - 1})
        np.testing.assert_allclose(answer["scores"], expected["scores"][:2] + 100, atol=1e-4)
        assert answer["on_gpu"].all()
    assert others == {model: _worker(server, model).pid for model in others}


def _reason(client: Client, model: str) -> str:
    return next(entry.reason for entry in client.repository_index() if entry.name == model)


def _worker(server: RocserveProcess, model: str) -> psutil.Process:
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = server.workers(model)
        return bool(found)

    wait_until(is_there, f"a worker of {model}")
    return found[0]
