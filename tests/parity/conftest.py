"""Triton, recorded or running (`--triton`), and rocserve next to it, started once for most tests here. The tests skip
if a running Triton is wanted and cannot be installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from support.parity.counting import Comparisons
from support.parity.differences import DELIBERATE_DIFFERENCES, Difference
from support.parity.models import write_models
from support.parity.pair import Pair, Paired, Servers, running_servers
from support.parity.recorded import ANSWERS, RecordedTriton

from benchmarks.environments import PeerUnavailable
from benchmarks.triton_peer import TritonPeer, default_cache_folder, provision

NO_TRITON = "no Triton here"
FLAGS = ("--load-model=*", "--cache-config=local,size=4194304")


@pytest.fixture(scope="session")
def peer(pytestconfig: pytest.Config) -> TritonPeer | None:
    """The Triton to compare with, installed by pip if it is missing; None if recorded answers replace it."""
    if pytestconfig.getoption("triton") == "recorded":
        return None
    try:
        return provision(default_cache_folder())
    except PeerUnavailable as error:
        pytest.skip(f"{NO_TRITON}: {error}")


@pytest.fixture(scope="session")
def servers(peer: TritonPeer | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Both servers on the models of `support.parity.models`."""
    folder = tmp_path_factory.mktemp("parity")
    models, scratch = folder / "models", folder / "scratch"
    models.mkdir()
    scratch.mkdir()
    write_models(models)
    with running_servers(peer, [models, scratch], folder, FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def paired(request: pytest.FixtureRequest, comparisons: Comparisons) -> Paired:
    """Makes the pair of a test module. The module's recorded answers are in the file of its name."""
    file = ANSWERS / f"{request.path.stem.removeprefix('test_')}.json"
    records = request.config.getoption("triton") == "record"

    @contextmanager
    def pair(servers: Servers, differences: Sequence[Difference]) -> Iterator[Pair]:
        recorded = RecordedTriton(file, servers.folder, records)
        yield Pair(servers, recorded, comparisons, differences)
        if records:
            recorded.write()

    return pair


@pytest.fixture(scope="module")
def pair(servers: Servers, paired: Paired) -> Iterator[Pair]:
    """The pair of a module that needs no special servers."""
    with paired(servers, DELIBERATE_DIFFERENCES) as pair:
        yield pair
