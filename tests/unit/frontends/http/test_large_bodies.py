"""Bodies that other processes parse."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import until
from support.workers import open_descriptors

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.body import LargeBodies
from rocserve.frontends.http.infer_bodies import InferText, parse_infer_text


@pytest.fixture(autouse=True)
def found_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions below, for those processes."""
    tests = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{tests.parent}{os.pathsep}{tests}", prepend=os.pathsep)


def process_of(body: Buffer) -> int:
    return os.getpid()


def doubled(body: Buffer) -> Any:
    return SimpleNamespace(data=[bytes(body) * 2, b"small", slice(1, 2)])


def refuse(code: StatusCode, body: Buffer) -> None:
    raise ServeError(code, f"no {len(body)} bytes")


def end(body: Buffer) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take_long(body: Buffer) -> None:
    """Create the file that the body names, and go on until the process is ended."""
    Path(bytes(body).decode()).touch()
    time.sleep(600)


async def test_bodies_are_parsed_by_another_process_that_stays() -> None:
    large = LargeBodies()
    process = await large.parse(process_of, b"")
    assert process != os.getpid()
    body = os.urandom(3 << 20)
    parsed = await large.parse(doubled, body)
    assert [part if isinstance(part, slice) else bytes(part) for part in parsed.data] == [
        body * 2,
        b"small",
        slice(1, 2),
    ]
    with pytest.raises(ServeError, match="no 3 bytes") as refused:
        await large.parse(partial(refuse, StatusCode.INVALID_ARGUMENT), b"abc")
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
    assert await large.parse(process_of, b"") == process


async def test_two_at_a_time_and_the_third_waits() -> None:
    large = LargeBodies()
    processes = await asyncio.gather(*(large.parse(process_of, bytes(1 << 20)) for _ in range(6)))
    assert len(set(processes)) == 2


async def test_a_process_that_ends_is_one_request_s_business() -> None:
    large = LargeBodies()
    with pytest.raises(ServeError, match="the process that parses large bodies has ended") as refused:
        await large.parse(end, b"12345")
    assert refused.value.code is StatusCode.UNAVAILABLE
    assert await large.parse(process_of, b"") != os.getpid()


async def test_a_process_that_ended_while_nobody_asked_is_nobody_s_business() -> None:
    large = LargeBodies()
    process = await large.parse(process_of, b"")
    os.kill(process, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert await large.parse(process_of, b"") not in (process, os.getpid())


async def test_where_no_process_can_be_started_the_client_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*words: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", start)
    before = open_descriptors()
    with pytest.raises(ServeError, match="cannot start a process to parse a large body: Resource temp") as refused:
        await LargeBodies().parse(process_of, b"")
    assert refused.value.code is StatusCode.UNAVAILABLE
    assert open_descriptors() <= before


async def test_a_client_that_leaves_ends_what_is_done_for_it(tmp_path: Path) -> None:
    large = LargeBodies()
    process = await large.parse(process_of, b"")
    begun = tmp_path / "begun"
    parsing = asyncio.ensure_future(large.parse(take_long, str(begun).encode()))
    await until(begun.exists)
    parsing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await parsing
    assert await large.parse(process_of, b"") != process


async def test_a_request_is_the_same_wherever_it_is_parsed() -> None:
    values = list(range(100_000))
    entry = {"name": "X", "shape": [100_000], "datatype": "INT32"}
    binary = {**entry, "name": "Y", "parameters": {"binary_data_size": 400_000}}
    body = json.dumps({"id": "i", "inputs": [{**entry, "data": values}, binary], "parameters": {"a": 1}}).encode()
    parse = partial(parse_infer_text, "m", 400_000)
    here: InferText = parse(body)
    elsewhere: InferText = await LargeBodies().parse(parse, body)
    assert (elsewhere.id, elsewhere.inputs, elsewhere.parameters) == (here.id, here.inputs, here.parameters)
    assert elsewhere.data[0] == here.data[0]
    assert elsewhere.data[1] == here.data[1] == slice(0, 400_000)
