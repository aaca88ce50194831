"""The time of a load: all of its parts together, without what the engine compiles."""

from __future__ import annotations

import asyncio

import pytest

from rocserve.workers.group import LoadLimit


async def test_the_parts_of_a_load_share_its_time():
    limit = LoadLimit(0.3)
    async with limit.bounding():
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.3)
    with pytest.raises(TimeoutError):
        async with limit.bounding():
            await asyncio.sleep(0.2)
    with pytest.raises(TimeoutError):
        async with limit.bounding():
            await asyncio.sleep(0.2)


async def test_what_is_compiled_is_not_counted_and_what_follows_is():
    limit = LoadLimit(0.3)
    with pytest.raises(TimeoutError):
        async with limit.bounding():
            await asyncio.sleep(0.2)
            limit.note("compiling")
            await asyncio.sleep(0.3)
            limit.note("compiling (1 s so far)")
            await asyncio.sleep(0.3)
            limit.note("")
            compiled = True
            await asyncio.sleep(0.3)
    assert compiled


async def test_without_a_limit_it_takes_as_long_as_it_takes():
    limit = LoadLimit(0)
    async with limit.bounding():
        limit.note("compiling")
        limit.note("")
        await asyncio.sleep(0.01)
