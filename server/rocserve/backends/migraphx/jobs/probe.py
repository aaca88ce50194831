"""Tries a compiled program: loads it from its file and runs it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.migraphx.binding.interface import Array, Binding, Program, ProgramTensor
from rocserve.backends.migraphx.jobs.samples import Samples
from rocserve.core.errors import internal, invalid_argument
from rocserve.jobs.messages import Report


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """Try a .mxr that rocserve has not compiled itself."""

    model_name: str
    path: str

    @property
    def title(self) -> str:
        return f"trying {Path(self.path).name} of model '{self.model_name}'"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    inputs: tuple[ProgramTensor, ...]
    """By name."""
    outputs: tuple[ProgramTensor, ...]


def perform(job: ProbeJob, binding: Binding, report: Report) -> ProbeResult:
    """
    Raises:
        MigraphxError: MIGraphX refuses the file, or to run it.
        ServeError: it cannot be served.
    """
    name = Path(job.path).name
    report("loading it")
    program = binding.load(Path(job.path))
    if program.extra_parameters:
        raise invalid_argument(
            f"{name} was compiled with offload_copy off (it has the parameters {', '.join(program.extra_parameters)}):"
            " it wants its inputs and outputs in the GPU's memory, where requests' tensors are not; compile it with"
            " offload_copy on (`rocserve compile`; `migraphx-driver compile --enable-offload-copy`)"
        )
    if not program.outputs:
        raise invalid_argument(f"{name} has no outputs")
    report("running it")
    program.run(Samples().inputs(program.parameters))
    return ProbeResult(
        inputs=tuple(program.parameters.values()),
        outputs=program.outputs,
    )


def try_saved(binding: Binding, program: Program, path: Path) -> None:
    """Load what a program has been saved as; it must give what the program itself gives, bit for bit.

    Raises:
        MigraphxError: it cannot be loaded or run.
        ServeError: INTERNAL, it is another program.
    """
    inputs = Samples().inputs(program.parameters)
    expected = program.run(inputs)
    loaded = binding.load(path)
    if dict(loaded.parameters) != dict(program.parameters) or list(loaded.outputs) != list(program.outputs):
        raise internal(
            f"the program that was saved has other inputs or outputs when it is loaded: {_described(loaded)} instead"
            f" of {_described(program)}"
        )
    if _same(loaded.run(inputs), expected):
        return
    # Some of a GPU's kernels add up in any order. Whose results differ by themselves cannot be compared by their bits.
    if _same(program.run(inputs), expected):
        raise internal("the program that was saved gives other results when it is loaded")


def _same(some: Sequence[Array], others: Sequence[Array]) -> bool:
    return [values.tobytes() for values in some] == [values.tobytes() for values in others]


def _described(program: Program) -> str:
    tensors = [*program.parameters.values(), *program.outputs]
    return ", ".join(f"{tensor.name or 'output'} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)
