"""The compile cache under concurrent processes, and under processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.cached_programs import GENEROUS, a_recipe, being_built, cache_at, printed_lines, start, stored

from rocserve.backends.migraphx.compiling.program_cache import ProgramCache

pytestmark = pytest.mark.long

COMPILE = """
folder, log = sys.argv[1:]
cache, recipe = cache_at(Path(folder)), a_recipe()
def build(file):
    with open(log, "a") as lines:
        lines.write("compiled\\n")
    time.sleep(0.2)
    file.write_bytes(b"x" * 100_000)
    return about(recipe)
sys.stdin.readline()
print(cache.find_or_build(recipe.key, build, wait).path.stat().st_size)
"""

HOLD_THE_LOCK = """
with being_built(cache_at(Path(sys.argv[1])), a_recipe().key):
    print("locked", flush=True)
    sys.stdin.readline()
"""

HOLD_A_PROGRAM = """
found = cache_at(Path(sys.argv[1])).find(a_recipe().key)
print("held", flush=True)
sys.stdin.readline()
print(found.path.read_bytes().decode())
"""

STORE_AND_READ = """
cache = cache_at(Path(sys.argv[1]), 60_000)
sys.stdin.readline()
for turn in range(40):
    recipe = a_recipe(f"d{turn % 8}")
    content = str(turn % 8).encode() * 10_000
    found = store(cache, recipe, content)
    assert found.path.read_bytes() == content, turn
    found.release()
print("done")
"""


def holder(script: str, cache: ProgramCache) -> subprocess.Popen[str]:
    """Start a process that holds something in the cache, and says so, until it may go on."""
    process = start(script, cache.directory)
    assert process.stdout is not None and process.stdout.readline() in ("locked\n", "held\n")
    return process


def go(processes: list) -> list[list[str]]:
    """Let all processes go on together; return the output of each."""
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return [printed_lines(process) for process in processes]


def test_four_that_want_the_same_program_compile_it_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(COMPILE, tmp_path / "cache", log) for _ in range(4)]
    assert go(processes) == [["100000"]] * 4
    assert log.read_text() == "compiled\n"


def test_a_killed_holder_frees_the_lock_and_its_remains_go(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    key = a_recipe().key
    process = holder(HOLD_THE_LOCK, cache)
    assert cache.compiling() == [key]
    cache.prune(0)
    programs = cache.directory / "programs"
    assert [file.read_bytes() for file in programs.glob(".*/*")] == [b"half"], "what is being compiled stays"

    waited: list[str] = []

    def waiting() -> None:
        waited.append("asked")
        if len(waited) == 1:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()

    with being_built(cache, key, waiting):
        assert waited == ["asked"]
        assert cache.compiling() == [key]
    assert cache.compiling() == []


def test_what_a_killed_process_has_left_goes(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    process = holder(HOLD_THE_LOCK, cache)
    process.kill()
    process.wait()
    cache.prune(GENEROUS)
    assert list((cache.directory / "programs").iterdir()) == []


def test_a_wait_can_be_called_off(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    process = holder(HOLD_THE_LOCK, cache)

    class CalledOff(Exception):
        pass

    def enough() -> None:
        raise CalledOff

    with pytest.raises(CalledOff), being_built(cache, a_recipe().key, enough):
        pass
    with being_built(cache, a_recipe("another").key, enough):
        pass
    go([process])


def test_nothing_is_evicted_while_another_process_reads_it(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    key = stored(cache, a_recipe(), b"content")
    reader = holder(HOLD_A_PROGRAM, cache)
    assert cache.prune(0) == []
    assert not cache.remove(key)
    assert go([reader]) == [["content"]]
    assert cache.remove(key)


def test_a_killed_reader_holds_nothing_any_more(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    key = stored(cache, a_recipe())
    reader = holder(HOLD_A_PROGRAM, cache)
    reader.kill()
    reader.wait()
    assert cache.remove(key)


def test_many_that_store_read_and_evict_always_read_what_was_stored(tmp_path: Path) -> None:
    processes = [start(STORE_AND_READ, tmp_path / "cache") for _ in range(4)]
    assert go(processes) == [["done"]] * 4
    cache = cache_at(tmp_path / "cache", 60_000)
    assert sum(entry.size_bytes for entry in cache.entries()) <= 60_000
    assert list((cache.directory / "programs").glob(".*")) == []


def test_a_process_that_is_killed_with_a_lock_leaves_nothing(tmp_path: Path) -> None:
    script = """
cache = cache_at(Path(sys.argv[1]))
def build(path):
    path.parent.rmdir()
    print("locked", flush=True)
    sys.stdin.read()
cache.find_or_build("a" * 64, build, lambda: None)
"""
    cache = cache_at(tmp_path / "cache")
    process = holder(script, cache)
    process.kill()
    process.wait()
    cache.prune(1 << 30)
    assert list((cache.directory / "programs").iterdir()) == []


def test_storing_can_be_killed_at_any_moment(tmp_path: Path) -> None:
    script = """
cache = cache_at(Path(sys.argv[1]))
print("ready", flush=True)
for turn in range(100_000):
    stored(cache, a_recipe(f"d{turn}"), b"sound" * 2000)
"""
    cache = cache_at(tmp_path / "cache")
    for turn in range(5):
        process = start(script, cache.directory)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.005 * turn)
        process.kill()
        process.wait()
    for entry in cache.entries():
        found = cache.find(entry.key)
        assert found is not None and found.path.read_bytes() == b"sound" * 2000
        found.release()
    cache.prune(0)
    assert list((cache.directory / "programs").iterdir()) == []
