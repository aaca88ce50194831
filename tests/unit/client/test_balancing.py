"""Clients of several servers: who is asked, and what is tried again, by gRPC's own service config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from unit.client.conftest import LoopbackServer

from rocserve_client import Balancing, Client, Internal, InvalidArgument, Unavailable

LARGE = {"A": np.zeros(1 << 20, np.uint8)}
"""More than gRPC keeps by itself to send it again."""


@pytest.mark.parametrize(("model", "error", "attempts"), [("UNAVAILABLE", Unavailable, 3), ("INTERNAL", Internal, 1)])
def test_what_may_be_tried_again_is(
    call: Any, loopback: Any, model: str, error: type[Exception], attempts: int
) -> None:
    with pytest.raises(error):
        call(loopback.address, "infer", f"fails.{model}", LARGE, connection={"balancing": Balancing(attempts=3)})
    assert len(loopback.requests) == attempts


def test_without_it_nothing_is_tried_again(call: Any, loopback: Any) -> None:
    for connection in ({}, {"balancing": Balancing(attempts=1)}):
        loopback.requests.clear()
        with pytest.raises(Unavailable):
            call(loopback.address, "infer", "fails.UNAVAILABLE", LARGE, connection=connection)
        assert len(loopback.requests) == 1


def test_requests_of_sequences_are_refused(call: Any, loopback: Any) -> None:
    with pytest.raises(InvalidArgument, match="on a stream"):
        call(
            loopback.address, "infer", "echo", {}, parameters={"sequence_id": 7}, connection={"balancing": Balancing()}
        )
    assert loopback.requests == []


def test_all_servers_are_asked_and_none_that_has_gone(serve: Callable[..., grpc.Server]) -> None:
    servers = [LoopbackServer() for _ in range(3)]
    running = [serve(server) for server in servers]
    with Client("ipv4:" + ",".join(server.address for server in servers), balancing=Balancing()) as client:
        asked = Counter[int]()
        while len(asked) < len(servers):
            client.infer("echo", {})
            asked.update(index for index, server in enumerate(servers) if server.requests)
        running[0].stop(None).wait()
        for _ in range(20):
            client.infer("echo", {})
