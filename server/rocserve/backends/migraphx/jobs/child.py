"""The child process of a job with MIGraphX, which it loads before the job begins."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rocserve.backends.migraphx.binding.choice import open_binding
from rocserve.backends.migraphx.binding.interface import MigraphxError
from rocserve.backends.migraphx.installation import MigraphxInstallation, python_command
from rocserve.backends.migraphx.jobs.hints import with_hint
from rocserve.core.errors import unavailable
from rocserve.core.plain import from_json, to_json
from rocserve.jobs.child import main
from rocserve.jobs.messages import Report
from rocserve.jobs.runner import JobEngine


@dataclass(frozen=True, slots=True)
class _Library:
    installation: MigraphxInstallation
    binding: str


def migraphx_jobs(installation: MigraphxInstallation, binding: str = "auto") -> JobEngine:
    """`binding`: auto, c_api or module."""
    context = to_json(_Library(installation, binding)).decode()
    return JobEngine("MIGraphX", __name__, tuple(python_command(installation)), context, with_hint)


def perform(job: Any, context: str, report: Report) -> Any:
    """The job's result. Raises: ServeError: MIGraphX refuses it, or cannot be loaded."""
    library = from_json(_Library, context.encode())
    try:
        binding = open_binding(library.installation, library.binding)
    except MigraphxError as error:
        raise unavailable(f"MIGraphX cannot be loaded: {with_hint(str(error))}") from None
    try:
        return job.perform(binding, report)
    except MigraphxError as error:
        raise unavailable(f"MIGraphX says: {with_hint(str(error))}") from None


if __name__ == "__main__":
    main(sys.argv[1:], perform)
