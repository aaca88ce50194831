"""Has MIGraphX read a model, or load a compiled program, and print it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.migraphx.binding.interface import Binding, ProgramTensor
from rocserve.backends.migraphx.jobs.sources import parse_recipe
from rocserve.backends.migraphx.planning.recipe import ProgramRecipe
from rocserve.jobs.messages import Report


@dataclass(frozen=True, slots=True)
class InspectJob:
    """Of the two, one is given."""

    name: str
    """The model or file, for people."""
    recipe: ProgramRecipe | None = None
    """A model to be read, and not compiled."""
    program_file: str = ""
    """A .mxr to be loaded."""

    @property
    def title(self) -> str:
        return f"inspecting {self.name}"


@dataclass(frozen=True, slots=True)
class InspectResult:
    parameters: tuple[ProgramTensor, ...]
    """By name."""
    outputs: tuple[ProgramTensor, ...]
    text: str
    """MIGraphX's print."""


def perform(job: InspectJob, binding: Binding, report: Report) -> InspectResult:
    """
    Raises:
        MigraphxError: MIGraphX cannot read it.
    """
    recipe = job.recipe
    report("reading the compiled program" if recipe is None else "reading the model")
    program = binding.load(Path(job.program_file)) if recipe is None else parse_recipe(binding, recipe)
    return InspectResult(
        parameters=tuple(program.parameters.values()),
        outputs=program.outputs,
        text=program.text(),
    )
