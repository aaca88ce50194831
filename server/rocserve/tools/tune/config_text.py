"""Puts a choice of batch size and instances into the text of a config.pbtxt; all else in it stays as it is written."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.config.completion import normalise
from rocserve.config.pbtxt import parse_model_config, read_text
from rocserve.config.sources import CONFIG_FILENAME, CONFIGS_FOLDER
from rocserve.config.validation import check_model_config
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.tools.model_choice import ToolModel
from rocserve.tools.printing import replacing


@dataclass(frozen=True, slots=True)
class ServingChoice:
    """What a model is to be served with."""

    instances: int
    largest_batch: int = 0
    """0 for a model that does not batch."""
    batch_sizes: tuple[int, ...] = ()
    """What is compiled ahead, where an engine does that; ascending."""


@dataclass(frozen=True, slots=True)
class _Change:
    start: int
    end: int
    text: str


def with_choice(text: str, choice: ServingChoice, filename: str) -> str:
    """The text with the choice written in.

    Raises:
        ServeError: INVALID_ARGUMENT; the text is no config.pbtxt, or has no one place for the choice.
    """
    expected = parse_model_config(text, filename)
    changed = _ConfigText(text).changed(choice)
    _set(expected, choice)
    _check(changed, expected, filename)
    return changed


class _ConfigText:
    """A text with the places of its fields. A change without a place, a str, goes to the end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._fields = _Reader(text).fields()

    def changed(self, choice: ServingChoice) -> str:
        changes = [self._instance_count(choice.instances)]
        if choice.largest_batch:
            changes += [self._largest_batch(choice.largest_batch), self._preferred_batch_size(choice.largest_batch)]
        if choice.batch_sizes:
            changes.append(self._batch_sizes(f'"{_listed(choice.batch_sizes)}"'))
        return _apply(self._text, changes)

    def _instance_count(self, count: int) -> _Change | str:
        groups = [value for field in _named(self._fields, "instance_group") for value in field.values]
        if len(groups) > 1:
            raise invalid_argument(
                f"it has {len(groups)} instance groups, and which of them is to have a count of {count} is not known;"
                " write it yourself"
            )
        return _scalar_in(groups[0], "count", str(count)) if groups else f"instance_group [ {{ count: {count} }} ]"

    def _largest_batch(self, largest: int) -> _Change | str:
        found = _named(self._fields, "max_batch_size")
        return _replaced(found[-1].values[0], str(largest)) if found else f"max_batch_size: {largest}"

    def _preferred_batch_size(self, largest: int) -> _Change | str:
        batching = _named(self._fields, "dynamic_batching")
        if not batching:
            return f"dynamic_batching {{ preferred_batch_size: [ {largest} ] }}"
        inner = _named(batching[0].values[0].fields, "preferred_batch_size")
        if not inner:
            return _inserted(batching[0].values[0], f"preferred_batch_size: [ {largest} ]")
        if len(inner) > 1:
            raise invalid_argument(
                f"it has preferred_batch_size {len(inner)} times; write it once, as a list, or {largest} yourself"
            )
        start, end = inner[0].list_span or (inner[0].values[0].start, inner[0].values[0].end)
        return _Change(start, end, f"[ {largest} ]")

    def _batch_sizes(self, quoted: str) -> _Change | str:
        for entry in (value for field in _named(self._fields, "parameters") for value in field.values):
            keys, holders = _named(entry.fields, "key"), _named(entry.fields, "value")
            if keys and holders and self._text_of(keys[0].values[0]) == "batch_sizes":
                return _scalar_in(holders[0].values[0], "string_value", quoted)
        return f'parameters {{ key: "batch_sizes" value: {{ string_value: {quoted} }} }}'

    def _text_of(self, quoted: _Value) -> str:
        return self._text[quoted.start + 1 : quoted.end - 1]


def _set(message: ModelConfig, choice: ServingChoice) -> None:
    if not message.instance_group:
        message.instance_group.add()
    message.instance_group[0].count = choice.instances
    if choice.largest_batch:
        message.max_batch_size = choice.largest_batch
        message.dynamic_batching.preferred_batch_size[:] = [choice.largest_batch]
    if choice.batch_sizes:
        message.parameters["batch_sizes"].string_value = _listed(choice.batch_sizes)


def _check(text: str, expected: ModelConfig, filename: str) -> None:
    """However the text was written: it now says what it is to say, and all else that it said before."""
    try:
        written = parse_model_config(text, filename)
    except ServeError as error:
        raise internal(f"{filename} would not be valid any more ({error.text}) and stays as it was") from None
    if written != expected:
        raise internal(f"the choice cannot be written into {filename} as it is; write it yourself")


def _scalar_in(message: _Value, name: str, text: str) -> _Change:
    found = _named(message.fields, name)
    return _replaced(found[-1].values[0], text) if found else _inserted(message, f"{name}: {text}")


def _replaced(value: _Value, text: str) -> _Change:
    return _Change(value.start, value.end, text)


def _inserted(message: _Value, text: str) -> _Change:
    """As the message's first field."""
    return _Change(message.start + 1, message.start + 1, f" {text}")


def _apply(text: str, changes: Sequence[_Change | str]) -> str:
    placed = [change for change in changes if isinstance(change, _Change)]
    added = [change for change in changes if isinstance(change, str)]
    for change in sorted(placed, key=lambda one: one.start, reverse=True):
        text = text[: change.start] + change.text + text[change.end :]
    if added and text and not text.endswith("\n"):
        text += "\n"
    return text + "".join(f"{line}\n" for line in added)


def _listed(sizes: Iterable[int]) -> str:
    return ",".join(map(str, sizes))


_USUAL_MODE = 0o644


def config_path(model: ToolModel, config_name: str) -> Path:
    """The file that says how the model is served; it need not be there yet.

    Raises:
        ServeError: INVALID_ARGUMENT; there is none that could be written.
    """
    definition = model.definition
    if definition is None:
        raise invalid_argument("--write: a bare file has no config.pbtxt; give a model's folder")
    if definition.is_amd:
        raise invalid_argument(
            f"--write: {definition.source} is written for AMD Inference Server, which has no fields for the choice;"
            f" `rocserve config` prints it as a {CONFIG_FILENAME}"
        )
    if "batch" in definition.config.parameters:
        raise invalid_argument(
            "--write: the parameter 'batch' names the one batch size, which contradicts a choice; remove it first"
        )
    named = definition.folder / CONFIGS_FOLDER / f"{config_name}.pbtxt"
    if config_name and named.is_file():
        return named.resolve()
    found = definition.folder / definition.source
    return found.resolve() if found.is_file() else definition.folder / CONFIG_FILENAME


def write_choice(path: Path, model: ToolModel, choice: ServingChoice) -> None:
    """Replace the file in one step; a server that watches sees the one or the other.

    Raises:
        ServeError: the choice cannot be written into it; it is as it was.
    """
    before = read_text(path) if path.exists() else f'backend: "{model.backend.name}"\n'
    text = with_choice(before, choice, path.name)
    message = parse_model_config(text, path.name)
    message.name = message.name or model.source.name
    if not message.platform and not message.backend:
        message.backend = model.backend.name
    normalise(message, model.backend)
    check_model_config(message)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else _USUAL_MODE
    try:
        with replacing(path, mode) as file:
            file.write(text.encode())
    except OSError as error:
        raise unavailable(f"cannot write {path}: {error.strerror or error}") from None


_TOKEN = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<mark>[][{}<>:,;])
      | (?P<word>[^][{}<>:,;\s#"']+)""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class _Value:
    """A scalar, or a message with its fields; an element of a list or a field's one value."""

    start: int
    end: int
    """The brackets of a message included."""
    fields: tuple[_Field, ...] = ()


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    values: tuple[_Value, ...]
    """One, or those of a list."""
    list_span: tuple[int, int] | None = None
    """Where the list is, its brackets included."""


def _named(fields: Sequence[_Field], name: str) -> tuple[_Field, ...]:
    return tuple(field for field in fields if field.name == name)


class _Reader:
    """Finds the fields of a text in protobuf's text format, which is known to be well-formed. Goes through it once."""

    def __init__(self, text: str) -> None:
        self._tokens = [match for match in _TOKEN.finditer(text) if match.lastgroup != "blank"]
        self._next = 0

    def fields(self, until: str = "") -> tuple[_Field, ...]:
        """Up to the bracket `until`, which is not taken; "" = to the end."""
        found = []
        while self._peek() != until:
            found.append(self._field())
            while self._peek() in (",", ";"):
                self._take()
        return tuple(found)

    def _field(self) -> _Field:
        name = self._take()[0]
        if self._peek() == ":":
            self._take()
        if self._peek() != "[":
            return _Field(name, (self._value(),))
        start = self._take().start()
        values = []
        while self._peek() != "]":
            values.append(self._value())
            if self._peek() == ",":
                self._take()
        return _Field(name, tuple(values), (start, self._take().end()))

    def _value(self) -> _Value:
        first = self._take()
        if first[0] in _CLOSING:
            fields = self.fields(until=_CLOSING[first[0]])
            return _Value(first.start(), self._take().end(), fields)
        end = first.end()
        # Strings that follow each other are one.
        while first.lastgroup == "string" and self._peek().startswith(('"', "'")):
            end = self._take().end()
        return _Value(first.start(), end)

    def _peek(self) -> str:
        """The next token (no string is a mark: it has its quotes); "" at the end."""
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _take(self) -> re.Match[str]:
        self._next += 1
        return self._tokens[self._next - 1]
