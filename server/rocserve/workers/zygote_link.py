"""The link to the zygote: starts it, talks to it, and starts another when it ends or does not answer."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rocserve.core.passed_descriptors import receive_with_descriptors, send_with_descriptors
from rocserve.workers.messages import Kept, decode_message, encode_message
from rocserve.workers.process import kill

_MESSAGE_BYTES = 64 * 1024
_MOST_DESCRIPTORS = 3
"""That come with a message."""
_SEND_BUFFER_BYTES = 1024 * 1024
"""Launches queue here while the zygote imports."""
_HEALTHY_SECONDS = 5.0
_FULL_SECONDS = 0.05
"""Between two looks whether the zygote takes further messages."""

Answer = TypeVar("Answer")


class ZygoteProcess:
    """As servers see it: the one that started it, and those that come after that."""

    def __init__(self, pid: int, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process`: None: another server has started it."""
        self.pid = pid
        self.connection = connection
        self._process = process

    @classmethod
    def start(cls, preload: Sequence[str], parent_pipe: int, environment: Mapping[str, str]) -> ZygoteProcess:
        """One that imports the modules ahead, where they are installed, and ends when the pipe breaks."""
        connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        with other:
            descriptors = (other.fileno(), parent_pipe)
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


@dataclass(frozen=True, slots=True)
class KeptWorker:
    pid: int
    control_group: str
    """The folder of its cgroup; "" = it has none of its own."""
    reception: socket.socket
    """By it the worker gets the sockets of its sessions."""
    output: int
    """Of the pipe that it writes to."""
    pidfd: int | None

    def close(self) -> None:
        self.reception.close()
        for descriptor in (self.output, self.pidfd):
            if descriptor is not None:
                os.close(descriptor)


class KeptWorkers:
    """The workers that the server before has left: held by the zygote until they are taken over, or ended."""

    def __init__(self) -> None:
        self.are_known = asyncio.Event()
        """The zygote has told of all."""
        self._workers: dict[str, list[KeptWorker]] = {}
        """By their keys."""

    def add(self, kept: Kept, descriptors: Sequence[int]) -> None:
        """As the zygote tells of it."""
        reception, output, *pidfds = descriptors
        worker = KeptWorker(
            kept.pid, kept.control_group, socket.socket(fileno=reception), output, pidfds[0] if pidfds else None
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
            kill(worker.pid, worker.pidfd)
            worker.close()
        self._workers.clear()


class ZygoteLink:
    """`start` needs no asyncio loop; everything else runs on the loop."""

    def __init__(
        self,
        preload: Sequence[str],
        log: logging.Logger,
        environment: Mapping[str, str],
        answer_seconds: float,
        parent_pipe: int,
        zygote: ZygoteProcess | None,
        on_zygote: Callable[[ZygoteProcess], None],
        on_message: Callable[[Any, Sequence[int]], None],
        on_gone: Callable[[], None],
    ) -> None:
        """
        Args:
            preload, parent_pipe, environment: what a zygote is started with.
            answer_seconds: how long it may say nothing while something is waited for.
            zygote: of the server before.
            on_zygote: told of each that is started.
            on_message: takes what it says, and the descriptors that come with it.
            on_gone: called each time that one has ended.
        """
        self._preload = tuple(preload)
        self._log = log
        self._environment = environment
        self.answer_seconds = answer_seconds
        self._parent_pipe = parent_pipe
        self._zygote = zygote
        self._on_zygote = on_zygote
        self._on_message = on_message
        self._on_gone = on_gone
        self._started_at = self._heard_at = time.monotonic()
        """When the zygote last said something; before `_started_at` while it has not."""
        self._attached = False

    @property
    def has_zygote(self) -> bool:
        return self._zygote is not None

    def start(self) -> None:
        """Start a zygote. It imports the modules on its own; what is sent meanwhile waits for it."""
        self._started_at, self._heard_at = time.monotonic(), 0.0
        self._zygote = ZygoteProcess.start(self._preload, self._parent_pipe, self._environment)
        self._on_zygote(self._zygote)

    def tell(self, message: Any) -> None:
        """Lost where there is no zygote, or it takes nothing now."""
        if self._zygote is not None:
            with suppress(OSError):
                self._zygote.connection.send(encode_message(message), socket.MSG_DONTWAIT)

    async def ask(self, message: Any, descriptors: Sequence[int], answer: asyncio.Future[Answer]) -> Answer:
        """What `on_message` or `on_gone` sets as the answer, an exception too."""
        await self._send(encode_message(message), descriptors, answer)
        asked_at = time.monotonic()
        while not answer.done():
            left = max(asked_at, self._heard_at) + self.answer_seconds - time.monotonic()
            if left > 0:
                await asyncio.wait((answer,), timeout=left)
            else:
                self.give_up()
        return answer.result()

    async def _send(self, message: bytes, descriptors: Sequence[int], answer: asyncio.Future[Answer]) -> None:
        """Nothing is sent once there is an answer."""
        asked_at = time.monotonic()
        while not answer.done():
            try:
                # A zygote that stands still must not keep the loop waiting.
                send_with_descriptors(self.attach(), message, descriptors, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                if time.monotonic() - max(asked_at, self._heard_at) > self.answer_seconds:
                    self.give_up()
                else:
                    await asyncio.sleep(_FULL_SECONDS)
            except ConnectionError:
                self._gone()

    def attach(self) -> socket.socket:
        """The connection to a zygote, watched by the running loop."""
        if self._zygote is None:
            self.start()
        assert self._zygote is not None
        connection = self._zygote.connection
        if not self._attached:
            self._attached = True
            asyncio.get_running_loop().add_reader(connection, self._on_readable, connection)
        return connection

    def give_up(self) -> None:
        """It has not answered in time."""
        self._log.error(
            "the zygote, which starts workers, has not answered for %g s; it is killed and started anew",
            self.answer_seconds,
        )
        if self._heard_at < self._started_at:
            # It may be an import that does not end.
            self._do_without_preload()
        self._gone()

    def end(self) -> str:
        """Kill it; how it has ended."""
        zygote, self._zygote = self._zygote, None
        if zygote is None:
            return ""
        if self._attached:
            asyncio.get_running_loop().remove_reader(zygote.connection)
        self._attached = False
        return zygote.end()

    def _on_readable(self, connection: socket.socket) -> None:
        try:
            data, descriptors = receive_with_descriptors(connection, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._gone()
            return
        self._heard_at = time.monotonic()
        self._on_message(decode_message(data), descriptors)

    def _do_without_preload(self) -> None:
        if self._preload:
            self._log.error("the next zygote does without importing %s ahead", ", ".join(self._preload))
            self._preload = ()

    def _gone(self) -> None:
        if self._zygote is None:
            return
        is_own = self._zygote.is_own
        end = self.end()
        self._log.error("the zygote, which starts workers, has ended (%s); workers go on", end)
        if is_own and time.monotonic() - self._started_at < _HEALTHY_SECONDS:
            self._do_without_preload()
        self._on_gone()
