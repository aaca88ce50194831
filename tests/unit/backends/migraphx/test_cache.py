"""The compile cache in one process: what is found, what counts as damaged, what is evicted."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from support.cached_programs import (
    GENEROUS,
    a_recipe,
    about,
    being_built,
    cache_at,
    printed_lines,
    start,
    store,
    stored,
    stored_by_another_version,
)

from rocserve.backends.migraphx.compiling.program_cache import ABOUT_FILENAME, ProgramCache, open_cache
from rocserve.cache.folders import FolderCache, cache_directory
from rocserve.settings import EngineSettings


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, warnings: list[str]) -> ProgramCache:
    return ProgramCache(tmp_path / "cache", GENEROUS, spare_directory=tmp_path / "spare", warn=warnings.append)


def entry(cache: ProgramCache, key: str) -> Path:
    return cache.directory / "programs" / key


def used_long_ago(cache: ProgramCache, key: str, seconds: int) -> None:
    os.utime(entry(cache, key), (seconds, seconds))


def test_a_stored_program_is_found_with_its_description(cache: ProgramCache, warnings: list[str]) -> None:
    recipe = a_recipe()
    assert cache.find(recipe.key) is None
    new = store(cache, recipe, b"bytes of a program")
    found = cache.find(recipe.key)
    assert found is not None and found == new
    assert found.path.read_bytes() == b"bytes of a program"
    assert found.path.suffix == ".mxr" and found.path.is_relative_to(cache.directory)
    assert found.about == about(recipe)
    assert found.size_bytes == 18
    assert cache.find(a_recipe("another").key) is None
    assert warnings == []


def test_only_its_owner_can_read_or_write_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = cache_at(tmp_path / "new" / "cache")
        key = stored(cache, a_recipe())
    finally:
        os.umask(before)
    for folder in (cache.directory, *cache.directory.iterdir(), entry(cache, key)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for file in entry(cache, key).iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_nothing_is_left_of_how_a_program_came_in(cache: ProgramCache) -> None:
    with being_built(cache, a_recipe().key) as file:
        assert file.is_relative_to(cache.directory / "programs")
        assert cache.entries() == []
    stored(cache, a_recipe())
    assert len(list((cache.directory / "programs").iterdir())) == 1


def test_a_program_that_another_version_has_described_is_made_again(cache: ProgramCache, warnings: list[str]) -> None:
    key = a_recipe().key
    stored_by_another_version(cache, key)
    assert cache.find(key) is None
    assert warnings == [f"{entry(cache, key)} is damaged, and not used: another version of rocserve has written it"]
    assert store(cache, a_recipe(), b"sound").path.read_bytes() == b"sound"


def test_it_is_made_anew_while_the_other_version_holds_it(cache: ProgramCache) -> None:
    key = a_recipe().key
    stored_by_another_version(cache, key)
    held = FolderCache(cache.directory / "programs", GENEROUS, print).find(key)
    assert held is not None
    assert store(cache, a_recipe(), b"sound").path.read_bytes() == b"sound"
    held.release()


def test_those_used_least_lately_go_first(cache: ProgramCache) -> None:
    keys = [stored(cache, a_recipe(f"d{place}"), bytes(1000)) for place in range(4)]
    for place, key in enumerate(keys):
        used_long_ago(cache, key, 1000 + place)
    found = cache.find(keys[0])
    assert found is not None
    found.release()
    assert [one.key for one in cache.entries()] == [keys[1], keys[2], keys[3], keys[0]]
    sizes = {one.key: one.size_bytes for one in cache.entries()}
    assert all(size > 1000 for size in sizes.values())

    assert cache.prune(sum(sizes.values())) == []
    removed = cache.prune(sum(sizes.values()) - 1)
    assert [one.key for one in removed] == [keys[1]]
    removed = cache.prune(sizes[keys[0]])
    assert [one.key for one in removed] == [keys[2], keys[3]]
    assert [one.key for one in cache.prune(0)] == [keys[0]]


def test_storing_evicts_others_but_never_what_is_stored(cache: ProgramCache, tmp_path: Path) -> None:
    small = ProgramCache(cache.directory, 5000, spare_directory=tmp_path / "spare")
    keys = [stored(small, a_recipe(f"d{place}"), bytes(1000)) for place in range(2)]
    used_long_ago(small, keys[0], 1000)
    used_long_ago(small, keys[1], 2000)
    third = stored(small, a_recipe("d2"), bytes(1500))
    assert [one.key for one in small.entries()] == [keys[1], third]
    large = stored(small, a_recipe("large"), bytes(10_000))
    assert [one.key for one in small.entries()] == [large]


def test_what_is_held_is_not_evicted(cache: ProgramCache) -> None:
    held = store(cache, a_recipe())
    other = stored(cache, a_recipe("other"))
    assert [one.key for one in cache.prune(0)] == [other]
    assert not cache.remove(held.key)
    held.release()
    assert cache.remove(held.key)
    assert cache.remove(held.key), "it is gone, by any process"


def test_it_is_held_for_as_long_as_the_result_lives(cache: ProgramCache) -> None:
    key = stored(cache, a_recipe())
    found = cache.find(key)
    assert not cache.remove(key)
    del found
    assert cache.remove(key)


def test_a_folder_that_vanishes_comes_back(cache: ProgramCache, tmp_path: Path) -> None:
    stored(cache, a_recipe())
    cache.directory.rename(tmp_path / "away")
    assert cache.find(a_recipe().key) is None
    assert cache.entries() == [] and cache.prune(0) == []
    stored(cache, a_recipe())
    assert cache.find(a_recipe().key) is not None


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory(EngineSettings()) == Path("/home/someone/.cache/rocserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative, so to be ignored")
    assert cache_directory(EngineSettings()) == Path("/home/someone/.cache/rocserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/x")
    assert cache_directory(EngineSettings()) == Path("/var/cache/x/rocserve")
    assert cache_directory(EngineSettings(cache_directory="~/c")) == Path("/home/someone/c")
    cache = open_cache(EngineSettings(cache_directory=str(tmp_path / "c"), cache_bytes=5))
    assert (cache.directory, cache.limit_bytes) == (tmp_path / "c", 5)
    assert cache.tuning_folder.is_dir()


def test_a_user_whom_the_machine_does_not_know_has_a_cache_too(tmp_path: Path) -> None:
    script = """
from rocserve.cache.folders import FolderCache
from rocserve.cache.folders import cache_directory
from rocserve.settings import EngineSettings
os.setuid(54321)
print(cache_directory(EngineSettings()))
"""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    assert printed_lines(start(script)) == ["/tmp/rocserve-cache-54321"]


def test_what_is_kept_can_be_read_by_people_and_checked_with_sha256sum(cache: ProgramCache) -> None:
    folder = entry(cache, stored(cache, a_recipe(), b"bytes of a program"))
    text = (folder / ABOUT_FILENAME).read_text()
    assert '"model":"m"' in text and '"precision":"fp32"' in text
    checked = subprocess.run(
        ["sha256sum", "--check", ".sha256"], check=True, cwd=folder, capture_output=True, text=True
    )
    assert checked.stdout.splitlines() == ["about.json: OK", "program.mxr: OK"]
