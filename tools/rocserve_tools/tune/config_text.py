"""Writes a choice of batch size and instances into the text of a config.pbtxt; the rest of the text is preserved."""

from __future__ import annotations

import re
import stat
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.written_sizes import SIZES
from rocserve.config.completion import normalise
from rocserve.config.model_folder import CONFIG_FILENAME, CONFIGS_FOLDER
from rocserve.config.pbtxt import parse_model_config, read_text
from rocserve.config.validation import check_model_config
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.verbs.model_choice import ToolModel
from rocserve.verbs.printing import replacing


@dataclass(frozen=True, slots=True)
class ServingChoice:
    instances: int
    largest_batch: int = 0
    """0 = the model does not batch."""
    batch_sizes: tuple[int, ...] = ()
    """Ascending, for an engine that compiles programs ahead; empty = none."""
    sizes: str = ""
    """The parameter `sizes`; "" = unchanged."""


def with_choice(text: str, choice: ServingChoice, filename: str) -> str:
    """Return the text with the choice written into it. Raises ServeError (INVALID_ARGUMENT) if the text is not a
    config.pbtxt, or if the place for the choice is ambiguous."""
    expected = parse_model_config(text, filename)
    if not expected.instance_group:
        expected.instance_group.add()
    expected.instance_group[0].count = choice.instances
    places = _Places(text)
    if (groups := len(places.values["instance_group"])) > 1:
        raise invalid_argument(
            f"it has {groups} instance groups, and which of them is to have a count of {choice.instances} is not known;"
            " write it yourself"
        )
    places.put("instance_group.count", str(choice.instances), f"instance_group [ {{ count: {choice.instances} }} ]")
    if largest := choice.largest_batch:
        expected.max_batch_size = largest
        expected.dynamic_batching.preferred_batch_size[:] = [largest]
        places.put("max_batch_size", str(largest), f"max_batch_size: {largest}")
        if (times := len(places.fields[_PREFERRED])) > 1:
            raise invalid_argument(
                f"it has preferred_batch_size {times} times; write it once, as a list, or {largest} yourself"
            )
        places.put(_PREFERRED, f"[ {largest} ]", f"dynamic_batching {{ preferred_batch_size: [ {largest} ] }}")
    for key, value in (("batch_sizes", ",".join(map(str, choice.batch_sizes))), (SIZES, choice.sizes)):
        if value:
            expected.parameters[key].string_value = value
            line = f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
            places.put("parameters.value.string_value", f'"{value}"', line, places.parameter(key))
    changed = places.changed()
    # The text may be written in any style. Parsing proves that it now has the choice, and everything else is unchanged.
    try:
        written = parse_model_config(changed, filename)
    except ServeError as error:
        raise internal(f"{filename} would become invalid ({error.text}) and stays unchanged") from None
    if written != expected:
        raise internal(f"the choice cannot be written into {filename}; write it yourself")
    return changed


_PREFERRED = "dynamic_batching.preferred_batch_size"
_TOKEN = re.compile(
    r"""(?P<blank>[\s:,;]+|\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<bracket>[][{}<>])
      | (?P<word>[^][{}<>:,;\s#"']+)""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">"}
_Span = tuple[int, int]
"""Start and end of a piece of text, in characters. The brackets of a message or list are included."""


class _Places:
    """Finds the positions of fields in a well-formed protobuf text by their paths, such as "instance_group.count", and
    collects changes to them."""

    def __init__(self, text: str) -> None:
        self.fields: dict[str, list[_Span]] = defaultdict(list)
        """Positions of each field's value or list."""
        self.values: dict[str, list[_Span]] = defaultdict(list)
        """Positions of each single value, also within a list."""
        self._text = text
        self._changes: list[tuple[_Span, str]] = []
        self._added: list[str] = []
        self._tokens = deque(match for match in _TOKEN.finditer(text) if match.lastgroup != "blank")
        self._read_fields("", "")

    def put(self, path: str, value: str, line: str, holders: Sequence[_Span] | None = None) -> None:
        """Replace the field's value. If the field is missing, insert it into the first message of its path, or else
        append `line` to the text. `holders`: the messages that may contain the field; None = all of the path."""
        outer, _, name = path.rpartition(".")
        holders = self.values[outer] if holders is None else holders
        found = [field for field in self.fields[path] if not outer or any(_holds(one, field) for one in holders)]
        if found:
            self._changes.append((found[-1], value))
        elif holders:
            begin = holders[0][0] + 1
            self._changes.append(((begin, begin), f" {name}: {value}"))
        else:
            self._added.append(line)

    def parameter(self, name: str) -> list[_Span]:
        """Return the positions of `value` in the entry of `parameters` with this key."""
        keys = [key for key in self.values["parameters.key"] if self._text[key[0] + 1 : key[1] - 1] == name]
        entries = [entry for entry in self.values["parameters"] if any(_holds(entry, key) for key in keys)]
        return [one for one in self.values["parameters.value"] if any(_holds(entry, one) for entry in entries)]

    def changed(self) -> str:
        text = self._text
        for (start, end), value in sorted(self._changes, reverse=True):
            text = text[:start] + value + text[end:]
        if self._added and text and not text.endswith("\n"):
            text += "\n"
        return text + "".join(f"{line}\n" for line in self._added)

    def _read_fields(self, prefix: str, until: str) -> None:
        """Read fields up to the bracket `until`, which is not consumed; "" = up to the end."""
        while self._next() != until:
            path = prefix + self._tokens.popleft()[0]
            start = self._tokens[0].start()
            if self._next() == "[":
                self._tokens.popleft()
                while self._next() != "]":
                    self._read_value(path)
                end = self._tokens.popleft().end()
            else:
                end = self._read_value(path)
            self.fields[path].append((start, end))

    def _read_value(self, path: str) -> int:
        first = self._tokens.popleft()
        end = first.end()
        if first[0] in _CLOSING:
            self._read_fields(f"{path}.", _CLOSING[first[0]])
            end = self._tokens.popleft().end()
        # Adjacent strings form one string.
        while first.lastgroup == "string" and self._next().startswith(('"', "'")):
            end = self._tokens.popleft().end()
        self.values[path].append((first.start(), end))
        return end

    def _next(self) -> str:
        """Return the next token, "" at the end. A string includes its quotes, so it never equals a bracket."""
        return self._tokens[0][0] if self._tokens else ""


def _holds(outer: _Span, inner: _Span) -> bool:
    return outer[0] < inner[0] < outer[1]


def config_path(model: ToolModel, config_name: str) -> Path:
    """Return the file that configures the model; it may not exist yet. Raises ServeError if none could be written."""
    definition = model.definition
    if model.is_bare:
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
    """Replace the file in one step. Raises ServeError if the choice cannot be written; the file is then unchanged."""
    before = read_text(path) if path.exists() else f'backend: "{model.backend.name}"\n'
    text = with_choice(before, choice, path.name)
    message = parse_model_config(text, path.name)
    message.name = message.name or model.source.name
    if not message.platform and not message.backend:
        message.backend = model.backend.name
    normalise(message, model.backend)
    check_model_config(message)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    try:
        with replacing(path, mode) as file:
            file.write(text.encode())
    except OSError as error:
        raise unavailable(f"cannot write {path}: {error.strerror or error}") from None
