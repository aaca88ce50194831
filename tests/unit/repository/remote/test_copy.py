"""The copy on the disk: its content after crashes and damage, and the space that copies may take."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.cache.folders import lock_file, still_names
from rocserve.repository.remote.copy import CopyRoom, UnitCopy, mark_used, recorded_units
from rocserve.repository.remote.objects import RemoteObject, StoreError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    recorded_units(tmp_path)
    return tmp_path


def copy_of(home: Path, name: str = "m") -> UnitCopy:
    found = UnitCopy(home, home / "models", name)
    found.read()
    return found


def put(copy: UnitCopy, gone: tuple[str, ...] = (), **contents: str) -> None:
    fetched = []
    for key, content in contents.items():
        item = RemoteObject(f"m/{key}", len(content), content)
        copy.incoming(item).write_text(content)
        fetched.append(item)
    copy.place(fetched, gone)


def files(home: Path) -> dict[str, str]:
    found = (home / "models").rglob("*")
    return {str(file.relative_to(home / "models")): file.read_text() for file in found if file.is_file()}


def test_what_is_placed_is_there_after_a_restart(home: Path) -> None:
    put(copy_of(home), a="1", b="2")
    put(copy_of(home), gone=("m/b",), a="3")
    assert files(home) == {"m/a": "3"}
    assert copy_of(home).fingerprint == (("m/a", 1, "3"),)
    assert recorded_units(home) == ["m"]


@pytest.mark.parametrize("umask", [0, 0o077])
def test_workers_may_read_models_and_nobody_else_may_write_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    home = tmp_path / "cache/repositories/s3"
    before = os.umask(umask)
    try:
        mark_used(home).close()
        recorded_units(home)
        put(copy_of(home), a="1", **{"1/b": "2"})
    finally:
        os.umask(before)
    modes = {str(path.relative_to(home)): path.stat().st_mode & 0o777 for path in (home, *home.rglob("*"))}
    folders = ("records", "incoming", ".", "models", "models/m", "models/m/1")
    assert [modes[name] for name in folders] == [0o700, 0o700, 0o755, 0o755, 0o755, 0o755]


def test_a_folder_goes_with_its_last_file_and_what_a_run_left_there(home: Path) -> None:
    copy = copy_of(home)
    put(copy, a="1")
    (home / "models/m/__pycache__").mkdir()
    put(copy, gone=("m/a",))
    assert list((home / "models").iterdir()) == []
    assert recorded_units(home) == []


def test_a_server_killed_while_it_places_leaves_nothing_half_done(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_of(home)
    put(copy, a="old", b="old")
    replace = Path.replace
    replaced = []

    def dies(path: Path, target: Path) -> Path:
        if target.name == "b":
            raise KeyboardInterrupt
        replaced.append(target.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        put(copy, a="new", b="new")
    assert files(home) == {"m/a": "new", "m/b": "old"}
    monkeypatch.undo()
    # The next server completes it, without the network.
    assert recorded_units(home) == ["m"]
    assert copy_of(home).fingerprint == (("m/a", 3, "new"), ("m/b", 3, "new"))
    assert files(home) == {"m/a": "new", "m/b": "new"}


def test_a_server_that_starts_leaves_a_change_to_the_server_that_makes_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(copy_of(home), a="old")
    copy = copy_of(home)
    # The change is recorded, but no file has been moved yet.
    monkeypatch.setattr(UnitCopy, "read", _die)
    with pytest.raises(KeyboardInterrupt):
        put(copy, a="new")
    monkeypatch.undo()
    starting = UnitCopy(home, home / "models", "m")
    with (home / "records/m.lock").open("ab") as lock:
        assert lock_file(lock, shared=False)
        starting.open()
        assert files(home) == {"m/a": "old"}
        assert starting.fingerprint == (("m/a", 3, "old"),)
    starting.open()
    assert files(home) == {"m/a": "new"}


def test_a_damaged_file_is_no_longer_counted(home: Path) -> None:
    put(copy_of(home), a="good", b="good")
    (home / "models/m/a").write_text("evil")
    # Touched, with the same content.
    (home / "models/m/b").write_text("good")
    assert copy_of(home).fingerprint == (("m/b", 4, "good"),)


def test_a_damaged_record_counts_as_none(home: Path) -> None:
    put(copy_of(home), a="1")
    (home / "records/m.json").write_text(json.dumps({"m/a": {"size": 1}}))
    assert copy_of(home).kept == {}


async def test_one_server_at_a_time_changes_a_copy(home: Path) -> None:
    first, second = copy_of(home), copy_of(home)
    async with first.locked():
        waiting = asyncio.ensure_future(_keys(second))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        put(first, a="1")
    assert await waiting == ["m/a"]


def _die(_: UnitCopy) -> None:
    raise KeyboardInterrupt


async def _keys(copy: UnitCopy) -> list[str]:
    async with copy.locked():
        return list(copy.kept)


def copy_home(folder: Path, name: str, size: int, used: float) -> Path:
    """The copy of a repository that no server uses."""
    found = folder / name
    mark_used(found).close()
    (found / "file").write_bytes(bytes(size))
    os.utime(found / "in-use", (used, used))
    return found


def test_copies_that_nobody_uses_go_first_the_oldest_before_others(tmp_path: Path) -> None:
    old, young = copy_home(tmp_path, "old", 400, 1.0), copy_home(tmp_path, "young", 400, 2.0)
    room = CopyRoom(tmp_path, 1000)
    room.make(200, "'m'")
    assert old.exists()
    room.make(300, "'n'")
    assert not old.exists()
    assert young.exists()


def test_what_is_in_use_stays_and_the_text_says_what_to_do(tmp_path: Path) -> None:
    kept = copy_home(tmp_path, "kept", 900, 1.0)
    with (
        mark_used(kept),
        pytest.raises(StoreError, match=r"room for the 200 bytes of 'm': 900 bytes used in .* or raise --"),
    ):
        CopyRoom(tmp_path, 1000).make(200, "'m'")
    assert kept.exists()


def test_room_is_found_while_files_come_and_go(tmp_path: Path) -> None:
    """Other servers may share the folder of the copies."""
    has_ended = threading.Event()

    def change() -> None:
        while not has_ended.is_set():
            for number in range(8):
                copy_home(tmp_path, f"copy{number}", 100, 1.0)
            for number in range(8):
                shutil.rmtree(tmp_path / f"copy{number}")

    with ThreadPoolExecutor() as threads:
        changing = threads.submit(change)
        try:
            for _ in range(200):
                CopyRoom(tmp_path, 1 << 30).make(1, "'m'")
                list(CopyRoom(tmp_path, 1 << 30)._unused())
        finally:
            has_ended.set()
        changing.result(PATIENCE_SECONDS)


def test_without_a_limit_a_tenth_of_the_disk_stays_free(tmp_path: Path) -> None:
    CopyRoom(tmp_path, None).make(0, "'m'")
    with pytest.raises(StoreError, match="a tenth of the disk must stay free"):
        CopyRoom(tmp_path, None).make(1 << 60, "'m'")


def test_a_copy_that_is_just_being_removed_is_begun_again(tmp_path: Path) -> None:
    home = tmp_path / "copy"
    mark_used(home).close()
    with (home / "in-use").open("ab") as removing, ThreadPoolExecutor() as threads:
        assert lock_file(removing, shared=False)
        using = threads.submit(mark_used, home)
        with pytest.raises(TimeoutError):
            using.result(0.3)
        shutil.rmtree(home)
        removing.close()
        with using.result(PATIENCE_SECONDS) as file:
            assert still_names(home / "in-use", file)
