"""Temporary folders of processes that end, are killed, or make folders while others remove what is left."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rocserve.cache.temporary_folder import TemporaryFolder, remove_left, temporary_folder

PREFIX = "rocserve-test-"
HOLDER = f"""
import sys
from rocserve.cache.temporary_folder import TemporaryFolder
folder = TemporaryFolder("{PREFIX}")
(folder.path / "0.npz").write_bytes(b"cases")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_killed_process_leaves_a_folder_that_another_process_removes() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        remove_left(PREFIX)
        assert (left / "0.npz").exists(), "its process lives"
        holder.kill()
    assert left.exists()
    with temporary_folder(PREFIX) as own:
        assert own.exists()
        assert not left.exists()
    assert not own.exists()


def test_a_folder_can_be_removed_twice() -> None:
    folder = TemporaryFolder(PREFIX)
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_a_new_folder_stays_while_others_remove_what_is_left() -> None:
    def make_folders() -> list[bool]:
        found = []
        for _ in range(100):
            with temporary_folder(PREFIX) as folder:
                found.append(folder.exists())
        return found

    with ThreadPoolExecutor(4) as threads:
        made = [threads.submit(make_folders) for _ in range(4)]
    assert all(all(one.result()) for one in made)
