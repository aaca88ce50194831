"""Allocates GPU memory through the HIP that MIGraphX has loaded, for programs whose tensors lie on the GPU."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Mapping
from ctypes import c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

_TO_DEVICE, _TO_HOST = 1, 2
"""Values of hipMemcpyKind."""

Array = np.ndarray[Any, Any]


class GpuMemoryError(Exception):
    """HIP refused a call; the text is HIP's own."""


class GpuBuffers:
    """Holds a program's inputs and output buffers in the memory of the process's first GPU, at the same addresses in
    every run. The memory is freed with the object, but left alone at the process's end. Calls release the GIL."""

    def __init__(self, hip: Any, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        """`hip`: libamdhip64. Raises GpuMemoryError if memory cannot be allocated."""
        self._hip = hip
        hip.hipGetErrorString.restype = ctypes.c_char_p
        self.arrays: dict[str, Array] = {}
        """Only addresses, shapes and types: the host must not read the values."""
        for name, (shape, dtype) in shapes.items():
            address, nbytes = c_void_p(), max(1, int(np.prod(shape)) * dtype.itemsize)
            self._call("hipMalloc", ctypes.byref(address), c_size_t(nbytes))
            weakref.finalize(self, _free, hip, address).atexit = False
            memory: Any = (ctypes.c_char * nbytes).from_address(address.value or 0)
            self.arrays[name] = np.ndarray(shape, dtype, memory)

    def fill(self, inputs: Mapping[str, Array]) -> None:
        """Copy inputs, which are C-contiguous, to the GPU."""
        for name, array in inputs.items():
            if array.nbytes:
                self._copy(_address(self.arrays[name]), array, array.nbytes, _TO_DEVICE)
        self.wait()

    def copied_to_host(self, result: Array) -> Array:
        """Copy a result to the host. `result` is an array on the GPU's memory. Call `wait` before."""
        strides = [(size - 1) * stride for size, stride in zip(result.shape, result.strides, strict=True)]
        extent = sum(strides) + result.itemsize if result.size else 0
        octets = np.empty(extent, np.uint8)
        if extent:
            self._copy(_address(octets), result, extent, _TO_HOST)
        return np.ndarray(result.shape, result.dtype, octets, strides=result.strides)

    def wait(self) -> None:
        """Wait for all work on the GPU: a copy of memory that is not pinned may return before it is done."""
        self._call("hipDeviceSynchronize")

    def _copy(self, destination: int, source: Array, nbytes: int, kind: int) -> None:
        self._call("hipMemcpy", c_void_p(destination), c_void_p(_address(source)), c_size_t(nbytes), kind)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._hip, name)(*arguments)
        if status:
            words = self._hip.hipGetErrorString(status)
            raise GpuMemoryError(f"{name}: {words.decode(errors='replace') if words else f'error {status}'}")


def _free(hip: Any, address: c_void_p) -> None:
    hip.hipFree(address)


def loaded_hip() -> ctypes.CDLL | None:
    """Return this process's libamdhip64; None = no library has loaded HIP (MIGraphX's target gpu loads it)."""
    match = re.search(r"(/\S*/libamdhip64\.so\S*)", Path("/proc/self/maps").read_text(errors="surrogateescape"))
    return ctypes.CDLL(match[1]) if match else None


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
