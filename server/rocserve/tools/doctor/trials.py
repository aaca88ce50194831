"""Runs trials of engines, each in a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

from rocserve.core.plain import from_json, to_json
from rocserve.jobs.ends import describe_end
from rocserve.jobs.output import JobOutput
from rocserve.tools.doctor.trial import TrialOrder, TrialResult

_CHILD = "rocserve.tools.doctor.trial"


def run_trial(
    order: TrialOrder, python: Sequence[str], timeout_seconds: float, environment: Mapping[str, str]
) -> TrialResult:
    """What became of the trial; a process that crashes or is late is a failure like another.

    `python`: the words that start the interpreter. `environment`: set on top of this process's.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    output = JobOutput()
    process: subprocess.Popen[bytes] | None = None
    started = time.monotonic()
    try:
        with tempfile.TemporaryFile() as standard_input:
            standard_input.write(to_json(order))
            standard_input.seek(0)
            # A process group of its own: it ends with all that it has started.
            process = subprocess.Popen(
                [*python, "-P", "-m", _CHILD, str(writing)],
                stdin=standard_input,
                stdout=output.descriptor,
                stderr=output.descriptor,
                pass_fds=(writing,),
                env={**os.environ, **environment},
                process_group=0,
            )
        os.close(writing)
        writing = -1
        data = _read_all(reading, started + timeout_seconds)
        if data:
            return from_json(TrialResult, data)
        seconds = time.monotonic() - started
        if data is None:
            return TrialResult(seconds, f"took longer than {timeout_seconds:g} s and was stopped")
        status = process.wait()
        output.take_lines(ended=True)
        return TrialResult(seconds, describe_end(status, output.last_lines, 0, "the process"))
    finally:
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for descriptor in (reading, writing):
            if descriptor >= 0:
                os.close(descriptor)
        output.close()


def _read_all(descriptor: int, deadline: float) -> bytes | None:
    """Up to the end of the writer; None where that does not come in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    data = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        more = os.read(descriptor, 65536)
        if not more:
            return data
        data += more
