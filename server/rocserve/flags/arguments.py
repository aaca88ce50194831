"""Makes a command's arguments of a dataclass with flags at its fields (settings/flag.py), and the dataclass of what is
given."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rocserve.settings.flag import METADATA, Flag, number

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class FieldFlag:
    """A flag, and the field that it sets."""

    names: tuple[str, ...]
    """Without dashes."""
    target: str
    """The field; what stands before a point leads into a part of the dataclass ("grpc.port")."""
    default: Any
    flag: Flag
    group: str

    @property
    def help(self) -> str:
        """Ends with the default, where there is one and the help does not say it itself."""
        default, text = self.default, self.flag.help
        if default in (None, "", ()) or "(default" in text or dataclasses.is_dataclass(default):
            return text
        value = default.value if isinstance(default, enum.Enum) else default
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{text} (default {shown.lower() if isinstance(value, bool) else shown})"


def flags_of(defaults: Any, prefix: str = "", group: str = "") -> Iterator[FieldFlag]:
    """Those of a dataclass, with those of its parts. `defaults`: holds what the fields are where no flag is given."""
    for field in dataclasses.fields(defaults):
        found = field.metadata.get(METADATA)
        value = getattr(defaults, field.name)
        if isinstance(found, Flag):
            names = (found.name or field.name.replace("_", "-"), *found.aliases)
            yield FieldFlag(names, prefix + field.name, value, found, found.group or group)
            for other in found.others:
                yield FieldFlag((other.name,), prefix + field.name, (), other, found.group or group)
        elif found is not None:
            yield from flags_of(value, f"{prefix}{field.name}.", found)


def add_flags(parser: argparse.ArgumentParser, defaults: Any, group: str = "") -> None:
    """`filled` makes the dataclass of what is found. `group`: of the dataclass's own flags; "" = the parser's."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for one in flags_of(defaults, group=group):
        if one.group not in groups:
            groups[one.group] = parser.add_argument_group(one.group)
        kind = one.flag.kind
        groups[one.group].add_argument(
            *(f"--{name}" for name in one.names),
            dest=one.target,
            type=for_argparse(kind.read),
            choices=kind.choices or None,
            action="append" if one.flag.repeatable else "store",
            # Without a value: a switch that stands without "=true", as tritonserver allows.
            nargs=None if kind.alone is None else "?",
            const=None if kind.alone is None else kind.read(kind.alone),
            default=None,
            metavar=kind.shown or None,
            help=one.help,
        )


def filled(defaults: T, arguments: argparse.Namespace) -> T:
    """The dataclass with what was given in place of its defaults. Raises: ValueError: it makes no sense."""
    made: T = _filled(defaults, vars(arguments), "")
    return made


def _filled(defaults: Any, given: dict[str, Any], prefix: str) -> Any:
    changes = {}
    for field in dataclasses.fields(defaults):
        found = field.metadata.get(METADATA)
        if isinstance(found, Flag):
            value = given.get(prefix + field.name)
            if value is not None:
                make = found.make or (tuple if found.repeatable else lambda one: one)
                changes[field.name] = make(value)
        elif found is not None:
            changes[field.name] = _filled(getattr(defaults, field.name), given, f"{prefix}{field.name}.")
    return dataclasses.replace(defaults, **changes)


def for_argparse(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def at_least(least: float, of: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of numbers from `least` on."""
    return for_argparse(number("", least, of).read)
