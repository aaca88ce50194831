"""Tensors between JSON and raw contents; invalid JSON, in the words of Triton's parser (recorded from it), and bytes
that are kept unchanged."""

from __future__ import annotations

import gc
import json
import struct
from typing import Any

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensors import Tensor, encode_bytes_elements
from rocserve.frontends.http.json_text import SLICE, SLICE_BYTES, element_pieces, json_bytes, parse_json, raw_contents


@pytest.mark.parametrize(
    ("datatype", "data", "raw"),
    [
        ("UINT8", [256, 257], b"\0\1"),
        ("INT8", [128, -129], b"\x80\x7f"),
        ("INT32", [2**31, 2**32 + 5], struct.pack("<iI", -(2**31), 5)),
        ("FP32", [1e39, float("nan")], np.array([np.inf, np.nan], np.float32).tobytes()),
        ("BYTES", ["\udcff", ""], b"\1\0\0\0\xff\0\0\0\0"),
        ("INT8", [[1], [[2]]], b"\1\2"),
        ("INT8", [[[1, 2]]], b"\1\2"),
        ("INT8", [1, [2]], b"\1\2"),
    ],
)
def test_from_json(datatype: str, data: Any, raw: bytes) -> None:
    assert raw_contents(data, datatype, 2, "X") == raw


def test_a_byte_order_mark_is_none_of_the_text() -> None:
    mark = b"\xef\xbb\xbf"
    assert parse_json(mark + b' {"a": "\xef\xbb\xbf"}') == {"a": "\ufeff"}
    for text, offset in ((mark, 3), (mark + b"[x]", 4), (mark * 2, 3)):
        with pytest.raises(ServeError, match=f" at {offset}$"):
            parse_json(text)


_WRONG_COUNT = (
    "Unable to parse 'data': Shape does not match true shape of 'data' field; input 'X' has 3 elements, expected 2 for"
    " its shape"
)


@pytest.mark.parametrize(
    ("datatype", "data", "text"),
    [
        ("INT8", [1, 2, "x"], _WRONG_COUNT),
        ("INT8", [True, 2], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("INT64", [2**63, 2], "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ("UINT8", [-1, 2], "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (
            "UINT64",
            [2**64, 2],
            "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ("BOOL", [1, 0], "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
        ("FP32", ["1", 2], "Unable to parse 'data': attempt to access JSON non-number as double"),
        ("FP64", [10**400, 2], "Unable to parse 'data': attempt to access JSON non-number as double"),
    ],
)
def test_what_does_not_fit(datatype: str, data: Any, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        raw_contents(data, datatype, 2, "X")
    assert (caught.value.code, caught.value.text) == (StatusCode.INTERNAL, text)


def test_data_that_are_nested_too_deeply() -> None:
    data: list[Any] = [1]
    for _ in range(150):
        data = [data]
    with pytest.raises(ServeError, match="nesting depth"):
        raw_contents(data, "INT8", 1, "X")


def tensor(datatype: DataType, shape: tuple[int, ...], data: bytes) -> Tensor:
    return Tensor("X", datatype, shape, data)


def test_to_json() -> None:
    assert _elements(tensor(DataType.BOOL, (2,), b"\1\0")) == [True, False]
    assert _elements(tensor(DataType.FP32, (1, 2), struct.pack("<ff", 0.1, 2))) == [0.10000000149011612, 2.0]
    assert _elements(tensor(DataType.BYTES, (2,), b"\1\0\0\0\xff\0\0\0\0")) == ["\udcff", ""]
    assert _elements(tensor(DataType.INT8, (0,), b"")) == []


def test_many_elements_come_in_pieces() -> None:
    array = np.arange(2 * SLICE + 1, dtype=np.int32)
    pieces = list(element_pieces(tensor(DataType.INT32, array.shape, array.tobytes())))
    assert [piece.strip(b",").count(b",") + 1 for piece in pieces] == [SLICE, SLICE, 1]
    assert json.loads(b"[%b]" % b"".join(pieces)) == array.tolist()


def test_many_texts_come_in_pieces() -> None:
    texts = [b"a" * 5, *[b""] * (2 * SLICE), *[b"b" * (SLICE_BYTES // 3)] * 5, b"c"]
    pieces = list(element_pieces(tensor(DataType.BYTES, (len(texts),), encode_bytes_elements(texts))))
    assert max(piece.count(b",") for piece in pieces) <= SLICE
    assert max(map(len, pieces)) < 2 * SLICE_BYTES
    assert json.loads(b"[%b]" % b"".join(pieces)) == [text.decode() for text in texts]


@pytest.mark.parametrize("ahead", [[], ["x"], ["x" * SLICE_BYTES]], ids=["first", "second", "behind a long one"])
def test_a_long_text_comes_in_pieces(ahead: list[str]) -> None:
    long = b'\xff"\\\n' * SLICE_BYTES + "\N{SNOWMAN}".encode() * SLICE_BYTES
    data = encode_bytes_elements([*ahead, long, b"behind"])
    pieces = list(element_pieces(tensor(DataType.BYTES, (len(ahead) + 2,), data)))
    assert max(map(len, pieces)) <= 2 * SLICE_BYTES, "some are written as two characters"
    given = [*ahead, str(long, "utf-8", "surrogateescape"), "behind"]
    assert b"".join(pieces) == json_bytes(given)[1:-1]


def test_objects_do_not_pile_up_while_texts_are_written() -> None:
    texts = tensor(DataType.BYTES, (20 * SLICE,), bytes(4 * 20 * SLICE))
    gc.collect()
    before = len(gc.get_objects())
    assert max(len(gc.get_objects()) - before for _ in element_pieces(texts)) < SLICE


@pytest.mark.parametrize(
    ("faulty", "text"),
    [
        (
            tensor(DataType.BF16, (1,), b"\0\0"),
            "sending BF16 data via JSON is not supported. Please use the binary data format for output",
        ),
        (tensor(DataType.INT32, (2,), b"\0\0"), "output tensor shape does not match size of output for 'X'"),
        (tensor(DataType.BYTES, (2,), b"\1\0\0\0a"), "output tensor shape does not match size of output for 'X'"),
        (tensor(DataType.BYTES, (1,), b"\2\0\0\0a"), "output tensor shape does not match size of output for 'X'"),
        (tensor(DataType.BYTES, (1,), b"\0\0\2\0a"), "output tensor shape does not match size of output for 'X'"),
        (tensor(DataType.BYTES, (1,), b"\0\0\0\0a"), "output tensor shape does not match size of output for 'X'"),
    ],
)
def test_outputs_without_json(faulty: Tensor, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        _elements(faulty)
    assert caught.value.text == text


def _elements(tensor: Tensor) -> list[Any]:
    elements: list[Any] = parse_json(b"[%b]" % b"".join(element_pieces(tensor)))
    return elements


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("   ", "The document is empty. at 3"),
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


def test_an_unknown_datatype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ServeError) as caught:
        raw_contents([1.0], "float32", 1, "X")
    assert caught.value.text == (
        "invalid datatype for input X; the datatypes are: BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32,"
        " INT64, FP16, BF16, FP32, FP64, BYTES"
    )
