"""The service behind the listener: what calls hold whose clients have gone."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.http.body import LargeBodies
from rocserve.frontends.http.inference import HttpParts
from rocserve.frontends.http.listener import HttpListener
from rocserve.frontends.http.request import Request
from rocserve.frontends.http.service import HttpService
from rocserve.frontends.listen_address import ListenAddress
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.access import Access
from rocserve.services.methods import Method
from rocserve.settings import HttpSettings

LOG = logging.getLogger("test")


async def test_a_load_goes_on_without_its_client_and_counts_as_long() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def load(request: Any) -> pb.RepositoryModelLoadResponse:
        begun.set()
        await may_end.wait()
        return pb.RepositoryModelLoadResponse()

    memory = RequestMemory()
    methods = {"RepositoryModelLoad": Method(pb.RepositoryModelLoadRequest, load, is_slow=True)}
    inference: Any = SimpleNamespace()
    access = Access({}, None, ())
    parts = HttpParts(inference, methods, lambda name, version: None, memory, LargeBodies(), HttpSettings())
    service = HttpService(parts, access, LOG)
    left = asyncio.Event()

    def handle(request: Request) -> None:
        service.handle(request)
        request.on_gone = left.set

    listener = HttpListener(handle, LOG)
    port = await listener.start(ListenAddress("HTTP", "http", "127.0.0.1", 0))
    body = json.dumps({"parameters": {"config": "x" * 10_000}}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v2/repository/models/m/load HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body)
    await begun.wait()
    writer.close()
    await left.wait()
    assert memory.request_bytes == len(body)
    may_end.set()
    await asyncio.sleep(0.1)
    assert memory.request_bytes == 0
    await listener.stop()
