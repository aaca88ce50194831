"""Runs the jobs of MIGraphX and of ONNX Runtime in the test's own process, which must be able to load MIGraphX."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from rocserve.backends.migraphx.compiling import child_process
from rocserve.core.errors import ServeError
from rocserve.core.plain import from_json, to_json
from rocserve.jobs.messages import Job, JobError
from rocserve.jobs.runner import JobRunner, JobWatch

_ONE_AT_A_TIME = threading.Lock()
"""As children, jobs share nothing."""


def run_here(
    runner: JobRunner, job: Job, result_type: type[Any], *, report: Callable[[str], None] | None = None, **_: object
) -> Any:
    """Replaces JobRunner.run. Three quarters of a child's time go into its start. Job and result travel as JSON, as to
    and from a child, and errors have a child's words; limits of time and variables of the environment are left out."""
    runner.check_called_off(job.title)
    engine = runner._engine
    watch = JobWatch(job.title, report or runner.report, logging.getLogger("test"), engine.name)
    received: Any = from_json(type(job), to_json(job))
    try:
        with _ONE_AT_A_TIME:
            if engine.child == child_process.__name__:
                result = child_process.perform(received, engine.context, watch.enter_phase)
            else:
                result = received.perform(watch.enter_phase)
    except ServeError as failure:
        error = JobError(failure.code, f"{job.title} failed while {watch.phase}: {failure.text}")
        raise error.passing() if failure.can_pass else error.lasting() from None
    return from_json(result_type, to_json(result))
