"""The dispatcher: what requests are told while a server that takes another's place still loads."""

from __future__ import annotations

import pytest
from support.dispatching import dispatcher_of

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.serving import ServingTableHolder


@pytest.mark.parametrize(
    ("is_returning", "version", "code"),
    [
        (False, "", StatusCode.NOT_FOUND),
        (True, "", StatusCode.UNAVAILABLE),
        (True, "one", StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_model_that_is_not_there_yet_may_be_asked_again(is_returning: bool, version: str, code: StatusCode) -> None:
    told: list[ServeError] = []

    class Client:
        fail = staticmethod(told.append)

    dispatcher = dispatcher_of(ServingTableHolder())
    dispatcher.is_returning = is_returning
    dispatcher.dispatch(InferRequest(RequestHead("m", version, ()), "", []), Client())  # type: ignore[arg-type]
    assert [error.code for error in told] == [code]
