"""Flag declarations at the fields of frozen dataclasses: one line has a field's default, flag, values and help.
flags/arguments.py builds the parser from them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rocserve.core.printable import encodable

T = TypeVar("T")

METADATA = "flag"
"""Key of a Flag or Part in a field's metadata."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Reads the values of a flag."""

    shown: str
    """Name of the value in the help."""
    read: Callable[[str], Any]
    """Raises ValueError with the expected and the actual value."""
    choices: tuple[str, ...] = ()
    alone: str | None = None
    """The value that the flag without a value has; None = the flag needs a value."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the command line."""

    kind: Kind
    help: str
    name: str = ""
    """Name without leading dashes; "" = prefix of the part and name of the field, with "-secs" for "_seconds"."""
    repeatable: bool = False
    aliases: tuple[str, ...] = ()
    group: str = ""
    """Heading in the help; "" = the dataclass's group."""
    others: tuple[Flag, ...] = ()
    """More flags of the same field. If they are repeatable, the values stay in the order of the command line."""
    make: Callable[[Any], Any] | None = None
    """Converts the read value, or all values of a repeatable flag, to the field's value. Raises ValueError."""
    is_positional: bool = False
    nargs: str | None = None
    """As in argparse."""
    required: bool = False
    exclusive: bool = False
    """All exclusive flags of a dataclass exclude each other."""


@dataclass(frozen=True, slots=True)
class Part:
    """A field that is a dataclass whose fields declare flags."""

    group: str = ""
    """Heading in the help; "" = among the other options."""
    names: str = ""
    """Prefix of the flags that are named by their fields."""


def flag(default: T, kind: Kind, help_text: str, **more: Any) -> T:
    """Declare a field and its flag; `more` is passed to Flag."""
    return field(default=default, metadata={METADATA: Flag(kind, help_text, **more)})


def repeated(kind: Kind, help_text: str, **more: Any) -> tuple[Any, ...]:
    """Declare a field with all values of its flag."""
    return flag((), kind, f"{help_text}; repeatable", repeatable=True, **more)


def positional(default: T, kind: Kind, help_text: str, **more: Any) -> T:
    """Declare a field that is an argument without a flag."""
    return flag(default, kind, help_text, is_positional=True, **more)


def part(default: Callable[[], T], *of_part: str) -> T:
    """Declare a field that is a dataclass; `of_part` is passed to Part."""
    return field(default_factory=default, metadata={METADATA: Part(*of_part)})


def boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "on"):
        return True
    if text.lower() in ("false", "0", "off"):
        return False
    raise ValueError(f"expected true or false, got '{text}'")


LARGEST_INT32 = (1 << 31) - 1
"""Largest number that gRPC's core accepts."""


def number(shown: str, least: float, of: Callable[[str], Any] = int, most: int | None = None) -> Kind:
    """Return a kind for numbers from `least` to `most`; None = no upper bound."""

    def read(text: str) -> Any:
        try:
            value = of(text)
        except ValueError:
            raise ValueError(f"expected a {'' if of is float else 'whole '}number, got '{text}'") from None
        # Written this way to refuse "nan", which is not less than anything.
        if not value >= least:
            raise ValueError(f"expected at least {least:g}, got '{text}'")
        if most is not None and value > most:
            raise ValueError(f"expected at most {most}, got '{text}'")
        return value

    return Kind(shown, read)


def number_or_auto(shown: str, least: int, most: int) -> Kind:
    """Return a kind for whole numbers, and for "auto", which is None."""

    def read(text: str) -> int | None:
        if text.lower() == "auto":
            return None
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"expected auto, or a whole number from {least} to {most}, got '{text}'")
        return int(text)

    return Kind(shown, read)


def level(text: str) -> int:
    """Read a number, or tritonserver's true and false."""
    words = {"true": 1, "false": 0}
    return words[text.lower()] if text.lower() in words else int(text)


def text(shown: str) -> Kind:
    def read(text: str) -> str:
        # Bytes that are not UTF-8 arrive as surrogates, which no message can hold.
        if encodable(text) != text:
            raise ValueError(f"expected text in UTF-8, got {text!r}")
        return text

    return Kind(shown, read)


def one_of(choices: Iterable[str]) -> Kind:
    """Return a kind for these words, in small or capital letters."""
    by_lower_case = {choice.lower(): choice for choice in choices}
    return Kind("", lambda text: by_lower_case.get(text.lower(), text), tuple(by_lower_case.values()))


def byte_size(text: str, least: int = 1, expected: str = "a size such as 512M or 16G") -> int:
    """Read a number of bytes, or of KiB, MiB, GiB or TiB: 512M, 16G."""
    found = re.fullmatch(r"([0-9]+)([KMGT]?)", text, re.IGNORECASE)
    if found is None or int(found[1]) < least:
        raise ValueError(f"expected {expected}, got '{text}'")
    return int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")


def setting(text: str) -> tuple[str, str]:
    """Read `name=value`."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"expected SETTING=VALUE, got '{text}'")
    return name, value


def scoped_setting(text: str) -> tuple[str, str, str]:
    """Read `scope,name=value`, or `name=value` with the scope ""."""
    first, separator, rest = text.partition(",")
    if separator and "=" not in first:
        return (first, *setting(rest))
    return ("", *setting(text))


def setting_of(form: str, shown: str = "") -> Kind:
    """Return a kind for `scope,name=value` with all parts. `form` is for errors, and the help if `shown` is empty."""

    def read(text: str) -> tuple[str, str, str]:
        scope, _, rest = text.partition(",")
        name, equals, value = rest.partition("=")
        if "=" in scope or not (scope and name and equals):
            raise ValueError(f"expected {form}, got '{text}'")
        return scope, name, value

    return Kind(shown or form, read)


def regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"expected a regular expression, got '{text}': {error}") from None
    return text


SWITCH = Kind("", boolean, alone="true")
"""A flag alone, or with =true or =false; the next argument is not its value."""
BOOLEAN = Kind("true|false", boolean, alone="true")
PORT = number("PORT", 0, most=65535)
COUNT = number("N", 0, most=LARGEST_INT32)
AMOUNT = number("N", 0)
BOUND = number("N", 0, most=10**18 - 1)
"""Fits the kernel's 63 bits, as the models' parameters must."""
POSITIVE = number("N", 1)
MESSAGE_BYTES = number("N", 1, most=LARGEST_INT32)
SECONDS = number("SECONDS", 0, float)
SECONDS_IN_INT32_MS = number("SECONDS", 0, float, LARGEST_INT32 // 1000)
"""Becomes a 32-bit number of milliseconds: at most 24 days."""
POSITIVE_SECONDS = number("SECONDS", 0.001, float)
MILLISECONDS = number("MS", 0, most=LARGEST_INT32)
POSITIVE_MILLISECONDS = number("MS", 1, most=LARGEST_INT32)
FILE = Kind("FILE", Path)
FILE_OR_NONE = Kind("FILE", lambda text: Path(text) if text else None)
"""Empty = None, because charts write an omitted value as an empty one."""
FOLDER = Kind("DIR", Path)
# Path.expanduser fails for users that the machine does not know; this keeps the "~".
ABSOLUTE_FOLDER = Kind("DIR", lambda text: str(Path(os.path.expanduser(text)).absolute()))  # noqa: PTH111
"""Absolute, because workers and their children have another working directory."""
BYTE_SIZE = Kind("SIZE", byte_size)
SETTING = Kind("SETTING=VALUE", setting)
REGULAR_EXPRESSION = Kind("REGEX", regular_expression)
