"""Has MIGraphX print a model or a compiled program, and say what it is itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.migraphx.binding.interface import (
    Binding,
    MigraphxError,
)
from rocserve.backends.migraphx.configuration.options import Target
from rocserve.backends.migraphx.jobs.probe import InspectResult, parse_recipe
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

    def perform(self, binding: Binding, report: Report) -> InspectResult:
        """Raises: MigraphxError: MIGraphX cannot read it."""
        report("reading the compiled program" if self.recipe is None else "reading the model")
        program = parse_recipe(binding, self.recipe) if self.recipe else binding.load(Path(self.program_file))
        return InspectResult(tuple(program.parameters.values()), program.outputs, program.text())


@dataclass(frozen=True, slots=True)
class LibraryResult:
    version: str
    """E.g. "2.14.0"; "" where it is not known."""
    binding: str
    """c_api or module."""
    library: str
    """The file."""
    targets: Mapping[str, str]
    """Why a target cannot be used, in MIGraphX's words; "" where its library can be loaded."""


@dataclass(frozen=True, slots=True)
class LibraryJob:
    """Load MIGraphX and ask it what only a process that has loaded it knows."""

    title = "loading MIGraphX"

    def perform(self, binding: Binding, report: Report) -> LibraryResult:
        report("trying its targets")
        targets = dict.fromkeys((target.value for target in Target), "")
        for target in targets:
            try:
                binding.check_target(target)
            except MigraphxError as error:
                targets[target] = str(error)
        return LibraryResult(binding.migraphx_version, binding.name, binding.library, targets)
