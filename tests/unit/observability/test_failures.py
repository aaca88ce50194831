"""What is logged of errors that nobody expected."""

from __future__ import annotations

import asyncio
import gc
import logging
from functools import partial

import pytest

from rocserve.core.errors import StatusCode, invalid_argument
from rocserve.observability.failures import RequestFailures, log_loop_error

LOG = logging.getLogger("test.failures")


def fail(text: str) -> Exception:
    try:
        raise KeyError(text)
    except KeyError as error:
        return error


def fail_elsewhere() -> Exception:
    try:
        raise KeyError
    except KeyError as error:
        return error


def test_what_is_for_the_client_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = invalid_argument("so not")
    assert RequestFailures(LOG).error_of("a call", error) is error
    assert caplog.records == []


def test_the_client_gets_a_fault_of_the_server_and_the_log_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    error = RequestFailures(LOG).error_of("a call", fail("x"))
    assert (error.code, error.text) == (StatusCode.INTERNAL, "KeyError: 'x'")
    assert caplog.messages == ["a call failed"]
    assert caplog.records[0].exc_info is not None


def test_the_same_fault_again_is_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("rocserve.observability.failures.time.monotonic", lambda: now)
    failures = RequestFailures(LOG)
    for number in range(1000):
        failures.error_of("a call", fail(str(number)))
    assert len(caplog.records) == 1
    failures.report("elsewhere", fail_elsewhere())
    now += 10.0
    failures.report("later", fail("y"))
    assert caplog.messages[1:] == ["elsewhere", "later (999 more like it since the last logged one)"]


async def test_what_nobody_awaits_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("lost")

    asyncio.get_running_loop().set_exception_handler(partial(log_loop_error, LOG))
    task = asyncio.ensure_future(fail())
    await asyncio.wait([task])
    del task
    gc.collect()
    assert caplog.messages == ["Task exception was never retrieved"]
    assert "ValueError: lost" in caplog.text
