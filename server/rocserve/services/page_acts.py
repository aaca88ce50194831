"""Carries out operators' acts on the page at the HTTP port. The front end checks their permission."""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.printable import encodable, printable
from rocserve.observability.logs import ServerLog
from rocserve.protocol import page_pb2
from rocserve.repository.model_repository import ModelRepository
from rocserve.services.methods import Method
from rocserve.settings import ControlMode
from rocserve.workers.recent_lines import RecentLines


@dataclass(eq=False)
class PageActService:
    """Works on the event loop. Each act is an event, with the client's address, and a line in the log."""

    _repository: ModelRepository
    _server_log: ServerLog
    _lines: RecentLines
    _mode: ControlMode
    _log: logging.Logger
    _token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def methods(self) -> Mapping[str, Method]:
        return {
            "Acts": Method(page_pb2.ActsRequest, self.acts),
            "Act": Method(page_pb2.ActRequest, self.act, is_slow=True),
        }

    def acts(self, request: page_pb2.ActsRequest) -> page_pb2.ActsResponse:
        return page_pb2.ActsResponse(
            token=self._token,
            is_explicit=self._mode is ControlMode.EXPLICIT,
            log_verbose_level=self._server_log.settings.verbose,
        )

    async def act(self, request: page_pb2.ActRequest) -> page_pb2.ActResponse:
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            raise ServeError(
                StatusCode.PERMISSION_DENIED,
                "expected this server's token from /v2/page/acts, got another; load the page again",
            )
        name, response = request.name, page_pb2.ActResponse()
        match request.act:
            case "reload":
                self._note("reload", request)
                await self._repository.reload(name)
            case "unload":
                self._note("unload", request)
                await self._repository.unload(name, unload_dependents=False)
            case "log":
                self._note("read the log of", request)
                for line in self._lines.of(name):
                    response.lines.add(time_ms=line.time_ms, level=line.level, text=encodable(line.text))
            case "verbosity":
                # The server has two levels, 0 and more; tritonserver's users also write others.
                if not 0 <= request.level <= 9:
                    raise invalid_argument(f"expected a level from 0 to 9, got {request.level}")
                self._note(f"log verbosity {request.level}", request)
                self._server_log.change(verbose=request.level)
            case other:
                raise invalid_argument(f"expected the act reload, unload, log or verbosity, got '{other}'")
        return response

    def _note(self, act: str, request: page_pb2.ActRequest) -> None:
        # No folder has a longer name.
        name = printable(request.name[:255])
        self._repository.events.note_act(act, name, request.address)
        about = f" '{name}'" if name else ""
        self._log.info("the page at %s: %s%s", request.address, act, about)
