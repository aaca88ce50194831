"""A server's prints to descriptors whose reader is slow or absent."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import socket
import tty
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS, until

from rocserve.standard_output import PatientWriter, Printed

TEXT = b"0123456789abcde\n" * 20_000


def nobody_reads(kind: str) -> tuple[int, int]:
    """The reading end, and a descriptor that blocks once it is full."""
    if kind == "socket":
        ours, theirs = socket.socketpair()
        return ours.detach(), theirs.detach()
    if kind == "terminal":
        reader, writer = pty.openpty()
        tty.setraw(writer)
        return reader, writer
    return os.pipe()


@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
async def test_it_is_written_as_it_is_read(kind: str) -> None:
    reader, descriptor = nobody_reads(kind)
    writer = PatientWriter(descriptor, TEXT)
    await asyncio.sleep(0.05)
    assert not writer.is_done
    assert os.get_blocking(descriptor), "others share it"
    os.set_blocking(reader, False)
    read = bytearray()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(read) < len(TEXT):
            await asyncio.sleep(0)
            try:
                read += os.read(reader, 1 << 16)
            except BlockingIOError:
                continue
    assert (bytes(read), writer.is_done) == (TEXT, True)
    os.close(reader)
    os.close(descriptor)


async def test_what_nobody_has_read_is_dropped_at_the_end() -> None:
    reader, descriptor = os.pipe()
    writer = PatientWriter(descriptor, TEXT)
    await asyncio.sleep(0.05)
    writer.close()
    writer.close()
    os.close(descriptor)
    with os.fdopen(reader, "rb") as file:
        held = file.read()
    assert 0 < len(held) < len(TEXT)
    assert TEXT.startswith(held)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_reader_that_goes_is_no_error(when: str) -> None:
    reader, descriptor = os.pipe()
    if when == "before":
        os.close(reader)
    writer = PatientWriter(descriptor, TEXT)
    await asyncio.sleep(0.05)
    if when == "meanwhile":
        assert not writer.is_done
        os.close(reader)
    await until(lambda: writer.is_done)
    os.close(descriptor)


async def test_a_file_has_all_at_once_behind_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "printed"
    path.write_bytes(b"before\n")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    assert PatientWriter(descriptor, TEXT).is_done
    os.write(descriptor, b"behind\n")
    os.close(descriptor)
    assert path.read_bytes() == b"before\n" + TEXT + b"behind\n"


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full"])
async def test_devices_without_room_or_end(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    writer = PatientWriter(descriptor, TEXT)
    await until(lambda: writer.is_done)
    os.close(descriptor)


async def test_the_descriptor_is_not_for_children() -> None:
    reader, descriptor = os.pipe()
    opened = os.dup(reader)
    os.close(opened)
    writer = PatientWriter(descriptor, TEXT)
    assert (os.get_inheritable(opened), os.get_blocking(opened)) == (False, False)
    writer.close()
    os.close(reader)
    os.close(descriptor)


def test_what_an_encoding_has_not_is_escaped() -> None:
    printed = Printed(io.TextIOWrapper(io.BytesIO(), "ascii"))
    print("é\udcff", file=printed)
    assert (printed.octets, printed.isatty()) == (b"\\xe9\\udcff\n", False)
