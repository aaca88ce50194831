"""The texts that the server must give for MIGraphX's failures: those in the rows of docs/reference/migraphx-errors.md,
and those that the page leaves out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.migraphx_error_texts import INDEX_TEXTS, RESPONSE_TEXTS

CHECKOUT = Path(__file__).parents[2]
_PAGE = CHECKOUT / "docs/reference/migraphx-errors.md"
_ROW = re.compile(r"^\| (.*) \|$", re.MULTILINE)
_BETWEEN_CELLS = re.compile(r" \|(?= |$)")
_TEXT = re.compile(r"\b(index|log|response): (`{1,2})(.+?)\2(?!`)")
_COLUMNS = 4
"""Of a table of errors. Tables with fewer columns have no texts of the server."""
_VARYING = re.compile(r"<[a-z ]+>")


@dataclass(frozen=True, slots=True)
class Text:
    """A message, with `<...>` for the parts that vary."""

    text: str

    @property
    def start(self) -> str:
        """The text before the first part that varies."""
        return _VARYING.split(self.text)[0]

    def fits(self, message: str) -> bool:
        pattern = ".+?".join(map(re.escape, _VARYING.split(self.text)))
        return re.fullmatch(pattern, message, re.DOTALL) is not None


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    texts: dict[str, Text]
    """Place where a user sees the text (index, log, response) -> text."""


def rows() -> list[Row]:
    """The rows of all tables of errors, and those of the texts that the page leaves out."""
    left_out = [
        Row(case, {place: Text(text)})
        for place, texts in (("index", INDEX_TEXTS), ("response", RESPONSE_TEXTS))
        for case, text in texts.items()
    ]
    return [_row(columns) for columns in _tables(_PAGE.read_text())] + left_out


def text(case: str, place: str = "index") -> Text:
    """The text that the row gives for this place."""
    (row,) = (row for row in rows() if row.case == case)
    return row.texts[place]


def _row(columns: Sequence[str]) -> Row:
    return Row(columns[0], {place: Text(text.strip()) for place, _, text in _TEXT.findall(columns[2])})


def _tables(page: str) -> list[list[str]]:
    """The cells of all rows without the headings."""
    found = [[cell.strip() for cell in _BETWEEN_CELLS.split(match[1])] for match in _ROW.finditer(page)]
    return [cells for cells in found if len(cells) == _COLUMNS and cells[0] != "case"]
