"""Whether a program fits into memory, told before it is compiled or loaded, in numbers.

An estimate leaves out what is not known and so is too low: what is refused cannot fit; what is not may still fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rocserve.backends.free_memory import FreeMemory, free_gpu_memory, free_host_memory
from rocserve.backends.host import Host
from rocserve.backends.migraphx.binding.interface import NUMPY_DTYPES, DimensionRange, ProgramTensor
from rocserve.backends.migraphx.configuration.options import Precision, Target
from rocserve.backends.migraphx.planning.plan import PlannedTensor, ProgramPlan
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe
from rocserve.backends.migraphx.program_cache import CachedProgram
from rocserve.core.byte_sizes import readable_size
from rocserve.core.errors import ServeError, unavailable

_BYTES_OF_FOUR = {
    Precision.FP32: 4,
    Precision.FP16: 2,
    Precision.BF16: 2,
    Precision.FP8: 1,
    Precision.INT8: 1,
}
"""What is left of a weight of four bytes."""

_COPIES_WHILE_LOADED = 4
"""Saving and loading a program takes so many times its weights in the host's memory for a moment: measured with
MIGraphX 2.14 and a matrix of 195 MiB, 787 MiB (saved) and 782 MiB (loaded)."""


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """What one program takes, as far as is known."""

    recipe: ProgramRecipe
    weight_bytes: int
    tensor_bytes: int
    """Its inputs and outputs."""
    scratch_bytes: int | None
    """What it works in beside; None = not known before it is compiled, or not at all."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.tensor_bytes + (self.scratch_bytes or 0)

    @property
    def loading_bytes(self) -> int:
        """Of the host's memory, while it is saved or loaded."""
        return self.weight_bytes * _COPIES_WHILE_LOADED


def planned_memory(recipe: ProgramRecipe, plan: ProgramPlan) -> ProgramMemory:
    """Of a program that is yet to be compiled."""
    batch = recipe.largest_batch or recipe.batch_size
    return ProgramMemory(
        recipe,
        plan.weight_bytes * _BYTES_OF_FOUR[recipe.options.precision] // 4,
        sum(_planned_bytes(tensor, batch) for tensor in (*plan.inputs, *plan.outputs)),
        None,
    )


def compiled_memory(program: CachedProgram) -> ProgramMemory:
    """Of a program that is compiled; its file holds its weights and its kernels."""
    about = program.about
    tensors = (*about.inputs, *about.outputs)
    return ProgramMemory(about.recipe, program.size_bytes, _tensor_bytes(tensors), about.scratch_bytes)


def check_memory(model: str, programs: Sequence[ProgramMemory], device: int | None, host: Host | None = None) -> None:
    """Refuse programs that cannot be loaded beside what is in memory now.

    Args:
        programs: those to be loaded one after the other into one process.
        device: the GPU's number, for programs of the target gpu; None = 0.

    Raises:
        ServeError: UNAVAILABLE, with what is needed, what is free and what can be done.
    """
    if not programs:
        return
    host = host or Host()
    total = sum(program.total_bytes for program in programs)
    on_gpu = programs[0].recipe.options.target is Target.GPU
    around = free_host_memory(host)
    if on_gpu:
        gpu = host.gpu(device or 0)
        there = free_gpu_memory(gpu, host) if gpu else None
        if there is not None and total > there.free_bytes:
            raise _does_not_fit(model, programs, total, there, on_gpu=True)
    elif around is not None and total > around.free_bytes:
        raise _does_not_fit(model, programs, total, around, on_gpu=False)
    most = max(program.loading_bytes for program in programs)
    if around is not None and most > around.free_bytes:
        raise unavailable(
            f"model {model} cannot be loaded: MIGraphX needs about {readable_size(most)} of the host's memory for a"
            f" moment, {_COPIES_WHILE_LOADED} times a program's weights, and {_free(around)}; give it more memory, or"
            " load fewer models"
        )


def _does_not_fit(
    model: str, programs: Sequence[ProgramMemory], total: int, memory: FreeMemory, *, on_gpu: bool
) -> ServeError:
    listed = "; ".join(_described(program) for program in programs)
    return unavailable(
        f"model {model} does not fit into {memory.place}: it needs at least {readable_size(total)} ({listed}), and"
        f" {_free(memory)}; {_remedies(programs, on_gpu)}"
    )


def _described(program: ProgramMemory) -> str:
    parts = [
        f"weights {readable_size(program.weight_bytes)}",
        f"inputs and outputs {readable_size(program.tensor_bytes)}",
    ]
    if program.scratch_bytes is not None:
        parts.append(f"scratch memory {readable_size(program.scratch_bytes)}")
    return f"{program.recipe.title}: {', '.join(parts)}"


def _free(memory: FreeMemory) -> str:
    return f"{readable_size(memory.free_bytes)} of {readable_size(memory.total_bytes)} are free"


def _remedies(programs: Sequence[ProgramMemory], on_gpu: bool) -> str:
    remedies: list[str] = []
    if any(max(program.recipe.batch_size, program.recipe.largest_batch) > 1 for program in programs):
        remedies.append('smaller "batch_sizes"')
    if programs[0].recipe.options.precision is Precision.FP32 and any(program.weight_bytes for program in programs):
        remedies.append('"precision" fp16')
    remedies.append("fewer instances (instance_group count)")
    remedies.append("another GPU (instance_group gpus)" if on_gpu else "more memory")
    return f"use {', '.join(remedies[:-1])} or {remedies[-1]}"


def _planned_bytes(tensor: PlannedTensor, batch: int) -> int:
    """0 where it is not known."""
    if tensor.datatype is None or tensor.shape is None:
        return 0
    sizes = [batch if place == 0 and size == -1 else size for place, size in enumerate(tensor.shape)]
    return 0 if -1 in sizes else math.prod(sizes) * tensor.datatype.itemsize


def _tensor_bytes(tensors: Iterable[ProgramTensor]) -> int:
    total = 0
    for tensor in tensors:
        dtype = NUMPY_DTYPES.get(tensor.datatype)
        sizes = (size.most if isinstance(size, DimensionRange) else size for size in tensor.shape)
        total += math.prod(sizes) * (dtype.itemsize if dtype else 0)
    return total
