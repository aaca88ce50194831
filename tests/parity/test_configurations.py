"""What both servers make of configurations, good ones and bad ones, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.parity.bad_configurations import bad_configurations
from support.parity.configuration_differences import CONFIGURATION_DIFFERENCES
from support.parity.configurations import Configuration, IndexRows, described, dropped
from support.parity.exchange import Exchange
from support.parity.good_configurations import good_configurations
from support.parity.models import ParityModel, parity_models, python, tensor, write_model
from support.parity.pair import Pair, Paired, running_servers

from benchmarks.triton_peer import TritonPeer

MEMBERS = ("add_sub", "add_sub_whole")
"""Of the comparisons' models, those that the ensembles here are made of."""
FLOATS = ParityModel(
    "floats",
    python(tensor("input", "INPUT_FP32", "FP32", [-1]) + tensor("output", "OUTPUT_FP32", "FP32", [-1])),
    "identity",
)


@pytest.fixture(scope="module")
def members(
    request: pytest.FixtureRequest,
    peer: TritonPeer | None,
    paired: Paired,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Both servers on what the ensembles here need, so that the index holds little else."""
    folder = tmp_path_factory.mktemp("configurations")
    models, scratch = folder / "models", folder / "scratch"
    models.mkdir()
    scratch.mkdir()
    for model in (*(model for model in parity_models() if model.name in MEMBERS), FLOATS):
        write_model(models, model)
    with (
        running_servers(peer, [models, scratch], folder, ["--load-model=*"]) as servers,
        paired(servers, CONFIGURATION_DIFFERENCES) as running,
    ):
        here = [
            item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)
        ]
        wanted = [item.callspec.params["configuration"] for item in here]
        with running.asking_ahead(*([exchange_of(configuration, scratch)] for configuration in wanted)):
            yield running


def exchange_of(configuration: Configuration, scratch: Path) -> Exchange:
    is_bad = bool(configuration.group)
    asked = [IndexRows(configuration.name)] if is_bad else described(configuration.name)
    return dropped(configuration, scratch, asked)


@pytest.mark.parametrize("configuration", bad_configurations(), ids=lambda configuration: configuration.name)
def test_bad_configurations(members: Pair, configuration: Configuration) -> None:
    members.compare(exchange_of(configuration, members.scratch), configuration.name)


@pytest.mark.parametrize("configuration", good_configurations(), ids=lambda configuration: configuration.name)
def test_good_configurations(members: Pair, configuration: Configuration) -> None:
    members.compare(exchange_of(configuration, members.scratch), configuration.name)
