"""The methods that ask about the server and its models."""

from __future__ import annotations

import pytest
from support.parity.exchange import Call, Exchange
from support.parity.models import parity_models
from support.parity.pair import Pair
from tritonclient.grpc import service_pb2 as pb

_EVERY_MODEL = [model.name for model in parity_models()]


def of_model(rpc: str, name: str, version: str = "") -> Call:
    request = {
        "ModelReady": pb.ModelReadyRequest,
        "ModelMetadata": pb.ModelMetadataRequest,
        "ModelConfig": pb.ModelConfigRequest,
        "ModelStatistics": pb.ModelStatisticsRequest,
    }[rpc]
    return Call(rpc, request(name=name, version=version))


SERVER = [
    Exchange("live", [Call("ServerLive")]),
    Exchange("server metadata", [Call("ServerMetadata")]),
    Exchange("unknown method", [Call("NoSuchMethod")]),
    Exchange("unknown service", [Call("/inference.NoSuchService/ServerLive")]),
]
MODELS = [
    Exchange(f"{rpc} {name}", [of_model(rpc, name)])
    for name in _EVERY_MODEL
    for rpc in ("ModelReady", "ModelMetadata", "ModelConfig")
]
VERSIONS = [
    Exchange(f"{rpc} {name} {version!r}", [of_model(rpc, name, version)])
    for rpc, several in (
        ("ModelReady", "versions"),
        ("ModelMetadata", "versions"),
        ("ModelConfig", "versions"),
        ("ModelStatistics", "idle"),
    )
    for name, version in (
        *((several, version) for version in ("1", "2", "3", "03", "9", "-1", "0", " 3", "3 ", "3x", "abc", "9" * 20)),
        ("latest", "1"),
        ("missing", ""),
        ("missing", "1"),
        ("missing", "abc"),
        ("", "abc"),
    )
]
ANY_VERSION = [
    *(
        Exchange(f"{rpc} latest '7'", [of_model(rpc, "latest", "7")])
        for rpc in ("ModelReady", "ModelMetadata", "ModelConfig")
    ),
    *(
        Exchange(f"{rpc} without a name {version!r}", [of_model(rpc, "", version)])
        for rpc in ("ModelReady", "ModelMetadata", "ModelConfig")
        for version in ("", "1")
    ),
    Exchange("ModelStatistics idle", [of_model("ModelStatistics", "idle")]),
]


@pytest.mark.parametrize("exchange", [*SERVER, *MODELS, *VERSIONS, *ANY_VERSION], ids=lambda exchange: exchange.name)
def test_metadata(pair: Pair, exchange: Exchange) -> None:
    pair.compare(exchange)
