"""The server's side of one worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence

from rocserve.core.errors import ServeError, internal
from rocserve.core.requests import Signature
from rocserve.workers.channel import Channel
from rocserve.workers.messages import ControlMessage, Load, Loaded, LoadFailed, Unload, WarmedUp, WarmUp
from rocserve.workers.wire import FRAME_LENGTH, decode_message, encode_frame, status_code
from rocserve.workers.worker_output import WorkerOutput

_STATUS_WAIT_SECONDS = 1.0
"""A worker that has closed a channel is about to end; if it does not, it is ended."""


class WorkerProcess:
    """One worker: its control conversation, its channels, its end. Lives on the asyncio loop."""

    def __init__(
        self,
        pid: int,
        pidfd: int | None,
        control: socket.socket,
        output: WorkerOutput,
        channels: Sequence[Channel],
    ) -> None:
        self.pid = pid
        self.channels = channels
        self._pidfd = pidfd
        self._control = control
        self._control.setblocking(False)
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._asking = False
        self._end = ""
        self._broken = ""
        self._kill_timer: asyncio.TimerHandle | None = None

    # Conversation

    async def load(self, message: Load) -> Signature:
        """Raises: ServeError: the reason why it cannot be loaded, in the engine's words."""
        reply = await self._ask(message, "loading")
        if not isinstance(reply, Loaded):
            raise _failure(reply)
        return reply.signature

    async def warm_up(self, message: WarmUp) -> None:
        """Its channels take batches afterwards. Raises: ServeError, as `load`."""
        reply = await self._ask(message, "warming up")
        if not isinstance(reply, WarmedUp):
            raise _failure(reply)
        for channel in self.channels:
            channel.open()

    async def unload(self, grace_seconds: float) -> None:
        """End the worker after the batches that it has; kill it when that takes longer than `grace_seconds`."""
        for channel in self.channels:
            channel.stop_taking()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._send(Unload())
                await self._exited.wait()
        except (TimeoutError, OSError):
            pass
        finally:
            self.kill()
        try:
            async with asyncio.timeout(_STATUS_WAIT_SECONDS):
                await self._exited.wait()
        except TimeoutError:
            self.has_exited(None)  # Nothing survives SIGKILL; it is the zygote that is stuck.

    async def _ask(self, message: ControlMessage, doing: str) -> object:
        self._asking = True
        reply = asyncio.ensure_future(self._exchange(message))
        exited = asyncio.ensure_future(self._exited.wait())
        both = (reply, exited)
        try:
            # A worker that ends may have answered before, and what it wrote is read after its end is known; the other
            # way round, its control socket closes a moment before its exit status is known.
            if (await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED))[1]:
                if reply.done() and reply.exception() is None:
                    return reply.result()
                await asyncio.wait(both, timeout=_STATUS_WAIT_SECONDS)
            if reply.done() and reply.exception() is None:
                return reply.result()
            raise internal(f"worker ended while {doing} ({self.end}){self._last_words()}")
        finally:
            reply.cancel()
            exited.cancel()
            self._asking = False
            self._close_control()

    async def _exchange(self, message: ControlMessage) -> object:
        await self._send(message)
        (length,) = FRAME_LENGTH.unpack(await self._receive_exactly(FRAME_LENGTH.size))
        return decode_message(await self._receive_exactly(length))

    async def _send(self, message: ControlMessage) -> None:
        await self._loop.sock_sendall(self._control, encode_frame(message))

    async def _receive_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await self._loop.sock_recv(self._control, size - len(data))
            if not piece:
                raise EOFError("the worker closed its control socket")
            data += piece
        return bytes(data)

    # Its end

    @property
    def end(self) -> str:
        """How it ended: "killed by signal 9", "exited with status 3"."""
        return self._end or "no exit status"

    @property
    def reason(self) -> str:
        """How it ended and, where that is known, why."""
        return f"{self._broken}; {self.end}" if self._broken else self.end

    async def wait(self) -> None:
        """Until it has ended."""
        await self._exited.wait()

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._exited.is_set():
            return
        try:
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def channel_broken(self, reason: str) -> None:
        """A channel has ended without the worker's end being known (yet)."""
        if not self._exited.is_set() and self._kill_timer is None:
            self._kill_timer = self._loop.call_later(_STATUS_WAIT_SECONDS, self._kill_broken, reason)

    def _kill_broken(self, reason: str) -> None:
        self._broken = reason
        self.kill()
        self._kill_timer = self._loop.call_later(_STATUS_WAIT_SECONDS, self.has_exited, None)

    def zygote_gone(self) -> None:
        """Nobody will tell of its end any more: watch for it."""
        if self._exited.is_set():
            return
        if self._pidfd is None:
            self.kill()
            self.has_exited(None)
        else:
            self._loop.add_reader(self._pidfd, self.has_exited, None)

    def has_exited(self, wait_status: int | None) -> None:
        """It is gone; None = nobody knows how."""
        if self._exited.is_set():
            return
        self._end = _describe(wait_status)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._output.close()
        self._exited.set()
        self._close_control()

    def _close_control(self) -> None:
        if self._exited.is_set() and not self._asking:
            self._control.close()

    def _last_words(self) -> str:
        line = self._output.last_line
        return f"; it last wrote: {line}" if line else ""


def _failure(reply: object) -> ServeError:
    if isinstance(reply, LoadFailed):
        return ServeError(status_code(reply.code), reply.reason)
    return internal(f"the worker answered with {type(reply).__name__}")


def _describe(wait_status: int | None) -> str:
    if wait_status is None:
        return "its exit status is not known"
    code = os.waitstatus_to_exitcode(wait_status)
    return f"killed by signal {-code}" if code < 0 else f"exited with status {code}"
