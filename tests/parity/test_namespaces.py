"""Models of one name in two repositories, and methods restricted by a header: a pair with special flags."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.parity.differences import Difference, health_bodies
from support.parity.exchange import Call, Exchange, HttpCall, Stream
from support.parity.inference import infer, raw_input
from support.parity.models import ParityModel, add_sub_tensors, ensemble, python, step, write_model
from support.parity.pair import Pair, Paired, running_servers
from support.parity.repository import Index, load, unload
from tritonclient.grpc import service_pb2 as pb

from benchmarks.triton_peer import TritonPeer

FLAGS = (
    "--model-namespacing=true",
    "--grpc-restricted-protocol=logging,trace:admin=secret",
    "--http-restricted-api=logging,trace:admin=secret",
)
INPUTS = [raw_input("INPUT0", [[1, 2, 3, 4]]), raw_input("INPUT1", [[5, 6, 7, 8]])]
MODELS = ("member", "one", "two", "same")


def chain(swapped: bool) -> str:
    """An ensemble of `member`; `swapped` distinguishes the two repositories' ensembles."""
    names = {f"INPUT{index}": f"INPUT{index}" for index in (0, 1)}
    outputs = {f"OUTPUT{index}": f"OUTPUT{1 - index if swapped else index}" for index in (0, 1)}
    return ensemble(add_sub_tensors(), step("member", names, outputs))


def asked(model: str) -> list[Call]:
    return [
        Call("ModelInfer", infer(model, *INPUTS)),
        Call("ModelInfer", infer(model, *INPUTS, version="1")),
        Call("ModelReady", pb.ModelReadyRequest(name=model)),
        Call("ModelMetadata", pb.ModelMetadataRequest(name=model)),
        Call("ModelConfig", pb.ModelConfigRequest(name=model)),
    ]


IN_THEIR_ORDER = [
    Exchange("namespaces: nothing is loaded", [Index(MODELS), Call("ModelReady", pb.ModelReadyRequest(name="member"))]),
    Exchange("namespaces: load of an ensemble", [load("one"), *asked("one"), Index(MODELS)], ordered=False),
    Exchange("namespaces: its member is in both", asked("member")),
    Exchange(
        "namespaces: over a stream and HTTP",
        [
            Stream([infer("member", *INPUTS)]),
            HttpCall("GET", "/v2/models/member"),
            HttpCall("GET", "/v2/models/member/ready"),
        ],
    ),
    Exchange("namespaces: load of the other", [load("two"), *asked("two")], ordered=False),
    Exchange("namespaces: ensembles of one name", [load("same"), *asked("same")]),
    Exchange("namespaces: unload of both", [unload("same"), Index(["same"])]),
    Exchange("namespaces: a name that is nobody's", [Call("ModelInfer", infer("nobody", *INPUTS)), load("nobody")]),
    Exchange("restricted: gRPC", [Call("LogSettings"), Call("TraceSetting"), Call("ServerLive")]),
    Exchange(
        "restricted: HTTP",
        [
            HttpCall("GET", "/v2/logging"),
            HttpCall("GET", "/v2/logging", headers={"admin": "wrong"}),
            HttpCall("GET", "/v2/trace/setting"),
            HttpCall("GET", "/v2/health/live"),
        ],
    ),
]
DIFFERENCES = (
    Difference(
        "An unknown model is NOT_FOUND, also with namespaces",
        ["namespaces: a name that is nobody's"],
        "^INVALID_ARGUMENT: Request for unknown model: 'nobody' is not found",
        "^NOT_FOUND: Request for unknown model: 'nobody' is not found",
    ),
    health_bodies(["namespaces: over a stream and HTTP", "restricted: HTTP"]),
)


@pytest.fixture(scope="module")
def own_pair(peer: TritonPeer | None, paired: Paired, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("namespaces")
    repositories = [folder / "first", folder / "second"]
    for repository, name in zip(repositories, ("one", "two"), strict=True):
        _write(repository, name)
    with running_servers(peer, repositories, folder, FLAGS) as servers, paired(servers, DIFFERENCES) as running:
        yield running


def _write(repository: Path, name: str) -> None:
    repository.mkdir()
    write_model(repository, ParityModel("member", python(add_sub_tensors()), "add_sub"))
    for own in (name, "same"):
        write_model(repository, ParityModel(own, chain(name == "two")))


@pytest.mark.parametrize("exchange", IN_THEIR_ORDER, ids=lambda exchange: exchange.name)
def test_namespaces(own_pair: Pair, exchange: Exchange) -> None:
    own_pair.compare(exchange)
