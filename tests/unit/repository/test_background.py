"""What becomes of tasks that fail beside everything else."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rocserve.core.errors import unavailable
from rocserve.repository.lifecycle import BackgroundTasks

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
def test_a_refusal_is_told_in_a_line_and_a_fault_with_its_places(
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
