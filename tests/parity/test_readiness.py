"""Server readiness. A separate pair, because one failed load changes readiness for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.parity.differences import DELIBERATE_DIFFERENCES
from support.parity.exchange import Call, Exchange, HttpCall
from support.parity.models import ParityModel, add_sub_tensors, python, write_model
from support.parity.pair import Pair, Paired, running_servers
from support.parity.repository import Index, load, unload

from benchmarks.triton_peer import TritonPeer

ADD_SUB = python(add_sub_tensors())
MODELS = [
    ParityModel("good", ADD_SUB, "add_sub"),
    ParityModel("again", ADD_SUB, "add_sub"),
    ParityModel("broken", ADD_SUB, "broken"),
    ParityModel("unknown", 'backend: "nothing"\n' + add_sub_tensors(), "add_sub"),
]
READY = (Call("ServerReady"), Call("/grpc.health.v1.Health/Check"), HttpCall("GET", "/v2/health/ready"))
IN_THEIR_ORDER = [
    Exchange("health of a service", [Call("/grpc.health.v1.Health/Check", b"\x0a\x1einference.GRPCInferenceService")]),
    Exchange("health of nothing known", [Call("/grpc.health.v1.Health/Check", b"\x0a\x07nowhere")]),
    Exchange("ready without models", READY),
    Exchange("ready with a model", [load("good"), *READY]),
    Exchange("ready with an unloaded model", [load("again"), unload("again"), Index(["again"]), *READY]),
    Exchange("ready after a load of nothing", [load("nowhere"), *READY]),
    Exchange("ready with a model that cannot be loaded", [load("broken"), *READY]),
    Exchange("ready when that model is unloaded", [unload("broken"), *READY]),
    Exchange("ready with an unknown backend", [load("unknown"), *READY]),
]


@pytest.fixture(scope="module")
def own_pair(peer: TritonPeer | None, paired: Paired, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("readiness")
    repository = folder / "models"
    repository.mkdir()
    for model in MODELS:
        write_model(repository, model)
    with running_servers(peer, [repository], folder) as servers, paired(servers, DELIBERATE_DIFFERENCES) as running:
        yield running


def test_readiness(own_pair: Pair) -> None:
    for exchange in IN_THEIR_ORDER:
        own_pair.compare(exchange)
