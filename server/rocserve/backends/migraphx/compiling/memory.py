"""Estimates whether programs fit into memory. The estimate leaves out unknown parts, so it is too low: a refused
program cannot fit, but an accepted one may still fail."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rocserve.backends.host import FreeMemory, Host
from rocserve.backends.migraphx.binding import ANY, NUMPY_DTYPES, bounds
from rocserve.backends.migraphx.compiling.plan import ProgramPlan
from rocserve.backends.migraphx.compiling.program_cache import CachedProgram
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.backends.migraphx.options import Precision, Target
from rocserve.core.errors import unavailable
from rocserve.core.printable import readable_size


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """The known part of one program's memory."""

    recipe: ProgramRecipe
    weight_bytes: int
    tensor_bytes: int
    """Size of inputs and outputs."""
    scratch_bytes: int | None
    """Working memory; None = unknown, as for every program that is not compiled yet."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.tensor_bytes + (self.scratch_bytes or 0)


def planned_memory(recipe: ProgramRecipe, plan: ProgramPlan) -> ProgramMemory:
    """Estimate the memory of a program before it is compiled."""
    tensors = (
        (
            tensor.datatype.itemsize,
            [recipe.batch_size if index == 0 and size == -1 else size for index, size in enumerate(shape)],
        )
        for tensor in (*plan.inputs, *plan.outputs)
        if tensor.datatype is not None and (shape := plan.shape_in(tensor, recipe)) is not None
    )
    # The size of a four-byte weight after quantising, in bytes.
    bytes_of_four = {
        Precision.FP32: 4,
        Precision.FP16: 2,
        Precision.BF16: 2,
        Precision.FP8: 1,
        Precision.INT8: 1,
    }
    weight_bytes = plan.weight_bytes * bytes_of_four[recipe.options.precision] // 4
    return ProgramMemory(recipe, weight_bytes, _tensor_bytes(tensors), None)


def compiled_memory(program: CachedProgram) -> ProgramMemory:
    """Return the memory of a compiled program. Its file holds its weights and its kernels."""
    about = program.about
    tensors = (
        (NUMPY_DTYPES[tensor.datatype].itemsize, [bounds(dimension)[1] for dimension in tensor.shape])
        for tensor in (*about.inputs, *about.outputs)
        if tensor.datatype in NUMPY_DTYPES
    )
    return ProgramMemory(about.recipe, program.size_bytes, _tensor_bytes(tensors), about.scratch_bytes)


def _tensor_bytes(tensors: Iterable[tuple[int, Sequence[int]]]) -> int:
    """Sum the tensors' sizes from element size and dimensions. A tensor with an unknown dimension counts as 0."""
    return sum(itemsize * math.prod(sizes) for itemsize, sizes in tensors if {-1, ANY}.isdisjoint(sizes))


def free_memory(target: Target, device: int | None, host: Host) -> FreeMemory | None:
    """Return the free memory where programs of a target are kept; None = not known. `device`: as of `check_memory`."""
    if target is not Target.GPU:
        return host.free_memory()
    gpu = host.gpu(device or 0)
    return host.free_gpu_memory(gpu) if gpu else None


def check_memory(model: str, program: ProgramMemory, device: int | None, host: Host | None = None) -> None:
    """Refuse a program that needs more than the free memory. `device`: the GPU's number for programs of the target gpu;
    None = 0. Raises ServeError (UNAVAILABLE) with the needed and the free memory, and remedies."""
    host = host or Host()
    on_host, target = host.free_memory(), program.recipe.options.target
    memory = free_memory(target, device, host)
    if memory is not None and program.total_bytes > memory.free_bytes:
        parts = {
            "weights": program.weight_bytes,
            "inputs and outputs": program.tensor_bytes,
            "scratch memory": program.scratch_bytes,
        }
        described = ", ".join(f"{name} {readable_size(size)}" for name, size in parts.items() if size is not None)
        recipe = program.recipe
        remedies = {
            'smaller "batch_sizes"': recipe.batch_size > 1,
            'smaller "sizes"': bool(recipe.sizes),
            '"precision" fp16': recipe.options.precision is Precision.FP32 and program.weight_bytes > 0,
            "fewer instances (instance_group count)": True,
        }
        use = ", ".join(remedy for remedy, helps in remedies.items() if helps)
        last = "another GPU (instance_group gpus)" if target is Target.GPU else "more memory"
        raise unavailable(
            f"model {model} does not fit into {memory.place}: it needs at least {readable_size(program.total_bytes)}"
            f" ({program.recipe.title}: {described}), and {_free(memory)}; use {use} or {last}"
        )
    # The host memory that saving or loading a program briefly takes, as a multiple of its weights. Measured with
    # MIGraphX 2.14 and a matrix of 195 MiB: 787 MiB (saving), 782 MiB (loading).
    weight_copies = 4
    loading_bytes = program.weight_bytes * weight_copies
    if on_host is not None and loading_bytes > on_host.free_bytes:
        raise unavailable(
            f"model {model} cannot be loaded: MIGraphX briefly needs about {readable_size(loading_bytes)} of host"
            f" memory, {weight_copies} times a program's weights, and {_free(on_host)}; add memory, or load fewer"
            " models"
        )


def _free(memory: FreeMemory) -> str:
    return f"{readable_size(memory.free_bytes)} of {readable_size(memory.total_bytes)} are free"
