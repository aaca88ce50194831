"""Reads the bodies of predict: `instances` (rows) or `inputs` (columns), as tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InputConfig
from rocserve.core.printable import encodable, names_hint
from rocserve.core.requests import check_entries
from rocserve.core.tensors import Buffer, Tensor, encode_bytes_elements
from rocserve.frontends.http.json_text import DEEPEST_NESTING, from_base64, kind_of, nested_too_deeply, parse_json

ROWS, COLUMNS = "instances", "inputs"


MOST_REQUESTS = 4096
"""Infer requests that one body may become; bounds the work that a small body with many rows causes."""


@dataclass(frozen=True, slots=True)
class PredictBody:
    """The body of a predict request."""

    requests: Sequence[Sequence[Tensor]]
    """The inputs of each infer request that the body becomes."""
    instances: int | None
    """The number of rows; None = the body has columns (`inputs`)."""
    are_single: bool
    """Each request is one instance, without a dimension for several."""


@dataclass(frozen=True, slots=True)
class _Given:
    """The values of an input in a body."""

    entry: InputConfig
    shape: tuple[int, ...]
    elements: Sequence[Any]
    """The values without their lists."""


def read_predict(inputs: Sequence[InputConfig], max_batch_size: int, body: Buffer) -> PredictBody:
    """Read a body for a model with these inputs. Also called in the process for large bodies. Raises ServeError
    (INVALID_ARGUMENT)."""
    try:
        value = parse_json(body)
    except ServeError as error:
        raise invalid_argument(error.text) from None
    if type(value) is not dict:
        raise invalid_argument(f"the body: expected a JSON object, got {_kind(value)}")
    for name in value:
        if name not in (ROWS, COLUMNS, "signature_name"):
            hint = names_hint("the members are", name, (ROWS, COLUMNS, "signature_name"))
            raise invalid_argument(f"unknown member {_shown(name)}{hint}")
    signature = value.get("signature_name")
    # TensorFlow Serving's name if a model has only one signature, as each model here.
    if signature not in (None, "", "serving_default"):
        shown = _shown(signature) if type(signature) is str else _kind(signature)
        raise invalid_argument(f"signature_name: expected 'serving_default', the model's only one, got {shown}")
    if (ROWS in value) == (COLUMNS in value):
        found = "both" if ROWS in value else "neither"
        raise invalid_argument(f"the body: expected either '{ROWS}' or '{COLUMNS}', got {found}")
    entries = {entry.name: entry for entry in inputs}
    by_name = _of_rows(value[ROWS], entries) if ROWS in value else _of_columns(value[COLUMNS], entries)
    check_entries(len(by_name))
    given = [_given(entries[name], values) for name, values in by_name.items()]
    if COLUMNS in value:
        given = [_filled(one, max_batch_size > 0) for one in given]
        return PredictBody(_divided(given, max_batch_size), None, False)
    count = len(value[ROWS])
    if not max_batch_size and all(len(one.shape) == len(one.entry.dims) + 1 for one in given):
        single = [[replace(tensor, shape=tensor.shape[1:]) for tensor in one] for one in _divided(given, 1)]
        return PredictBody(single, count, True)
    given = [_filled(one, max_batch_size > 0) for one in given]
    takes_one_row = all(one.entry.dims[:1] == (1,) for one in given)
    return PredictBody(_divided(given, max_batch_size or (1 if takes_one_row else 0)), count, False)


def _divided(given: Sequence[_Given], most: int) -> Sequence[Sequence[Tensor]]:
    """Divide inputs among requests of at most `most` rows; 0 = any number. Inputs with different numbers of rows stay
    together, and the model refuses them."""
    counts = {one.shape[0] if one.shape else 0 for one in given}
    rows = counts.pop() if len(counts) == 1 else 0
    if not most or rows <= most:
        return [[_tensor(one, one.shape, one.elements) for one in given]]
    if rows > most * MOST_REQUESTS:
        raise invalid_argument(
            f"expected at most {most * MOST_REQUESTS} rows, as the model takes {most} at once, got {rows}; send several"
            " requests"
        )
    return [[_part(one, begin, min(begin + most, rows)) for one in given] for begin in range(0, rows, most)]


def _part(given: _Given, begin: int, end: int) -> Tensor:
    row_size = len(given.elements) // given.shape[0]
    return _tensor(given, (end - begin, *given.shape[1:]), given.elements[begin * row_size : end * row_size])


def _tensor(given: _Given, shape: tuple[int, ...], elements: Sequence[Any]) -> Tensor:
    return Tensor(given.entry.name, given.entry.datatype, shape, _octets(given.entry, elements))


def _filled(given: _Given, has_rows: bool) -> _Given:
    """Add last dimensions of 1 that the values lack: a text fills TEXT BYTES [1]."""
    dims, shape = (-1, *given.entry.dims) if has_rows else given.entry.dims, given.shape
    if not given.entry.any_rank and len(shape) < len(dims) and set(dims[len(shape) :]) <= {1, -1}:
        shape += (1,) * (len(dims) - len(shape))
    return replace(given, shape=shape)


def _of_rows(rows: Any, entries: Mapping[str, InputConfig]) -> Mapping[str, Any]:
    """Return the values of each input."""
    if type(rows) is not list or not rows:
        raise invalid_argument(f"{ROWS}: expected a list of at least one instance, got {_kind(rows)}")
    if not _is_named(rows[0], entries):
        return {_only(entries, ROWS): rows}
    names = rows[0].keys()
    for place, row in enumerate(rows):
        if type(row) is not dict or row.keys() != names:
            found = _listed(row) if type(row) is dict else _kind(row)
            raise invalid_argument(
                f"{ROWS}[{place}]: expected an object with {_listed(names)}, as {ROWS}[0] is, got {found}"
            )
    _check_names(names, entries)
    return {name: [row[name] for row in rows] for name in names}


def _of_columns(columns: Any, entries: Mapping[str, InputConfig]) -> Mapping[str, Any]:
    if not _is_named(columns, entries):
        return {_only(entries, COLUMNS): columns}
    _check_names(columns.keys(), entries)
    named: Mapping[str, Any] = columns
    return named


def _is_named(value: Any, entries: Mapping[str, InputConfig]) -> bool:
    """Return whether a value is an object of inputs, and not bytes in base64."""
    return type(value) is dict and (value.keys() != {"b64"} or "b64" in entries)


def _only(entries: Mapping[str, InputConfig], member: str) -> str:
    """Return the name of the model's only input; optional ones count only if all are."""
    needed = [name for name, entry in entries.items() if not entry.optional] or list(entries)
    if len(needed) != 1:
        raise invalid_argument(
            f"{member}: expected an object with the values of {_listed(entries)}, as the model has several inputs, got"
            " plain values"
        )
    return needed[0]


def _check_names(names: Collection[str], entries: Mapping[str, InputConfig]) -> None:
    for name in names:
        if name not in entries:
            hint = names_hint("the model's inputs are", name, entries)
            raise invalid_argument(f"unexpected input {_shown(name)}{hint}")
    missing = [name for name, entry in entries.items() if not entry.optional and name not in names]
    if missing:
        raise invalid_argument(f"expected values of {_listed(missing)} too, got those of {_listed(names)}")


def _given(entry: InputConfig, values: Any) -> _Given:
    shape: list[int] = []
    level = [values]
    while level and type(level[0]) is list:
        if len(shape) == DEEPEST_NESTING:
            raise nested_too_deeply()
        lengths = {len(value) if type(value) is list else -1 for value in level}
        if len(lengths) > 1:
            raise invalid_argument(
                f"input '{entry.name}': expected lists of equal length at each depth, got different ones at depth"
                f" {len(shape) + 1}"
            )
        shape.append(len(level[0]))
        level = list(chain.from_iterable(level))
    return _Given(entry, tuple(shape), level)


_EXPECTED: Mapping[str, tuple[set[type], str]] = {
    "b": ({bool}, "true or false"),
    "i": ({int}, "whole numbers"),
    "u": ({int}, "whole numbers"),
    "f": ({int, float}, "numbers"),
}
"""numpy's kind -> the types of elements in JSON, and their name."""


def _octets(entry: InputConfig, level: Sequence[Any]) -> bytes:
    """Return elements as a tensor's bytes."""
    datatype = entry.datatype
    if datatype is DataType.BYTES:
        return encode_bytes_elements([_element(entry.name, value) for value in level])
    dtype = np.dtype(np.float32) if datatype is DataType.BF16 else datatype.numpy_dtype
    types, expected = _EXPECTED[dtype.kind]
    if not types.issuperset(map(type, level)):
        other = next(value for value in level if type(value) not in types)
        raise invalid_argument(f"input '{entry.name}': expected {expected} ({datatype.value}), got {_kind(other)}")
    try:
        with np.errstate(over="ignore"):
            # numpy refuses integers that the datatype does not hold.
            array = np.array(level, np.float64 if dtype.kind == "f" else dtype).astype(dtype, copy=False)
    except OverflowError:
        raise invalid_argument(f"input '{entry.name}': a number is too large for {datatype.value}") from None
    if datatype is DataType.BF16:
        bits = array.view(np.uint32)
        # To the nearest, of two equally near ones to the even one.
        array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return array.tobytes()


def _element(name: str, value: Any) -> bytes:
    if type(value) is str:
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise invalid_argument(f"input '{name}': expected texts, got one with a lone surrogate") from None
    if type(value) is dict and "b64" in value:
        return from_base64(value, name)
    raise invalid_argument(f'input \'{name}\': expected texts, or {{"b64": "..."}} (BYTES), got {_kind(value)}')


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else kind_of(value)


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(_shown, names)) or "no members"


def _shown(text: str) -> str:
    # 80 characters of a client's text are enough in an error.
    return f"'{encodable(text[:80])}'"
