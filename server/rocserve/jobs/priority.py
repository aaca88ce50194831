"""What a child process is to the kernel: who goes first, and who goes when memory is short."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
from pathlib import Path

_LOWEST = 19
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of ioprio_set(2), for which the C library has no function."""
_IOPRIO_OF_GROUP = 2
_IOPRIO_IDLE = 3 << 13
_OOM_SCORE = 600
"""When memory is short, the kernel is to end a compile rather than the worker that waits for it (proc(5))."""


def yield_to_others() -> None:
    """Have this process group, with all threads that it has by now, run where nobody else wants to.

    nice(2) would be of the calling thread alone: numpy has threads of its own from its import on.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, 0, _LOWEST)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, _IOPRIO_OF_GROUP, 0, _IOPRIO_IDLE)


def go_first_when_memory_is_short() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def leave_no_core() -> None:
    """A crash is expected here; its dump would be gigabytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
