"""How much copies may take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rocserve.repository.remote.copy import Room, use
from rocserve.repository.remote.objects import StoreError


def home(folder: Path, name: str, size: int, used: float) -> Path:
    """A repository's copy that no server uses."""
    found = folder / name
    use(found).close()
    (found / "file").write_bytes(bytes(size))
    os.utime(found / "in-use", (used, used))
    return found


def test_copies_that_nobody_uses_go_first_the_oldest_before_others(tmp_path: Path) -> None:
    old, young = home(tmp_path, "old", 400, 1.0), home(tmp_path, "young", 400, 2.0)
    room = Room(tmp_path, 1000)
    room.make(200, "'m'")
    assert old.exists()
    room.make(300, "'n'")
    assert not old.exists()
    assert young.exists()


def test_what_is_in_use_stays_and_the_text_says_what_to_do(tmp_path: Path) -> None:
    kept = home(tmp_path, "kept", 900, 1.0)
    with (
        use(kept),
        pytest.raises(StoreError, match=r"room for the 200 bytes of 'm', came: 900 bytes in .* or raise --"),
    ):
        Room(tmp_path, 1000).make(200, "'m'")
    assert kept.exists()


def test_without_a_limit_a_tenth_of_the_disk_stays_free(tmp_path: Path) -> None:
    Room(tmp_path, None).make(0, "'m'")
    with pytest.raises(StoreError, match="a tenth of the disk stays so"):
        Room(tmp_path, None).make(1 << 60, "'m'")
