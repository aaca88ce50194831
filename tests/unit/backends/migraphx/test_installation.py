"""The search for MIGraphX, and its order; docker/migraphx-root.sh before and after its work, which needs a network."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.migraphx.installation import (
    INSTALL_LINES,
    LIBRARY,
    MigraphxInstallation,
    find_installation,
    python_command,
)
from rocserve.core.errors import ServeError, StatusCode
from rocserve.settings import EngineSettings

MODULE = f"migraphx{importlib.machinery.EXTENSION_SUFFIXES[0]}"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    (tmp_path / "opt").mkdir()
    return tmp_path


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def find(system: Path, **environment: str) -> MigraphxInstallation:
    return find_installation(EngineSettings(), environment, system)


def refusal(system: Path, settings: EngineSettings | None = None, **environment: str) -> str:
    with pytest.raises(ServeError) as caught:
        find_installation(settings or EngineSettings(), environment, system)
    assert caught.value.code is StatusCode.UNAVAILABLE
    return caught.value.text


def test_it_says_where_it_looked(system: Path, tmp_path: Path) -> None:
    put(tmp_path / "opt" / "rocm-6.4.0")
    assert refusal(system, ROCM_PATH="/r", LD_LIBRARY_PATH=":/a:/b") == (
        f"MIGraphX is not installed: neither {LIBRARY} (in /r/lib ($ROCM_PATH); /a ($LD_LIBRARY_PATH); "
        f"/b ($LD_LIBRARY_PATH); {tmp_path}/opt/rocm/lib (ROCm's default folder); {tmp_path}/opt/rocm-6.4.0/lib (an "
        "installed ROCm), or the dynamic loader's cache) nor a Python module migraphx was found. Install it "
        f"({INSTALL_LINES}), or name a folder that holds it (--migraphx-root, $ROCSERVE_MIGRAPHX_ROOT)"
    )


def test_the_order(system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place is found once the earlier places are removed."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    places = {
        "$ROCM_PATH": put(tmp_path / "named" / "lib", LIBRARY),
        "$LD_LIBRARY_PATH": put(tmp_path / "path", LIBRARY),
        "the wheel migraphx-libs": put(tmp_path / "site" / "migraphx_libs", LIBRARY),
        "ROCm's default folder": put(tmp_path / "opt" / "rocm" / "lib", LIBRARY),
        "ROCm's extras": put(tmp_path / "opt" / "rocm" / "extras-10" / "lib", LIBRARY),
        "an installed ROCm": put(tmp_path / "opt" / "rocm-7.10.0" / "lib", LIBRARY),
    }
    older = put(tmp_path / "opt" / "rocm-7.9.1" / "lib", LIBRARY)
    cached = put(tmp_path / "cached", LIBRARY)
    (put(system / "etc") / "ld.so.cache").write_bytes(
        f"glibc\0{LIBRARY}\0{cached}/{LIBRARY}\0libz.so.1\0/lib/libz.so.1\0".encode()
    )
    variables = {"ROCM_PATH": str(tmp_path / "named"), "LD_LIBRARY_PATH": f"/nowhere:{tmp_path / 'path'}"}
    for reason, folder in places.items():
        found = find(system, **variables)
        assert (found.library, found.origin, found.loader) == (str(folder / LIBRARY), reason, ())
        (folder / LIBRARY).unlink()
    assert find(system, **variables).library == str(older / LIBRARY)
    (older / LIBRARY).unlink()
    assert find(system, **variables).library == str(cached / LIBRARY)
    assert find(system, **variables).origin == "the dynamic loader's cache"


def test_this_systems_own_loader_cache_can_be_read() -> None:
    """Whatever the loader's cache contains, reading it is not an error."""
    try:
        assert find_installation(EngineSettings(), {}).library
    except ServeError as error:
        assert "or the dynamic loader's cache" in error.text


def test_a_root_that_is_named_is_the_only_place(system: Path, tmp_path: Path) -> None:
    put(tmp_path / "opt" / "rocm" / "lib", LIBRARY)
    root = put(tmp_path / "root")
    message = refusal(system, ROCSERVE_MIGRAPHX_ROOT=str(root))
    assert message.startswith(
        f"MIGraphX is not in {root}, which $ROCSERVE_MIGRAPHX_ROOT names: there is no {LIBRARY} in "
    )
    settings = EngineSettings(migraphx_root=str(root))
    assert "which --migraphx-root or $ROCSERVE_MIGRAPHX_ROOT names" in refusal(
        system, settings, ROCSERVE_MIGRAPHX_ROOT="/other"
    )


def test_a_root_may_be_a_rocm_folder(system: Path, tmp_path: Path) -> None:
    folder = put(tmp_path / "rocm" / "lib", LIBRARY, MODULE)
    found = find(system, ROCSERVE_MIGRAPHX_ROOT=str(tmp_path / "rocm"))
    assert found == MigraphxInstallation(str(folder / LIBRARY), str(folder), (), "$ROCSERVE_MIGRAPHX_ROOT")
    assert python_command(found) == (sys.executable,)


def test_a_root_with_its_own_c_library_has_loader_words(system: Path, tmp_path: Path) -> None:
    libraries = put(tmp_path / "root" / "usr/lib/x86_64-linux-gnu", LIBRARY, "ld-linux-x86-64.so.2")
    found = find(system, ROCSERVE_MIGRAPHX_ROOT=str(tmp_path / "root"))
    assert python_command(found) == (
        str(libraries / "ld-linux-x86-64.so.2"),
        "--library-path",
        f"{libraries}:{libraries}/migraphx/lib",
        sys.executable,
    )


def test_the_module_lies_beside_the_library(system: Path, tmp_path: Path) -> None:
    folder = put(tmp_path / "opt" / "rocm" / "lib", LIBRARY, "migraphx.cpython-27-x86_64-linux-gnu.so")
    assert find(system).module_folder == ""  # It belongs to another Python.
    put(folder, MODULE)
    assert find(system).module_folder == str(folder)


def test_the_module_alone_is_enough(system: Path, tmp_path: Path) -> None:
    folder = put(tmp_path / "opt" / "rocm" / "lib", MODULE)
    assert find(system) == MigraphxInstallation("", str(folder), (), "the Python module")


def test_the_module_on_the_interpreters_path(system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    put(tmp_path / "site" / "migraphx")
    refusal(system)  # An unrelated folder with this name.
    put(tmp_path / "site" / "migraphx", "__init__.py").joinpath("__init__.py").write_text("raise SystemExit")
    assert find(system).module_folder == str(tmp_path / "site")
    assert "migraphx" not in sys.modules


def test_the_command_runs_python_with_migraphx(migraphx_root: Path) -> None:
    installation = find_installation(EngineSettings(migraphx_root=str(migraphx_root)))
    script = f"import ctypes, sys; ctypes.CDLL({installation.library!r}); print(sys.executable)"
    command = [*python_command(installation), "-c", script]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (finished.stdout.strip(), finished.stderr) == (sys.executable, "")


CHECKOUT = Path(__file__).parents[4]
SCRIPT = CHECKOUT / "docker" / "migraphx-root.sh"
NEEDED = ("bash", "dirname", "basename", "cksum", "cat", "flock", "rm", "mkdir", "grep", "head", "tr", "tail")


def make(root: Path, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path or os.environ["PATH"], **variables}
    command = [shutil.which("bash") or "bash", SCRIPT, root]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with the commands that the script needs, without apt and dpkg."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def put_script(folder: Path, name: str, script: str) -> None:
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
        put_script(commands, name, "exit 0")
    put_script(commands, "dpkg", "echo arm64")
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
