"""The cache's folder if it cannot be written, its disk is full, or others could have written to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.cached_programs import (
    GENEROUS,
    a_recipe,
    cache_at,
    printed_lines,
    start,
    store,
    stored,
    stored_by_another_version,
    wait,
)

from rocserve.backends.migraphx.compiling.program_cache import ProgramAbout, ProgramCache
from rocserve.core.errors import ServeError, StatusCode, unavailable

SPARE_OPENED = """
warnings = []
cache = ProgramCache(Path(sys.argv[1]), GENEROUS, spare_directory=Path(sys.argv[2]), warn=warnings.append)
"""


@pytest.fixture(scope="module")
def mounting(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """Words before a command that let it mount file systems that no other process sees."""
    words = ("unshare", "--map-root-user", "--mount")
    folder = tmp_path_factory.mktemp("mount")
    try:
        attempt = [*words, "mount", "-t", "tmpfs", "none", str(folder)]
        subprocess.run(attempt, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    return words


def mounted(mounting: Sequence[str], *commands: str) -> tuple[str, ...]:
    """Start a process after these shell commands."""
    return (*mounting, "sh", "-ec", "; ".join((*commands, 'exec "$@"')), "sh")


def test_a_cache_that_is_only_read_is_used_and_new_programs_go_elsewhere(
    tmp_path: Path, mounting: Sequence[str]
) -> None:
    directory, spare = tmp_path / "cache", tmp_path / "spare"
    stored(cache_at(directory), a_recipe("old"), b"old")
    script = """
print(cache.find(a_recipe("old").key).path.read_bytes().decode())
print(store(cache, a_recipe("new"), b"new").path.read_bytes().decode())
stored(cache, a_recipe("spare"))
print(cache.find(a_recipe("new").key).path.is_relative_to(sys.argv[2]))
print(cache.load_trials.directory, cache.load_trials.spare, cache.tuning_folder)
print(len(cache.entries()))
try:
    cache.remove(a_recipe("old").key)
except Exception as error:
    print(error)
print(*warnings, sep="\\n")
cache.find(a_recipe("new").key).release()
print(cache.remove(a_recipe("spare").key), len(cache.entries()))
"""
    only_read = mounted(mounting, f"mount --bind {directory} {directory}", f"mount -o remount,bind,ro {directory}")
    lines = printed_lines(start(SPARE_OPENED + script, directory, spare, before=only_read))
    assert lines[:5] == ["old", "new", "True", f"{directory}/load-trials {spare}/load-trials {spare}/miopen", "3"]
    assert lines[5].startswith("compiled programs cannot be removed: [Errno 30] Read-only file system")
    assert lines[6:] == [
        f"cannot write compiled programs to {directory} (Read-only file system): existing ones are used, new"
        f" ones go to {spare}; name another folder with --cache-directory",
        "True 2",
    ]
    # Another process finds what was stored in the spare folder.
    cache = ProgramCache(directory, GENEROUS, spare_directory=spare)
    found = cache.find(a_recipe("new").key)
    assert found is not None and found.path.read_bytes() == b"new"


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="Debian: util-linux")
def test_a_cache_that_cannot_be_looked_into_is_replaced(tmp_path: Path) -> None:
    """Like root's cache in an image whose server runs as another user."""
    directory, spare = tmp_path / "cache", tmp_path / "spare"
    stored(cache_at(directory), a_recipe("old"))
    script = """
print(cache.find(a_recipe("old").key), *warnings)
key = stored(cache, a_recipe("new"))
print(cache.find(key).path.is_relative_to(sys.argv[2]), len(cache.entries()), cache.compiling(), cache.remove(key))
"""
    directory.chmod(0)
    without_rights = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    try:
        lines = printed_lines(start(SPARE_OPENED + script, directory, spare, before=without_rights))
    finally:
        directory.chmod(0o700)
    assert lines == [
        f"None cannot write compiled programs to {directory} (Permission denied): existing ones are used, new"
        f" ones go to {spare}; name another folder with --cache-directory",
        "True 1 [] True",
    ]


def test_what_another_version_has_left_where_nothing_can_be_written_is_made_elsewhere(
    tmp_path: Path, mounting: Sequence[str]
) -> None:
    directory, spare = tmp_path / "cache", tmp_path / "spare"
    stored_by_another_version(cache_at(directory), a_recipe().key)
    script = """
print(store(cache, a_recipe(), b"new").path.is_relative_to(sys.argv[2]))
"""
    only_read = mounted(mounting, f"mount --bind {directory} {directory}", f"mount -o remount,bind,ro {directory}")
    assert printed_lines(start(SPARE_OPENED + script, directory, spare, before=only_read)) == ["True"]


def test_repeated_calls_warn_of_a_full_disk_once(tmp_path: Path, mounting: Sequence[str]) -> None:
    disk, spare = tmp_path / "disk", tmp_path / "spare"
    disk.mkdir()
    script = """
def no_slot_is_free(file):
    raise LookupError
for attempt in range(3):
    try:
        cache.find_or_build(a_recipe().key, no_slot_is_free, wait)
    except LookupError:
        print(len(warnings))
store(cache, a_recipe())
print(len(warnings))
"""
    small = mounted(mounting, f"mount -t tmpfs -o size=2m none {disk}")
    lines = printed_lines(start(SPARE_OPENED + script, disk / "cache", spare, before=small))
    assert lines == ["0", "0", "0", "1"]


def test_a_full_disk_keeps_no_model_from_being_compiled(tmp_path: Path, mounting: Sequence[str]) -> None:
    disk, spare = tmp_path / "disk", tmp_path / "spare"
    disk.mkdir()
    script = """
found = store(cache, a_recipe(), bytes(3 << 20))
print(found.path.is_relative_to(sys.argv[2]), found.size_bytes)
print(cache.find(a_recipe().key) == found)
print(*warnings, sep="\\n")
"""
    small = mounted(mounting, f"mount -t tmpfs -o size=2m none {disk}")
    lines = printed_lines(start(SPARE_OPENED + script, disk / "cache", spare, before=small))
    assert lines[:2] == [f"True {3 << 20}", "True"]
    assert f"cannot compile into {disk}/cache: the disk has " in lines[2]
    assert " MiB free, and a program may take 64 MiB; make room, or name" in lines[2]


@pytest.mark.parametrize("full_while", ["saving", "describing"])
def test_a_disk_that_becomes_full_meanwhile_keeps_no_model_from_being_compiled(
    tmp_path: Path, mounting: Sequence[str], full_while: str
) -> None:
    disk, spare = tmp_path / "disk", tmp_path / "spare"
    disk.mkdir()
    script = f"""
from contextlib import suppress
from rocserve.core.errors import unavailable
def build(file):
    # As MIGraphX writes: it does not look whether it could.
    with suppress(OSError), open(file, "wb", buffering=0) as opened:
        while opened.tell() < 100 << 20 and opened.write(bytes(1 << 20)) == 1 << 20:
            pass
    if file.stat().st_size < 100 << 20 and {full_while == "saving"}:
        raise unavailable("MIGraphX says: insufficient bytes")
    return about(a_recipe())
found = cache.find_or_build(a_recipe().key, build, wait)
print(found.path.is_relative_to(sys.argv[2]), found.size_bytes, os.listdir(cache.directory / "programs"))
print(*warnings, sep="\\n")
"""
    small = mounted(mounting, f"mount -t tmpfs -o size=80m none {disk}")
    lines = printed_lines(start(SPARE_OPENED + script, disk / "cache", spare, before=small))
    assert lines == [
        f"True {100 << 20} []",
        f"cannot compile into {disk}/cache: No space left on device; make room, or name another folder with"
        " --cache-directory",
    ]


def test_what_fails_by_itself_is_not_laid_to_the_disk(tmp_path: Path) -> None:
    def build(file: Path) -> ProgramAbout:
        raise unavailable("MIGraphX says: Unknown operator")

    warnings: list[str] = []
    cache = ProgramCache(tmp_path / "cache", GENEROUS, spare_directory=tmp_path / "spare", warn=warnings.append)
    with pytest.raises(ServeError, match=r"^MIGraphX says: Unknown operator$"):
        cache.find_or_build(a_recipe().key, build, wait)
    assert warnings == []


def test_on_a_full_disk_trials_are_remembered_elsewhere(tmp_path: Path, mounting: Sequence[str]) -> None:
    disk, spare = tmp_path / "disk", tmp_path / "spare"
    disk.mkdir()
    script = """
from rocserve.backends.migraphx.compiling.program_cache import LoadTrial
cache.load_trials.remember("one", LoadTrial("m", "model.mxr", "2.14.0", "crash"))
again = ProgramCache(Path(sys.argv[1]), GENEROUS, spare_directory=Path(sys.argv[2]))
print(again.load_trials.find("one").crash, again.tuning_folder)
print(*warnings, sep="\\n")
"""
    full = (f"mount -t tmpfs -o size=1m none {disk}", f"cat /dev/zero > {disk}/file 2> /dev/null || true")
    lines = printed_lines(start(SPARE_OPENED + script, disk / "cache", spare, before=mounted(mounting, *full)))
    assert lines == [
        f"crash {spare}/miopen",
        f"cannot write compiled programs to {disk}/cache (No space left on device): existing ones are used,"
        f" new ones go to {spare}; name another folder with --cache-directory",
    ]


def test_a_full_cache_can_be_pruned(tmp_path: Path, mounting: Sequence[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = """
stored(cache, a_recipe(), bytes(1 << 20))
with open(Path(sys.argv[1]).parent / "rest", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        print(error.strerror)
print(len(cache.prune(0)), len(cache.entries()))
"""
    small = mounted(mounting, f"mount -t tmpfs -o size=2m none {disk}")
    lines = printed_lines(start(SPARE_OPENED + script, disk / "cache", tmp_path / "spare", before=small))
    assert lines == ["No space left on device", "1 0"]


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path, mounting: Sequence[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = """
try:
    stored(cache, a_recipe())
except Exception as error:
    print(repr(error))
"""
    small = mounted(mounting, f"mount -t tmpfs -o size=2m none {disk}")
    (line,) = printed_lines(start(SPARE_OPENED + script, disk / "cache", disk / "spare", before=small))
    assert "UNAVAILABLE" in line
    assert f"no folder takes compiled programs ({disk}/cache: the disk has 2 MiB free" in line
    assert line.endswith("make room, or name another folder with --cache-directory')")


def test_a_folder_that_cannot_be_made_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    warnings: list[str] = []
    cache = ProgramCache(tmp_path / "file/cache", GENEROUS, spare_directory=tmp_path / "spare", warn=warnings.append)
    assert store(cache, a_recipe()).path.is_relative_to(tmp_path / "spare")
    assert cache.find(a_recipe().key) is not None
    assert len(warnings) == 1 and "(Not a directory)" in warnings[0]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o720])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ServeError) as caught:
        cache_at(directory)
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert caught.value.text == (
        f"cache directory {directory} is not used: others may write to it (mode {mode:04o}), and the compiled programs"
        f" in it are executed; run chmod go-w {directory}, or name a folder in it with --cache-directory, which the"
        " server then creates with mode 0700"
    )
    assert list(directory.iterdir()) == []


def test_a_folder_that_others_may_only_read_is_used(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o755)
    assert stored(cache_at(directory), a_recipe())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    os.chown(directory, 4321, -1)
    with pytest.raises(ServeError, match="it belongs to user 4321, not to 0, who runs this"):
        cache_at(directory)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ServeError, match="it is not a folder"):
        cache_at(tmp_path / "cache")


def test_a_spare_folder_can_be_looked_after_as_any(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "spare", GENEROUS, spare_directory=tmp_path / "spare")
    stored = store(cache, a_recipe())
    assert [entry.key for entry in cache.entries()] == [stored.key]


def test_a_spare_folder_that_others_have_made_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    spare = tmp_path / "spare"
    spare.mkdir()
    spare.chmod(0o777)
    cache = ProgramCache(tmp_path / "file/cache", GENEROUS, spare_directory=spare)
    found = store(cache, a_recipe())
    assert not found.path.is_relative_to(spare)
    assert found.path.exists() and list(spare.iterdir()) == []


def test_a_process_that_is_killed_leaves_no_folder_of_its_own_for_long(tmp_path: Path) -> None:
    """A process makes one if others could write to both folders; the next process that makes one removes it."""
    temporary, spare = tmp_path / "temporary", tmp_path / "spare"
    for folder in (temporary, spare):
        folder.mkdir()
        folder.chmod(0o777)
    (tmp_path / "file").write_text("in the way")
    places = (tmp_path / "file/cache", spare)
    elsewhere = ("env", f"TMPDIR={temporary}")
    script = """
import signal
stored(cache, a_recipe())
print(*os.listdir(os.environ["TMPDIR"]), flush=True)
"""
    killed = start(f"{SPARE_OPENED}{script}os.kill(os.getpid(), signal.SIGKILL)", *places, before=elsewhere)
    (left,) = killed.communicate()[0].split()
    assert [folder.name for folder in temporary.iterdir()] == [left]
    (own,) = printed_lines(start(SPARE_OPENED + script, *places, before=elsewhere))
    assert own != left
    assert list(temporary.iterdir()) == []
