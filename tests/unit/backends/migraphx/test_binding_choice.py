"""Which way to MIGraphX is taken, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.migraphx import run_with_migraphx

from rocserve.backends.migraphx.binding.interface import MigraphxError
from rocserve.backends.migraphx.binding.module import open_binding
from rocserve.backends.migraphx.installation import MigraphxInstallation

BOTH = MigraphxInstallation(library="/none/libmigraphx_c.so.3", module_folder="/none/module")


@pytest.mark.parametrize(
    ("installation", "wanted", "expected"),
    [
        (BOTH, "auto", "MIGraphX's C library cannot be loaded: /none/libmigraphx_c.so.3: cannot open shared object"),
        (BOTH, "c_api", "MIGraphX's C library cannot be loaded: /none/libmigraphx_c.so.3: cannot open shared object"),
        (BOTH, "module", "MIGraphX's Python module in '/none/module' cannot be imported: No module named 'migraphx'"),
        (BOTH, "fastest", "there is no binding 'fastest': it is one of auto, c_api, module"),
        (
            MigraphxInstallation(library="", module_folder="/none"),
            "auto",
            "MIGraphX's Python module in '/none' cannot be imported: No module named 'migraphx'",
        ),
        (
            MigraphxInstallation(library="", module_folder="/none"),
            "c_api",
            "binding c_api is wanted, but MIGraphX's C library (libmigraphx_c.so.3) was not found",
        ),
        (
            MigraphxInstallation(library="/none"),
            "module",
            "binding module is wanted, but no Python module migraphx that fits this Python was found",
        ),
    ],
)
def test_what_is_chosen(installation: MigraphxInstallation, wanted: str, expected: str) -> None:
    with pytest.raises(MigraphxError) as caught:
        open_binding(installation, wanted)
    assert str(caught.value).startswith(expected)


OPEN = """
from rocserve.backends.migraphx.binding.module import open_binding
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
