"""The phases of a version's life: which may follow which, and which a version goes through."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import ServeError, unavailable
from rocserve.repository.version_life import PHASES, Phase, VersionLife
from rocserve.settings import ResidencySettings

from .conftest import FakeLoader, Folders, Served, Start

LIVES = list[tuple[str, Phase]]


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> LIVES:
    """The changes of all lives, with the models' names."""
    changes: LIVES = []
    change = VersionLife.change

    def recorded(life: VersionLife, phase: Phase) -> None:
        change(life, phase)
        changes.append((life.name, phase))

    monkeypatch.setattr(VersionLife, "change", recorded)
    return changes


def of(name: str, changes: LIVES) -> list[Phase]:
    return [phase for one, phase in changes if one == name]


async def test_an_illegal_change_raises_and_changes_nothing(m: Path, served: Served) -> None:
    (version,) = served.repository._table.models["m"].versions  # type: ignore[index]
    life = version._current
    assert life is not None and life.phase is Phase.READY
    for before, after in itertools.product(Phase, Phase):
        life.phase = before
        if after in PHASES[before]:
            life.change(after)
        else:
            with pytest.raises(RuntimeError, match=f"^'m' version 1: {after.name} cannot follow {before.name}$"):
                life.change(after)
            assert life.phase is before
    life.phase = Phase.READY


def test_every_phase_can_be_reached_and_ends() -> None:
    def after(phase: Phase) -> set[Phase]:
        found: set[Phase] = set()
        waiting = [phase]
        while waiting:
            new = set(PHASES[waiting.pop()]) - found
            found |= new
            waiting += new
        return found

    assert PHASES.keys() == set(Phase)
    assert after(Phase.REGISTERED) == set(Phase)
    assert all(Phase.GONE in after(phase) for phase in Phase if phase is not Phase.GONE)
    assert not after(Phase.GONE)


async def test_a_version_that_is_loaded_checked_and_replaced(
    lives: LIVES, folders: Folders, loader: FakeLoader, start: Start
) -> None:
    held = loader.hold("m")
    folders.model("m", 1)
    started = asyncio.create_task(start())
    while "m" not in loader.progress:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)
    loader.progress["m"]("comparing", is_check=True)
    loader.progress["m"]("warming up")
    held.set()
    served: Served = await asyncio.wait_for(started, PATIENCE_SECONDS)
    first = [Phase.LOADING, Phase.CHECKING, Phase.LOADING, Phase.READY]
    assert of("m", lives) == first
    folders.version("m", 1, "new")
    await served.until(lambda: served.data("m") == "new")
    await served.until(lambda: len(lives) == len(first) + 4)
    assert of("m", lives)[4:] == [Phase.LOADING, Phase.READY, Phase.DRAINING, Phase.GONE]


async def test_a_version_that_fails_and_is_taken_away(lives: LIVES, folders: Folders, start: Start) -> None:
    folder = folders.model("m", 1, data="broken")
    served: Served = await start(retry_seconds=3600.0, longest_retry_seconds=3600.0)
    assert of("m", lives) == [Phase.LOADING, Phase.REGISTERED]
    folder.rename(folder.with_name(".aside"))
    await served.until(lambda: of("m", lives)[2:] == [Phase.GONE])


async def test_a_version_that_is_loaded_by_requests(
    lives: LIVES, folders: Folders, loader: FakeLoader, make: Callable[..., Any]
) -> None:
    for name in "ab":
        folders.model(name, 1)
    served: Served = make(residency=ResidencySettings(max_loaded_models=1))
    served.plane.start()
    await asyncio.wait_for(served.repository.start(), PATIENCE_SECONDS)
    assert lives == [] and served.state("a") == "READY"

    async def load(name: str) -> None:
        await asyncio.wait_for(served.table.table.find(name, "").ensure_loaded(), PATIENCE_SECONDS)

    loader.failing["a"] = unavailable("out of order")
    with pytest.raises(ServeError, match="out of order"):
        await load("a")
    assert (served.state("a"), of("a", lives)) == ("UNAVAILABLE", [Phase.LOADING, Phase.REGISTERED])
    del loader.failing["a"]
    await load("a")
    assert of("a", lives)[2:] == [Phase.LOADING, Phase.READY]
    await load("b")
    assert of("a", lives)[4:] == [Phase.DRAINING, Phase.REGISTERED]
    assert served.rows("a") == {"1": ("READY", "not loaded: its first request loads it")}
    await asyncio.wait_for(served.repository.stop(), PATIENCE_SECONDS)
    assert of("a", lives)[6:] == of("b", lives)[2:] == [Phase.DRAINING, Phase.GONE]
