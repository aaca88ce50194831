"""Finds the version that serves a request and hands the request over, whatever is being swapped meanwhile."""

from __future__ import annotations

from rocserve.core.errors import ServeError, unavailable
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder, ServingTableHolder, VersionEnding

_ATTEMPTS = 100


def dispatch(tables: ServingTableHolder, request: InferRequest, responder: Responder) -> None:
    """Schedule a request with the version that it names; every error goes to the responder."""
    head = request.head
    try:
        for _ in range(_ATTEMPTS):
            version = tables.table.find(head.model_name, head.model_version)
            try:
                version.infer(request, responder)
            except VersionEnding:
                # The table was replaced between the look-up and now; the new one has the successor.
                continue
            return
        raise unavailable(f"Request for unknown model: '{head.model_name}' is being replaced, try again")
    except ServeError as error:
        responder.fail(error)
