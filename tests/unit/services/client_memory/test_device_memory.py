"""The process that opens memory of GPUs, where there is none; tests/e2e/test_gpu.py has one."""

from __future__ import annotations

import importlib.util

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.services.client_memory import device_memory
from rocserve.services.client_memory.device_memory import DeviceProcess, Devices


def _has_gpu() -> bool:
    return device_memory.has_file("torch", ("lib/libtorch_hip.so", "lib/libtorch_cuda.so"))


pytestmark = pytest.mark.skipif("_has_gpu()", reason="PyTorch is one for GPUs here")


def test_without_pytorch_for_gpus_no_process_is_started() -> None:
    with pytest.raises(ServeError) as raised:
        Devices().open("r", bytes(64), 0, 64)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert raised.value.text == "failed to register CUDA shared memory region: 'r', GPUs not supported"


@pytest.mark.long
def test_a_process_that_finds_no_gpu_says_so_and_ends() -> None:
    why = "finds no GPU here" if importlib.util.find_spec("torch") else "it has closed its socket"
    with pytest.raises(ServeError, match=why):
        DeviceProcess()
