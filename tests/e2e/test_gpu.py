"""A GPU: memory of it that clients share, and what an unloaded model gives back."""

from __future__ import annotations

import base64
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.models import drop
from support.pytorch import TorchFiles
from support.server import RocserveProcess
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

from rocserve.backends.installed import has_file
from rocserve_client import Client

FREE = "import torch; print(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0)"
LOAD_SECONDS = 60
MIB = 1 << 20
CONFIG = """
max_batch_size: 8
instance_group { kind: %s gpus: [ 0 ] }
"""


def free_bytes() -> int:
    """Of the first GPU; found out by a process of its own, for a process that has used a GPU keeps some of it."""
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
                client.wait_until_ready(LOAD_SECONDS, model=model)
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
    """With the input in region "in", the output "scores" in "out"."""
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
    next(process for process in server.family() if any("device_process" in word for word in process.cmdline())).kill()
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
        wait_until(lambda: free_before - free_bytes() < used - 200 * MIB, seconds=LOAD_SECONDS)
        for _ in range(3):
            client.load_model("on_gpu")
            client.wait_until_ready(LOAD_SECONDS, model="on_gpu")
            client.unload_model("on_gpu")
        wait_until(lambda: free_before - free_bytes() < used - 200 * MIB, seconds=LOAD_SECONDS)


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
        client.wait_until_ready(LOAD_SECONDS, model="double")
        x = np.arange(5, dtype=np.float32)
        answer = client.infer("double", {"x": x})
        np.testing.assert_array_equal(answer["tensor"], 2 * x)
        np.testing.assert_array_equal(answer["capsule"], 3 * x)
