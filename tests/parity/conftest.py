"""A real Triton and rocserve beside it, started once for all tests here, which skip where Triton cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.parity.counting import Comparisons
from support.parity.differences import DELIBERATE_DIFFERENCES
from support.parity.models import write_models
from support.parity.pair import Pair, running_pair

from benchmarks.triton_peer import TritonPeer, TritonUnavailable, default_cache_folder, provision

NO_TRITON = "no Triton here"
PROVISION_SECONDS = 900
FLAGS = ("--load-model=*", "--cache-config=local,size=4194304")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The first test waits until pip has brought Triton and both servers have loaded all models.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(PROVISION_SECONDS))


@pytest.fixture(scope="session")
def triton_peer() -> TritonPeer:
    """An installed Triton; it is brought by pip when it is not there."""
    try:
        return provision(default_cache_folder())
    except TritonUnavailable as error:
        pytest.skip(f"{NO_TRITON}: {error}")


@pytest.fixture(scope="session")
def pair(triton_peer: TritonPeer, comparisons: Comparisons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both servers on the models of `support.parity.models`."""
    folder = tmp_path_factory.mktemp("parity")
    models, scratch = folder / "models", folder / "scratch"
    models.mkdir()
    scratch.mkdir()
    write_models(models)
    with running_pair(triton_peer, [models, scratch], folder, comparisons, DELIBERATE_DIFFERENCES, FLAGS) as running:
        yield running
