"""An engine whose programs the tests of a file share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs_here import run_here
from support.migraphx_engine import Engine

from rocserve.jobs.runner import JobRunner

RUN = JobRunner.run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def engine(tmp_path: Path, cache: Path) -> Engine:
    """An engine with the shared cache: programs of earlier tests are neither compiled nor tried again."""
    return Engine(tmp_path, cache)


@pytest.fixture
def jobs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles and checks run in the test's process. Those of test_compiler.py, and of all servers, have children."""
    monkeypatch.setattr(JobRunner, "run", run_here)


@pytest.fixture
def jobs_in_children(jobs_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test whose subject is a child, in a file with `jobs_here`."""
    monkeypatch.setattr(JobRunner, "run", RUN)
