"""The memory that programs take, and what is refused before it is tried. The GPU's memory is a HIP whose device memory
is the host's."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.cached_programs import a_recipe, about, cache_at, stored, wait
from support.gpu_tree import GpuTree
from support.host_hip import host_hip
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.host import Host
from rocserve.backends.migraphx.binding import ANY, DimensionRange, ProgramTensor
from rocserve.backends.migraphx.compiling.graph import GraphTensor
from rocserve.backends.migraphx.compiling.memory import ProgramMemory, check_memory, compiled_memory, planned_memory
from rocserve.backends.migraphx.compiling.plan import ProgramPlan
from rocserve.backends.migraphx.compiling.program_cache import ProgramAbout
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.backends.migraphx.gpu_memory import GpuBuffers, GpuMemoryError
from rocserve.backends.migraphx.options import CompileOptions, Precision, Target
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode

GIB = 1 << 30


def recipe(target: Target = Target.GPU, precision: Precision = Precision.FP32, batch: int = 1) -> ProgramRecipe:
    return a_recipe(options=CompileOptions(target, precision), batch_size=batch)


def machine(folder: Path, *, available: int, gpu_free: int = 0) -> Host:
    tree = GpuTree(folder / "sys")
    if gpu_free:
        tree.add_gpu(version=90010, memory=64 * GIB, used=64 * GIB - gpu_free)
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text(f"MemTotal: {256 << 20} kB\nMemAvailable: {available // 1024} kB\n")
    return Host(system=tree.system, processes=folder / "proc", variables={})


def refusal(program: ProgramMemory, host: Host) -> str:
    with pytest.raises(ServeError) as caught:
        check_memory("resnet", program, 0, host)
    assert caught.value.code is StatusCode.UNAVAILABLE
    return caught.value.text


def test_before_compiling_the_model_and_its_plan_tell() -> None:
    plan = ProgramPlan(
        recipes=(recipe(),),
        inputs=(GraphTensor("x", DataType.FP32, ("", 3, 10, 10)),),
        outputs=(
            GraphTensor("y", DataType.FP16, ("", 5)),
            GraphTensor("open", DataType.FP32, ("", "open")),
            GraphTensor("unknown", None, None),
        ),
        batches=True,
        weight_bytes=1000,
    )
    assert planned_memory(recipe(batch=4), plan) == ProgramMemory(recipe(batch=4), 1000, 4 * (1200 + 10), None)
    halved = {precision: planned_memory(recipe(precision=precision), plan).weight_bytes for precision in Precision}
    assert list(halved.values()) == [1000, 500, 500, 250, 250]
    assert planned_memory(recipe(batch=8), plan).tensor_bytes == 8 * (1200 + 10)


def test_once_compiled_the_program_tells(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    found = cache.find(stored(cache, a_recipe(), bytes(500)))
    assert found is not None
    # x is a float of at most 8 by 3, the output a half of 1 by 4.
    assert compiled_memory(found) == ProgramMemory(a_recipe(), 500, 8 * 3 * 4 + 4 * 2, 100)


def test_of_a_dimension_without_a_bound_nothing_is_known(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    open_end = ProgramTensor("", "float", (3, DimensionRange(0, ANY)))
    described = dataclasses.replace(about(a_recipe()), inputs=(), outputs=(open_end,))

    def build(file: Path) -> ProgramAbout:
        file.write_bytes(bytes(500))
        return described

    assert compiled_memory(cache.find_or_build(a_recipe().key, build, wait)).tensor_bytes == 0


def test_what_fits_is_not_refused(tmp_path: Path) -> None:
    host = machine(tmp_path, available=8 * GIB, gpu_free=2 * GIB)
    check_memory("resnet", ProgramMemory(recipe(), GIB, 0, GIB), 0, host)
    check_memory("resnet", ProgramMemory(recipe(Target.REF), 2 * GIB, 0, None), None, host)


def test_a_program_that_is_too_large_for_the_gpu(tmp_path: Path) -> None:
    host = machine(tmp_path, available=100 * GIB, gpu_free=2 * GIB)
    program = ProgramMemory(recipe(batch=8), 2 * GIB, 300 << 20, None)
    assert refusal(program, host) == (
        "model resnet does not fit into GPU 0 (gfx90a): it needs at least 2.29 GiB (batch size 8: weights 2.00 GiB,"
        ' inputs and outputs 300.0 MiB), and 2.00 GiB of 64.00 GiB are free; use smaller "batch_sizes", "precision"'
        " fp16, fewer instances (instance_group count) or another GPU (instance_group gpus)"
    )
    small = ProgramMemory(recipe(precision=Precision.FP16), GIB, 0, 1536 << 20)
    assert refusal(small, host) == (
        "model resnet does not fit into GPU 0 (gfx90a): it needs at least 2.50 GiB (batch size 1: weights 1.00 GiB,"
        " inputs and outputs 0 B, scratch memory 1.50 GiB), and 2.00 GiB of 64.00 GiB are free; use fewer instances"
        " (instance_group count) or another GPU (instance_group gpus)"
    )


def test_without_a_gpu_the_machine_s_memory_counts(tmp_path: Path) -> None:
    host = machine(tmp_path, available=2 * GIB)
    assert refusal(ProgramMemory(recipe(Target.CPU), 3 * GIB, 0, None), host) == (
        "model resnet does not fit into this machine: it needs at least 3.00 GiB (batch size 1: weights 3.00 GiB,"
        ' inputs and outputs 0 B), and 2.00 GiB of 256.00 GiB are free; use "precision" fp16, fewer instances'
        " (instance_group count) or more memory"
    )


def test_loading_takes_more_than_the_program(tmp_path: Path) -> None:
    host = machine(tmp_path, available=3 * GIB, gpu_free=60 * GIB)
    assert refusal(ProgramMemory(recipe(), GIB, 0, None), host) == (
        "model resnet cannot be loaded: MIGraphX briefly needs about 4.00 GiB of host memory, 4 times a"
        " program's weights, and 3.00 GiB of 256.00 GiB are free; add memory, or load fewer models"
    )


def test_nothing_is_refused_if_the_memory_is_unknown(tmp_path: Path) -> None:
    nowhere = Host(system=tmp_path, processes=tmp_path, variables={})
    check_memory("resnet", ProgramMemory(recipe(), 1 << 50, 0, None), 0, nowhere)


FLOAT = np.dtype(np.float32)


class Counting:
    """The library with its calls counted."""

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
    buffers = GpuBuffers(library, {"x": ((2, 3), FLOAT), "empty": ((0, 3), FLOAT), "one": ((), FLOAT)})
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffers.fill({"x": x, "empty": np.empty((0, 3), np.float32), "one": np.array(7, np.float32)})
    np.testing.assert_array_equal(buffers.copied_to_host(buffers.arrays["x"]), x)
    # Strides that MIGraphX may return.
    np.testing.assert_array_equal(buffers.copied_to_host(buffers.arrays["x"].T), x.T)
    np.testing.assert_array_equal(buffers.copied_to_host(buffers.arrays["x"][:, 1:]), x[:, 1:])
    assert buffers.copied_to_host(buffers.arrays["empty"]).shape == (0, 3)
    assert buffers.copied_to_host(buffers.arrays["one"]) == 7
    x[:] = 0
    assert buffers.copied_to_host(buffers.arrays["x"])[1, 2] == 5


def test_it_is_freed_with_the_buffers(library: Counting) -> None:
    buffers = GpuBuffers(library, {"x": ((2, 3), FLOAT), "y": ((4,), FLOAT)})
    assert (library.calls["hipMalloc"], library.calls["hipFree"]) == (2, 0)
    del buffers
    gc.collect()
    assert library.calls["hipFree"] == 2


def test_its_own_words_are_the_error(library: Counting) -> None:
    with pytest.raises(GpuMemoryError, match="hipMalloc: out of memory"):
        GpuBuffers(library, {"x": ((1 << 40,), FLOAT)})


def test_the_library_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    script = """
import ctypes, sys
import numpy as np
from rocserve.backends.migraphx.gpu_memory import GpuBuffers, loaded_hip
assert loaded_hip() is None
ctypes.CDLL(sys.argv[1])
GpuBuffers(loaded_hip(), {"x": ((64,), np.dtype(np.uint8))})
"""
    command = [sys.executable, "-c", script, str(host_hip(tmp_path))]
    subprocess.run(command, check=True, env=dict(os.environ), timeout=PATIENCE_SECONDS)
