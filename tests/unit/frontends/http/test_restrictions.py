"""Restricted calls over HTTP: the secret that the file holds now counts, whatever was admitted before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.http.body import LargeBodies
from rocserve.frontends.http.inference import HttpParts
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.service import HttpService
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import page_pb2
from rocserve.services import access
from rocserve.services.access import Access, Restriction, SecretFile
from rocserve.services.methods import Method
from rocserve.settings import HttpSettings

from .conftest import LOG, Connect, Listen


async def overview(request: page_pb2.OverviewRequest) -> page_pb2.OverviewResponse:
    return page_pb2.OverviewResponse()


METHODS = {
    "ServerLive": Method(pb.ServerLiveRequest, lambda request: pb.ServerLiveResponse(live=True)),
    "Overview": Method(page_pb2.OverviewRequest, overview, is_slow=True),
}


@pytest.mark.parametrize(
    ("method", "path"), [("ServerLive", "/v2/health/live"), ("ModelStatistics", "/v2/overview")], ids=["call", "page"]
)
async def test_a_secret_that_has_been_renewed_is_asked_of_those_who_sent_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: Listen, connect: Connect, method: str, path: str
) -> None:
    monkeypatch.setattr(access, "_POLL_SECONDS", 0.0)
    secret = tmp_path / "secret"
    secret.write_text("first")
    inference: Any = None
    parts = HttpParts(inference, METHODS, lambda *_: None, RequestMemory(), LargeBodies(), HttpSettings(allow_ui=True))
    service = HttpService(parts, Access({method: Restriction("Key", SecretFile(secret, LOG))}, None, ()), LOG)
    port = await listen(HttpListener(service.handle, LOG, failure=service.failure))

    async def status(key: str) -> bytes:
        reader, _ = await connect(port, f"GET {path} HTTP/1.1\r\nHost: x\r\nKey: {key}\r\n\r\n".encode())
        return (await reader.readline()).split()[1]

    assert [await status(key) for key in ("first", "second", "first")] == [b"200", b"403", b"200"]
    secret.write_text("second one")
    assert [await status(key) for key in ("first", "second one", "first")] == [b"403", b"200", b"403"]
