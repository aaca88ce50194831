"""A real server process a test, and one that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.server import RocserveProcess

SAMPLE_REPOSITORY = Path(__file__).parents[2] / "model_repository"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., RocserveProcess]]:
    """Start a server on repositories with further flags; it is ended with the test."""
    with ExitStack() as running:
        count = 0

        def start(*repositories: Path, flags: tuple[str, ...] = ()) -> RocserveProcess:
            nonlocal count
            count += 1
            return running.enter_context(RocserveProcess(repositories, *flags, log=tmp_path / f"server-{count}.log"))

        yield start


@pytest.fixture(scope="module")
def rocserve_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """One server on the sample repository, for tests that change nothing."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with RocserveProcess([SAMPLE_REPOSITORY], log=log) as server:
        server.wait_until_ready()
        yield server
