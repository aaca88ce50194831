"""CI's count of what failed decides whether it asks once more; its count of skips, whether it passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci" / "reports.py"
CASE = '<testcase classname="{}" name="{}">{}</testcase>'
NO_SERVER = '<error message="failed on setup with &quot;AssertionError: the server did not start&quot;">...</error>'
NO_STORE = '<error message="failed on setup with &quot;AssertionError: no store&quot;">...</error>'
LATE = '<error message="failed on teardown with &quot;ValueError: late&quot;">...</error>'
WRONG = '<failure message="assert 0">...</failure>'
NO_RAY = '<skipped message="no Ray here: it comes by make cluster-tools"/>'


def report(file: Path, *cases: tuple[str, str, str]) -> str:
    body = "".join(CASE.format(*case) for case in cases)
    file.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    return str(file)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], check=False, capture_output=True, text=True)


def test_a_set_up_that_fails_for_all_tests_of_a_file_counts_once(tmp_path: Path) -> None:
    first = report(
        tmp_path / "1.xml",
        *(("tests.e2e.test_http", f"test_{number}", NO_SERVER) for number in range(40)),
        ("tests.e2e.test_http", "test_right", ""),
        ("tests.e2e.test_log", "test_1", NO_SERVER),
    )
    assert run("--faults", "--reports", first).stdout == "2\n"
    second = report(
        tmp_path / "2.xml",
        ("tests.e2e.test_http", "test_41", NO_STORE),
        ("tests.e2e.test_log", "test_2", WRONG),
        ("tests.e2e.test_log", "test_3", WRONG),
        # Both of one test.
        ("tests.e2e.test_log", "test_3", LATE),
        ("tests.e2e.test_log", "test_4", LATE),
        ("tests.e2e.test_log", "test_5", NO_RAY),
    )
    assert run("--faults", "--reports", first, second).stdout == "6\n"


def test_skips_that_nothing_excuses_fail(tmp_path: Path) -> None:
    file = report(tmp_path / "1.xml", ("tests.e2e.test_ray", "test_1", NO_RAY))
    assert run("--allowed", "0", "--reports", file).returncode == 1
    assert run("--allowed", "1", "--reports", file).returncode == 0
    excused = run("--allowed", "0", "--excused", "no Ray here", "--reports", file)
    assert (excused.returncode, excused.stdout.splitlines()[-1]) == (0, "0 skipped, 0 allowed")
