"""Command arguments: builds a parser from a dataclass with flags (settings/flag.py), and the dataclass from
arguments."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rocserve.settings.flag import METADATA, SWITCH, Flag

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class FieldFlag:
    """A flag and the field that it sets."""

    names: tuple[str, ...]
    """Names without the leading dashes."""
    target: str
    """The field's path through parts of the dataclass ("grpc.port")."""
    default: Any
    flag: Flag
    group: str

    @property
    def help(self) -> str:
        """The help with the default appended, if there is one and the help does not state it."""
        default, text = self.default, self.flag.help
        is_needed = self.flag.is_positional or self.flag.required
        omits_default = is_needed or self.flag.kind is SWITCH or "(default" in text
        if omits_default or default in (None, "", ()):
            return text
        value = default.value if isinstance(default, enum.Enum) else default
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{text} (default {shown.lower() if isinstance(value, bool) else shown})"


def flags_of(defaults: Any, prefix: str = "", group: str = "", begin: str = "") -> Iterator[FieldFlag]:
    """Yield the flags of a dataclass and its parts. `defaults`: an instance with the defaults."""
    for field in dataclasses.fields(defaults):
        found = field.metadata.get(METADATA)
        value = getattr(defaults, field.name)
        if isinstance(found, Flag):
            own = begin + re.sub("_seconds$", "_secs", field.name).replace("_", "-")
            names = (found.name or own, *found.aliases)
            yield FieldFlag(names, prefix + field.name, value, found, found.group or group)
            for other in found.others:
                yield FieldFlag((other.name,), prefix + field.name, (), other, found.group or group)
        elif found is not None:
            yield from flags_of(value, f"{prefix}{field.name}.", found.group, found.names)


def add_flags(parser: argparse.ArgumentParser, defaults: Any, group: str = "") -> None:
    """Add the flags to a parser for `filled`. `group`: heading of the dataclass's own flags; "" = none."""
    containers: dict[str, argparse._ActionsContainer] = {"": parser}
    for one in flags_of(defaults, group=group):
        place = "exclusive" if one.flag.exclusive else one.group
        if place not in containers:
            exclusive = one.flag.exclusive
            containers[place] = parser.add_mutually_exclusive_group() if exclusive else parser.add_argument_group(place)
        if one.flag.kind is SWITCH:
            for value, ending, text in ((True, "", one.help), (True, "=true", None), (False, "=false", None)):
                words = [f"--{name}{ending}" for name in one.names]
                hidden = text or argparse.SUPPRESS
                containers[place].add_argument(*words, dest=one.target, action="store_const", const=value, help=hidden)
        else:
            _add_flag(containers[place], one)


def _add_flag(container: argparse._ActionsContainer, one: FieldFlag) -> None:
    flag, kind = one.flag, one.flag.kind
    # As in tritonserver, a boolean flag alone means "=true".
    may_stand_alone = kind.alone is not None
    more: dict[str, Any] = {"nargs": "?" if may_stand_alone else flag.nargs}
    if flag.is_positional:
        names = [one.target]
    else:
        names = [f"--{name}" for name in one.names]
        more |= {"dest": one.target, "required": flag.required}
        more |= {"const": kind.read(kind.alone)} if kind.alone is not None else {}
    container.add_argument(
        *names,
        type=for_argparse(kind.read),
        choices=kind.choices or None,
        action="append" if flag.repeatable else "store",
        # None means not given; argparse requires a list for "*".
        default=[] if flag.nargs == "*" else None,
        metavar=kind.shown or None,
        help=one.help,
        **more,
    )


def filled(defaults: T, arguments: argparse.Namespace, prefix: str = "") -> T:
    """Return the dataclass with the given arguments instead of defaults. Raises ValueError for an unusable one."""
    plain: Any = defaults
    changes = {}
    for field in dataclasses.fields(plain):
        found = field.metadata.get(METADATA)
        if isinstance(found, Flag):
            value = getattr(arguments, prefix + field.name, None)
            if value is not None:
                value = tuple(value) if isinstance(value, list) else value
                changes[field.name] = found.make(value) if found.make else value
        elif found is not None:
            changes[field.name] = filled(getattr(plain, field.name), arguments, f"{prefix}{field.name}.")
    made: T = dataclasses.replace(plain, **changes)
    return made


def for_argparse(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
