"""The command that the tests of its verbs run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.jobs_here import run_here
from support.migraphx import MARK
from support.tools import Command

from rocserve.backends.migraphx.compiling.probe_jobs import LibraryJob, LibraryResult
from rocserve.jobs.runner import JobEngine, JobRunner
from rocserve.verbs import tool_context


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "cache", capsys)


@pytest.fixture(scope="session")
def libraries() -> dict[JobEngine, LibraryResult]:
    """What each installation of MIGraphX has said of itself."""
    return {}


@pytest.fixture(autouse=True)
def _few_processes(
    request: pytest.FixtureRequest, libraries: dict[JobEngine, LibraryResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of fifty commands would start a process that loads MIGraphX and its targets, for the same answer. In a test
    that runs where MIGraphX is, all jobs run in its process."""
    if request.node.get_closest_marker(MARK):
        monkeypatch.setattr(JobRunner, "run", run_here)

    class Runner(JobRunner):
        def run(self, job: Any, *others: Any, **more: Any) -> Any:
            if not isinstance(job, LibraryJob):
                return super().run(job, *others, **more)
            if self._engine not in libraries:
                libraries[self._engine] = super().run(job, *others, **more)
            return libraries[self._engine]

    monkeypatch.setattr(tool_context, "JobRunner", Runner)
