"""The workers that the server before has left: held by the zygote until they are taken over, or ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rocserve.workers.messages import Kept


@dataclass(frozen=True, slots=True)
class KeptWorker:
    pid: int
    control_group: str
    """The folder of its cgroup; "" = it has none of its own."""
    takeover: socket.socket
    """By it the worker gets what a server shares with it."""
    output: int
    """Of the pipe that it writes to."""
    pidfd: int | None

    def close(self) -> None:
        self.takeover.close()
        for descriptor in (self.output, self.pidfd):
            if descriptor is not None:
                os.close(descriptor)


class KeptWorkers:
    def __init__(self) -> None:
        self.are_known = asyncio.Event()
        """The zygote has told of all."""
        self._workers: dict[str, list[KeptWorker]] = {}
        """By their keys."""

    def add(self, kept: Kept, descriptors: Sequence[int]) -> None:
        """As the zygote tells of it."""
        takeover, output, *pidfds = descriptors
        worker = KeptWorker(
            kept.pid, kept.control_group, socket.socket(fileno=takeover), output, pidfds[0] if pidfds else None
        )
        self._workers.setdefault(kept.key, []).append(worker)

    def has(self, key: str) -> bool:
        return bool(self._workers.get(key))

    def take(self, key: str) -> KeptWorker:
        """One with this key, of which there is one; it is the caller's."""
        return self._workers[key].pop()

    def exited(self, pid: int) -> None:
        for workers in self._workers.values():
            for worker in [each for each in workers if each.pid == pid]:
                workers.remove(worker)
                worker.close()

    @property
    def control_groups(self) -> Sequence[str]:
        return [each.control_group for workers in self._workers.values() for each in workers if each.control_group]

    def end(self) -> None:
        """What has not been taken is wanted no more."""
        for worker in (each for workers in self._workers.values() for each in workers):
            with suppress(ProcessLookupError):
                if worker.pidfd is not None:
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
                else:
                    os.kill(worker.pid, signal.SIGKILL)
            worker.close()
        self._workers.clear()
