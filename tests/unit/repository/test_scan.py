from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rocserve.core.private_paths import PrivatePaths
from rocserve.repository import scanner as scanner_file
from rocserve.repository.scan import ModelScan, scan_model

from .conftest import Folders, make_scanner

MOST_ENTRIES = 1000
NOBODY = 65534


def scanned(*roots: Path) -> dict[str, ModelScan]:
    return make_scanner(*roots, max_folder_entries=MOST_ENTRIES).scan().models


@pytest.mark.parametrize(
    "name", [".hidden", "model.onnx~", "model.tmp", "model.onnx.part", ".model.onnx.swp", "__pycache__/model.pyc"]
)
def test_temporary_files_are_no_part_of_a_model(root: Path, folders: Folders, name: str) -> None:
    folders.model("m", 1)
    before = scanned(root)["m"]
    for path in (root / "m" / "1" / name, root / "m" / name):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert scanned(root)["m"] == before


def test_a_scan_distinguishes_a_folders_parts(root: Path, folders: Folders) -> None:
    folders.model("m", 1, 2)
    before = scanned(root)["m"]
    folders.config("m", "# a comment")
    after = scanned(root)["m"]
    assert after.config_files != before.config_files
    assert (after.other_files, after.versions) == (before.other_files, before.versions)
    (root / "m" / "labels.txt").write_text("cat")
    last = scanned(root)["m"]
    assert last.other_files != after.other_files
    assert last.config_files == after.config_files
    assert not after.same_for(1, last)


@pytest.mark.parametrize("place", ["m/1", "m"])
def test_recorded_answers_are_a_part_of_what_is_loaded(root: Path, folders: Folders, place: str) -> None:
    folders.model("m", 1)
    before = scanned(root)["m"]
    (root / place / "check.npz").write_text("answers")
    after = scanned(root)["m"]
    assert not before.same_for(1, after)
    assert after.versions[1].total_bytes == before.versions[1].total_bytes, "they do not belong to the loaded model"
    (root / place / "check.npz").write_text("others!")
    assert not after.same_for(1, scanned(root)["m"])


def test_an_older_time_or_another_file_of_the_same_time_and_size_is_a_change(root: Path, folders: Folders) -> None:
    folders.model("m", 1)
    path = root / "m" / "1" / "model.onnx"
    before = scanned(root)["m"]
    os.utime(path, (1_000_000, 1_000_000))
    older = scanned(root)["m"]
    assert older.fingerprint != before.fingerprint
    (root / "m" / "1" / "new.tmp").write_text("evil")
    os.utime(root / "m" / "1" / "new.tmp", (1_000_000, 1_000_000))
    (root / "m" / "1" / "new.tmp").rename(path)
    assert scanned(root)["m"].fingerprint != older.fingerprint, "same size and time, another inode"


def test_version_folders_with_leading_zeros_are_ignored_and_zero_is_valid(root: Path, folders: Folders) -> None:
    folders.model("m", 0)
    before = scanned(root)["m"]
    (root / "m" / "01").mkdir()
    (root / "m" / "01" / "model.onnx").write_text("x")
    scan = scanned(root)["m"]
    assert sorted(scan.versions) == [0]
    assert scan.ignored == ("01",)
    assert scan.fingerprint == before.fingerprint


async def test_the_log_says_once_why_a_version_folder_is_ignored(
    root: Path, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    folders.model("m", 1)
    for name in ("01", str(2**63)):
        (root / "m" / name).mkdir()
    scanner = make_scanner(root)
    for _ in range(2):
        await scanner.run()
    assert sorted(record.getMessage() for record in caplog.records) == [
        "ignoring version folder '01' of model 'm': a version has no leading zeros",
        "ignoring version folder '9223372036854775808' of model 'm': a version has at most 63 bits",
    ]


def test_a_file_that_is_a_link_out_of_the_repository_is_refused(root: Path, folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    folders.model("m", 1, 2)
    (root / "m" / "2" / "weights.bin").symlink_to(tmp_path / "secret")
    scan = scanned(root)["m"]
    assert "leads out of the model repository" in scan.versions[2].refusal
    assert scan.versions[1].refusal == ""
    assert scan.refusal == ""
    (root / "m" / "labels.txt").symlink_to("/etc/passwd")
    assert "/etc/passwd" in scanned(root)["m"].refusal


def test_a_model_folder_that_is_a_link_out_of_the_repository_is_refused(root: Path, tmp_path: Path) -> None:
    Folders(tmp_path / "elsewhere").model("m", 1)
    (root / "m").symlink_to(tmp_path / "elsewhere" / "m")
    scan = scanned(root)["m"]
    assert "leads out of the model repository" in scan.refusal
    assert not scan.versions


def test_links_from_one_repository_into_another_are_followed(root: Path, tmp_path: Path) -> None:
    Folders(tmp_path / "second").model("m", 1)
    (root / "n").symlink_to(tmp_path / "second" / "m")
    models = scanned(root, tmp_path / "second")
    assert models["n"].refusal == ""
    assert sorted(models["n"].versions) == [1]


def test_a_link_to_itself_beside_models_keeps_none_of_them_from_being_read(root: Path, folders: Folders) -> None:
    folders.model("m", 1)
    (root / "loop").symlink_to("loop")
    scan = make_scanner(root).scan()
    assert (list(scan.models), scan.unreadable) == (["m"], {})


def test_a_folder_that_fails_while_it_is_read_is_refused_by_itself(
    root: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a broken disk, or on a network file system whose server has forgotten the folder."""
    folders.model("bad", 1)
    folders.model("good", 1)
    scandir = os.scandir

    @contextmanager
    def failing(folder: str | Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            yield broken() if str(folder) == str(root / "bad" / "1") else entries

    def broken() -> Iterator[os.DirEntry[str]]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield

    monkeypatch.setattr(os, "scandir", failing)
    scan = make_scanner(root).scan()
    assert scan.unreadable == {}
    assert scan.models["bad"].refusal == f"'{root}/bad/1' cannot be read: Input/output error"
    assert scan.models["good"].refusal == ""


@contextmanager
def no_root() -> Iterator[None]:
    """Run as user nobody, because root may read everything."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOBODY)
    yield
    os.seteuid(own)


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_folder_that_the_server_may_not_read_is_refused_by_itself(mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        closed = Folders(root).model("closed", 1)
        Folders(root).model("open", 1)
        closed.chmod(mode)
        with no_root():
            models = scanned(root)
        closed.chmod(0o755)
    assert "cannot be read: Permission denied" in models["closed"].refusal
    assert (models["open"].refusal, set(models["open"].versions)) == ("", {1})


def test_circles_of_links_and_pipes_end_the_walk_with_a_reason(root: Path, folders: Folders) -> None:
    folders.model("m", 1, 2)
    (root / "m" / "1" / "loop").symlink_to(root / "m")
    os.mkfifo(root / "m" / "2" / "pipe")
    scan = scanned(root)["m"]
    assert "link to a folder that it is in" in scan.versions[1].refusal
    assert "not a regular file" in scan.versions[2].refusal


def test_a_root_that_is_a_link_works_and_notices_its_swap(tmp_path: Path) -> None:
    for name in ("one", "two"):
        Folders(tmp_path / name).model("m", 1)
    (tmp_path / "root").symlink_to("one")
    before = scanned(tmp_path / "root")["m"]
    assert before.refusal == ""
    (tmp_path / "root").unlink()
    (tmp_path / "root").symlink_to("two")
    assert scanned(tmp_path / "root")["m"].fingerprint != before.fingerprint


def test_the_same_name_in_two_repositories_is_refused(root: Path, folders: Folders, tmp_path: Path) -> None:
    folders.model("m", 1)
    Folders(tmp_path / "second").model("m", 1)
    Folders(tmp_path / "second").model("n", 1)
    models = scanned(root, tmp_path / "second")
    refusal = (
        "model appears in two or more repositories: 'm' is in {} (--model-repository no. 1) and {} (no. 2); keep one"
    )
    assert models["m"].refusal == refusal.format(f"'{root / 'm'}'", f"'{tmp_path / 'second' / 'm'}'")
    assert PrivatePaths([root, tmp_path / "second"]).hide(models["m"].refusal) == refusal.format("'m'", "'m'")
    assert models["n"].refusal == ""


def test_a_repository_that_is_itself_one_model(tmp_path: Path) -> None:
    folder = Folders(tmp_path).model("models", 1, 2)
    scan = scanned(folder)["models"]
    assert scan.is_root
    assert scan.folder == folder
    assert sorted(scan.versions) == [1, 2]
    (folder / "config.pbtxt").unlink()
    assert scanned(folder)["models"].is_root, "version folders alone are enough"


def test_a_stray_file_beside_models_makes_no_model_of_the_repository(root: Path, folders: Folders) -> None:
    folders.model("m", 1)
    (root / "model.onnx").write_text("stray")
    (root / "config.pbtxt").write_text("stray")
    assert {name: scan.is_stray for name, scan in scanned(root).items()} == {"m": False, "model.onnx": True}


def test_a_model_in_a_folder_of_its_own_name(root: Path) -> None:
    Folders(root / "m").model("m", 1)
    scan = scanned(root)["m"]
    assert scan.folder == root / "m" / "m"
    assert sorted(scan.versions) == [1]


def test_a_repository_that_vanishes_keeps_its_models_as_they_were(root: Path, folders: Folders) -> None:
    folders.model("m", 1)
    scanner = make_scanner(root)
    before = scanner.scan().models
    root.rename(root.with_name("away"))
    scan = scanner.scan()
    assert scan.models == before
    assert root in scan.unreadable
    root.with_name("away").rename(root)
    assert scanner.scan().unreadable == {}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_repository_that_vanishes_during_a_scan_keeps_its_models_as_they_were(
    root: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    folders.model("m", 1)
    scanner = make_scanner(root)
    before = scanner.scan().models["m"]

    def vanish(*arguments: Any, **options: Any) -> ModelScan:
        """Remove the folder after it has been listed."""
        root.rename(root.with_name("away"))
        if replaced:
            root.mkdir()
        return scan_model(*arguments, **options)

    monkeypatch.setattr(scanner_file, "scan_model", vanish)
    scan = scanner.scan()
    assert list(scan.unreadable) == [root]
    assert scan.models["m"] == before


def test_a_rescan_tells_whether_a_loads_files_changed(root: Path, folders: Folders) -> None:
    folders.model("m", 1, 2)
    scanner = make_scanner(root)
    scan = scanner.scan().models["m"]
    folders.version("m", 2, "changed")
    assert scan.same_for(1, scanner.rescan(scan))
    assert not scan.same_for(2, scanner.rescan(scan))
    (root / "m").rename(root / ".gone")
    assert not scan.same_for(1, scanner.rescan(scan))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"caf\xe9", r"caf\xe9"),
        (b"line\nbreak", r"line\nbreak"),
        (b"\x1b[31mred", r"\x1b[31mred"),
        (b"tab\there\xff", "tab\there\\xff"),
    ],
)
def test_a_folder_whose_name_cannot_be_printed_is_refused_by_itself(
    root: Path, folders: Folders, name: bytes, shown: str
) -> None:
    folders.model("m", 1)
    (root / os.fsdecode(name)).mkdir()
    models = scanned(root)
    assert set(models) == {"m", shown}
    assert "rename the folder" in models[shown].refusal
    assert not models["m"].refusal


def test_a_name_that_is_only_shown_so_takes_the_name_of_no_model(root: Path, folders: Folders) -> None:
    folders.model(r"caf\xe9", 1)
    (root / os.fsdecode(b"caf\xe9")).mkdir()
    (scan,) = scanned(root).values()
    assert scan.versions
    assert not scan.refusal


def test_files_whose_names_cannot_be_printed_are_left_to_their_model(root: Path, folders: Folders) -> None:
    folder = folders.model("m", 1)
    before = scanned(root)["m"]
    for part in (folder, folder / "1"):
        (part / os.fsdecode(b"caf\xe9\n.txt")).touch()
    after = scanned(root)["m"]
    assert not after.refusal
    assert not after.versions[1].refusal
    assert after != before


def test_a_folder_with_too_many_files_is_refused(root: Path, folders: Folders) -> None:
    folder = folders.model("m", 1)
    for number in range(MOST_ENTRIES):
        (folder / "1" / f"{number}").touch()
    scan = scanned(root)["m"]
    assert scan.refusal.endswith(
        f"holds more than {MOST_ENTRIES} files and folders; move files that do not belong to the model, or raise"
        " --max-folder-entries"
    )
    # Nothing of it is remembered, so a change in it does not count.
    (folder / "1" / "one more").touch()
    assert scanned(root)["m"] == scan


def test_a_folder_that_overflows_during_a_load_is_no_longer_the_one_that_was_read(root: Path, folders: Folders) -> None:
    folder = folders.model("m", 1)
    scanner = make_scanner(root, max_folder_entries=MOST_ENTRIES)
    scan = scanner.scan().models["m"]
    assert asyncio.run(scanner.changed_file(scan, 1)) is None
    for number in range(MOST_ENTRIES):
        (folder / "1" / f"{number}").touch()
    assert asyncio.run(scanner.changed_file(scan, 1)) is not None
    assert scanner.rescan(scan) == scanner.scan().models["m"]


def test_only_what_has_changed_or_is_young_is_scanned_again(
    root: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("told", "untold", "gone"):
        folders.model(name, 1)
    (root / "empty").mkdir()
    monkeypatch.setattr(scanner_file, "_CLOCK_SECONDS", 0)
    scanner = make_scanner(root)
    before = scanner.scan().models
    # The times of files may be coarser than the clock by this much.
    time.sleep(0.02)
    for name in ("told", "untold", "new", "empty"):
        folders.model(name, 1, 2)
    shutil.rmtree(root / "gone")
    monkeypatch.setattr(scanner_file, "_YOUNG_SECONDS", 0)
    after = scanner.scan([root / "told"]).models
    assert sorted(after) == ["empty", "new", "told", "untold"]
    assert sorted(after["told"].versions) == [1, 2]
    assert sorted(after["empty"].versions) == [1, 2], "it held no model"
    assert after["untold"] is before["untold"]
    monkeypatch.undo()
    for name in ("untold", "new"):
        folders.model(name, 1, 2, 3)
    again = scanner.scan([]).models
    assert sorted(again["new"].versions) == [1, 2, 3], "it is young"
    assert again["untold"] is before["untold"], "it was there at the start"


@pytest.mark.parametrize("link", ["whole", "version", "file"])
def test_what_has_links_is_scanned_each_time(
    root: Path, folders: Folders, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner_file, "_YOUNG_SECONDS", 0)
    folders.model("origin", 1)
    target = {"whole": "origin", "version": "origin/1", "file": "origin/1/model.onnx"}[link]
    path = {"whole": root / "m", "version": root / "m" / "1", "file": root / "m" / "1" / "model.onnx"}[link]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(root / target)
    scanner = make_scanner(root)
    before = scanner.scan().models["m"]
    folders.version("origin", 1, "changed")
    assert scanner.scan([root / "origin"]).models["m"].fingerprint != before.fingerprint
