"""Reports the installed MIGraphX: its version and targets, which only a process that has loaded it knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocserve.backends.migraphx.binding.interface import Binding, MigraphxError
from rocserve.backends.migraphx.configuration.options import Target
from rocserve.jobs.messages import Report


@dataclass(frozen=True, slots=True)
class LibraryJob:
    """Load MIGraphX and ask it."""

    @property
    def title(self) -> str:
        return "loading MIGraphX"


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


def perform(job: LibraryJob, binding: Binding, report: Report) -> LibraryResult:
    report("trying its targets")
    targets = {target.value: _fault(binding, target) for target in Target}
    return LibraryResult(binding.migraphx_version, binding.name, binding.library, targets)


def _fault(binding: Binding, target: Target) -> str:
    try:
        binding.check_target(target.value)
    except MigraphxError as error:
        return str(error)
    return ""
