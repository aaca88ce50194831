"""Folders of what engines have compiled: made once, and again where their files have changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocserve.cache.folders import cached_folder


class Cache:
    """Counts how often its one folder is made."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.made = 0
        self.warnings: list[str] = []

    def folder(self) -> Path:
        return cached_folder(self.place, "name", 1 << 30, self._make, lambda: None, self.warnings.append)

    def _make(self, folder: Path) -> None:
        self.made += 1
        (folder / "program.pt2").write_bytes(b"compiled")
        (folder / "signature.json").write_bytes(b"{}")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "pytorch")


def test_a_folder_is_made_once(cache: Cache) -> None:
    assert cache.folder() == cache.folder() == cache.place / "name"
    assert (cache.made, cache.warnings) == (1, [])


@pytest.mark.parametrize("file", ["program.pt2", "signature.json", ".sha256"])
@pytest.mark.parametrize("content", [b"c0mpiled", None], ids=["changed", "gone"])
def test_a_folder_whose_files_have_changed_is_made_anew(cache: Cache, file: str, content: bytes | None) -> None:
    damaged = cache.folder() / file
    damaged.write_bytes(content) if content else damaged.unlink()
    assert (cache.folder() / "program.pt2").read_bytes() == b"compiled"
    assert cache.made == 2
    assert cache.warnings == [
        f"{cache.place / 'name'} is damaged, and made anew: its files are not those that were stored"
    ]
    cache.folder()
    assert cache.made == 2
