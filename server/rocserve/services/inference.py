"""The one way in for inference requests, whatever front end they come from."""

from __future__ import annotations

from rocserve.core.dispatch import dispatch
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder, ServingTableHolder
from rocserve.services.readiness import Readiness


def exiting() -> ServeError:
    """What requests are told that come while the server ends."""
    return ServeError(StatusCode.UNAVAILABLE, "Server exiting")


class InferenceService:
    """Callable from any thread."""

    def __init__(self, tables: ServingTableHolder, readiness: Readiness) -> None:
        self._tables = tables
        self._readiness = readiness

    def infer(self, request: InferRequest, responder: Responder) -> None:
        """Schedule a request; never blocks, and every error goes to the responder."""
        if self._readiness.is_exiting:
            responder.fail(exiting())
            return
        dispatch(self._tables, request, responder)
