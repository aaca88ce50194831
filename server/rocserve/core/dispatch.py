"""Finds the version that serves a request and hands the request over."""

from __future__ import annotations

from rocserve.core.errors import ServeError
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder, ServingTableHolder


def dispatch(tables: ServingTableHolder, request: InferRequest, responder: Responder) -> None:
    """Schedule a request with the version that it names; every error goes to the responder. On the data plane's thread,
    where versions are closed as well: none can end between the look-up and the request."""
    try:
        tables.table.find(request.head.model_name, request.head.model_version).infer(request, responder)
    except ServeError as error:
        responder.fail(error)
