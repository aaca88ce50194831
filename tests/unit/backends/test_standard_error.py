"""Captures what a library writes to descriptor 2, whatever that descriptor is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rocserve.backends.standard_error import StandardErrorCapture


@contextmanager
def led_to(descriptor: int) -> Iterator[None]:
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.fixture(params=["pipe", "file", "memfd", "unlinked", "write-only"])
def descriptor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The kinds of file that standard error may be."""
    reading = -1
    if request.param == "pipe":
        reading, descriptor = os.pipe()
    elif request.param == "memfd":
        descriptor = os.memfd_create("standard-error")
    else:
        flags = os.O_WRONLY if request.param == "write-only" else os.O_RDWR
        descriptor = os.open(tmp_path / "log", flags | os.O_CREAT)
        if request.param != "file":
            (tmp_path / "log").unlink()
    yield descriptor
    os.close(descriptor)
    if reading >= 0:
        os.close(reading)


def test_each_call_sees_what_it_wrote(descriptor: int) -> None:
    capture = StandardErrorCapture()
    taken = []
    with led_to(descriptor):
        for text in (b"first\n", b"", b"second \xff\n"):
            start = capture.begin()
            os.write(2, text)
            taken.append(capture.end(start))
        before = os.fstat(2)
    assert taken == ["first\n", "", "second �\n"]
    assert (before.st_dev, before.st_ino) == (os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino)


def test_calls_that_overlap(descriptor: int) -> None:
    capture = StandardErrorCapture()
    with led_to(descriptor):
        outer = capture.begin()
        os.write(2, b"a")
        inner = capture.begin()
        os.write(2, b"b")
        assert capture.end(outer) == "ab"
        os.write(2, b"c")
        assert capture.end(inner) == "bc"
        again = capture.begin()
        assert capture.end(again) == ""


def test_a_file_without_a_name_keeps_the_text() -> None:
    descriptor = os.memfd_create("standard-error")
    capture = StandardErrorCapture()
    with led_to(descriptor):
        start = capture.begin()
        os.write(2, b"kept\n")
        assert capture.end(start) == "kept\n"
    assert os.pread(descriptor, 100, 0) == b"kept\n"
    os.close(descriptor)


def test_a_log_does_not_get_the_text(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, led_to(log.fileno()):
        capture = StandardErrorCapture()
        os.write(2, b"before\n")
        start = capture.begin()
        os.write(2, b"taken\n")
        assert capture.end(start) == "taken\n"
        os.write(2, b"after\n")
    assert (tmp_path / "log").read_bytes() == b"before\nafter\n"


def test_standard_error_that_is_closed() -> None:
    kept = os.dup(2)
    os.close(2)
    try:
        capture = StandardErrorCapture()
        start = capture.begin()
        os.write(2, b"text")
        assert capture.end(start) == "text"
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_threads(tmp_path: Path) -> None:
    """Each thread finds its own text, and standard error is restored at the end."""
    capture = StandardErrorCapture()
    missed: list[str] = []

    def work(number: int) -> None:
        for turn in range(200):
            word = f"<{number}.{turn}>"
            start = capture.begin()
            os.write(2, word.encode())
            if word not in capture.end(start):
                missed.append(word)

    with (tmp_path / "log").open("wb") as log, led_to(log.fileno()):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.write(2, b"end")
    assert missed == []
    assert (tmp_path / "log").read_bytes() == b"end"
