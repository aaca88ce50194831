"""Events of models for clients that watch; and background tasks that fail."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import unavailable
from rocserve.core.serving import IndexEntry
from rocserve.repository.background_tasks import BackgroundTasks
from rocserve.repository.table import RepositoryEvents


def row(state: str, reason: str = "", version: str = "1") -> IndexEntry:
    return IndexEntry("m", version, state, reason)


async def test_changes_of_rows_are_events() -> None:
    events = RepositoryEvents()
    events.record("m", [row("LOADING")])
    events.record("m", [row("LOADING")])
    events.record("m", [row("READY"), row("LOADING", version="2")])
    events.record("m", [row("READY"), row("UNAVAILABLE", "broken", version="2")])
    found = await events.after(0, 0.0)
    assert [(event.number, event.version, event.state) for event in found] == [
        (1, "1", "LOADING"),
        (2, "1", "READY"),
        (3, "2", "LOADING"),
        (4, "2", "UNAVAILABLE"),
    ]
    assert [event.number for event in await events.after(3, 0.0)] == [4]


async def test_the_next_event_is_waited_for() -> None:
    events = RepositoryEvents()
    assert list(await events.after(0, 0.01)) == []
    # The id of another server, whose clients now come to this one.
    waiting = asyncio.create_task(events.after(70, PATIENCE_SECONDS))
    await asyncio.sleep(0)
    assert not waiting.done()
    events.record("m", [row("READY")])
    assert [event.number for event in await waiting] == [1]
    waiting = asyncio.create_task(events.after(1, PATIENCE_SECONDS))
    await asyncio.sleep(0)
    events.end()
    assert list(await waiting) == []
    assert list(await events.after(1, PATIENCE_SECONDS)) == []


async def test_the_last_events_are_kept() -> None:
    events = RepositoryEvents()
    for number in range(1000):
        events.record("m", [row("UNAVAILABLE", f"failed {number}")])
    assert [event.number for event in await events.after(0, 0.0)] == list(range(801, 1001))


LOG = logging.getLogger("test.background")


async def _fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "line", "has_traceback"),
    [
        (unavailable("the file is empty"), "load request for m failed: the file is empty", False),
        (ValueError("x"), "load request for m failed: ValueError('x')", True),
    ],
)
def test_the_log_has_a_line_for_a_refusal_and_a_traceback_for_a_fault(
    caplog: pytest.LogCaptureFixture, error: Exception, line: str, has_traceback: bool
) -> None:
    async def run() -> None:
        tasks = BackgroundTasks(LOG)
        tasks.start(_fail(error), "load request for m")
        await tasks.wait()
        await asyncio.sleep(0)

    with caplog.at_level(logging.INFO, LOG.name):
        asyncio.run(run())
    (record,) = caplog.records
    assert record.getMessage() == line
    assert (record.exc_info is not None) == has_traceback
