"""CI's count of skips decides whether it passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci" / "reports.py"
CASE = '<testcase classname="{}" name="{}">{}</testcase>'
NO_RAY = '<skipped message="no Ray here: it comes by make cluster-tools"/>'


def report(file: Path, *cases: tuple[str, str, str]) -> str:
    body = "".join(CASE.format(*case) for case in cases)
    file.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    return str(file)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], check=False, capture_output=True, text=True)


def test_skips_that_nothing_excuses_fail(tmp_path: Path) -> None:
    file = report(tmp_path / "1.xml", ("tests.e2e.test_ray", "test_1", NO_RAY))
    assert run("--allowed", "0", "--reports", file).returncode == 1
    assert run("--allowed", "1", "--reports", file).returncode == 0
    excused = run("--allowed", "0", "--excused", "no Ray here", "--reports", file)
    assert (excused.returncode, excused.stdout.splitlines()[-1]) == (0, "0 skipped, 0 allowed")
