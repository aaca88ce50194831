"""The process that opens GPU memory, on machines without a GPU; tests/e2e/test_gpu.py uses one."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import has_ended
from support.shared_memory import GUARD
from support.waiting import wait_until

from rocserve.backends.installed import has_file
from rocserve.core.errors import ServeError, StatusCode
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.client_memory.device_memory import DeviceProcess
from rocserve.services.client_memory.regions import ClientRegions


def _has_gpu() -> bool:
    return has_file("torch", ("lib/libtorch_hip.so", "lib/libtorch_cuda.so"))


pytestmark = pytest.mark.skipif("_has_gpu()", reason="PyTorch is one for GPUs here")


def test_without_pytorch_for_gpus_no_process_is_started() -> None:
    service = ClientRegions(GUARD)
    request = pb.CudaSharedMemoryRegisterRequest(name="r", raw_handle=bytes(64), device_id=0, byte_size=64)
    with pytest.raises(ServeError) as raised:
        asyncio.run(service.cuda_register(request))
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert raised.value.text == "failed to register CUDA shared memory region: 'r', GPUs not supported"


@pytest.mark.long
def test_a_process_that_is_stuck_in_a_driver_ends_with_the_server(tmp_path: Path) -> None:
    told = tmp_path / "told"
    (tmp_path / "torch.py").write_text(
        "import ctypes, os, pathlib\n"
        f"told = pathlib.Path({str(told)!r})\n"
        "told.with_suffix('.new').write_text(str(os.getpid()))\n"
        "told.with_suffix('.new').rename(told)\n"
        "ctypes.PyDLL(None).sleep(600)\n"
    )
    program = "from rocserve.services.client_memory.device_memory import DeviceProcess; DeviceProcess()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as server:
        wait_until(told.exists, "the import of what stands for PyTorch")
        pid = int(told.read_text())
        assert not has_ended(pid)
        server.kill()
    wait_until(lambda: has_ended(pid), "the end of the process")


@pytest.mark.long
def test_a_process_that_finds_no_gpu_says_so_and_ends() -> None:
    why = "finds no usable GPU" if importlib.util.find_spec("torch") else "it has closed its socket"
    with pytest.raises(ServeError, match=why):
        DeviceProcess()
