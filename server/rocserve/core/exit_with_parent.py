"""Ends a process when its parent process ends, however the parent ends and whatever the process is doing.

The parent (the server for its workers and front ends, a worker for its compilers) alone has the writing end of a
pipe. The process has the reading end and asks for signals on it (O_ASYNC, fcntl(2)); the kernel sends one when the last
writer is gone. The signal is SIGKILL, because an engine that holds the GIL for an hour of compiling would see neither a
handler nor an end-of-file. PR_SET_PDEATHSIG does not fit. It would tie workers to the zygote. It would tie each process
to the thread that started it. And it would not reach the process's own children.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def exit_with_parent(descriptor: int) -> int:
    """End this process, or the process group that it leads, when no process holds the pipe's writing end any longer.
    `descriptor` is the reading end. The returned descriptor must stay open."""
    # Owner and signal belong to an open file description, which processes share; opening the pipe again makes a
    # separate one.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    pid = os.getpid()
    fcntl.fcntl(own, fcntl.F_SETOWN, -pid if os.getpgrp() == pid else pid)
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(own, 0)
    if poll.poll(0):
        os._exit(0)  # The parent ended before this process asked for the signal.
    return own
