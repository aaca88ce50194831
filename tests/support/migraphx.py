"""Runs tests on the real MIGraphX that `make migraphx-root` installs. A pytest plugin, which tests/conftest.py loads.

MIGraphX needs a newer C library than the tests' interpreter has, so it runs in separate processes:
- a test that starts such processes (servers, workers, children) takes the fixture `migraphx_root`;
- a test that calls MIGraphX itself has `pytestmark = pytest.mark.in_migraphx_process`: it is collected and reported
  here as any other test, but runs in a pytest under the root's loader (one process for a group of files, and another
  one after a crash);
- `run_with_migraphx` runs a Python text there.
All of them skip if there is no root.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

from support.waiting import PATIENCE_SECONDS

CHECKOUT = Path(__file__).parents[2]
MARK = "in_migraphx_process"
NO_ROOT = "no MIGraphX here: run make migraphx-root"

_END_SECONDS = 60
"""Time for what pytest does after its last report: it also removes old temporary folders of other runs."""
REPORTS = "ROCSERVE_TEST_REPORTS"
"""In a pytest under the root's loader: the descriptor to which it writes its reports."""


def find_root() -> Path | None:
    """$ROCSERVE_MIGRAPHX_ROOT, or .migraphx-root/ of the checkout."""
    named = os.environ.get("ROCSERVE_MIGRAPHX_ROOT")
    root = Path(named) if named else CHECKOUT / ".migraphx-root"
    return root if (root / "usr/lib/x86_64-linux-gnu/libmigraphx_c.so.3").exists() else None


def python_words(root: Path) -> list[str]:
    """The words that start this interpreter with the root's C library."""
    libraries = root / "usr/lib/x86_64-linux-gnu"
    loader = libraries / "ld-linux-x86-64.so.2"
    return [str(loader), "--library-path", f"{libraries}:{libraries}/migraphx/lib", sys.executable]


def run_with_migraphx(
    root: Path,
    script: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    error_descriptor: int = subprocess.PIPE,
    timeout: float = PATIENCE_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run the script (Python text, with the arguments as sys.argv[1:]) in a process that can load MIGraphX."""
    return subprocess.run(
        [*python_words(root), "-c", script, *arguments],
        env={**os.environ, "ROCSERVE_MIGRAPHX_ROOT": str(root), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=error_descriptor,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="session")
def migraphx_root() -> Path:
    """The folder that $ROCSERVE_MIGRAPHX_ROOT and --migraphx-root take. Skips if there is none."""
    root = find_root()
    if root is None:
        pytest.skip(NO_ROOT)
    return root.resolve()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: the test calls MIGraphX; it runs in a process that can load it")
    descriptor = os.environ.get(REPORTS)
    config.pluginmanager.register(ReportWriter(config, int(descriptor)) if descriptor else ChildRuns(config))


class ReportWriter:
    """In the pytest under the root's loader: sends each report to the parent pytest, as a line of JSON."""

    def __init__(self, config: pytest.Config, descriptor: int) -> None:
        self._config = config
        self._stream = os.fdopen(descriptor, "w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write({"report": self._config.hook.pytest_report_to_serializable(config=self._config, report=report)})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write({"ends": nodeid})

    def _write(self, message: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(message, default=str) + "\n")
        self._stream.flush()


class ChildRuns:
    """In the parent pytest: lets the pytest under the root's loader run marked tests, and passes on their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._root = find_root()
        self._waiting: list[pytest.Item] = []
        self._child: ChildPytest | None = None

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if self._root is None and item.get_closest_marker(MARK):
                item.add_marker(pytest.mark.skip(reason=NO_ROOT))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._waiting = [item for item in session.items if item.get_closest_marker(MARK)]

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if self._root is None or not item.get_closest_marker(MARK):
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(self._root, item):
            hook.pytest_runtest_logreport(report=report)
        # Ends the module fixtures of earlier tests here as well, if the next test is of another module.
        item.session._setupstate.teardown_exact(nextitem)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        if self._child is not None:
            self._child.end()

    def _reports(self, root: Path, item: pytest.Item) -> list[pytest.TestReport]:
        if self._child is None:
            # Collect this group only: another process may run the others, and nobody would read their reports here.
            left = self._waiting[self._waiting.index(item) :]
            here = [test.nodeid for test in left if group_of(test) == group_of(item)]
            self._child = ChildPytest(root, here, self._config.rootpath)
        try:
            received, complete = self._child.reports(item.nodeid)
            end = "" if complete else self._child.end()
        except pytest.fail.Exception as timeout:
            received, end = [], f"{timeout}\n{self._child.end()}"
        reports = [self._report(data) for data in received]
        if end:
            self._child = None
            reports.append(failure(item, f"in the process with MIGraphX: {end}"))
        elif self._child.is_done:
            # If it lived until the session's end, tests of processes would find an unexpected child.
            self._child.end()
            self._child = None
        return reports

    def _report(self, data: dict[str, Any]) -> pytest.TestReport:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        if report.skipped and isinstance(report.longrepr, list):
            report.longrepr = tuple(report.longrepr)  # JSON knows no tuples
        return report


class ChildPytest:
    """A pytest under the root's loader, on the given tests in their order."""

    def __init__(self, root: Path, tests: Sequence[str], folder: Path) -> None:
        reading, writing = os.pipe()
        environment = {**os.environ, REPORTS: str(writing), "ROCSERVE_MIGRAPHX_ROOT": str(root)}
        environment.pop("PYTEST_ADDOPTS", None)
        # A test that hangs ends there first, which tells where.
        options = ["-q", "--color=no", "-p", "no:cacheprovider", "--timeout=500"]
        self._output = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(
            [*python_words(root), "-m", "pytest", *options, *tests],
            cwd=folder,
            env=environment,
            pass_fds=[writing],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        os.close(writing)
        self._messages: IO[str] = os.fdopen(reading)
        self._received: dict[str, list[dict[str, Any]]] = {}
        self._missing = set(tests)

    def reports(self, test: str) -> tuple[list[dict[str, Any]], bool]:
        """Wait for the end of a test; return its reports, and whether it came to its end."""
        while test in self._missing:
            line = self._messages.readline()
            if not line:
                return self._received.pop(test, []), False
            message = json.loads(line)
            if "report" in message:
                self._received.setdefault(message["report"]["nodeid"], []).append(message["report"])
            self._missing.discard(message.get("ends"))
        return self._received.pop(test, []), True

    @property
    def is_done(self) -> bool:
        """Whether all tests have run."""
        return not self._missing

    def end(self) -> str:
        """End the pytest; return how it ended. It is killed: immediately if tests are left, else if it does not end
        within `_END_SECONDS`."""
        if not self._missing:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        self._process.kill()
        status = self._process.wait()
        self._messages.close()
        with self._output as output:
            output.seek(0)
            text = output.read()
        cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"{cause}; its last words:\n{text[-4000:]}"


def group_of(item: pytest.Item) -> str:
    """The group of files that one process runs one after another; tests/conftest.py marks all tests with theirs."""
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    return str(mark.args[0])


def failure(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, "call")
