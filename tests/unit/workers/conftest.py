"""Real workers for tests: a zygote, the data plane's loop, groups with the engines in `engines`. The tests of a file
share an event loop and a zygote."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from support.instance_peer import Peer
from support.request_models import RequestModels
from support.workers import LOG, OwnChildren, Workshop

from rocserve.plane.loop import PlaneLoop
from rocserve.workers.launcher import WorkerLauncher

ENGINES = Path(__file__).with_name("engines")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINES.parent in item.path.parents and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture(autouse=True, scope="module")
def _engines_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ENGINES))
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def launcher(_engines_on_path: None) -> AsyncIterator[WorkerLauncher]:
    launcher = WorkerLauncher(("numpy",), LOG)
    launcher.start()
    yield launcher
    await launcher.close()


@pytest.fixture(autouse=True)
def own_children() -> OwnChildren:
    """The processes that the test itself has started, without servers and a zygote that stay for other tests."""
    bystanders = {child.pid for child in psutil.Process().children(recursive=True)}

    def find() -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child.pid not in bystanders]

    return find


@pytest_asyncio.fixture(loop_scope="module")
async def workshop(plane: PlaneLoop, launcher: WorkerLauncher, tmp_path: Path) -> AsyncIterator[Workshop]:
    workshop = Workshop(plane, launcher, tmp_path)
    yield workshop
    await workshop.close()
    if launcher.zygote is None:
        launcher.start()  # The next test's own children are without it.


@pytest_asyncio.fixture(loop_scope="module")
async def models(plane: PlaneLoop, launcher: WorkerLauncher, tmp_path: Path) -> AsyncIterator[RequestModels]:
    models = RequestModels(plane, launcher, tmp_path)
    yield models
    await models.close()


@pytest.fixture
def peer(plane: PlaneLoop) -> Iterator[Peer]:
    peer = Peer(plane)
    yield peer
    peer.end()
