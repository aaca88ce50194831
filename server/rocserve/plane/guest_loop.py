"""GuestLoop runs asyncio's callbacks on the data plane's thread, in the turns of its loop. The asyncio code of HTTP
connections thus runs on the thread that schedules requests, and no thread has to wake another. The plane's loop sleeps
for both. It watches the descriptors that asyncio reads and runs their callbacks itself, which saves a turn of asyncio's
loop per request. It watches the guest's epoll for writable descriptors, and sets a timer for asyncio's next timer."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from rocserve.core.steps import Steps
from rocserve.plane.loop import NEVER, PlaneLoop, TimerHandle

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class GuestLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in the plane's loop. All calls come on the plane's thread, except `run` and calls that asyncio
    allows on other threads. Callbacks may run between its turns, when asyncio has no running loop."""

    _ssock: socket.socket
    """asyncio's own socket, with which other threads wake it."""

    def __init__(self, plane: PlaneLoop) -> None:
        """May be called on any thread while the plane's loop runs."""
        self._plane = plane
        self._wakes_at = NEVER
        """time.monotonic() seconds of the timer that wakes the plane's loop for the guest."""
        self._timer: TimerHandle | None = None
        self._readers: dict[int, asyncio.Handle] = {}
        """Descriptor -> handle of the callback that reads it."""
        selector = _Selector(self._end_turn)
        self._descriptor = selector.fileno()
        super().__init__(selector)
        plane.register(self._descriptor, self._turn)

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `work` on this loop and return its result, for tasks of other loops."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self))

    def call_soon(
        self, callback: Callable[[*_Arguments], object], *args: *_Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        self._plane.at_end_of_turn(self._turn)
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*_Arguments], object], *args: *_Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if when < self._wakes_at:
            self._wake_at(when)
        return super().call_at(when, callback, *args, context=context)

    # asyncio calls these two methods for its transports and `add_reader`.

    def _add_reader(self, descriptor: int, callback: Callable[..., object], *args: Any) -> asyncio.Handle:
        if descriptor == self._ssock.fileno():
            # A callback from another thread needs a turn of the guest loop.
            woken: asyncio.Handle = super()._add_reader(descriptor, callback, *args)  # type: ignore[misc]
            return woken
        self._remove_reader(descriptor)
        handle = self._readers[descriptor] = asyncio.Handle(callback, args, self)
        self._plane.register(descriptor, handle._run)
        return handle

    def _remove_reader(self, descriptor: int) -> bool:
        handle = self._readers.pop(descriptor, None)
        if handle is None:
            return bool(super()._remove_reader(descriptor))  # type: ignore[misc]
        self._plane.unregister(descriptor)
        handle.cancel()
        return True

    def close(self) -> None:
        for task in asyncio.all_tasks(self):
            task.cancel()
        self._turn()
        for descriptor in (self._descriptor, *self._readers):
            self._plane.unregister(descriptor)
        if self._timer is not None:
            self._timer.cancel()
        super().close()

    def _turn(self) -> None:
        if not self.is_closed():
            self.run_forever()

    def _end_turn(self, timeout: float | None) -> None:
        """Run at the start of a turn's `select`, which would wait for `timeout` seconds."""
        self.stop()
        if timeout is None or self._wakes_at != NEVER:
            return
        if timeout > 0:
            self._wake_at(self.time() + timeout)
        else:
            # There is more to do now, so the next turn calls this again.
            self._plane.at_end_of_turn(self._turn)

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = when
        self._timer = self._plane.call_at(when, self._on_time)

    def _on_time(self) -> None:
        self._wakes_at = NEVER
        self._turn()


async def worked_off(plane: PlaneLoop, steps: Steps[_Result]) -> _Result:
    """Run steps between the plane's other work, the first immediately, and return their result. Cancelling ends
    them."""
    outcome: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()

    def taken() -> Steps[None]:
        try:
            while not outcome.cancelled():
                next(steps)
                yield
        except StopIteration as end:
            outcome.set_result(end.value)
        except Exception as error:
            outcome.set_exception(error)

    plane.work_off(taken())
    return await outcome


class _Selector(selectors.EpollSelector):
    """Polls without waiting."""

    def __init__(self, on_select: Callable[[float | None], None]) -> None:
        super().__init__()
        self._on_select = on_select

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._on_select(timeout)
        return super().select(0)
