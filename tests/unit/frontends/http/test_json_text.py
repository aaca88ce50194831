"""JSON that is none, in the words of Triton's parser (asked there), and bytes that pass through."""

from __future__ import annotations

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.frontends.http.json_text import json_bytes, parse_json


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("", "The document is empty. at 0"),
        ("   ", "The document is empty. at 3"),
        ("{", "Missing a name for object member. at 1"),
        ("[", "Invalid value. at 1"),
        ("nul", "Invalid value. at 3"),
        ('{"a":tru}', "Invalid value. at 8"),
        ('{"a":-}', "Invalid value. at 6"),
        ("[1,]", "Invalid value. at 3"),
        ("{a:1}", "Missing a name for object member. at 1"),
        ('{"a":1,}', "Missing a name for object member. at 7"),
        ('{"ready" true}', "Missing a colon after a name of object member. at 9"),
        ('{"a":1 "b":2}', "Missing a comma or '}' after an object member. at 7"),
        ('{"a":01}', "Missing a comma or '}' after an object member. at 6"),
        ('{"é":1 x}', "Missing a comma or '}' after an object member. at 8"),
        ("[1 2]", "Missing a comma or ']' after an array element. at 3"),
        ('[{"a":"]}"} 2]', "Missing a comma or ']' after an array element. at 12"),
        ('{"a":1.}', "Miss fraction part in number. at 7"),
        ('{"ready":true} x', "The document root must not be followed by other values. at 15"),
        ('{"a":"x', "Missing a closing quotation mark in string. at 7"),
        ('{"a":"\\q"}', "Invalid escape character in string. at 6"),
        ('{"a":"\n"}', "Invalid escape character in string. at 6"),
        ('{"a":"\\u12"}', "Incorrect hex digit after \\u escape in string. at 6"),
        ("1" * 5000, "Number too big to be stored in double. at 0"),
    ],
)
def test_what_is_no_json(source: str, fault: str) -> None:
    with pytest.raises(ServeError) as caught:
        parse_json(source.encode())
    assert caught.value.code is StatusCode.INTERNAL
    assert caught.value.text == f"failed to parse the request JSON buffer: {fault}"


def test_what_is_nested_too_deeply() -> None:
    with pytest.raises(ServeError, match=r"JSON nesting depth exceeds maximum allowed limit \(100\)") as caught:
        parse_json(b"[" * 100_000)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "raw", [b'{"a":"\xff\xfe\xc3\xa9"}', b'[1.5,NaN,Infinity,"\\n\\"",18446744073709551615]', b"[]"]
)
def test_there_and_back(raw: bytes) -> None:
    assert json_bytes(parse_json(raw)) == raw


def test_what_no_encoding_has() -> None:
    assert json_bytes("\ud800") == b'"?"'
