"""What a store is asked: the same of all kinds of stores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rocserve.repository.remote.objects import RemoteObject

Note = Callable[[int], None]
"""Told of bytes that have come."""
Result = TypeVar("Result")


class Source(Protocol):
    async def listing(self, folder: str = "") -> Sequence[RemoteObject]:
        """All objects, or those of a folder. Raises: StoreError."""

    async def fetch(self, item: RemoteObject, file: Path, note: Note) -> None:
        """Write an object's content to a file. Raises: StoreError; ObjectChanged, it is another one by now."""

    async def is_gone(self, key: str) -> bool:
        """Whether an object that a listing lacks is really no more there. Raises: StoreError."""


async def beside(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all, or the first error, which ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def in_thread(work: Callable[[], Result]) -> Result:
    """What blocks for long, in a thread that keeps no process from ending, as those of asyncio.to_thread would."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def tell(result: Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[Result | None, BaseException | None] = (work(), None)
        except Exception as error:
            outcome = (None, error)
        # The loop may have ended meanwhile.
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=run, name="remote repository", daemon=True).start()
    return await done
