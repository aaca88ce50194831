"""Shared memory: growth, seals, and giving pages back."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from rocserve.workers.memory import ALIGNMENT, Arena, aligned


def used_bytes(arena: Arena) -> int:
    """Memory that the file takes."""
    return os.fstat(arena.descriptor).st_blocks * 512


def test_the_other_end_sees_what_is_written_after_growth() -> None:
    writer = Arena.create("test")
    reader = Arena(os.dup(writer.descriptor))
    early = reader.view[:4]
    writer.reserve(10_000_000)
    writer.mapping[0:10_000_000] = b"frst" + bytes(9_999_992) + b"last"
    with pytest.raises(ValueError, match="ends at byte 100000000 of shared memory of 10002432 bytes"):
        reader.cover(100_000_000)
    reader.cover(10_000_000)
    assert bytes(reader.view[9_999_996:10_000_000]) == b"last"
    assert bytes(early) == b"frst"  # On the earlier mapping, of the same memory.
    writer.close()
    reader.close()
    assert bytes(early) == b"frst"


def test_what_nobody_has_written_is_not_read() -> None:
    """A worker makes its memory as long as it likes at no cost; whoever read all of that would pay for it."""
    arena = Arena.create("test")
    other = os.dup(arena.descriptor)
    os.ftruncate(other, 1 << 40)
    with pytest.raises(ValueError, match="ends at byte 1000000000000 of shared memory of 0 bytes"):
        arena.cover(1_000_000_000_000)
    assert used_bytes(arena) == 0
    os.close(other)
    arena.close()


def test_growing_costs_no_memory_until_it_is_used() -> None:
    arena = Arena.create("test")
    arena.reserve(1 << 36)
    assert arena.size == 1 << 36 and used_bytes(arena) == 0
    arena.close()


def test_nobody_can_shrink_it() -> None:
    arena = Arena.create("test")
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, 0)
    arena.close()


def test_trim_keeps_what_the_last_period_used() -> None:
    arena = Arena.create("test")
    arena.reserve(8 << 20)
    arena.mapping[: 8 << 20] = b"x" * (8 << 20)
    arena.trim(1 << 20)
    assert used_bytes(arena) == 8 << 20  # It was in use until now.
    arena.reserve(2 << 20)
    arena.trim(1 << 20)
    assert used_bytes(arena) == 2 << 20
    arena.trim(1 << 20)
    assert used_bytes(arena) == 1 << 20
    assert bytes(arena.view[(1 << 20) - 1 : (1 << 20) + 1]) == b"x\x00"
    assert arena.size == 8 << 20
    arena.close()


def test_close_gives_everything_back() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        arena = Arena.create("test")
        arena.reserve(1 << 20)
        arena.close()
        arena.close()
    del arena
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_alignment() -> None:
    assert [aligned(offset) for offset in (0, 1, 64, 65)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]


@pytest.mark.parametrize("kept", [0, 4096, 123_456, 300_000])
def test_what_is_gone_of_a_mapped_file_becomes_zeros(tmp_path: Path, kept: int) -> None:
    # More than is copied in place, so that it is the kernel that copies; touching it would end this process.
    size = 300_000
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    arena = Arena.create("test")
    arena.reserve(10 + size)
    arena.octets[:] = 1
    os.truncate(path, kept)
    arena.write(10, memoryview(mapping))
    # The last page that is left is filled up with zeros.
    assert bytes(arena.view[10 : 10 + kept]) == b"x" * kept
    assert not arena.octets[10 + kept : 10 + size].any()
    assert bytes(arena.view[:10]) == b"\1" * 10
    arena.close()
