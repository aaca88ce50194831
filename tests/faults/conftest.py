"""Fixtures for servers under load whose repository changes and whose processes fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.server import RocserveProcess


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., RocserveProcess]]:
    """Start a server on a repository with further flags; it ends with the test."""
    with ExitStack() as running:

        def start(repository: Path, *flags: str) -> RocserveProcess:
            server = running.enter_context(RocserveProcess([repository], *flags, log=tmp_path / "server.log"))
            server.wait_until_ready()
            return server

        yield start
