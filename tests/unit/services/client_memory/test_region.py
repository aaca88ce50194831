"""Regions of shared memory: what may be registered, bounds, and files that change after registration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shared_memory import FOLDER, GUARD, SharedFile, shared_file

from rocserve.core.errors import ServeError, StatusCode
from rocserve.services.client_memory.regions import ClientRegion

MOST = (1 << 64) - 1


@pytest.fixture
def file() -> Iterator[SharedFile]:
    with shared_file(4096) as made:
        yield made


def refusal(name: str, key: str, offset: int = 0, nbytes: int = 16) -> str:
    with pytest.raises(ServeError) as caught:
        ClientRegion(name, key, offset, nbytes, GUARD)
    return f"{caught.value.code.name}: {caught.value.text}"


def test_a_part_of_a_file_is_read_and_written(file: SharedFile) -> None:
    region = ClientRegion("r", file.key, 100, 64, GUARD)
    file.put(110, b"abc")
    assert region.read(10, 3) == b"abc"
    list(region.write(60, memoryview(b"wxyz")))
    assert file.get(159, 6) == b"\0wxyz\0"


def test_the_slash_before_a_key_may_be_left_out_or_doubled(file: SharedFile) -> None:
    for key in (file.key.removeprefix("/"), "/" + file.key):
        assert ClientRegion("r", key, 0, 4096, GUARD).read(4095, 1) == b"\0"


@pytest.mark.parametrize("key", ["/no_such_file", "/..", "..", ".", "/../etc/hostname", "/a/b", "a\0b", "x" * 300])
def test_a_key_that_names_no_file_of_shared_memory(key: str) -> None:
    assert refusal("r", key) == f"INTERNAL: Unable to open shared memory region: '{key}'"


def test_links_and_pipes_are_no_shared_memory(file: SharedFile) -> None:
    link, pipe = FOLDER / f"{file.path.name}_link", FOLDER / f"{file.path.name}_pipe"
    link.symlink_to("/etc/hostname")
    os.mkfifo(pipe)
    try:
        for path in (link, pipe):
            assert refusal("r", path.name) == f"INTERNAL: Unable to open shared memory region: '{path.name}'"
    finally:
        link.unlink()
        pipe.unlink()


def test_keys_that_are_refused_by_their_names() -> None:
    for key in ("", "/", "///"):
        text = f"INVALID_ARGUMENT: cannot register shared memory region 'r' - invalid shm key '{key}'"
        assert refusal("r", key) == text
    key = "/triton_python_backend_shm_region_1"
    assert refusal("r", key) == (
        f"INVALID_ARGUMENT: cannot register shared memory region 'r' with key '{key}' as the key contains the"
        " reserved prefix 'triton_python_backend_shm_region_'"
    )


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4097), (4096, 1), (4090, 7), (MOST, 2), (8192, MOST - 4095)])
def test_a_region_ends_within_its_file(file: SharedFile, offset: int, nbytes: int) -> None:
    assert refusal("r", file.key, offset, nbytes) == (
        "INVALID_ARGUMENT: failed to register shared memory region 'r': invalid args"
    )


def test_a_region_has_at_least_a_byte(file: SharedFile) -> None:
    assert refusal("r", file.key, 0, 0) == (
        "INVALID_ARGUMENT: failed to register shared memory region 'r': unable to process address spaceInvalid argument"
    )


@pytest.mark.parametrize(
    ("offset", "nbytes", "text"),
    [
        (64, 0, "Invalid offset for shared memory region: 'r'"),
        (MOST, 1, "Invalid offset for shared memory region: 'r'"),
        (0, 65, "Invalid offset + byte size for shared memory region: 'r'"),
        (60, 5, "Invalid offset + byte size for shared memory region: 'r'"),
        (0, MOST, "Invalid offset + byte size for shared memory region: 'r'"),
        (
            10,
            MOST - 4,
            f"Integer overflow detected: byte_size ({MOST - 4}) + offset (10) exceeds maximum value ({MOST}) for"
            " region 'r'",
        ),
    ],
)
def test_a_part_lies_within_its_region_not_only_within_the_file(
    file: SharedFile, offset: int, nbytes: int, text: str
) -> None:
    with pytest.raises(ServeError) as caught:
        ClientRegion("r", file.key, 16, 64, GUARD).check_bounds(offset, nbytes)
    assert (caught.value.code, caught.value.text) == (StatusCode.INVALID_ARGUMENT, text)


def test_parts_at_the_edges_are_within(file: SharedFile) -> None:
    region = ClientRegion("r", file.key, 16, 64, GUARD)
    for offset, nbytes in ((0, 64), (63, 1), (63, 0)):
        region.check_bounds(offset, nbytes)


def test_a_file_that_its_client_cuts_is_refused_and_harms_nothing(file: SharedFile) -> None:
    region = ClientRegion("r", file.key, 0, 4096, GUARD)
    file.cut(100)
    assert region.read(0, 100) == bytes(100)
    text = f"shared memory region 'r' has been cut: byte 101 of '{file.key}' is needed, which has 100 now; register"
    for use in (lambda: region.read(1, 100), lambda: list(region.write(1, memoryview(bytes(100))))):
        with pytest.raises(ServeError) as caught:
            use()
        assert caught.value.text == f"{text} it again"
    assert file.path.stat().st_size == 100


def test_a_region_outlives_the_name_of_its_file(file: SharedFile) -> None:
    region = ClientRegion("r", file.key, 0, 4096, GUARD)
    file.put(0, b"still here")
    file.path.unlink()
    assert region.read(0, 10) == b"still here"


def test_the_file_is_closed_with_the_last_reference(file: SharedFile) -> None:
    def is_of_file(entry: Path) -> bool:
        try:
            return file.path.samefile(entry)
        except FileNotFoundError:
            return False  # Another thread has closed it.

    def descriptors() -> int:
        return sum(map(is_of_file, Path("/proc/self/fd").iterdir()))

    region = ClientRegion("r", file.key, 0, 4096, GUARD)
    assert descriptors() == 1
    del region
    refusal("r", file.key, 0, 5000)
    assert descriptors() == 0
