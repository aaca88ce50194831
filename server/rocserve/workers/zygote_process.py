"""The zygote's process, as servers see it: the one that started it, and those that come after that."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SEND_BUFFER_BYTES = 1024 * 1024
"""Launches queue here while the zygote imports."""


class ZygoteProcess:
    def __init__(self, pid: int, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process`: None: another server has started it."""
        self.pid = pid
        self.connection = connection
        self._process = process

    @classmethod
    def start(cls, preload: Sequence[str], lifeline: int, environment: Mapping[str, str]) -> ZygoteProcess:
        """One that imports the modules ahead, where they are installed, and ends when the lifeline breaks."""
        connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        with other:
            descriptors = (other.fileno(), lifeline)
            bootstrap = Path(__file__).with_name("bootstrap.py")
            process = subprocess.Popen(
                [sys.executable, str(bootstrap), "rocserve.workers.zygote", *map(str, descriptors), *preload],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                # ONNX Runtime's own builds report usage over the network, with a thread that a zygote must not have.
                env={"ORT_DISABLE_TELEMETRY": "1", **environment},
            )
        return cls(process.pid, connection, process)

    @property
    def is_own(self) -> bool:
        """This server has started it."""
        return self._process is not None

    def end(self) -> str:
        """Kill it; how it has ended."""
        if self._process is not None:
            self._process.kill()
        elif not _has_closed(self.connection):
            # Its number is still its own: nobody else has the other end.
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()
        return f"exit status {self._process.wait()}" if self._process is not None else "its exit status is not known"


def _has_closed(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))
