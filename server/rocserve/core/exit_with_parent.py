"""Ends a process when the one that it works for ends, however that ends and whatever the process is doing.

The server (for its workers) or a worker (for its compilers) alone holds the writing end of a pipe. A process that
asks for it on the reading end (O_ASYNC, fcntl(2)) gets a signal of the kernel when that last writer is gone. The signal
is SIGKILL: an engine that holds the GIL for an hour of compiling would see neither a handler nor an end-of-file.
PR_SET_PDEATHSIG would tie workers to the zygote instead, and any process to the one thread that started it, and would
spare what it has started itself.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


def exit_with_parent(descriptor: int) -> int:
    """End this process, or its process group where it leads one, with the holder of the pipe's writing end.
    `descriptor` is the pipe's reading end. The descriptor that is returned has to stay open."""
    # Owner and signal belong to an open file, which processes share; opening the pipe anew gives one of our own.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    pid = os.getpid()
    fcntl.fcntl(own, fcntl.F_SETOWN, -pid if os.getpgrp() == pid else pid)
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(own, 0)
    if poll.poll(0):
        os._exit(0)  # It had gone before the signal was asked for.
    return own
