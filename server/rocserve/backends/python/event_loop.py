"""The asyncio event loop on which a model's coroutines run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class EventLoop:
    """A loop on a thread of its own, so that coroutines go on while `execute` takes further requests."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start the coroutine; the loop starts with the first."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="event loop", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Stop the loop; what has not ended is cancelled."""
        if self._loop is None or self._thread is None:
            return
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop = self._thread = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._run_until_closed(loop)
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def _run_until_closed(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                # asyncio lets these end the loop, too; only then would their coroutine's future hear of them.
                if self._closing:
                    return
