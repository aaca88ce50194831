"""docker/migraphx-root.sh, where it cannot do its work and where it has done it; doing it takes a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[4]
SCRIPT = CHECKOUT / "docker" / "migraphx-root.sh"
NEEDED = ("bash", "dirname", "basename", "cksum", "cat", "flock", "rm", "mkdir", "grep", "head", "tr", "tail")


def make(root: Path, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path or os.environ["PATH"], **variables}
    command = [shutil.which("bash") or "bash", SCRIPT, root]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with the commands that the script needs, those of apt and dpkg apart."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_without_apt(tmp_path: Path, commands: Path) -> None:
    finished = make(tmp_path / "root", str(commands))
    assert finished.returncode == 1
    assert finished.stderr == (
        "migraphx-root: apt-get is missing: only a Debian or Ubuntu system can make this folder\n"
    )


def test_on_another_architecture(tmp_path: Path, commands: Path) -> None:
    for name in ("apt-get", "apt-cache", "dpkg-deb"):
        put(commands, name, "exit 0")
    put(commands, "dpkg", "echo arm64")
    finished = make(tmp_path / "root", str(commands))
    assert finished.returncode == 1
    assert finished.stderr == "migraphx-root: this machine is arm64, the folder is for amd64 only\n"


def test_where_the_folder_cannot_be(tmp_path: Path) -> None:
    finished = make(tmp_path / "none" / "root")
    assert finished.returncode == 1
    assert f"there is no folder {tmp_path}/none to make" in finished.stderr


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt here")
def test_without_a_network_what_is_there_stays(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "made before").touch()
    mirror = "file:/nowhere/debian"
    finished = make(root, ROCSERVE_DEBIAN_MIRROR=mirror)
    assert finished.returncode == 1
    if "Debian's keys are missing" not in finished.stderr and "is for amd64 only" not in finished.stderr:
        assert (
            f"migraphx-root: no packages from {mirror} (is there a network? ROCSERVE_DEBIAN_MIRROR" in finished.stderr
        )
    assert (root / "made before").exists()
    assert not (tmp_path / "root.part").exists()


def test_what_is_made_is_not_made_again(migraphx_root: Path, tmp_path: Path) -> None:
    made_by = migraphx_root / ".made-by"
    if not made_by.exists():
        pytest.skip("this root was made in another way")
    root = tmp_path / "root"
    root.mkdir()
    cksum = subprocess.run(["cksum"], input=SCRIPT.read_text(), capture_output=True, text=True, check=True)
    (root / ".made-by").write_text(cksum.stdout)
    finished = make(root, ROCSERVE_DEBIAN_MIRROR="file:/nowhere/debian")
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
