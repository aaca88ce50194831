"""Parameters that the server acts on: their types and values, in Triton's words; request ids at the head of a model's
log lines; names of sequences."""

from __future__ import annotations

import asyncio

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.request_prefix import begin_requests, current_prefix, end_requests
from rocserve.core.sequences import sequence_id


def test_an_id_begins_no_line() -> None:
    token = begin_requests(("a]\n[request id: b",))
    assert current_prefix() == r"[request id: a]\n[request id: b] "
    end_requests(token)


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


def test_names_are_at_most_128_bytes_long() -> None:
    assert sequence_id("s" * 128) == "s" * 128
    with pytest.raises(ServeError) as caught:
        sequence_id("s" * 129)
    assert caught.value.code is StatusCode.UNIMPLEMENTED
    assert caught.value.text == "string correlation ID cannot be longer than 128 characters"


def test_numbers_below_zero_are_those_of_the_same_bits() -> None:
    assert sequence_id(-1) == 2**64 - 1
