"""Headers as parameters of a request."""

from __future__ import annotations

import re

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import RequestHead
from rocserve.services.inference import HeaderForwarding, header_forwarding

HEAD = RequestHead("m", "", (), (), {"kept": 1, "my_header": "from the request"})


def test_headers_that_match_become_parameters() -> None:
    headers = [("my_header", "a"), ("x-my_header-too", b"b"), ("another", "c"), ("my_header", "last")]
    forwarded = HeaderForwarding("my_header").forward(HEAD, headers)
    assert forwarded.parameters == {"kept": 1, "my_header": "last", "x-my_header-too": "b"}
    assert (forwarded.model_name, HEAD.parameters["my_header"]) == ("m", "from the request")


def test_nothing_that_matches_leaves_the_head() -> None:
    assert HeaderForwarding("^my_").forward(HEAD, [("x-my_header", "a")]) is HEAD
    # Headers' names are in lower case, whatever the client wrote.
    assert HeaderForwarding("^X-My_").forward(HEAD, [("x-my_header", "a")]).parameters["x-my_header"] == "a"


def test_equal_requests_go_on_having_one_head() -> None:
    forwarding = HeaderForwarding("my_.*")
    first = forwarding.forward(HEAD, [("my_header", "a")])
    assert forwarding.forward(HEAD, [("my_header", "a")]) is first
    assert forwarding.forward(HEAD, [("my_header", "b")]) is not first


@pytest.mark.parametrize("name", ["sequence_id", "priority", "timeout", "headers", "triton_anything"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ServeError) as refused:
        HeaderForwarding(".*").forward(HEAD, [(name, "1")])
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
    assert refused.value.text == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."


def test_no_pattern_is_no_forwarding() -> None:
    assert header_forwarding("") is None
    with pytest.raises(re.error):
        header_forwarding("(")
