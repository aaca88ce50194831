"""The HTTP front end on its port."""

from __future__ import annotations

import logging
import ssl

from rocserve.frontends.http.connection import ConnectionLimits
from rocserve.frontends.http.listener import HttpListener, binding_refusal
from rocserve.frontends.http.service import HttpService
from rocserve.settings import HttpSettings


class HttpEndpoint:
    """All calls are made on the loop."""

    def __init__(
        self,
        service: HttpService,
        settings: HttpSettings,
        limits: ConnectionLimits,
        log: logging.Logger,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._settings = settings
        self._listener = HttpListener(service.handle, log, limits, tls)

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            OSError: it cannot be listened on; the error's text says where and what to do.
        """
        settings = self._settings
        try:
            return await self._listener.start(settings.address, settings.port, settings.reuse_port)
        except OSError as error:
            raise binding_refusal("HTTP", settings.address, settings.port, error, "http") from None

    async def stop(self, grace_seconds: float) -> None:
        """Take no more connections, let open requests finish within the grace time, close all connections."""
        await self._listener.stop(grace_seconds)
