"""Converts dataclasses to JSON and back, by their type hints. Supported are dataclasses, named tuples (as lists), enums
(by value), tuples, frozensets, mappings, unions of plain values, None. Unlike pickle, reading a message never executes
or imports anything."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

from rocserve.core.printable import encodable

T = TypeVar("T")
_Reader = Callable[[Any], Any]


def to_json(value: object) -> bytes:
    return json.dumps(_to_plain(value), separators=(",", ":")).encode()


def from_json(kind: type[T], text: bytes) -> T:
    """Parse a dataclass of type `kind`. Raises ValueError if the text is not JSON or not of that type."""
    try:
        plain = json.loads(text)
    except RecursionError:
        raise ValueError(f"JSON of a {kind.__name__} is nested too deeply") from None
    try:
        return cast(T, _reader(cast(Hashable, kind))(plain))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"invalid {kind.__name__}: {error}") from None


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {entry.name: _to_plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_to_plain(element) for element in value]
    if isinstance(value, frozenset):
        return sorted(_to_plain(element) for element in value)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(element) for key, element in value.items()}
    return value


@functools.cache
def _reader(key: Hashable) -> _Reader:
    """Return the function that converts JSON data to the type hint `key`."""
    hint: Any = key
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_reader(hint)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _named_tuple_reader(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    if origin is tuple:
        if len(arguments) != 2 or arguments[1] is not Ellipsis:
            raise TypeError(f"only tuple[X, ...] can be read, not tuple{list(arguments)}")
        element = _reader(arguments[0])
        return lambda plain: tuple([element(entry) for entry in _expect(list, plain)])
    if origin is frozenset:
        element = _reader(arguments[0])
        return lambda plain: frozenset(element(entry) for entry in _expect(list, plain))
    if origin is Mapping:
        key_kind, value = arguments[0], _reader(arguments[1])
        return lambda plain: {key_kind(encodable(name)): value(one) for name, one in _expect(dict, plain).items()}
    if origin in (typing.Union, types.UnionType):
        return _union_reader(arguments)
    return functools.partial(_primitive, hint)


def _expect(kind: type[T], plain: Any) -> T:
    if not isinstance(plain, kind):
        raise ValueError(f"expected {kind.__name__}, got {type(plain).__name__}")
    return plain


def _primitive(kind: type, plain: Any) -> Any:
    if kind is float and type(plain) is int:
        return float(plain)
    if type(plain) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {type(plain).__name__}")
    return encodable(cast(str, plain)) if kind is str else plain


def _dataclass_reader(kind: type[Any]) -> _Reader:
    hints = typing.get_type_hints(kind)
    readers = {entry.name: _reader(hints[entry.name]) for entry in dataclasses.fields(kind)}

    def read(plain: Any) -> Any:
        entries = _expect(dict, plain)
        if entries.keys() != readers.keys():
            raise ValueError(f"fields {sorted(entries)} are not those of {kind.__name__}")
        return kind(**{name: readers[name](entry) for name, entry in entries.items()})

    return read


def _named_tuple_reader(kind: type[Any]) -> _Reader:
    readers = [_reader(hint) for hint in typing.get_type_hints(kind).values()]

    def read(plain: Any) -> Any:
        if len(_expect(list, plain)) != len(readers):
            raise ValueError(f"{len(plain)} fields are not those of {kind.__name__}")
        return kind(*[reader(entry) for reader, entry in zip(readers, plain, strict=True)])

    return read


def _union_reader(arguments: tuple[Any, ...]) -> _Reader:
    readers = [_reader(argument) for argument in arguments]

    def read(plain: Any) -> Any:
        for reader in readers:
            try:
                return reader(plain)
            except ValueError:
                continue
        raise ValueError(f"expected one of {arguments}, got {type(plain).__name__}")

    return read
