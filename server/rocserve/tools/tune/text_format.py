"""Where the fields of a text in protobuf's text format are, so that it can be changed without being printed anew.

Only what is well-formed is read: whoever changes a configuration has parsed it before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<mark>[][{}<>:,;])
      | (?P<word>[^][{}<>:,;\s#"']+)""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    """string, mark or word."""
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Value:
    """A scalar, or a message with its fields; an element of a list or a field's one value."""

    start: int
    end: int
    """The brackets of a message included."""
    fields: tuple[Field, ...] | None = None
    """None of a scalar."""


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    start: int
    end: int
    values: tuple[Value, ...]
    """One, or those of a list."""
    list_span: tuple[int, int] | None = None
    """Where the list is, its brackets included."""


def read_fields(text: str) -> tuple[Field, ...]:
    """The fields at the top.

    Raises:
        ValueError: the text is not well-formed.
    """
    return _Reader(_tokens(text)).fields(until="")


def named(fields: Sequence[Field] | None, name: str) -> tuple[Field, ...]:
    return tuple(field for field in fields or () if field.name == name)


def _tokens(text: str) -> list[Token]:
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise ValueError(f"unexpected {text[position]!r} at position {position}")
        if match.lastgroup != "blank":
            tokens.append(Token(match.lastgroup, match[0], match.start(), match.end()))
        position = match.end()
    return tokens


class _Reader:
    """Goes through the tokens once."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._next = 0

    def fields(self, until: str) -> tuple[Field, ...]:
        """Up to the bracket `until`, which is not taken; "" = to the end."""
        found = []
        while self._peek() != until:
            found.append(self._field())
            while self._peek() in (",", ";"):
                self._take()
        return tuple(found)

    def _field(self) -> Field:
        name = self._take()
        if name.kind != "word":
            raise ValueError(f"expected a field's name, got {name.text!r} at position {name.start}")
        if self._peek() == ":":
            self._take()
        if self._peek() == "[":
            values, span = self._list()
            return Field(name.text, name.start, span[1], values, span)
        value = self._value()
        return Field(name.text, name.start, value.end, (value,))

    def _list(self) -> tuple[tuple[Value, ...], tuple[int, int]]:
        opening = self._take()
        values = []
        while self._peek() != "]":
            values.append(self._value())
            if self._peek() == ",":
                self._take()
        return tuple(values), (opening.start, self._take().end)

    def _value(self) -> Value:
        first = self._take()
        if first.text in _CLOSING and first.kind == "mark":
            fields = self.fields(until=_CLOSING[first.text])
            return Value(first.start, self._take().end, fields)
        if first.kind == "mark":
            raise ValueError(f"expected a value, got {first.text!r} at position {first.start}")
        end = first.end
        # Strings that follow each other are one.
        while first.kind == "string" and self._peek_kind() == "string":
            end = self._take().end
        return Value(first.start, end)

    def _peek(self) -> str:
        """The next token's text (no string is a mark: it has its quotes); "" at the end."""
        return self._tokens[self._next].text if self._next < len(self._tokens) else ""

    def _peek_kind(self) -> str:
        return self._tokens[self._next].kind if self._next < len(self._tokens) else ""

    def _take(self) -> Token:
        if self._next >= len(self._tokens):
            raise ValueError("the text ends too early")
        self._next += 1
        return self._tokens[self._next - 1]
