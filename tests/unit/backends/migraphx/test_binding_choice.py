"""The choice between the bindings of MIGraphX, the errors if there is none, and what is read from files and from the
process besides MIGraphX's calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.migraphx import run_with_migraphx

from rocserve.backends.migraphx import binding as interface
from rocserve.backends.migraphx.binding import Binding, MigraphxError, loaded_version
from rocserve.backends.migraphx.installation import MigraphxInstallation
from rocserve.backends.migraphx.python_module import open_binding

BOTH = MigraphxInstallation(library="/none/libmigraphx_c.so.3", module_folder="/none/module")


@pytest.mark.parametrize(
    ("installation", "wanted", "expected"),
    [
        (BOTH, "auto", "MIGraphX's C library cannot be loaded: /none/libmigraphx_c.so.3: cannot open shared object"),
        (BOTH, "c_api", "MIGraphX's C library cannot be loaded: /none/libmigraphx_c.so.3: cannot open shared object"),
        (BOTH, "module", "MIGraphX's Python module in '/none/module' cannot be imported: No module named 'migraphx'"),
        (
            MigraphxInstallation(library="", module_folder="/none"),
            "auto",
            "MIGraphX's Python module in '/none' cannot be imported: No module named 'migraphx'",
        ),
        (
            MigraphxInstallation(library="", module_folder="/none"),
            "c_api",
            "binding c_api is configured, but MIGraphX's C library (libmigraphx_c.so.3) was not found",
        ),
        (
            MigraphxInstallation(library="/none"),
            "module",
            "binding module is configured, but no Python module migraphx that fits this Python was found",
        ),
    ],
)
def test_what_is_chosen(installation: MigraphxInstallation, wanted: str, expected: str) -> None:
    with pytest.raises(MigraphxError) as caught:
        open_binding(installation, wanted)
    assert str(caught.value).startswith(expected)


def test_a_call_of_the_module_whose_output_cannot_be_captured(tmp_path: Path) -> None:
    """The error is the system's own."""
    (tmp_path / "migraphx.py").write_text("def get_target(name): ...\n")
    code = f"""
import os, resource, sys
from rocserve.backends.migraphx.python_module import open_binding
from rocserve.backends.migraphx.installation import MigraphxInstallation
binding = open_binding(MigraphxInstallation(library="", module_folder={str(tmp_path)!r}))
resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    binding.check_target("ref")
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout == "Too many open files\n", done.stderr


OPEN = """
from rocserve.backends.migraphx.python_module import open_binding
from rocserve.backends.migraphx.installation import find_installation
from rocserve.settings import EngineSettings
binding = open_binding(find_installation(EngineSettings()))
print(binding.name, binding.library.endswith("/libmigraphx_c.so.3"), binding.migraphx_version)
"""


def test_the_c_api_comes_first(migraphx_root: Path) -> None:
    finished = run_with_migraphx(migraphx_root, OPEN)
    assert finished.stderr == ""
    name, library, version = finished.stdout.split()
    assert (name, library) == ("c_api", "True")
    assert [int(number) for number in version.split(".")] >= [2, 0, 0]


@pytest.mark.parametrize(
    ("file", "version"),
    [
        ("/opt/rocm-7.1.1/lib/migraphx/lib/libmigraphx.so.2014000.0.70101", "2.14.0"),
        ("/opt/a folder/libmigraphx.so.2009012", "2.9.12"),
        ("/opt/libmigraphx.so.3", ""),
    ],
)
def test_the_version_is_that_of_the_loaded_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, version: str
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 fd:00 12 /usr/lib/libmigraphx_c.so.3.0\n"
        f"7f02-7f03 r--p 00000000 fd:00 13                         {file}\n"
    )
    monkeypatch.setattr(interface, "_MAPS", maps)
    assert loaded_version() == version


def test_a_process_without_it() -> None:
    assert loaded_version() == ""


class SilentBinding(Binding):
    """A binding that only writes."""

    check_target = _parse_onnx = _parse_tensorflow = load = None  # type: ignore[assignment]


def test_messages_are_taken_once_and_bounded() -> None:
    binding = SilentBinding()
    binding.add_message("one\n\n  \ntwo")
    assert binding.take_messages() == ["one", "two"]
    assert binding.take_messages() == []
    binding.add_message("\n".join(str(number) for number in range(5000)))
    taken = binding.take_messages()
    assert (len(taken), taken[-1]) == (1000, "4999")
