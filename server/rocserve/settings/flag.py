"""Declares the flags of a command at the fields of frozen dataclasses: one line says a field's default, its flag, the
values that it takes and its help. flags/arguments.py makes the parser of it.
"""

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
"""Where a field's metadata have its Flag or Part."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Reads the values of a flag."""

    shown: str
    """In place of the value in the help."""
    read: Callable[[str], Any]
    """Raises ValueError with what was expected and what came."""
    choices: tuple[str, ...] = ()
    alone: str | None = None
    """What the flag means without a value; None = it needs one."""


@dataclass(frozen=True, slots=True)
class Flag:
    kind: Kind
    help: str
    name: str = ""
    """Without its dashes; "" = the field's, with dashes in it and "-secs" in place of "_seconds", behind what all of
    the part begin with."""
    repeatable: bool = False
    aliases: tuple[str, ...] = ()
    group: str = ""
    """The help's; "" = that of the dataclass."""
    others: tuple[Flag, ...] = ()
    """Further flags of the same field; the last one written counts."""
    make: Callable[[Any], Any] | None = None
    """Makes the field's value of what was read, of a repeatable flag of all values; raises ValueError."""
    is_positional: bool = False
    nargs: str | None = None
    """As argparse has it."""
    required: bool = False
    exclusive: bool = False
    """Those of a dataclass that are exclude each other."""


@dataclass(frozen=True, slots=True)
class Part:
    """A field that is a dataclass with flags of its own."""

    group: str = ""
    """Of the help; "" = among the other options."""
    names: str = ""
    """What the flags begin with that are named by their fields."""


def flag(default: T, kind: Kind, help_text: str, **more: Any) -> T:
    """A field of a dataclass, and its flag; `more` goes to Flag."""
    return field(default=default, metadata={METADATA: Flag(kind, help_text, **more)})


def repeated(kind: Kind, help_text: str, **more: Any) -> tuple[Any, ...]:
    """A field of a dataclass that has all values of its flag."""
    return flag((), kind, f"{help_text}; repeatable", repeatable=True, **more)


def positional(default: T, kind: Kind, help_text: str, **more: Any) -> T:
    """A field of a dataclass that is an argument without a flag."""
    return flag(default, kind, help_text, is_positional=True, **more)


def part(default: Callable[[], T], *of_part: str) -> T:
    """`of_part`: see Part."""
    return field(default_factory=default, metadata={METADATA: Part(*of_part)})


def boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "on"):
        return True
    if text.lower() in ("false", "0", "off"):
        return False
    raise ValueError(f"expected true or false, got '{text}'")


LARGEST_INT32 = (1 << 31) - 1
"""What gRPC's core can hold."""


def number(shown: str, least: float, of: Callable[[str], Any] = int, most: int | None = None) -> Kind:
    """Numbers from `least` on; `most`: None = without an end."""

    def read(text: str) -> Any:
        try:
            value = of(text)
        except ValueError:
            raise ValueError(f"expected a number, got '{text}'") from None
        # Also for "nan", which is not less than anything.
        if not value >= least:
            raise ValueError(f"expected at least {least:g}, got '{text}'")
        if most is not None and value > most:
            raise ValueError(f"expected at most {most}, got '{text}'")
        return value

    return Kind(shown, read)


def text(shown: str) -> Kind:
    def read(text: str) -> str:
        # What is no UTF-8 comes as surrogates, which no message holds.
        if encodable(text) != text:
            raise ValueError(f"expected text in UTF-8, got {text!r}")
        return text

    return Kind(shown, read)


def one_of(choices: Iterable[str]) -> Kind:
    return Kind("", str, tuple(choices))


def byte_size(text: str, least: int = 1, expected: str = "a size such as 512M or 16G") -> int:
    """A number of bytes, or of KiB, MiB, GiB or TiB: 512M, 16G."""
    found = re.fullmatch(r"([0-9]+)([KMGT]?)", text, re.IGNORECASE)
    if found is None or int(found[1]) < least:
        raise ValueError(f"expected {expected}, got '{text}'")
    return int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")


def setting(text: str) -> tuple[str, str]:
    """`name=value`."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"expected SETTING=VALUE, got '{text}'")
    return name, value


def scoped_setting(text: str) -> tuple[str, str, str]:
    """`scope,name=value`, or `name=value` for the scope ""."""
    first, separator, rest = text.partition(",")
    if separator and "=" not in first:
        return (first, *setting(rest))
    return ("", *setting(text))


def setting_of(form: str, shown: str = "") -> Kind:
    """`scope,name=value`, without which it makes no sense. `form`: what the error shows, and the help where `shown` is
    empty."""

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
"""Stands alone, or with =true or =false; does not take the next word for its value."""
BOOLEAN = Kind("true|false", boolean, alone="true")
PORT = number("PORT", 0, most=65535)
COUNT = number("N", 0, most=LARGEST_INT32)
AMOUNT = number("N", 0)
BOUND = number("N", 0, most=10**18 - 1)
"""What the kernel's 63 bits hold, as parameters of models have it."""
POSITIVE = number("N", 1)
MESSAGE_BYTES = number("N", 1, most=LARGEST_INT32)
SECONDS = number("SECONDS", 0, float)
SECONDS_IN_INT32_MS = number("SECONDS", 0, float, LARGEST_INT32 // 1000)
"""What becomes a whole number of smaller units; some three weeks."""
POSITIVE_SECONDS = number("SECONDS", 0.001, float)
MILLISECONDS = number("MS", 0, most=LARGEST_INT32)
POSITIVE_MILLISECONDS = number("MS", 1, most=LARGEST_INT32)
FILE = Kind("FILE", Path)
FILE_OR_NONE = Kind("FILE", lambda text: Path(text) if text else None)
"""None for no text, as charts write a value that is left out."""
FOLDER = Kind("DIR", Path)
# Path.expanduser fails for users that the machine does not know; this leaves the "~".
ABSOLUTE_FOLDER = Kind("DIR", lambda text: str(Path(os.path.expanduser(text)).absolute()))  # noqa: PTH111
"""As workers and their children get it."""
BYTE_SIZE = Kind("SIZE", byte_size)
SETTING = Kind("SETTING=VALUE", setting)
REGULAR_EXPRESSION = Kind("REGEX", regular_expression)
