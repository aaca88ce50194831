"""The ids of the requests that a model is at, at the head of the lines that it writes."""

from __future__ import annotations

import asyncio

from rocserve.core.request_prefix import begin_requests, current_prefix, end_requests


def test_one_batch_after_the_other() -> None:
    assert current_prefix() == ""
    outer = begin_requests(("a", ""))
    assert current_prefix() == "[request id: a, <id_unknown>] "
    inner = begin_requests(("", ""))
    assert current_prefix() == ""
    end_requests(inner)
    assert current_prefix() == "[request id: a, <id_unknown>] "
    end_requests(outer)
    assert current_prefix() == ""


async def test_a_coroutine_keeps_its_own() -> None:
    async def prefix() -> str:
        await asyncio.sleep(0)
        return current_prefix()

    tasks = []
    for request_id in "ab":
        token = begin_requests((request_id,))
        tasks.append(asyncio.ensure_future(prefix()))
        end_requests(token)
    assert await asyncio.gather(*tasks) == ["[request id: a] ", "[request id: b] "]
