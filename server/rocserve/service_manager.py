"""Reports the server's state to a service manager: systemd's protocol of NOTIFY_SOCKET (sd_notify(3)), `Type=notify`.

A message is one datagram of lines NAME=VALUE. Container engines such as podman speak the protocol, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress

_SOCKET, _WATCHDOG, _WATCHDOG_PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
_EXTENSION_SECONDS = 60
"""Time that each message of a start asks for. Loads have separate limits."""


class ServiceManager:
    """On the event loop. Without a manager that listens, nothing is sent."""

    def __init__(self, environment: MutableMapping[str, str], log: logging.Logger) -> None:
        """Takes the manager's variables out of the environment, which is not meant for child processes."""
        self._address = environment.pop(_SOCKET, "")
        limit, process = environment.pop(_WATCHDOG, ""), environment.pop(_WATCHDOG_PROCESS, "")
        is_meant = process in ("", str(os.getpid()))
        # Three signs of life within the manager's limit: a late one does not end the server.
        self._ping_seconds = int(limit) / 1e6 / 3 if limit.isdecimal() and is_meant else 0.0
        self._log = log
        self._status = ""
        self._is_stopping = self._has_failed = False
        self._tasks: list[asyncio.Task[None]] = []
        if self._address and self._address[0] not in "/@":
            log.warning("NOTIFY_SOCKET=%s: expected a path, or @ and a name; nothing is sent there", self._address)
            self._address = ""

    @property
    def listens(self) -> bool:
        return bool(self._address)

    def begin(self, check: Callable[[Callable[[], None]], object]) -> None:
        """The server starts. From now on signs of life are sent if the manager wants them. `check` calls its argument
        on any thread when all required parts have shown that they are alive."""
        if not self._address:
            return
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._extend_start()))
        if self._ping_seconds:
            self._tasks.append(loop.create_task(self._ping(lambda: check(self._sign_of_life_from(loop)))))

    def ready(self, status: str) -> None:
        if self._tasks:
            self._tasks.pop(0).cancel()
        self._status = ""
        self._send("READY=1")
        self.show(status)

    def show(self, status: str) -> None:
        """Report the server's state in one line for the manager's users, if it has changed."""
        if status != self._status and not self._is_stopping:
            self._status = status
            self._send(f"STATUS={' '.join(status.splitlines())}")

    def stopping(self, seconds: float) -> None:
        """The server ends within `seconds`, regardless of the manager's limit. The status does not change any more."""
        self._is_stopping = True
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}", "STATUS=finishing the work in flight")

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _extend_start(self) -> None:
        while True:
            self._send(f"EXTEND_TIMEOUT_USEC={_EXTENSION_SECONDS * 1_000_000}")
            await asyncio.sleep(_EXTENSION_SECONDS / 4)

    async def _ping(self, check: Callable[[], object]) -> None:
        while True:
            check()
            await asyncio.sleep(self._ping_seconds)

    def _sign_of_life_from(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        def pass_on() -> None:
            with suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(self._send, "WATCHDOG=1")

        return pass_on

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        address = f"\0{self._address[1:]}" if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto("\n".join(lines).encode(errors="replace"), address)
            self._has_failed = False
        except OSError as error:
            # A manager that reads late loses messages; the next ones come.
            if not self._has_failed:
                text = "cannot send %s to the service manager at NOTIFY_SOCKET=%s: %s; the server goes on"
                self._log.warning(text, lines[0], self._address, error)
            self._has_failed = True
