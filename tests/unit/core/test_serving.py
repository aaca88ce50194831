"""Versions as clients write them, and the errors of look-ups, in Triton's words."""

from __future__ import annotations

from typing import cast

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import RequestHead
from rocserve.core.serving import ServedModel, ServedVersion, ServingTable, parse_version

TABLE = ServingTable({"m": ServedModel("m", {}, None, {2: "unloaded"})})


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("1", 1), ("007", 7), ("0" * 5000 + "3", 3), (str(2**63 - 1), 2**63 - 1)]
)
def test_a_version_is_a_number(text: str, number: int) -> None:
    assert parse_version(text) == number


@pytest.mark.parametrize(
    "text", ["", " 3", "3 ", "3x", "+3", "0x3", "1.0", "-", "-0", "\u0663", str(2**63), "9" * 30, "9" * 5000]
)
def test_anything_else_is_none(text: str) -> None:
    with pytest.raises(ServeError) as caught:
        parse_version(text)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    assert caught.value.text == (
        f"failed to get model version from specified version string '{text}' (details: stol), version should be an"
        " integral value > 0"
    )


@pytest.mark.parametrize(
    ("name", "version", "code", "text"),
    [
        ("x", "", StatusCode.NOT_FOUND, "Request for unknown model: 'x' is not found"),
        ("x", "abc", StatusCode.INVALID_ARGUMENT, "failed to get model version from specified version string 'abc'"),
        ("m", "", StatusCode.NOT_FOUND, "Request for unknown model: 'm' has no available versions"),
        ("m", "1", StatusCode.NOT_FOUND, "Request for unknown model: 'm' version 1 is not found"),
        ("m", "2", StatusCode.UNAVAILABLE, "Request for unknown model: 'm' version 2 is not at ready state"),
    ],
)
def test_what_cannot_be_found(name: str, version: str, code: StatusCode, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        TABLE.find(name, version)
    assert caught.value.code is code
    assert caught.value.text.startswith(text)


def test_large_heads_are_not_remembered() -> None:
    """A client may send thousands of different heads."""
    version = cast(ServedVersion, object())
    table = ServingTable({"m": ServedModel("m", {1: version}, version)})
    small = RequestHead("m", "", (), (), {"a": "b"})
    assert (
        table.find_by_head(small) is table.find_by_head(RequestHead("m", "", (), (), {"a": "b" * 100_000})) is version
    )
    assert list(table.by_head) == [small]


@pytest.mark.parametrize(("count", "hint"), [(2, "; served are: m0, m1"), (101, "")])
def test_the_error_of_an_unknown_model_names_the_models_if_they_are_few(count: int, hint: str) -> None:
    version = cast(ServedVersion, object())
    table = ServingTable({f"m{number}": ServedModel(f"m{number}", {1: version}, version) for number in range(count)})
    with pytest.raises(ServeError) as caught:
        table.find("x", "")
    assert caught.value.text == f"Request for unknown model: 'x' is not found{hint}"
