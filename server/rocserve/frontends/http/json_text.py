"""Parses and writes JSON, and converts tensors between JSON arrays and raw contents, with Triton's rules and error
texts. Bytes that are not UTF-8 pass unchanged in both directions, as in Triton."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from rocserve.core.datatypes import DATATYPES, DataType
from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.printable import shortened
from rocserve.core.tensors import ELEMENT_LENGTH, Buffer, Tensor, encode_bytes_elements

DEEPEST_NESTING = 100

_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def parse_json(data: Buffer) -> Any:
    """Parse JSON. Raises ServeError: INTERNAL if it is not JSON, as in Triton; INVALID_ARGUMENT if too deep."""
    source = str(data, "utf-8", "surrogateescape")
    # Windows puts it before texts in UTF-8.
    mark = "\ufeff"
    if source.startswith(mark):
        # Triton's parser skips the mark, and counts its bytes in positions.
        source = " " * len(mark.encode()) + source.removeprefix(mark)
    try:
        return _DECODER.decode(source)
    except json.JSONDecodeError as error:
        fault, position = _fault(source, error)
        offset = len(source[:position].encode("utf-8", "surrogateescape"))
        raise internal(f"failed to parse the request JSON buffer: {fault} at {offset}") from None
    except ValueError:
        # Python refuses to read integers of thousands of digits.
        raise number_too_big() from None
    except RecursionError:
        raise nested_too_deeply() from None


def json_bytes(value: Any) -> bytes:
    """Return the value as JSON without spaces."""
    source = _ENCODER.encode(value)
    try:
        return source.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # A lone half of a surrogate pair has no encoding.
        return source.encode("utf-8", "replace")


def number_too_big() -> ServeError:
    return internal("failed to parse the request JSON buffer: Number too big to be stored in double. at 0")


def nested_too_deeply() -> ServeError:
    return invalid_argument(f"JSON nesting depth exceeds maximum allowed limit ({DEEPEST_NESTING})")


def _fault(source: str, error: json.JSONDecodeError) -> tuple[str, int]:
    position = error.pos
    if not source.strip(" \t\r\n"):
        return "The document is empty.", len(source)
    message = error.msg
    if message == "Unterminated string starting at":
        position = len(source)
    elif message.startswith("Expecting ',' delimiter"):
        number_start = len(source[:position].rstrip("-0123456789"))
        if re.match(r"-?\d+\.", source[number_start:]) and source[position] == ".":
            return "Miss fraction part in number.", position + 1
        return f"Missing a comma or {_after_element(source[:position])}", position
    elif message.startswith("Illegal trailing comma before end of object"):
        position = source.index("}", position)
    elif message.startswith("Invalid \\uXXXX"):
        position = source.rindex("\\", 0, position + 1)
    elif message in ("Expecting value", "Illegal trailing comma before end of array"):
        if source[position : position + 1] == ",":
            # Some versions of Python report the comma before the missing value.
            return "Invalid value.", len(source) - len(source[position + 1 :].lstrip(" \t\r\n"))
        word = re.match(r"n(ul?)?|t(ru?)?|f(a(ls?)?)?|-", source[position:])
        return "Invalid value.", position + word.end() if word else position
    # Fault in the words of Python's parser -> fault in the words of Triton's parser.
    faults = {
        "Expecting property name enclosed in double quotes": "Missing a name for object member.",
        "Illegal trailing comma before end of object": "Missing a name for object member.",
        "Expecting ':' delimiter": "Missing a colon after a name of object member.",
        "Extra data": "The document root must not be followed by other values.",
        "Unterminated string starting at": "Missing a closing quotation mark in string.",
        "Invalid \\escape": "Invalid escape character in string.",
        "Invalid control character at": "Invalid escape character in string.",
        "Invalid \\uXXXX escape": "Incorrect hex digit after \\u escape in string.",
    }
    known = next((text for found, text in faults.items() if message.startswith(found)), "Invalid value.")
    return known, position


def _after_element(before: str) -> str:
    """Return what else may follow an element, by the brackets that `before` leaves open."""
    open_brackets: list[str] = []
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', before):
        bracket = found[0]
        if bracket in "[{":
            open_brackets.append(bracket)
        elif bracket in "]}":
            open_brackets.pop()
    return "']' after an array element." if open_brackets[-1:] == ["["] else "'}' after an object member."


MISSING: Any = object()
"""In place of a missing member; null is None."""

UNSIGNED_LIMIT = 1 << 64


def find(value: Any, name: str) -> Any:
    """Return a member; MISSING if it is missing, or if the value is not an object."""
    return value.get(name, MISSING) if type(value) is dict else MISSING


def member(value: Any, name: str, where: str = "") -> Any:
    found = find(value, name)
    if found is MISSING:
        raise _wrong_kind(f"attempt to access non-existing object member '{name}'", where)
    return found


def text(value: Any, where: str = "") -> str:
    if type(value) is not str:
        raise _wrong_kind("attempt to access JSON non-string as string", where)
    return checked_text(value)


def shown_json(value: Any) -> str:
    """Return a value that a client has sent wrongly, for an error; a long one is cut."""
    return "nothing" if value is MISSING else shortened(json.dumps(value))


def kind_of(value: Any) -> str:
    """Return the kind of a value of JSON, for an error."""
    kinds = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return kinds.get(type(value), "an object")


def checked_text(value: str) -> str:
    """Return the text. Raises ServeError (INTERNAL) if it has no form in UTF-8."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise internal("failed to parse the request JSON buffer: Invalid encoding in string. at 0") from None
    return value


def boolean(value: Any, where: str = "") -> bool:
    if type(value) is not bool:
        raise _wrong_kind("attempt to access JSON non-boolean as boolean", where)
    return value


def unsigned(value: Any, where: str = "") -> int:
    if type(value) is not int or not 0 <= value < UNSIGNED_LIMIT:
        raise _wrong_kind("attempt to access JSON non-unsigned-integer as unsigned-integer", where)
    return value


def array(value: Any, where: str = "") -> list[Any]:
    if type(value) is not list:
        raise _wrong_kind("attempt to access JSON non-array as array", where)
    return value


def members(value: Any, where: str = "") -> Mapping[str, Any]:
    if type(value) is not dict:
        raise _wrong_kind("attempt to get members for non-object", where)
    return value


def _wrong_kind(fault: str, where: str) -> ServeError:
    return internal(f"{where}: {fault}" if where else fault)


_NUMBERS: Mapping[str, tuple[Any, set[type], str]] = {
    "b": (np.bool_, {bool}, "attempt to access JSON non-boolean as boolean"),
    "f": (np.float64, {int, float}, "attempt to access JSON non-number as double"),
    "u": (np.uint64, {int}, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
    "i": (np.int64, {int}, "attempt to access JSON non-signed-integer as signed-integer"),
}
"""numpy's kind -> (dtype for all such numbers, their types in JSON, the error for other types)."""
_BINARY_ONLY = frozenset({DataType.FP16, DataType.BF16})
SLICE = 4096
"""Elements whose JSON is written in one step, in which nothing else runs."""
SLICE_BYTES = 64 << 10
"""Bytes of strings whose JSON is written in one step."""


def raw_contents(data: Any, datatype: str, element_count: int, input_name: str, is_base64: bool = False) -> bytes:
    """Return the elements of an array, nested in any way, as raw contents; integers that are too wide keep their low
    bytes. An element of BYTES, or all elements of UINT8, may be `{"b64": "..."}`, as in TensorFlow Serving.

    `data` is an array, or one element. `element_count` is the required number; elements of BYTES are not counted here.
    `is_base64`: each element of BYTES is text in base64.

    Raises ServeError: INTERNAL if elements have another type or number, INVALID_ARGUMENT if the datatype has no form in
    JSON.
    """
    elements = _flat(data) if type(data) is list else [data]
    if datatype == "BYTES":
        return _bytes_contents([{"b64": entry} for entry in elements] if is_base64 else elements, input_name)
    known = DATATYPES.get(datatype)
    if known is None:
        raise invalid_argument(f"invalid datatype for input {input_name}; the datatypes are: {', '.join(DATATYPES)}")
    if known in _BINARY_ONLY:
        raise invalid_argument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input"
            f" {input_name}"
        )
    # Only the elements that fit are converted; the check of their number follows.
    if known is DataType.UINT8 and len(elements) == 1 and type(elements[0]) is dict:
        raw = from_base64(elements[0], input_name)
        count = len(raw)
    else:
        raw = _numbers(elements[:element_count], known)
        count = len(elements)
    if count != element_count:
        raise internal(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field; input '{input_name}' has"
            f" {count} elements, expected {element_count} for its shape"
        )
    return raw


def element_pieces(tensor: Tensor) -> Iterator[bytes]:
    """Yield the elements of a tensor as JSON without the outer brackets, in short steps. No Python objects are kept for
    the elements, because the garbage collector would traverse millions of them again and again.

    Raises ServeError: INVALID_ARGUMENT if the datatype has no form in JSON, INTERNAL if the data does not fit the
    shape; the pieces before the error are then useless.
    """
    datatype = tensor.datatype
    if datatype in _BINARY_ONLY:
        raise invalid_argument(
            f"sending {datatype.value} data via JSON is not supported. Please use the binary data format for output"
        )
    count = math.prod(tensor.shape)
    if datatype is DataType.BYTES:
        yield from _text_pieces(tensor, count)
        return
    if len(tensor.data) != count * datatype.itemsize:
        raise wrong_size(tensor.name)
    array = np.frombuffer(tensor.data, dtype=datatype.numpy_dtype)
    for start in range(0, count, SLICE):
        piece = json_bytes(array[start : start + SLICE].tolist())[1:-1]
        yield b"," + piece if start else piece


def _text_pieces(tensor: Tensor, count: int) -> Iterator[bytes]:
    view = memoryview(tensor.data)
    last, unpack = len(view) - ELEMENT_LENGTH.size, ELEMENT_LENGTH.unpack_from
    position = nbytes = 0
    texts: list[str] = []
    comma = b""
    for _ in range(count):
        if position > last:
            raise wrong_size(tensor.name)
        begin = position + ELEMENT_LENGTH.size
        position = begin + unpack(view, position)[0]
        nbytes += position - begin
        if texts and (nbytes > SLICE_BYTES or len(texts) == SLICE):
            yield comma + json_bytes(texts)[1:-1]
            comma = b","
            texts, nbytes = [], position - begin
        if nbytes <= SLICE_BYTES:
            texts.append(str(view[begin:position], "utf-8", "surrogateescape"))
            continue
        if position > len(view):
            raise wrong_size(tensor.name)
        # JSON escapes only ASCII here and leaves other bytes unchanged, so the text may be cut anywhere.
        yield comma + b'"'
        for start in range(begin, position, SLICE_BYTES):
            part = view[start : min(start + SLICE_BYTES, position)]
            yield json_bytes(str(part, "utf-8", "surrogateescape"))[1:-1]
        yield b'"'
        comma, nbytes = b",", 0
    if position != len(view):
        raise wrong_size(tensor.name)
    if texts:
        yield comma + json_bytes(texts)[1:-1]


def wrong_size(output_name: str) -> ServeError:
    return internal(f"output tensor shape does not match size of output for '{output_name}'")


def _flat(data: list[Any]) -> list[Any]:
    for _ in range(DEEPEST_NESTING):
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if len(kinds) > 1:
            data = [entry if type(entry) is list else [entry] for entry in data]
        data = list(chain.from_iterable(data))
    raise nested_too_deeply()


def _numbers(elements: list[Any], datatype: DataType) -> bytes:
    kind = datatype.numpy_dtype.kind
    wide, types, fault = _NUMBERS[kind]
    try:
        if not types.issuperset(map(type, elements)) or (kind == "u" and min(elements, default=0) < 0):
            raise OverflowError
        array = np.array(elements, dtype=wide)
    except OverflowError:
        raise internal(f"Unable to parse 'data': {fault}") from None
    with np.errstate(over="ignore"):
        return array.astype(datatype.numpy_dtype, copy=False).tobytes()


def _bytes_contents(elements: list[Any], input_name: str) -> bytes:
    kinds = set(map(type, elements))
    if not kinds <= {str, dict}:
        raise internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    if dict in kinds:
        elements = [from_base64(entry, input_name) if type(entry) is dict else entry for entry in elements]
    try:
        return encode_bytes_elements(
            [entry.encode("utf-8", "surrogateescape") if type(entry) is str else entry for entry in elements]
        )
    except UnicodeEncodeError:
        raise internal(
            "failed to parse the request JSON buffer: The surrogate pair in string is invalid. at 0"
        ) from None


def from_base64(value: Any, input_name: str) -> bytes:
    """Decode an element of an input that is {"b64": text}. Raises ServeError (INVALID_ARGUMENT)."""
    text = find(value, "b64")
    if type(text) is not str or len(value) != 1:
        raise invalid_argument(f"input '{input_name}': expected base64 as a text, or as {{\"b64\": text}}")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise invalid_argument(f"input '{input_name}' has an element that is not base64: {error}") from None
