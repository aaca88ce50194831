"""The child process of a job: `python -P -m rocserve.jobs.child MODULE JOB REPLIES PARENT_PIPE`. MODULE and JOB name
the job's class; REPLIES and PARENT_PIPE are descriptors. The JobOrder comes on standard input. The parent reads what
the engine writes to standard output and error. The process leads a process group, to which the engine's compilers
belong, and the kernel kills the group when the parent ends."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import resource
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.plain import from_json, to_json
from rocserve.jobs.hints import with_hint
from rocserve.jobs.messages import JobOrder, JobReply, Report

Perform = Callable[[Any, str, Report], Any]
"""Takes the job, JobEngine's context and a report function; returns the result."""


def main(arguments: Sequence[str], perform: Perform) -> NoReturn:
    module_name, class_name, *descriptors = arguments
    replies, parent_pipe = map(int, descriptors)
    for descriptor in (replies, parent_pipe):
        os.set_inheritable(descriptor, False)
    exit_with_parent(parent_pipe)
    with contextlib.suppress(OSError):
        # If memory is short, the kernel should kill this process rather than the worker that waits for it (proc(5)).
        Path("/proc/self/oom_score_adj").write_text("600")
    # A crash is expected here, and its core dump would have gigabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"rocserve:{module_name.rpartition('.')[2]}")
    with open(0, "rb") as standard_input:
        order = from_json(JobOrder, standard_input.read())
    try:
        job = from_json(getattr(importlib.import_module(module_name), class_name), order.job.encode())
        if order.low_priority:
            # Set for the whole process group, because nice(2) affects only the calling thread, and after the imports,
            # so that their threads (numpy's) get it too. The engine's threads inherit it.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, 0, 19)
            # The C library does not wrap ioprio_set(2).
            if (number := {"x86_64": 251, "aarch64": 30}.get(platform.machine())) is not None:
                # 2 = the process group, 3 = the class of idle processes.
                ctypes.CDLL(None, use_errno=True).syscall(number, 2, 0, 3 << 13)
        result = perform(job, order.context, lambda phase: _send(replies, JobReply(phase=phase)))
        reply = JobReply(result=to_json(result).decode())
    except ServeError as error:
        reply = JobReply(failure=error.text, code=error.code, can_pass=error.can_pass)
    except MemoryError:
        reply = JobReply(failure=with_hint("std::bad_alloc"), code=StatusCode.UNAVAILABLE)
    except Exception as error:
        traceback.print_exc()
        reply = JobReply(failure=f"{type(error).__name__}: {error}", code=StatusCode.INTERNAL)
    sys.stdout.flush()
    sys.stderr.flush()
    _send(replies, reply)
    # A normal exit may hang or crash in an engine or a GPU driver.
    os._exit(0)


def _send(replies: int, reply: JobReply) -> None:
    data = to_json(reply) + b"\n"
    while data:
        data = data[os.write(replies, data) :]


if __name__ == "__main__":
    main(sys.argv[1:], lambda job, _context, report: job.perform(report))
