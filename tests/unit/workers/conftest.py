"""Real workers for tests: a zygote, the data plane's loop, groups with the engines in `engines`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.instance_peer import Peer
from support.request_models import RequestModels
from support.workers import LOG, Workshop

from rocserve.plane.loop import PlaneLoop
from rocserve.workers.launcher import WorkerLauncher


@pytest.fixture(autouse=True)
def _engines_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("engines")))


@pytest.fixture(autouse=True)
def own_children() -> Callable[[], list[psutil.Process]]:
    """The processes that the test itself has started, without servers that stay for other tests."""
    bystanders = {child.pid for child in psutil.Process().children()}

    def find() -> list[psutil.Process]:
        direct = [child for child in psutil.Process().children() if child.pid not in bystanders]
        return [process for child in direct for process in (child, *child.children(recursive=True))]

    return find


@pytest.fixture
async def launcher() -> AsyncIterator[WorkerLauncher]:
    launcher = WorkerLauncher(("numpy",), LOG)
    launcher.start()
    yield launcher
    await launcher.close()


@pytest.fixture
async def workshop(plane: PlaneLoop, launcher: WorkerLauncher, tmp_path: Path) -> AsyncIterator[Workshop]:
    workshop = Workshop(plane, launcher, tmp_path)
    yield workshop
    await workshop.close()


@pytest.fixture
async def models(plane: PlaneLoop, launcher: WorkerLauncher, tmp_path: Path) -> AsyncIterator[RequestModels]:
    models = RequestModels(plane, launcher, tmp_path)
    yield models
    await models.close()


@pytest.fixture
def peer(plane: PlaneLoop) -> Iterator[Peer]:
    peer = Peer(plane)
    yield peer
    peer.end()
