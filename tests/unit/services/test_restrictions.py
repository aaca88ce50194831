"""Methods that are only for clients with a header."""

from __future__ import annotations

import logging

import pytest

from rocserve.core.errors import StatusCode
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.access import GRPC_HEADER_PREFIX, PROTOCOLS, Restriction, restrictions
from rocserve.settings import RestrictedProtocols

LOG = logging.getLogger(__name__)


def test_every_method_belongs_to_a_protocol() -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    assert set(PROTOCOLS) == methods | {"Check", "Watch"}


def test_only_the_methods_of_the_named_protocols_are_restricted() -> None:
    found = restrictions(
        [RestrictedProtocols(("inference", "trace"), "key", "one"), RestrictedProtocols(("health",), "other", "two")],
        LOG,
        GRPC_HEADER_PREFIX,
    )
    assert found["ModelInfer"] == found["TraceSetting"] == Restriction("triton-grpc-protocol-key", "one")
    assert found["ServerLive"] == found["Check"] == Restriction("triton-grpc-protocol-other", "two")
    assert "ModelConfig" not in found
    assert restrictions([], LOG) == {}


@pytest.mark.parametrize(
    ("metadata", "admitted"),
    [
        ([], False),
        ([("key", "secret")], True),
        ([("KEY", "secret")], True),
        ([("key", "Secret")], False),
        ([("key", b"secret")], True),
        ([("key", "no"), ("key", "secret")], False),
        ([("another", "secret")], False),
        ([("key", "s\u00e9cret")], False),
    ],
)
def test_the_first_header_of_the_name_counts(metadata: list[tuple[str, str | bytes]], admitted: bool) -> None:
    assert Restriction("Key", "secret").admits_metadata(metadata) is admitted


def test_the_refusal_names_the_header_and_not_its_value() -> None:
    refusal = Restriction("triton-grpc-protocol-key", "secret").refusal()
    assert refusal.code is StatusCode.UNAVAILABLE
    assert refusal.text == "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
