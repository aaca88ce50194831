"""Folders of compiled files: made once, and again when their files have changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rocserve.cache.folders import FolderCache, is_private, make_private
from rocserve.core.errors import ServeError, StatusCode


class Cache:
    """Counts how often its one folder is made."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.made = 0
        self.warnings: list[str] = []

    def folder(self) -> Path:
        cache = FolderCache(self.place, 1 << 30, self.warnings.append)
        found = cache.find_or_make("name", self._make, lambda: None)
        found.release()
        return found.path

    def _make(self, folder: Path) -> None:
        self.made += 1
        (folder / "kernels").mkdir()
        (folder / "program.pt2").write_bytes(b"compiled")
        (folder / "kernels/one.so").write_bytes(b"{}")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "pytorch")


def test_a_folder_is_made_once(cache: Cache) -> None:
    assert cache.folder() == cache.folder() == cache.place / "name"
    assert (cache.made, cache.warnings) == (1, [])


@pytest.mark.parametrize("file", ["program.pt2", "kernels/one.so", ".sha256"])
@pytest.mark.parametrize("content", [b"c0mpiled", None], ids=["changed", "gone"])
def test_a_folder_whose_files_have_changed_is_made_again(cache: Cache, file: str, content: bytes | None) -> None:
    damaged = cache.folder() / file
    damaged.write_bytes(content) if content else damaged.unlink()
    assert (cache.folder() / "program.pt2").read_bytes() == b"compiled"
    assert cache.made == 2
    (warning,) = cache.warnings
    unreadable = content is None and file == ".sha256"
    assert warning.startswith(f"{cache.place / 'name'} is damaged, and not used: ")
    assert ("it cannot be read: " if unreadable else "its files differ from the stored ones") in warning
    cache.folder()
    assert cache.made == 2


def test_a_folder_whose_files_others_may_write_to_is_made_again(cache: Cache) -> None:
    (cache.folder() / "kernels/one.so").chmod(0o666)
    assert FolderCache(cache.place, 1 << 30, cache.warnings.append).find("name") is None
    cache.folder()
    assert cache.made == 2
    assert cache.warnings == [f"{cache.place / 'name'} is damaged, and not used: others may write to it"] * 2


def test_folders_above_it_are_for_its_owner_alone_too(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        make_private(tmp_path / "cache/rocserve/pytorch")
    finally:
        os.umask(before)
    # Another engine's part of the cache may be next to it.
    assert is_private(tmp_path / "cache/rocserve")
    for folder in ("cache", "cache/rocserve", "cache/rocserve/pytorch"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700


def test_a_file_of_somebody_else_s_does_not_keep_folders_from_going(cache: Cache) -> None:
    cache.folder()
    (cache.place / "README").write_text("What is this?")
    os.utime(cache.place / "README", (1, 1))
    folders = FolderCache(cache.place, 0, cache.warnings.append)
    assert [entry.path.name for entry in folders.prune(0)] == ["name"]
    assert (folders.entries(), cache.warnings) == ([], [])


@pytest.mark.parametrize("kept", ["oldest", "remains"])
def test_what_cannot_be_removed_does_not_keep_the_others_from_going(cache: Cache, kept: str) -> None:
    folders = FolderCache(cache.place, 1 << 30, cache.warnings.append)
    names = ("oldest", "middle", "latest")
    for number, name in enumerate(names, 1):
        folders.find_or_make(name, cache._make, lambda: None).release()
        os.utime(cache.place / name, (number, number))
    # Nobody can lock it.
    (cache.place / f".{kept}.lock").mkdir()
    with pytest.raises(ServeError, match="compiled programs cannot be removed: ") as caught:
        folders.prune(0)
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert [entry.path.name for entry in folders.entries()] == [name for name in names if name == kept]


def test_a_new_folder_takes_the_place_of_the_next_one_where_the_oldest_cannot_be_removed(cache: Cache) -> None:
    folders = FolderCache(cache.place, 1 << 30, cache.warnings.append)
    for number, name in enumerate(("oldest", "middle"), 1):
        folders.find_or_make(name, cache._make, lambda: None).release()
        os.utime(cache.place / name, (number, number))
    (cache.place / ".oldest.lock").mkdir()
    size = folders.entries()[0].size_bytes
    FolderCache(cache.place, 2 * size, cache.warnings.append).find_or_make("new", cache._make, lambda: None).release()
    assert [entry.path.name for entry in folders.entries()] == ["oldest", "new"]
    (warning,) = cache.warnings
    assert warning.startswith("compiled programs cannot be removed: ")
