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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rocserve.core.errors import internal
from rocserve.core.passed_descriptors import receive_with_descriptors, send_with_descriptors
from rocserve.workers.messages import Exited, NewServer, Spawned, SpawnFailed, decode_message, encode_message
from rocserve.workers.process import WorkerProcess, kill

_MESSAGE_BYTES = 64 * 1024
_MOST_DESCRIPTORS = 3
"""That come with a message."""
_SEND_BUFFER_BYTES = 1024 * 1024
"""Launches queue here while the zygote imports."""
_HEALTHY_SECONDS = 5.0
_FULL_SECONDS = 0.05
"""Between two attempts to send to a zygote that takes no further messages."""


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


TakeReply = Callable[[Spawned, Sequence[int]], WorkerProcess]
"""Makes a worker of the zygote's reply, and of the descriptors that came with it."""


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
        on_exited: Callable[[Exited], None],
        on_gone: Callable[[], None],
    ) -> None:
        """`preload`, `parent_pipe`, `environment`: what a zygote is started with. `answer_seconds`: how long it may say
        nothing while something is waited for. `zygote`: of the server before. `on_zygote`: takes each that is started.
        `on_exited`: takes the ends of workers. `on_gone`: called each time that one has ended."""
        self._preload = tuple(preload)
        self._log = log
        self._environment = environment
        self._answer_seconds = answer_seconds
        self._parent_pipe = parent_pipe
        self._zygote = zygote
        self._on_zygote = on_zygote
        self._on_exited = on_exited
        self._on_gone = on_gone
        self._started_at = self._heard_at = time.monotonic()
        """When the zygote last said something; before `_started_at` while it has not."""
        self._attached = False
        self._asked: deque[tuple[asyncio.Future[WorkerProcess], TakeReply]] = deque()
        """What the zygote is to reply to, in the order of its replies."""
        self._is_in_turn = zygote is None
        """What comes is for this server, no longer for the one before."""

    @property
    def has_zygote(self) -> bool:
        return self._zygote is not None

    def start(self) -> None:
        """Start a zygote. It imports the modules on its own; messages wait for it meanwhile."""
        self._started_at, self._heard_at = time.monotonic(), 0.0
        self._zygote = ZygoteProcess.start(self._preload, self._parent_pipe, self._environment)
        self._on_zygote(self._zygote)

    def send(self, message: Any) -> None:
        """Lost where there is no zygote, or it takes nothing now."""
        if self._zygote is not None:
            with suppress(OSError):
                self._zygote.connection.send(encode_message(message), socket.MSG_DONTWAIT)

    async def ask(self, message: Any, descriptors: Sequence[int], take: TakeReply) -> WorkerProcess:
        """The worker that `take` makes of the reply, as soon as that has come: the next message may be that it has
        exited. When cancelled, none is left. Raises: ConnectionResetError: the zygote has ended; ServeError: INTERNAL,
        the worker could not be started."""
        answer: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        try:
            await self._send(encode_message(message), descriptors)
            self._asked.append((answer, take))
            asked_at = time.monotonic()
            while not answer.done():
                left = max(asked_at, self._heard_at) + self._answer_seconds - time.monotonic()
                if left > 0:
                    await asyncio.wait((answer,), timeout=left)
                else:
                    self._give_up()
            return answer.result()
        except asyncio.CancelledError:
            if not answer.cancel() and answer.exception() is None:
                answer.result().kill()
            raise

    async def _send(self, message: bytes, descriptors: Sequence[int]) -> None:
        asked_at = time.monotonic()
        while True:
            try:
                # A zygote that stands still must not keep the loop waiting.
                send_with_descriptors(self._attach(), message, descriptors, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                if time.monotonic() - max(asked_at, self._heard_at) > self._answer_seconds:
                    self._give_up()
                else:
                    await asyncio.sleep(_FULL_SECONDS)
            except ConnectionError:
                self._gone()

    def _attach(self) -> socket.socket:
        """The connection to a zygote, watched by the running loop."""
        if self._zygote is None:
            self.start()
        assert self._zygote is not None
        connection = self._zygote.connection
        if not self._attached:
            self._attached = True
            asyncio.get_running_loop().add_reader(connection, self._on_readable, connection)
        return connection

    def _give_up(self) -> None:
        """It has not answered in time."""
        self._log.error(
            "the zygote, which starts workers, has not answered for %g s; it is killed and started anew",
            self._answer_seconds,
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
        match decode_message(data):
            case NewServer():
                self._is_in_turn = True
            case Exited() as exited:
                self._on_exited(exited)
            case Spawned() | SpawnFailed() as reply:
                self._take_reply(reply, descriptors)

    def _take_reply(self, reply: Spawned | SpawnFailed, descriptors: Sequence[int]) -> None:
        answer, take = self._asked.popleft() if self._is_in_turn else (None, None)
        if answer is not None and take is not None and not answer.done():
            if isinstance(reply, Spawned):
                answer.set_result(take(reply, descriptors))
            else:
                answer.set_exception(internal(reply.reason))
            return
        # Nobody waits any more. A pidfd comes alone, or behind two others.
        if isinstance(reply, Spawned):
            kill(reply.pid, descriptors[-1] if len(descriptors) % 2 else None)
        for descriptor in descriptors:
            os.close(descriptor)

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
        asked, self._asked, self._is_in_turn = self._asked, deque(), True
        for answer, _ in asked:
            if not answer.done():
                answer.set_exception(ConnectionResetError("the zygote has ended"))
        self._on_gone()
