"""Looking for modules without running them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rocserve.backends.installed import is_installed


def test_what_is_there_and_what_is_not() -> None:
    assert is_installed("json")
    assert is_installed("xml.dom.minidom")
    assert not is_installed("no_such_package")
    assert not is_installed("no_such_package.inner")
    assert not is_installed("xml.no_such_module")
    assert not is_installed("this.inner")


def test_nothing_of_it_runs(tmp_path: Path) -> None:
    for package in (tmp_path / "loud", tmp_path / "loud" / "inner"):
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemExit('it was run')")
    program = "from rocserve.backends.installed import is_installed; print(is_installed('loud.inner'))"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {program}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.stdout, result.stderr) == ("True\n", "")
