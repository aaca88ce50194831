"""Captures what a library writes to standard error, whatever that is."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rocserve.backends.output_capture import OutputCapture


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
    capture = OutputCapture()
    taken = []
    with led_to(descriptor):
        for text in (b"first\n", b"", b"second \xff\n"):
            with capture.captured() as written:
                os.write(2, text)
            taken.append(written.text)
        before = os.fstat(2)
    assert taken == ["first\n", "", "second �\n"]
    assert (before.st_dev, before.st_ino) == (os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino)


def test_a_file_without_a_name_keeps_the_text() -> None:
    descriptor = os.memfd_create("standard-error")
    capture = OutputCapture()
    with led_to(descriptor):
        with capture.captured() as written:
            os.write(2, b"kept\n")
        assert written.text == "kept\n"
    assert os.pread(descriptor, 100, 0) == b"kept\n"
    os.close(descriptor)


def test_a_log_does_not_get_the_text(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, led_to(log.fileno()):
        capture = OutputCapture()
        os.write(2, b"before\n")
        with capture.captured() as written:
            os.write(2, b"taken\n")
        assert written.text == "taken\n"
        os.write(2, b"after\n")
    assert (tmp_path / "log").read_bytes() == b"before\nafter\n"


def test_standard_error_that_is_closed() -> None:
    kept = os.dup(2)
    os.close(2)
    try:
        with OutputCapture().captured() as written:
            os.write(2, b"text")
        assert written.text == "text"
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.mark.parametrize("free", [0, 1])
def test_too_few_descriptors(tmp_path: Path, free: int) -> None:
    """A capture that cannot begin says why, and leaves standard error and all descriptors unchanged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    with (tmp_path / "log").open("wb") as log, led_to(log.fileno()):
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 20, hard))
        try:
            with suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(free):
                os.close(held.pop())
            with pytest.raises(OSError, match="Too many open files"), OutputCapture().captured():
                pass
            for _ in range(free):
                held.append(os.open(os.devnull, os.O_RDONLY))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)
        os.write(2, b"after\n")
    assert (tmp_path / "log").read_bytes() == b"after\n"


def test_threads(tmp_path: Path) -> None:
    """Each thread finds its own text alone, and standard error is restored at the end."""
    capture = OutputCapture()
    missed: list[str] = []

    def work(number: int) -> None:
        for turn in range(200):
            word = f"<{number}.{turn}>"
            with capture.captured() as written:
                time.sleep(0)  # Other threads run.
                os.write(2, word.encode())
            if written.text != word:
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
