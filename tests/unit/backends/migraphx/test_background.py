"""Batch sizes that are compiled while a model serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.migraphx.background_sizes import BackgroundSizes
from rocserve.core.errors import unavailable

LOG = logging.getLogger("test")


def nothing() -> None:
    """A cancel function for a test that cancels nothing."""


def test_sizes_are_prepared_one_after_the_other_and_said_to_be_done() -> None:
    prepared: list[str] = []
    messages: list[str] = []

    def prepare(size: str, report: Callable[[str], None]) -> None:
        report("compiling")
        prepared.append(size)

    work = BackgroundSizes(["2", "4"], prepare, nothing, messages.append, LOG)
    work.start()
    work.wait()
    assert prepared == ["2", "4"]
    assert messages == [
        "serving; batch sizes still to compile: 2, 4",
        "serving; batch sizes still to compile: 2, 4; compiling",
        "serving; batch sizes still to compile: 4",
        "serving; batch sizes still to compile: 4; compiling",
        "",
    ]


def test_a_size_that_fails_leaves_the_others_be_and_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    prepared: list[str] = []
    messages: list[str] = []

    def prepare(size: str, report: Callable[[str], None]) -> None:
        if size == "2":
            raise unavailable("out of memory")
        if size == "4":
            raise OSError("no space")
        prepared.append(size)

    work = BackgroundSizes(["2", "4", "8"], prepare, nothing, messages.append, LOG)
    work.start()
    work.wait()
    assert prepared == ["8"]
    assert messages[-1] == "serving without batch sizes 2, 4: batch size 2: out of memory; batch size 4: no space"
    assert "batch size 2 is not in service: out of memory" in caplog.text
    assert "batch size 4 is not in service" in caplog.text


def test_stopping_ends_what_is_under_way_and_all_that_was_to_come() -> None:
    cancelled, begun = threading.Event(), threading.Event()
    prepared: list[str] = []
    messages: list[str] = []

    def prepare(size: str, report: Callable[[str], None]) -> None:
        prepared.append(size)
        begun.set()
        assert cancelled.wait(PATIENCE_SECONDS)
        raise unavailable("cancelled")

    work = BackgroundSizes(["2", "4"], prepare, cancelled.set, messages.append, LOG)
    work.start()
    assert begun.wait(PATIENCE_SECONDS)
    work.stop()
    assert prepared == ["2"]
    assert messages == ["serving; batch sizes still to compile: 2, 4"]


def test_stopping_before_the_start_is_nothing() -> None:
    BackgroundSizes(["2"], lambda size, report: None, nothing, lambda text: None, LOG).stop()


def test_without_sizes_nothing_is_said() -> None:
    messages: list[str] = []
    work = BackgroundSizes([], lambda size, report: None, nothing, messages.append, LOG)
    work.start()
    work.wait()
    assert messages == []


def test_many_programs_are_not_all_named() -> None:
    messages: list[str] = []
    names = [f"1x{length}" for length in range(1, 11)]
    work = BackgroundSizes(
        names, lambda size, report: None, nothing, messages.append, LOG, "program (batch x n)", "programs (batch x n)"
    )
    work.start()
    work.wait()
    assert messages[0] == (
        "serving; programs (batch x n) still to compile: 1x1, 1x2, 1x3, 1x4, 1x5, 1x6, 1x7, 1x8, and 2 more"
    )
