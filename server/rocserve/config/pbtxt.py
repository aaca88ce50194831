"""Protobuf's text format, with errors that state the position and the name that was probably meant. The format:
https://protobuf.dev/reference/protobuf/textformat-spec/"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from rocserve.config.bounds import MOST_CONFIG_BYTES, check_config_size
from rocserve.core.errors import invalid_argument, unreadable
from rocserve.protocol.model_config_pb2 import ModelConfig

NO_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>[^"]*)"(?: at "(?P<path>[^"]*)")?')
"""The error of protobuf's text and JSON parsers."""


def parse_model_config(text: str, source: str) -> ModelConfig:
    """Parse config.pbtxt's text. `source` names the file in errors. Raises ServeError (INVALID_ARGUMENT),
    "<source>:<line>:<column>: <fault>"."""
    message = ModelConfig()
    parse_text(text, message, source)
    return message


def parse_text(text: str, message: Message, source: str) -> None:
    """Merge text into an empty message of any type. Raises as `parse_model_config`."""
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        line, column = error.GetLine() or 1, error.GetColumn() or 1
        what = _explain(str(error), text, line, column, message)
        # A document mark, a list entry, a name without a value, or an unquoted text. Each match stays within its line,
        # because a search across a million empty lines would take quadratic time.
        yaml = r"(?m)^---[^\S\n]*$|^[^\S\n]*- \S|^\w+:[^\S\n]*$|^(name|platform|backend): *[A-Za-z].*$"
        found = "JSON" if text.lstrip().startswith(("{", "[")) else "YAML" if re.search(yaml, text) else ""
        if found:
            example = 'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [4] }'
            what += f"; this looks like {found}, but must be protobuf's text format, e.g. {example}"
        raise invalid_argument(f"{source}:{line}:{column}: {what}") from None
    except ValueError as error:
        # Parse raises it for a number that no enumeration can have.
        raise invalid_argument(f"{source}: {str(error)[:1].lower()}{str(error)[1:]}") from None
    if fault := unknown_value(message):
        raise invalid_argument(f"{source}: {fault}")


def unknown_value(message: Message) -> str:
    """Return the fault if an enumeration has an unknown number, which protobuf accepts; "" = none."""
    for field, value in message.ListFields():
        if field.enum_type is not None:
            for number in value if field.is_repeated else (value,):
                if number not in field.enum_type.values_by_number:
                    known = suggest(str(number), field.enum_type.values_by_name)
                    return f"unknown value {number} of {field.enum_type.name} in '{field.name}'{known}"
        else:
            for part in messages_in(field, value):
                if fault := unknown_value(part):
                    return fault
    return ""


def messages_in(field: Any, value: Any) -> Iterable[Message]:
    """Return the messages in a field's value."""
    if field.message_type is None:
        return ()
    if field.message_type.GetOptions().map_entry:
        return value.values() if field.message_type.fields_by_name["value"].message_type is not None else ()
    return value if field.is_repeated else (value,)


def format_model_config(message: ModelConfig) -> str:
    return text_format.MessageToString(message, as_utf8=True)


def read_text(path: Path) -> str:
    """Read a configuration file. Raises ServeError (INVALID_ARGUMENT) if it is unreadable, too large, or not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_CONFIG_BYTES + 1)
    except OSError as error:
        raise unreadable(f"failed to open text file for read {path}: {error.strerror}", error) from None
    check_config_size(len(raw), path.name)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise invalid_argument(f"{path.name}:{line}:{column}: not UTF-8 text (byte 0x{raw[error.start]:02x})") from None


def suggest(wrong: str, known: Iterable[str]) -> str:
    """Return the end of an error about a wrong name: the name that was probably meant, or all known names."""
    names = sorted(known)
    by_lower = {name.lower(): name for name in names}
    # The comparison's time grows with the square of the length.
    close = difflib.get_close_matches(wrong[:100].lower(), by_lower, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{by_lower[close[0]]}'?"
    return f"; expected one of: {', '.join(names)}" if names else ""


def _explain(error: str, text: str, line: int, column: int, message: Message) -> str:
    reason = re.sub(r"^\d+:\d+ : ", "", error)
    lines = text.split("\n")
    quoted = f"'{lines[line - 1]}': " if line <= len(lines) else ""
    reason = reason.removeprefix(quoted).rstrip(".")
    if match := NO_FIELD.match(reason):
        return unknown_field(match, message)
    if match := re.match(r'Enum type "(?P<type>[\w.]+)" has no value named (?P<name>"?\w+"?)', reason):
        written, name = match["name"], match["name"].strip('"')
        values = list(message.DESCRIPTOR.file.pool.FindEnumTypeByName(match["type"]).values_by_name)
        prefixed = [value for value in values if value.split("_", 1)[-1] == name.upper()]
        kind = match["type"].rsplit(".", 1)[-1]
        quotes = " (remove the quotes)" if written != name else ""
        return f"unknown value {written} of {kind}{quotes}{suggest(name, prefixed or values)}"
    # An unfinished text ends in a line that the parser quotes, though it is empty.
    reason = reason.removeprefix("'': ")
    return reason[:1].lower() + reason[1:] + _remedy(reason, lines, line, column)


def _remedy(reason: str, lines: Sequence[str], line: int, column: int) -> str:
    """Return the end of an error about a value that does not fit its field; "" = the reason suffices."""
    # No more of the text than a name takes, since a file may be one long line.
    place = lines[line - 1] if line <= len(lines) else ""
    before, after = place[max(column - 200, 0) : column - 1].rstrip(), place[column - 1 : column + 200].strip()
    above = before or next((text[-200:].rstrip() for text in reversed(lines[: line - 1]) if text.strip()), "")
    if above.endswith(",") and after.startswith("]"):
        return "; remove the comma before ]"
    if reason == 'Expected "{"' and (field := re.search(r"(\w+)\s*:?$", before)):
        example = 'string_value: "..." ' if field[1] == "value" else "... " if after else ""
        return f"; {field[1]} is a message: write {field[1]} {{ {example}}}"
    if reason.startswith("Couldn't parse integer"):
        return "; write a whole number" + (", or -1 for any size" if re.search(r"\bdims:\s*\[?[^\]]*$", before) else "")
    if reason.startswith("Expected string"):
        return "; write texts in quotes"
    return ""


def unknown_field(found: re.Match[str], message: Message) -> str:
    """Return the error for an unknown field, with the name that was probably meant."""
    kind = found["type"].rsplit(".", 1)[-1]
    where = f" at {found['path']}" if found["path"] and found["path"] != kind else ""
    fields = message.DESCRIPTOR.file.pool.FindMessageTypeByName(found["type"]).fields_by_name
    return f"unknown field '{found['name']}' of {kind}{where}{suggest(found['name'], fields)}"
