"""Takes the signals that end or reload a server, from the start of its process on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_ENDING = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Notes signals until the server takes them. Without it a signal during the start would end the process
    silently, or, if it is a container's first process, would be lost. On the main thread."""

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._deliver: Callable[[int], object] = self._noted.append
        self._asked_to_end = 0
        for number in (*_ENDING, signal.SIGHUP):
            # A signal that was ignored from the start (nohup) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        # If the parent process ignored it, this process would not learn how its child processes end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def watch(self, on_signal: Callable[[int], object], loop: asyncio.AbstractEventLoop) -> None:
        """Report each signal to `on_signal`, on the loop, including earlier ones."""

        def deliver(number: int) -> None:
            with suppress(RuntimeError):  # The loop has ended, and the process is about to end.
                loop.call_soon_threadsafe(on_signal, number)

        self._deliver = deliver
        for number in self._noted:
            self._deliver(number)

    def _on_signal(self, number: int, frame: object) -> None:
        self._asked_to_end += number in _ENDING
        if self._asked_to_end > 2:
            # The third request to end has the signal's default effect.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            os._exit(128 + number)  # The kernel ignores such a signal from a container's first process to itself.
        self._deliver(number)
