"""Reads the keys of a pipeline file's objects, and reports wrong values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


def shown(value: Any) -> str:
    """Return a value as JSON, so that the pipeline's author recognises it."""
    return cut(json.dumps(value, ensure_ascii=False, default=str))


def cut(text: str) -> str:
    # Characters of a value in an error; a longer one ends in dots.
    most = 80
    return text if len(text) <= most else text[: most - 3] + "..."


def suggestion(name: Any, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the most similar known name; "" = no name is similar."""
    if not isinstance(name, str):
        return ""
    by_case = {one.casefold(): one for one in known}
    likely = difflib.get_close_matches(name.casefold(), by_case, n=1)
    return f'; did you mean "{by_case[likely[0]]}"?' if likely else ""


_LARGEST_SIZE = 65535
_LARGEST_NUMBER, _SMALLEST_DIVISOR = 3.4e38, 1.2e-38
"""The largest 32-bit float, and the smallest that may divide 1: pixels are computed in 32 bits."""


class PipelineError(ValueError):
    """Reports a wrong pipeline. The text has the place, the expected and the given value."""


REQUIRED = object()

Reader = Callable[[Any], Any]
"""Returns a key's value. Raises ValueError with the expected form."""


@dataclass(frozen=True, slots=True)
class Key:
    """Describes one key of an operation by its kind of value: `size` is a required key, `size(0)` an optional one."""

    read: Reader
    default: Any = REQUIRED
    is_bindable: bool = False
    """Whether a request's input may give the value, one per image, through {"input": "NAME"}. Only flags that do not
    change the result's size can be bound; they have their default until an image comes."""

    def __call__(self, default: Any, is_bindable: bool = False) -> Key:
        return Key(self.read, default, is_bindable)


@dataclass(frozen=True, slots=True)
class Binding:
    """Binds a flag to an input tensor of the request, with one value per image."""

    key: str
    input: str


def key_if(expected: str, holds: Callable[[Any], bool]) -> Key:
    def read(value: Any) -> Any:
        if not holds(value):
            raise ValueError(expected)
        return value

    return Key(read)


def _integer_key(least: int, expected: str) -> Key:
    def read(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST_SIZE:
            raise ValueError(f"{expected}a whole number from {least} to {_LARGEST_SIZE}")
        return value

    return Key(read)


def _number_key(expected: str, holds: Callable[[float], bool] = lambda number: True) -> Key:
    def read(value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(expected)
        # The comparison is also false for NaN.
        if not abs(value) <= _LARGEST_NUMBER:
            raise ValueError(f"{expected}, which 32 bits hold (up to {_LARGEST_NUMBER})")
        if not holds(value):
            raise ValueError(expected)
        return float(value)

    return Key(read)


name = key_if("a name", lambda value: isinstance(value, str) and value != "")
flag = key_if("true or false", lambda value: isinstance(value, bool))
axis = key_if("0, 1 or 2", lambda value: type(value) is int and value in (0, 1, 2))
"""Axis of an image: 0 = height, 1 = width, 2 = channels."""
size = _integer_key(0, "a size in pixels, ")
positive_size = _integer_key(1, "a size in pixels, ")
signed_integer = _integer_key(-_LARGEST_SIZE, "")
number = _number_key("a number")
fraction = _number_key("a fraction from 0 to 1", lambda number: 0 <= number <= 1)
area = _number_key("a fraction above 0, at most 1", lambda number: 0 < number <= 1)
positive_number = _number_key("a number above 0", lambda number: number >= _SMALLEST_DIVISOR)
not_negative = _number_key("a number of 0 or more", lambda number: number >= 0)
pixel_position = _number_key("a position in pixels, 0 or more", lambda number: number >= 0)
percentage = _number_key("a percentage of 0 or more, below 100", lambda number: 0 <= number < 100)
exponent = _number_key("a number from -32 to 32", lambda number: -32 <= number <= 32)
"""Exponent of 2. Numbers further from 0 would leave only black or white."""


@Key
def switch(value: Any) -> bool:
    """Parse a flag in rocAL's form, 0 or 1, or in JSON's."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError("true or false, or 1 or 0")
    return bool(value)


@Key
def names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of names")
    return tuple(value)


@Key
def channel_numbers(value: Any) -> tuple[float, ...]:
    expected = "a list of 1 or 3 numbers"
    if not isinstance(value, list) or len(value) not in (1, 3):
        raise ValueError(expected)
    return tuple(_number_key(expected).read(item) for item in value)


@Key
def divisors(value: Any) -> tuple[float, ...]:
    numbers: tuple[float, ...] = channel_numbers.read(value)
    if any(abs(number) < _SMALLEST_DIVISOR for number in numbers):
        raise ValueError("a list of 1 or 3 numbers, none of them 0")
    return numbers


class ChoiceError(ValueError):
    """Reports a value that is not among the possible names. The text lists them."""

    def __init__(self, choices: tuple[str, ...]) -> None:
        super().__init__("one of " + ", ".join(f'"{choice}"' for choice in choices))
        self.choices = choices


def choice(*choices: str, prefix: str = "", suffix: str = "") -> Key:
    """Return a key for one of several names. The prefix or suffix of rocAL's constants may be missing."""

    def read(value: Any) -> str:
        name = value.removeprefix(prefix).removesuffix(suffix) if isinstance(value, str) else None
        if name not in choices:
            raise ChoiceError(choices)
        return name

    return Key(read)


def list_of(item_key: Key, counts: tuple[int, ...], items: str) -> Key:
    """Return a key for a list whose length is in `counts`. `items` names the items in errors."""
    *others, last = (str(count) for count in counts)
    expected = f"a list of {' or '.join((', '.join(others), last)) if others else last} {items}"

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) not in counts:
            raise ValueError(expected)
        try:
            return tuple(item_key.read(item) for item in value)
        except ValueError as error:
            raise ValueError(f"{expected}, each {error}") from None

    return Key(read)


def read_keys(where: str, table: dict[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return the values of `keys` in a JSON object, with defaults. Raises PipelineError if a key is unknown, missing or
    of the wrong kind."""
    for name in table:
        if name not in keys:
            allowed = ", ".join(sorted(keys))
            raise PipelineError(f"{where}: unknown key '{cut(name)}'; allowed are {allowed}{suggestion(name, keys)}")
    values: dict[str, Any] = {}
    for name, key in keys.items():
        if name in table:
            try:
                values[name] = key.read(table[name])
            except ValueError as error:
                hint = suggestion(table[name], error.choices) if isinstance(error, ChoiceError) else ""
                raise PipelineError(f"{where}: key '{name}' must be {error}, not {shown(table[name])}{hint}") from None
        elif key.default is REQUIRED:
            needed = ", ".join(sorted(name for name, key in keys.items() if key.default is REQUIRED))
            raise PipelineError(f"{where}: key '{name}' is missing; required are {needed}")
        else:
            values[name] = key.default
    return values


def read_bound_keys(
    where: str, table: dict[str, Any], keys: Mapping[str, Key]
) -> tuple[dict[str, Any], tuple[Binding, ...]]:
    """Return the values as `read_keys` does, and a binding for each key with {"input": "NAME"}, which gets its default.
    Raises PipelineError if a key is unknown, missing, of the wrong kind, or cannot be bound."""
    bindings = []
    constants = {}
    for name, value in table.items():
        key = keys.get(name)
        if key is None or not isinstance(value, dict):
            constants[name] = value
            continue
        if not key.is_bindable:
            raise PipelineError(f"{where}: key '{name}' cannot be an object or come from an input, not {shown(value)}")
        if list(value) != ["input"] or not isinstance(value["input"], str) or not value["input"]:
            raise PipelineError(f'{where}: key \'{name}\' must be a value or {{"input": "NAME"}}, not {shown(value)}')
        bindings.append(Binding(name, value["input"]))
    return read_keys(where, constants, keys), tuple(bindings)
