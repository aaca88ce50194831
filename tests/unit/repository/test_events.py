"""What has become of models, for whoever watches."""

from __future__ import annotations

import asyncio

from rocserve.core.serving import IndexEntry
from rocserve.repository.table import RepositoryEvents


def row(state: str, reason: str = "", version: str = "1") -> IndexEntry:
    return IndexEntry("m", version, state, reason)


async def test_changes_of_rows_are_events() -> None:
    events = RepositoryEvents()
    events.note("m", [row("LOADING")])
    events.note("m", [row("LOADING")])
    events.note("m", [row("READY"), row("LOADING", version="2")])
    events.note("m", [row("READY"), row("UNAVAILABLE", "broken", version="2")])
    found = await events.after(0, 0.0)
    assert [(event.number, event.row.version, event.row.state) for event in found] == [
        (1, "1", "LOADING"),
        (2, "1", "READY"),
        (3, "2", "LOADING"),
        (4, "2", "UNAVAILABLE"),
    ]
    assert [event.number for event in await events.after(3, 0.0)] == [4]


async def test_the_next_event_is_waited_for() -> None:
    events = RepositoryEvents()
    assert list(await events.after(0, 0.01)) == []
    # Of another server, whose clients come to this one.
    waiting = asyncio.create_task(events.after(70, 10.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    events.note("m", [row("READY")])
    assert [event.number for event in await waiting] == [1]
    waiting = asyncio.create_task(events.after(1, 10.0))
    await asyncio.sleep(0)
    events.end()
    assert list(await waiting) == []
    assert list(await events.after(1, 10.0)) == []


async def test_the_last_events_are_kept() -> None:
    events = RepositoryEvents()
    for number in range(1000):
        events.note("m", [row("UNAVAILABLE", f"failed {number}")])
    assert [event.number for event in await events.after(0, 0.0)] == list(range(801, 1001))
