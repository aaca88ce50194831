"""Jobs in children, which end in every way in which a process can end."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.migraphx_jobs import StrangeJob, StrangeResult
from support.processes import has_ended
from support.waiting import PATIENCE_SECONDS, wait_until
from support.workers import open_descriptors

from rocserve.backends.migraphx.compiling.child_process import migraphx_jobs
from rocserve.backends.migraphx.installation import find_installation
from rocserve.core.errors import StatusCode
from rocserve.jobs import runner as jobs_runner
from rocserve.jobs.messages import JobError
from rocserve.jobs.runner import JobRunner, JobWatch
from rocserve.settings import EngineSettings

pytestmark = pytest.mark.long

TESTS = Path(__file__).parents[3]
PYTHONPATH = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
"""The children import this checkout, whichever version is installed."""
LOG = logging.getLogger("test.jobs")


class Jobs:
    """A runner, and its reports."""

    def __init__(self, root: Path) -> None:
        self.reports: list[str] = []
        self.reported = threading.Condition()
        installation = find_installation(EngineSettings(migraphx_root=str(root)))
        self.runner = JobRunner(migraphx_jobs(installation), self._take, LOG)

    def run(self, action: str, argument: str = "", **options: Any) -> str:
        environment = {"PYTHONPATH": PYTHONPATH, **options.pop("environment", {})}
        options = {"timeout_seconds": PATIENCE_SECONDS, **options}
        return self.runner.run(StrangeJob(action, argument), StrangeResult, environment=environment, **options).text

    def error(self, action: str, argument: str = "", **options: Any) -> JobError:
        with pytest.raises(JobError) as caught:
            self.run(action, argument, **options)
        return caught.value

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for the first report that matches."""
        with self.reported:
            found: list[re.Match[str]] = []

            def fits() -> bool:
                found.extend(match for text in self.reports if (match := re.search(pattern, text)))
                return bool(found)

            assert self.reported.wait_for(fits, PATIENCE_SECONDS), self.reports
            return found[0]

    def _take(self, text: str) -> None:
        with self.reported:
            self.reports.append(text)
            self.reported.notify_all()


@pytest.fixture
def jobs(migraphx_root: Path) -> Jobs:
    return Jobs(migraphx_root)


@pytest.fixture
def hanging(jobs: Jobs) -> Iterator[Callable[..., threading.Thread]]:
    """Start a job that hangs, on a thread; return the child, the child's own child, and the future error."""
    threads: list[threading.Thread] = []

    def start(**options: Any) -> tuple[psutil.Process, psutil.Process, list[JobError]]:
        errors: list[JobError] = []
        thread = threading.Thread(target=lambda: errors.append(jobs.error("hang", **options)))
        thread.start()
        threads.append(thread)
        pids = jobs.wait_for(r"hanging as (\d+) with (\d+)").groups()
        child, started = (psutil.Process(int(pid)) for pid in pids)
        return child, started, errors

    yield start
    jobs.runner.call_off()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_a_job_is_done_in_a_process_of_its_own(jobs: Jobs) -> None:
    done = re.fullmatch(r"hello by (c_api|module) in (\d+)", jobs.run("echo", "hello"))
    assert done
    assert int(done[2]) != os.getpid()
    assert jobs.reports[-1].startswith("doing echo: beginning")


@pytest.mark.parametrize(
    ("action", "argument", "code", "is_crash", "text"),
    [
        pytest.param(
            "refuse",
            "parse_graph: Unknown operator: MyFancyOp",
            StatusCode.UNAVAILABLE,
            False,
            "doing refuse failed while beginning: MIGraphX says: parse_graph: Unknown operator: MyFancyOp; this"
            " MIGraphX does not know the operator: ",
            id="MIGraphX",
        ),
        pytest.param(
            "refuse by itself",
            "the shape is wrong",
            StatusCode.INVALID_ARGUMENT,
            False,
            "doing refuse by itself failed while beginning: the shape is wrong",
            id="check",
        ),
        pytest.param(
            "fail", "key", StatusCode.INTERNAL, False, "doing fail failed while beginning: KeyError: 'key'", id="bug"
        ),
        pytest.param(
            "abort",
            "first\nassertion failed: x\x1b[31m\x1b[2J > 0\n",
            StatusCode.UNAVAILABLE,
            True,
            "doing abort failed while beginning: MIGraphX ended by signal 6 (SIGABRT): first; assertion failed:"
            " x\\x1b[2J > 0",
            id="abort",
        ),
        pytest.param(
            "crash",
            "",
            StatusCode.UNAVAILABLE,
            True,
            "doing crash failed while beginning: MIGraphX ended by signal 11 (SIGSEGV) without a message",
            id="segmentation fault",
        ),
        pytest.param(
            "exit",
            "3",
            StatusCode.UNAVAILABLE,
            True,
            "doing exit failed while beginning: the process ended with exit status 3: going",
            id="exit",
        ),
    ],
)
def test_says_how_a_job_failed(
    jobs: Jobs, action: str, argument: str, code: StatusCode, is_crash: bool, text: str
) -> None:
    error = jobs.error(action, argument)
    assert error.text.startswith(text)
    assert (error.code, error.is_crash) == (code, is_crash)


def test_says_how_much_memory_a_killed_job_had(jobs: Jobs, tmp_path: Path) -> None:
    def answer(report: str) -> None:
        for phase in ("one", "another"):
            if f": {phase}" in report:
                (tmp_path / phase).touch()

    error = jobs.error("kill itself", str(tmp_path), report=answer)
    begin = "doing kill itself failed while another: it was killed by signal 9 (SIGKILL) from outside (it had "
    assert error.text.startswith(begin)
    assert (error.code, error.is_crash) == (StatusCode.UNAVAILABLE, False)


def test_a_process_that_cannot_load_migraphx_says_nothing_about_the_job(migraphx_root: Path, tmp_path: Path) -> None:
    library = tmp_path / "libmigraphx_c.so.3"
    library.write_bytes(b"no library")
    found = find_installation(EngineSettings(migraphx_root=str(migraphx_root)))
    runner = JobRunner(migraphx_jobs(replace(found, library=str(library))), lambda text: None, LOG)
    with pytest.raises(JobError) as caught:
        runner.run(
            StrangeJob("echo"), StrangeResult, timeout_seconds=PATIENCE_SECONDS, environment={"PYTHONPATH": PYTHONPATH}
        )
    assert caught.value.text.startswith("doing echo failed while starting: MIGraphX cannot be loaded: ")
    assert str(library) in caught.value.text


def test_an_interpreter_that_cannot_be_started_says_nothing_about_the_job(migraphx_root: Path, tmp_path: Path) -> None:
    found = find_installation(EngineSettings(migraphx_root=str(migraphx_root)))
    missing = str(tmp_path / "loader")
    runner = JobRunner(migraphx_jobs(replace(found, loader=(missing,))), lambda text: None, LOG)
    with pytest.raises(JobError) as caught:
        runner.run(StrangeJob("echo"), StrangeResult, timeout_seconds=PATIENCE_SECONDS)
    assert not caught.value.is_crash
    assert caught.value.text == (
        f"doing echo failed: no process could be started: [Errno 2] No such file or directory: '{missing}'"
    )
    broken = JobRunner(migraphx_jobs(replace(found, loader=("/bin/false",))), lambda text: None, LOG)
    with pytest.raises(JobError) as caught:
        broken.run(StrangeJob("echo"), StrangeResult, timeout_seconds=PATIENCE_SECONDS)
    assert not caught.value.is_crash
    assert (
        caught.value.text == "doing echo failed while starting: the process ended with exit status 1 without a message"
    )


def test_what_the_child_writes_goes_to_the_log_also_without_an_end_of_line(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOG.name):
        jobs.run("write", "[WARNING]: of another version\nhalf a line")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "doing write: [WARNING]: of another version"),
        ("INFO", "doing write: half a line"),
    ]


def test_a_flood_of_words_is_cut_in_the_log(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOG.name):
        jobs.run("write", "line\n" * 2000)
    assert len(caplog.records) == 500
    assert caplog.records[-1].message == "doing write: writes too much; the rest is dropped"


class Clock:
    """Time that only the test moves."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_child_that_hangs_is_killed_at_its_limit_also_where_it_is_stopped(
    hanging: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(jobs_runner, "JobWatch", partial(JobWatch, clock=clock))
    child, started, errors = hanging(timeout_seconds=5.0, remedy="wait")
    child.suspend()
    clock.seconds = 5.0
    wait_until(lambda: has_ended(child.pid) and has_ended(started.pid), "the end of both")
    wait_until(lambda: errors, "the error")
    (error,) = errors
    assert not error.is_crash
    assert error.text == (
        "doing hang took longer than compile_timeout_secs (5 s) and was stopped while hanging as"
        f" {child.pid} with {started.pid}; raise compile_timeout_secs (0 = no limit), or wait"
    )


def test_without_a_limit_a_child_is_let_be_until_it_is_called_off(jobs: Jobs, hanging: Callable[..., Any]) -> None:
    child, started, errors = hanging(timeout_seconds=0.0)
    assert child.is_running()
    jobs.runner.call_off()
    wait_until(lambda: has_ended(child.pid) and has_ended(started.pid), "the end of both")
    wait_until(lambda: errors, "the error")
    (error,) = errors
    assert (error.is_crash, error.code, error.text) == (False, StatusCode.CANCELLED, "doing hang was called off")
    assert jobs.error("echo").text == "doing echo was called off"


def test_the_child_and_what_it_started_end_with_their_parent(migraphx_root: Path) -> None:
    script = (
        "import sys, logging; from pathlib import Path\n"
        "from support.migraphx_jobs import *\n"
        "from rocserve.backends.migraphx.installation import find_installation\n"
        "from rocserve.jobs.runner import JobRunner\n"
        "from rocserve.backends.migraphx.compiling.child_process import migraphx_jobs\n"
        "from rocserve.settings import EngineSettings\n"
        "installation = find_installation(EngineSettings(migraphx_root=sys.argv[1]))\n"
        "runner = JobRunner(migraphx_jobs(installation), lambda text: print(text, flush=True), logging.getLogger())\n"
        "runner.run(StrangeJob('hang'), StrangeResult, timeout_seconds=0)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(migraphx_root)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout as output:
        found = next(filter(None, (re.search(r"hanging as (\d+) with (\d+)", line) for line in output)))
        child, started = (psutil.Process(int(pid)) for pid in found.groups())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(PATIENCE_SECONDS)
    wait_until(lambda: has_ended(child.pid) and has_ended(started.pid), "the end of both")


def test_what_a_job_leaves_behind_ends_with_it(jobs: Jobs) -> None:
    pid = int(jobs.run("leave behind"))
    wait_until(lambda: has_ended(pid), "its end")


def test_the_child_has_none_of_its_parents_descriptors(jobs: Jobs, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    descriptor = os.open(secret, os.O_RDWR | os.O_CREAT)
    try:
        os.set_inheritable(descriptor, True)
        opened = jobs.run("descriptors").split()
    finally:
        os.close(descriptor)
    assert str(secret) not in opened
    assert not [name for name in opened if name.startswith("socket:")]


def test_low_priority_is_that_of_all_threads(jobs: Jobs) -> None:
    assert jobs.run("priority").startswith(f"nice [{os.nice(0)}], ")
    assert jobs.run("priority", low_priority=True) == "nice [19], idle"


def test_the_child_has_what_is_set_for_it_and_the_parents_environment(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert jobs.run("environment", "HIP_VISIBLE_DEVICES") == "3"
    assert jobs.run("environment", "MIOPEN_FIND_ENFORCE", environment={"MIOPEN_FIND_ENFORCE": "3"}) == "3"


def test_what_the_child_leaves_among_the_temporary_files_goes_with_it(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "rocserve-job-of-a-killed-process").mkdir()
    text = jobs.error("dump", "no room for").text
    dump = re.search(r"no room for (\S+)/migraphx/lowering1.mxr", text)
    assert dump, text
    assert Path(dump[1]).parent == tmp_path
    assert not [*tmp_path.iterdir()]


def test_migraphx_logs_errors_only_unless_asked(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIGRAPHX_LOG_LEVEL", raising=False)
    assert jobs.run("environment", "MIGRAPHX_LOG_LEVEL") == "1"
    monkeypatch.setenv("MIGRAPHX_LOG_LEVEL", "4")
    assert jobs.run("environment", "MIGRAPHX_LOG_LEVEL") == "4"


def test_the_child_has_a_name_and_leaves_no_core(jobs: Jobs) -> None:
    assert jobs.run("limits") == "core 0, rocserve:migrap"


def test_modules_of_the_working_directory_are_not_taken_for_pythons_own(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert jobs.run("echo", "hello").startswith("hello")


def test_no_descriptors_are_left_open(jobs: Jobs) -> None:
    jobs.run("echo")
    before = open_descriptors()
    jobs.run("echo")
    jobs.error("abort", "x")
    assert open_descriptors() <= before
