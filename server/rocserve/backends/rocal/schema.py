"""The keys that a pipeline's operations take, and how their values are checked."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rocserve.core.datatypes import DataType

_SHOWN = 80
"""Characters of a value; what is longer ends in dots."""


def shown(value: Any) -> str:
    """A value as JSON writes it, so that its writer knows it again."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def meant(name: Any, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known one that it is most like; nothing where none is like it."""
    if not isinstance(name, str):
        return ""
    by_case = {one.casefold(): one for one in known}
    likely = difflib.get_close_matches(name.casefold(), by_case, n=1)
    return f'; did you mean "{by_case[likely[0]]}"?' if likely else ""


_LARGEST_SIZE = 65535
_LARGEST_NUMBER, _SMALLEST_DIVISOR = 3.4e38, 1.2e-38
"""What 32-bit floats hold, in which pixels are computed: the first and one divided by the second."""


class PipelineError(ValueError):
    """A pipeline that cannot be run; the text says where the fault is, what was expected and what came."""


class _Required:
    pass


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Key:
    """One key of an operation."""

    read: Callable[[Any], Any]
    """Gives the value; raises ValueError with what was expected."""
    default: Any = REQUIRED
    """REQUIRED = the key must be there."""
    input_datatype: DataType | None = None
    """Where an input tensor of the request may give the value, one for each image: {"input": "NAME"} in place of it.
    BOOL for a flag, INT32 for a whole number, FP32 for a number. None = it may not; so for all that sets the size of
    the result. Such a key has a default, which stands for it until an image comes."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A key whose value comes with each image, in an input tensor of the request."""

    key: str
    input: str
    datatype: DataType
    read: Callable[[Any], Any]
    """As the key's: gives the value; raises ValueError with what was expected."""


def read_name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a name")
    return value


def read_names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of names")
    return tuple(value)


def read_size(value: Any) -> int:
    return _read_integer(value, 0, "a size in pixels")


def read_positive_size(value: Any) -> int:
    return _read_integer(value, 1, "a size in pixels")


def read_number(value: Any) -> float:
    return _read_number(value, "a number")


def read_fraction(value: Any) -> float:
    number = _read_number(value, "a fraction from 0 to 1")
    if not 0 <= number <= 1:
        raise ValueError("a fraction from 0 to 1")
    return number


def read_area(value: Any) -> float:
    number = _read_number(value, "a fraction above 0, at most 1")
    if not 0 < number <= 1:
        raise ValueError("a fraction above 0, at most 1")
    return number


def read_positive_number(value: Any) -> float:
    number = _read_number(value, "a number above 0")
    if number < _SMALLEST_DIVISOR:
        raise ValueError("a number above 0")
    return number


def read_pixel_position(value: Any) -> float:
    number = _read_number(value, "a position in pixels, 0 or more")
    if number < 0:
        raise ValueError("a position in pixels, 0 or more")
    return number


def read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def read_channel_numbers(value: Any) -> tuple[float, ...]:
    expected = "a list of 1 or 3 numbers"
    if not isinstance(value, list) or len(value) not in (1, 3):
        raise ValueError(expected)
    return tuple(_read_number(item, expected) for item in value)


def read_divisors(value: Any) -> tuple[float, ...]:
    numbers = read_channel_numbers(value)
    if any(abs(number) < _SMALLEST_DIVISOR for number in numbers):
        raise ValueError("a list of 1 or 3 numbers, none of them 0")
    return numbers


class ChoiceError(ValueError):
    """A value that is none of some names; the text says what was expected."""

    def __init__(self, choices: tuple[str, ...]) -> None:
        super().__init__("one of " + ", ".join(f'"{choice}"' for choice in choices))
        self.choices = choices


def read_choice(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ChoiceError(choices)
        return value

    return read


def read_keys(where: str, table: dict[str, Any], keys: dict[str, Key]) -> dict[str, Any]:
    """The values of `keys` in a JSON object, with defaults.

    Raises:
        PipelineError: a key that is unknown, missing or of the wrong kind.
    """
    for name in table:
        if name not in keys:
            allowed = ", ".join(sorted(keys))
            raise PipelineError(f"{where}: unknown key '{name}'; allowed are {allowed}{meant(name, keys)}")
    values: dict[str, Any] = {}
    for name, key in keys.items():
        if name in table:
            try:
                values[name] = key.read(table[name])
            except ValueError as error:
                hint = meant(table[name], error.choices) if isinstance(error, ChoiceError) else ""
                raise PipelineError(f"{where}: key '{name}' must be {error}, not {shown(table[name])}{hint}") from None
        elif key.default is REQUIRED:
            needed = ", ".join(sorted(name for name, key in keys.items() if key.default is REQUIRED))
            raise PipelineError(f"{where}: key '{name}' is missing; required are {needed}")
        else:
            values[name] = key.default
    return values


def read_bound_keys(
    where: str, table: dict[str, Any], keys: dict[str, Key]
) -> tuple[dict[str, Any], tuple[Binding, ...]]:
    """As `read_keys`, where keys may say {"input": "NAME"}: these get their defaults, and a binding each.

    Raises:
        PipelineError: a key that is unknown, missing, of the wrong kind, or that no input can give.
    """
    bindings = []
    constants = {}
    for name, value in table.items():
        key = keys.get(name)
        if key is None or not isinstance(value, dict):
            constants[name] = value
            continue
        if key.input_datatype is None:
            raise PipelineError(f"{where}: key '{name}' cannot be an object or come from an input, not {shown(value)}")
        if list(value) != ["input"] or not isinstance(value["input"], str) or not value["input"]:
            raise PipelineError(f'{where}: key \'{name}\' must be a value or {{"input": "NAME"}}, not {shown(value)}')
        bindings.append(Binding(name, value["input"], key.input_datatype, key.read))
    return read_keys(where, constants, keys), tuple(bindings)


def _read_integer(value: Any, least: int, expected: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST_SIZE:
        raise ValueError(f"{expected}, a whole number from {least} to {_LARGEST_SIZE}")
    return value


def _read_number(value: Any, expected: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(expected)
    # NaN is not, either.
    if not abs(value) <= _LARGEST_NUMBER:
        raise ValueError(f"{expected}, which 32 bits hold (up to {_LARGEST_NUMBER})")
    return float(value)


def read_switch(value: Any) -> bool:
    """A flag as rocAL writes it, 0 or 1, or as JSON does."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError("true or false, or 1 or 0")
    return bool(value)


def read_signed_integer(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _LARGEST_SIZE:
        raise ValueError(f"a whole number from -{_LARGEST_SIZE} to {_LARGEST_SIZE}")
    return value


def read_axis(value: Any) -> int:
    """Of an image: 0 = height, 1 = width, 2 = channels."""
    if not isinstance(value, int) or isinstance(value, bool) or value not in (0, 1, 2):
        raise ValueError("0, 1 or 2")
    return value


def read_not_negative(value: Any) -> float:
    number = _read_number(value, "a number of 0 or more")
    if number < 0:
        raise ValueError("a number of 0 or more")
    return number


def read_percentage(value: Any) -> float:
    """Of something that cannot go altogether."""
    number = _read_number(value, "a percentage of 0 or more, below 100")
    if not 0 <= number < 100:
        raise ValueError("a percentage of 0 or more, below 100")
    return number


def read_constant(*names: str, prefix: str = "", suffix: str = "") -> Callable[[Any], str]:
    """One of rocAL's constants, with or without the part that all of its kind share."""
    read_name_of_one = read_choice(*names)

    def read(value: Any) -> str:
        if isinstance(value, str):
            value = value.removeprefix(prefix).removesuffix(suffix)
        return read_name_of_one(value)

    return read


def read_list(read_item: Callable[[Any], Any], counts: tuple[int, ...], items: str) -> Callable[[Any], tuple[Any, ...]]:
    """A list of so many items as one of `counts` says; `items` names them in errors."""
    *others, last = (str(count) for count in counts)
    expected = f"a list of {' or '.join((', '.join(others), last)) if others else last} {items}"

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) not in counts:
            raise ValueError(expected)
        try:
            return tuple(read_item(item) for item in value)
        except ValueError as error:
            raise ValueError(f"{expected}, each {error}") from None

    return read


def read_exponent(value: Any) -> float:
    """Of 2; what is beyond would leave nothing but black or white."""
    number = _read_number(value, "a number from -32 to 32")
    if not -32 <= number <= 32:
        raise ValueError("a number from -32 to 32")
    return number
