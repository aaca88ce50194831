"""HTTP as the settings ask for it: the listener and the service behind it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.certificates import tls_context
from rocserve.frontends.http.large_bodies import LargeBodies
from rocserve.frontends.http.listener import HttpListener, most_descriptors
from rocserve.frontends.http.models import Models
from rocserve.frontends.http.protocol import ConnectionLimits
from rocserve.frontends.http.service import HttpService
from rocserve.frontends.listen_address import ListenAddress
from rocserve.services.admin_calls import Access
from rocserve.services.inference import Inference
from rocserve.services.method import Method
from rocserve.settings import ServerSettings

_TLS_BYTES = 320 << 10
"""That an HTTP connection with TLS takes: asyncio has a buffer of 256 KiB for each. Together they may take as much as
requests."""
_LEAST_TLS_CONNECTIONS = 64
"""However little that is."""


@dataclass(frozen=True, slots=True)
class HttpParts:
    """What HTTP asks, in the server's own process or beside it."""

    inference: Inference
    methods: Mapping[str, Method]
    models: Models
    memory: RequestMemory
    large: LargeBodies


async def start_http(
    settings: ServerSettings, where: ListenAddress, parts: HttpParts, log: logging.Logger
) -> tuple[HttpListener, int]:
    """The listener, and its port.

    Raises:
        OSError: it cannot be listened on, or a certificate cannot be used.
    """
    http, memory = settings.http, parts.memory
    service = HttpService(
        parts.inference,
        parts.methods,
        parts.models,
        http,
        memory,
        log,
        Access.of(settings, http, log),
        parts.large,
    )
    tls = tls_context(settings.grpc, http, "HTTP", log)
    limits = ConnectionLimits(
        idle_seconds=http.keepalive_seconds,
        age_seconds=settings.max_connection_age_seconds,
        write_seconds=settings.write_timeout_seconds,
        most=None if tls is None else max(memory.share_bytes // _TLS_BYTES, _LEAST_TLS_CONNECTIONS),
        most_descriptors=most_descriptors(),
    )
    listener = HttpListener(service.handle, log, limits, tls)
    return listener, await listener.start(where.protocol, where.flags, where.address, where.port, where.reuse_port)
