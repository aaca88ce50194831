"""Memory of the GPU, of the HIP that MIGraphX has loaded, for programs that take and give their tensors there."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Mapping
from ctypes import c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

_MAPS = Path("/proc/self/maps")
_HIP = re.compile(r"(/\S*/libamdhip64\.so\S*)")
_TO_DEVICE, _TO_HOST = 1, 2
"""Of hipMemcpyKind."""

Array = np.ndarray[Any, Any]


class GpuMemoryError(Exception):
    """HIP refused, in its own words."""


class Hip:
    """The device that is the process's first; its calls release the GIL."""

    def __init__(self, library: Any) -> None:
        """`library`: libamdhip64."""
        self._library = library
        library.hipGetErrorString.restype = ctypes.c_char_p

    def allocate(self, nbytes: int) -> GpuBlock:
        address = c_void_p()
        self._call("hipMalloc", ctypes.byref(address), c_size_t(nbytes))
        return GpuBlock(self, address.value or 0, nbytes)

    def free(self, address: int) -> None:
        """It is done with, whatever HIP says."""
        self._library.hipFree(c_void_p(address))

    def write(self, address: int, array: Array) -> None:
        """`array`: C-contiguous."""
        self._call("hipMemcpy", c_void_p(address), c_void_p(_address(array)), c_size_t(array.nbytes), _TO_DEVICE)

    def read(self, array: Array, address: int) -> None:
        """`array`: C-contiguous."""
        self._call("hipMemcpy", c_void_p(_address(array)), c_void_p(address), c_size_t(array.nbytes), _TO_HOST)

    def wait(self) -> None:
        """For all that the device has been given; a copy of memory that is not pinned may return before it is done."""
        self._call("hipDeviceSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            words = self._library.hipGetErrorString(status)
            raise GpuMemoryError(f"{name}: {words.decode(errors='replace') if words else f'error {status}'}")


class GpuBlock:
    """A piece of a GPU's memory, freed once nothing refers to it any more; at the process's end it is left alone."""

    def __init__(self, hip: Hip, address: int, nbytes: int) -> None:
        self.address = address
        self._memory: Any = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(self, hip.free, address).atexit = False

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """It says where tensors lie, to those who ask for an array's address; its values must not be looked at."""
        return np.ndarray(shape, dtype, self._memory)


class GpuBuffers:
    """A program's parameters in the GPU's memory, its buffers for outputs among them: at the same place in each run."""

    def __init__(self, hip: Hip, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        self._hip = hip
        self._blocks: list[GpuBlock] = []
        self.arrays: dict[str, Array] = {}
        """As `GpuBlock.array`."""
        for name, (shape, dtype) in shapes.items():
            block = hip.allocate(max(1, int(np.prod(shape)) * dtype.itemsize))
            self._blocks.append(block)
            self.arrays[name] = block.array(shape, dtype)

    def fill(self, inputs: Mapping[str, Array]) -> None:
        for name, array in inputs.items():
            if array.nbytes:
                self._hip.write(_address(self.arrays[name]), array)
        self._hip.wait()

    def fetched(self, result: Array) -> Array:
        """A result, which is described by an array on the GPU's memory, on the host's. After `wait`."""
        strides = [(size - 1) * stride for size, stride in zip(result.shape, result.strides, strict=True)]
        extent = sum(strides) + result.itemsize if result.size else 0
        octets = np.empty(extent, np.uint8)
        if extent:
            self._hip.read(octets, _address(result))
        return np.ndarray(result.shape, result.dtype, octets, strides=result.strides)

    def wait(self) -> None:
        self._hip.wait()


def loaded_hip() -> Hip | None:
    """Of this process; None = no library has loaded HIP, as MIGraphX's target gpu does."""
    match = _HIP.search(_MAPS.read_text(errors="surrogateescape"))
    return Hip(ctypes.CDLL(match[1])) if match else None


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
