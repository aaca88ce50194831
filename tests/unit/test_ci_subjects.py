"""The check of commits' subjects, as the hook and CI run it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "subjects.py"


def of_message(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    message = folder / "COMMIT_EDITMSG"
    message.write_text(text)
    return subprocess.run([sys.executable, str(SCRIPT), str(message)], check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    "message",
    [
        "docs: shorten the page of flags\n\nIt had 4,000 words.\n",
        "bench, tune: draw curves whose labels do not overlap",
        "CHANGELOG: name the flags that are new",
        "frontends/http: embed the page's icons",
        "\n# Please enter the message\ncache: re-read digests of changed files",
        "fixup! anything",
        'Revert "Anything at all"',
        "Merge branch 'main' into docs",
    ],
)
def test_good_subjects_pass(tmp_path: Path, message: str) -> None:
    assert of_message(tmp_path, message).returncode == 0


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Shorten the page of flags", "expected 'area: imperative verb ...'"),
        ("docs: Shorten the page", "expected 'area: imperative verb ...'"),
        ("docs: shorten the page.", "expected 'area: imperative verb ...'"),
        ("docs: shorten", "expected 'area: imperative verb ...'"),
        ("docs: the page of flags is short", "got 'the'"),
        ("docs: shortening pages", "got 'shortening'"),
        ("docs: added a page", "got 'added'"),
        ("docs: shorten " + "x" * 59, "at most 72 characters, got 73"),
        ("", "expected 'area: imperative verb ...'"),
    ],
)
def test_others_are_refused_with_the_reason(tmp_path: Path, subject: str, fault: str) -> None:
    ran = of_message(tmp_path, subject + "\n")
    assert ran.returncode == 1
    assert fault in ran.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_history_without_the_base_is_not_checked(tmp_path: Path) -> None:
    for command in (["init"], ["commit", "--allow-empty", "--message=An old subject"]):
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *author, *command], check=True, cwd=tmp_path, capture_output=True)
    ran = subprocess.run([sys.executable, str(SCRIPT)], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0
    assert "fetch it to check the subjects after it" in ran.stdout
