"""The GPU's memory, by a HIP whose device memory is the host's."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.host_hip import host_hip

from rocserve.backends.migraphx.binding.gpu_memory import GpuBuffers, GpuMemoryError, Hip

FLOAT = np.dtype(np.float32)


class Counting:
    """The library, with its calls counted."""

    def __init__(self, library: Path) -> None:
        self.calls: Counter[str] = Counter()
        self._library = ctypes.CDLL(str(library))

    def __getattr__(self, name: str) -> object:
        self.calls[name] += 1
        return getattr(self._library, name)


@pytest.fixture
def library(tmp_path: Path) -> Counting:
    return Counting(host_hip(tmp_path))


def test_what_goes_there_comes_back(library: Counting) -> None:
    buffers = GpuBuffers(Hip(library), {"x": ((2, 3), FLOAT), "empty": ((0, 3), FLOAT), "one": ((), FLOAT)})
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffers.fill({"x": x, "empty": np.empty((0, 3), np.float32), "one": np.array(7, np.float32)})
    np.testing.assert_array_equal(buffers.fetched(buffers.arrays["x"]), x)
    # As MIGraphX may give it: other strides.
    np.testing.assert_array_equal(buffers.fetched(buffers.arrays["x"].T), x.T)
    np.testing.assert_array_equal(buffers.fetched(buffers.arrays["x"][:, 1:]), x[:, 1:])
    assert buffers.fetched(buffers.arrays["empty"]).shape == (0, 3)
    assert buffers.fetched(buffers.arrays["one"]) == 7
    x[:] = 0
    assert buffers.fetched(buffers.arrays["x"])[1, 2] == 5


def test_it_is_freed_with_the_buffers(library: Counting) -> None:
    buffers = GpuBuffers(Hip(library), {"x": ((2, 3), FLOAT), "y": ((4,), FLOAT)})
    assert (library.calls["hipMalloc"], library.calls["hipFree"]) == (2, 0)
    del buffers
    gc.collect()
    assert library.calls["hipFree"] == 2


def test_its_own_words_are_the_error(library: Counting) -> None:
    with pytest.raises(GpuMemoryError, match="hipMalloc: out of memory"):
        GpuBuffers(Hip(library), {"x": ((1 << 40,), FLOAT)})


def test_the_library_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    script = """
import ctypes, sys
from rocserve.backends.migraphx.binding.gpu_memory import loaded_hip
assert loaded_hip() is None
ctypes.CDLL(sys.argv[1])
loaded_hip().allocate(64)
"""
    command = [sys.executable, "-c", script, str(host_hip(tmp_path))]
    subprocess.run(command, check=True, env=dict(os.environ), timeout=60)
