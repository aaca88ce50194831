"""Shared memory: growth, seals, and giving pages back."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
from support.workers import open_descriptors

from rocserve.core.errors import ServeError
from rocserve.workers.memory import ALIGNMENT, LARGEST, Arena, ArenaFile, aligned


def arena_of(file: ArenaFile | None = None) -> Arena:
    return Arena(file or ArenaFile.create("test", 1), 0)


def used_bytes(file: ArenaFile) -> int:
    """Memory that the file takes."""
    return os.fstat(file.descriptor).st_blocks * 512


def test_the_other_end_sees_what_is_written_after_growth() -> None:
    file = ArenaFile.create("test", 2)
    other = ArenaFile(os.dup(file.descriptor))
    # The memory before it is written to its end, and is another's.
    for index in (0, 1):
        writer, reader = Arena(file, index), Arena(other, index)
        writer.reserve(4)
        reader.cover(0)
        early = reader.view[:4]
        writer.reserve(10_000_000)
        writer.mapping[0:10_000_000] = b"fir%d" % index + bytes(9_999_992) + b"last"
        with pytest.raises(ValueError, match="ends at byte 100000000 of shared memory of 10002432 bytes"):
            reader.cover(100_000_000)
        reader.cover(10_000_000)
        assert bytes(reader.view[9_999_996:10_000_000]) == b"last"
        assert bytes(early) == b"fir%d" % index  # On the earlier mapping, of the same memory.
        writer.close()
        reader.close()
    assert bytes(early) == b"fir1"


def test_what_nobody_has_written_is_not_read() -> None:
    """Memory costs nothing until it is touched; whoever read all that a worker names would pay for it."""
    file = ArenaFile.create("test", 2)
    arena, neighbour = arena_of(file), Arena(file, 1)
    # What is written elsewhere in the file counts for nothing.
    neighbour.reserve(1 << 20)
    neighbour.mapping[: 1 << 20] = bytes(1 << 20)
    for nbytes in (1 << 17, 1_000_000_000_000):
        with pytest.raises(ValueError, match=f"ends at byte {nbytes} of shared memory of 0 bytes"):
            arena.cover(nbytes)
    # Nor does having written some of it open all of it.
    writer = arena_of(file)
    writer.reserve(1 << 30)
    writer.mapping[: 1 << 17] = bytes(1 << 17)
    arena.cover(1 << 17)
    with pytest.raises(ValueError, match="ends at byte 1073741824 of shared memory of 131072 bytes"):
        arena.cover(1 << 30)
    assert used_bytes(file) == (1 << 20) + (1 << 17)


def test_growing_costs_no_memory_until_it_is_used() -> None:
    file = ArenaFile.create("test", 1)
    arena = arena_of(file)
    arena.reserve(1 << 36)
    assert arena.size == 1 << 36 and used_bytes(file) == 0


def test_an_arena_does_not_grow_into_the_next() -> None:
    file = ArenaFile.create("test", 2)
    arena = arena_of(file)
    with pytest.raises(ServeError, match=f"take {LARGEST + 1} bytes, expected at most {LARGEST}"):
        arena.reserve(LARGEST + 1)
    with pytest.raises(ValueError, match=f"ends at byte {LARGEST + 1} of shared memory of 0 bytes"):
        arena.cover(LARGEST + 1)


@pytest.mark.parametrize("size", [0, LARGEST, 4 * LARGEST])
def test_nobody_can_change_its_size(size: int) -> None:
    file = ArenaFile.create("test", 2)
    with pytest.raises(PermissionError):
        os.ftruncate(file.descriptor, size)


def test_arenas_share_a_descriptor_and_are_mapped_when_they_are_used() -> None:
    before = open_descriptors()
    file = ArenaFile.create("test", 8)
    arenas = [Arena(file, index) for index in range(8)]
    for arena in arenas:
        arena.trim(0)
    assert open_descriptors() == before + 1
    copied = 0 if sys.version_info >= (3, 13) else 1
    for used, arena in enumerate(arenas, 1):
        arena.reserve(0)
        assert open_descriptors() == before + 1 + copied * used
    del file
    for arena in arenas:
        arena.close()
        arena.close()
    assert open_descriptors() <= before


def test_trim_keeps_what_the_last_period_used() -> None:
    file = ArenaFile.create("test", 1)
    arena = arena_of(file)
    arena.reserve(8 << 20)
    arena.mapping[: 8 << 20] = b"x" * (8 << 20)
    arena.trim(1 << 20)
    assert used_bytes(file) == 8 << 20  # It was in use until now.
    arena.reserve(2 << 20)
    arena.trim(1 << 20)
    assert used_bytes(file) == 2 << 20
    arena.trim(1 << 20)
    assert used_bytes(file) == 1 << 20
    assert bytes(arena.view[(1 << 20) - 1 : (1 << 20) + 1]) == b"x\x00"
    assert arena.size == 8 << 20
    arena.close()


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
    arena = arena_of()
    arena.reserve(10 + size)
    arena.octets[:] = 1
    os.truncate(path, kept)
    arena.write(10, memoryview(mapping))
    # The last page that is left is filled up with zeros.
    assert bytes(arena.view[10 : 10 + kept]) == b"x" * kept
    assert not arena.octets[10 + kept : 10 + size].any()
    assert bytes(arena.view[:10]) == b"\1" * 10
    arena.close()
