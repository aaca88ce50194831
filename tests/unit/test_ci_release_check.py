"""The release check's look at versions. `make release-check` runs all of it."""

from __future__ import annotations

import runpy
import shutil
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / ".ci/release_check.py"))
release, ReleaseError = SCRIPT["release"], SCRIPT["ReleaseError"]
FILES = ("pyproject.toml", "CHANGELOG.md", "server/rocserve/__init__.py")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_package_and_project_have_one_version() -> None:
    assert f'__version__ = "{VERSION}"' in (ROOT / FILES[2]).read_text()


def test_a_release_has_its_version_everywhere(checkout: Path) -> None:
    log = checkout / "CHANGELOG.md"
    log.write_text(f"# Changelog\n\n## {VERSION} - 2026-11-30\n\n### Added\n- All.\n")
    assert release(checkout) == release(checkout, f"v{VERSION}") == VERSION
    with pytest.raises(ReleaseError, match=f"expected the tag v{VERSION}, got v9"):
        release(checkout, "v9")


@pytest.mark.parametrize("heading", ["Unreleased", f"{VERSION}", "0.0.1 - 2026-01-01"])
def test_the_change_log_begins_with_the_release(checkout: Path, heading: str) -> None:
    (checkout / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n## {VERSION} - 2026-11-30\n")
    with pytest.raises(ReleaseError, match=r"first in CHANGELOG\.md, got"):
        release(checkout)


def test_the_package_has_the_projects_version(checkout: Path) -> None:
    (checkout / FILES[2]).write_text('__version__ = "0.0.0"\n')
    with pytest.raises(ReleaseError, match=r"as in pyproject\.toml"):
        release(checkout)
