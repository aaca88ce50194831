"""The end of the server part by part, whatever one of them does."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest

from rocserve.server import Ending

LOG = logging.getLogger("rocserve.test.ending")


async def fail() -> None:
    raise KeyError("b'/models/m'")


async def test_a_part_that_fails_or_takes_too_long_keeps_no_other_from_its_end(caplog: pytest.LogCaptureFixture):
    ended = []

    async def succeed() -> None:
        ended.append("workers")

    ending = Ending(LOG, 0, 30)
    await ending.end("the watch", fail())
    await ending.end("the models", asyncio.sleep(60), seconds=0.01)
    await ending.end("the workers", succeed())
    assert ended == ["workers"]
    assert [record.message for record in caplog.records] == [
        "the watch did not end as it should; the other parts end all the same",
        "the exit time-out passed: the models had not ended",
    ]


async def test_a_second_signal_cuts_short_what_runs_and_what_follows():
    ending = Ending(LOG, 0, 30)
    ending.on_signal(signal.SIGTERM)
    await asyncio.wait_for(ending.wait(), 5)
    assert not ending.is_at_once
    asyncio.get_running_loop().call_later(0.05, ending.on_signal, signal.SIGTERM)
    cut = []

    async def drain() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cut.append("front ends")
            raise

    async with asyncio.timeout(10):
        await ending.end("the front ends", drain())
        await ending.end("the models", asyncio.sleep(60))
    assert cut == ["front ends"]
    assert ending.is_at_once
