"""What the index says while models load, and hour-long loads next to others."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import ServeError, internal
from rocserve.repository.load_slots import OVERDUE_PER_SLOT, LoadSlots
from rocserve.settings import ControlMode, ResidencySettings

from .conftest import FakeLoader, Folders, Served, Start


async def test_a_model_that_loads_says_what_it_is_at(served: Served, folders: Folders, loader: FakeLoader) -> None:
    held = loader.hold("m")
    folders.model("m", 1)
    await served.until(lambda: "m" in loader.progress)
    assert served.rows("m") == {"1": ("LOADING", "")}
    loader.progress["m"]("compiling batch size 1: compile, 42 s")
    assert served.rows("m") == {"1": ("LOADING", "compiling batch size 1: compile, 42 s")}
    loader.progress["m"]("")
    assert served.rows("m") == {"1": ("LOADING", "")}
    held.set()
    await served.until(lambda: served.state("m") == "READY")
    loader.progress["m"]("late words")
    assert served.rows("m") == {"1": ("READY", "")}


async def test_a_version_that_is_being_checked_says_so(
    make: Callable[..., Served], folders: Folders, loader: FakeLoader
) -> None:
    held = loader.hold("m")
    folders.model("m", 1)
    served = make()
    starting = asyncio.create_task(served.repository.start())
    await served.until(lambda: "m" in loader.progress)
    loader.progress["m"]("running 3 inputs", True)
    assert served.rows("m") == {"1": ("CHECKING", "running 3 inputs")}
    assert not served.repository.is_ready(), "as while it loads"
    loader.progress["m"]("")
    assert served.rows("m") == {"1": ("LOADING", "")}
    held.set()
    await served.until(lambda: served.state("m") == "READY")
    await starting


async def test_a_pinned_version_of_bounded_memory_says_so_too(
    make: Callable[..., Served], folders: Folders, loader: FakeLoader
) -> None:
    held = loader.hold("m")
    folders.model("m", 1)
    served = make(residency=ResidencySettings(max_loaded_models=1), load_models=["m"])
    served.plane.start()
    starting = asyncio.create_task(served.repository.start())
    await served.until(lambda: "m" in loader.progress)
    loader.progress["m"]("compiling")
    assert served.rows("m") == {"1": ("LOADING", "compiling")}
    loader.progress["m"]("running 3 inputs", True)
    assert served.rows("m") == {"1": ("CHECKING", "running 3 inputs")}
    held.set()
    await starting


async def test_newer_content_that_loads_says_what_it_is_at(start: Start, folders: Folders, loader: FakeLoader) -> None:
    folders.model("m", 1, data="old")
    served: Served = await start()
    loader.hold("m")
    folders.version("m", 1, "new")
    await served.until(lambda: len(loader.loads) == 2)
    loader.progress["m"]("compiling")
    assert served.rows("m") == {"1": ("READY", "newer content is being loaded: compiling")}
    assert served.data("m") == "old"


async def test_a_second_try_says_what_it_is_at_and_how_the_first_ended(
    served: Served, folders: Folders, loader: FakeLoader
) -> None:
    loader.failing["m"] = internal("no memory")
    folders.model("m", 1)
    await served.until(lambda: served.state("m") == "UNAVAILABLE")
    loader.hold("m")
    await served.until(lambda: len(loader.loads) == 2)
    loader.progress["m"]("compiling")
    assert served.reason("m") == "compiling; failed before: no memory"


async def test_the_words_of_a_load_that_was_called_off_are_not_anothers(
    served: Served, folders: Folders, loader: FakeLoader
) -> None:
    loader.hold("m")
    folders.model("m", 1, data="old")
    await served.until(lambda: loader.loads == [("m", 1)])
    first = loader.progress["m"]
    folders.version("m", 1, "new")
    await served.until(lambda: len(loader.loads) == 2)
    loader.progress["m"]("compiling the new")
    first("compiling the old")
    assert served.reason("m") == "compiling the new"


async def test_a_load_that_waits_for_its_turn_says_so(start: Start, folders: Folders, loader: FakeLoader) -> None:
    served: Served = await start(concurrent_loads=1)
    held = loader.hold("a")
    folders.model("a", 1)
    await served.until(lambda: loader.running == 1)
    folders.model("b", 1)
    await served.until(lambda: served.rows("b") == {"1": ("LOADING", "waits for another model's load")})
    held.set()
    await served.until(lambda: served.state("b") == "READY")


async def test_loads_are_called_off_when_the_server_ends(start: Start, folders: Folders, loader: FakeLoader) -> None:
    folders.model("served", 1)
    folders.model("slow", 1)
    loader.hold("slow")
    served: Served = await start(control_mode=ControlMode.EXPLICIT, load_models=("served",))
    asked = asyncio.create_task(served.repository.load("slow", {}))
    await served.until(lambda: ("slow", 1) in loader.loads)
    served.repository.begin_stop()
    with pytest.raises(ServeError, match=r"^Server exiting$"):
        await asyncio.wait_for(asked, PATIENCE_SECONDS)
    assert loader.cancelled == [("slow", 1)]
    assert served.data("served") == "good"


async def test_a_client_that_leaves_does_not_end_the_load(start: Start, folders: Folders, loader: FakeLoader) -> None:
    folders.model("slow", 1)
    held = loader.hold("slow")
    served: Served = await start(control_mode=ControlMode.EXPLICIT)
    asked = asyncio.create_task(served.repository.load("slow", {}))
    await served.until(lambda: loader.loads == [("slow", 1)])
    asked.cancel()
    again = asyncio.create_task(served.repository.load("slow", {}))
    await asyncio.sleep(0.05)
    held.set()
    await asyncio.wait_for(again, PATIENCE_SECONDS)
    assert loader.loads == [("slow", 1)]
    assert served.state("slow") == "READY"


class Load:
    """A load that holds a slot until the test ends it."""

    def __init__(self, slots: LoadSlots, compiles: bool) -> None:
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run(slots, compiles))

    async def _run(self, slots: LoadSlots, compiles: bool) -> None:
        async with slots.acquire(compiles):
            self.began.set()
            await self.may_end.wait()

    async def has_begun(self, seconds: float = PATIENCE_SECONDS) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.began.wait(), seconds)
        return self.began.is_set()


async def test_a_long_load_hands_its_slot_on() -> None:
    slots = LoadSlots(1, patience_seconds=0.05)
    long, waiting = Load(slots, compiles=True), Load(slots, compiles=False)
    assert await long.has_begun() and await waiting.has_begun()
    assert slots.is_full
    # Its end does not release a slot that it no longer has.
    long.may_end.set()
    await long.task
    assert slots.is_full
    waiting.may_end.set()
    await waiting.task
    assert not slots.is_full


async def test_hanging_loads_hand_their_slots_on_up_to_a_bound() -> None:
    slots = LoadSlots(1, patience_seconds=0.02)
    hanging = [Load(slots, compiles=False) for _ in range(OVERDUE_PER_SLOT)]
    for load in hanging:
        assert await load.has_begun()
    keeps, waits = Load(slots, compiles=False), Load(slots, compiles=False)
    assert await keeps.has_begun() and not await waits.has_begun(0.2)
    # A load that ends makes room for the next overdue one.
    hanging[0].may_end.set()
    assert await waits.has_begun()
    # A load that compiles needs no such room.
    for load in (keeps, waits, *hanging):
        load.task.cancel()
        await asyncio.wait((load.task,))
    assert not slots.is_full
    again = [Load(slots, compiles=True) for _ in range(2 * OVERDUE_PER_SLOT)]
    for load in again:
        assert await load.has_begun()
        load.may_end.set()


async def test_a_load_that_was_called_off_has_no_slot() -> None:
    slots = LoadSlots(1, patience_seconds=0.05)
    for compiles in (True, False):
        load = Load(slots, compiles)
        assert await load.has_begun()
        load.task.cancel()
        await asyncio.wait((load.task,))
        assert not slots.is_full


async def test_a_load_that_takes_long_keeps_no_other_waiting_and_says_how_long(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    served: Served = await start(concurrent_loads=1, long_load_seconds=0.6)
    held = loader.hold("a")
    folders.model("a", 1)
    await served.until(lambda: loader.running == 1)
    folders.model("b", 1)
    await served.until(lambda: served.state("b") == "READY")
    assert served.state("a") == "LOADING"
    assert re.fullmatch(r"loading for [1-9]\d* s", served.reason("a"))
    held.set()
    await served.until(lambda: served.state("a") == "READY")
