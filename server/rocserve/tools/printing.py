"""Where the tools write: tables for people on a terminal, plain lines into a pipe, complaints on standard error."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, TextIO, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rocserve.core.byte_sizes import readable_size

UNWRAPPED_WIDTH = 10_000
"""Columns for a file or a pipe, whose lines nobody wants broken."""


def console_on(file: IO[str] | None = None) -> Console:
    """A console on `file` (standard output when left out), plain where that is no terminal."""
    console = Console(file=file)
    if console.is_terminal:
        return console
    return Console(file=console.file, width=UNWRAPPED_WIDTH, no_color=True)


def say(console: Console, text: str = "") -> None:
    """A line as it is: nothing in it is a style."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def complain(text: str, file: TextIO | None = None) -> None:
    """One line on standard error, even of a text that has several."""
    print(" ".join(text.split()), file=file or sys.stderr)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> Table:
    """The first `left` columns hold text, the others figures. No title: ""."""
    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def show(console: Console, made: Table) -> None:
    """A table in its full width: on a narrow terminal its lines go on in the next, rather than lose figures."""
    _print_lines(console, made, UNWRAPPED_WIDTH)


def show_folded(console: Console, made: RenderableType) -> None:
    """What may be folded to be as narrow as the terminal."""
    _print_lines(console, made, console.width)


def _print_lines(console: Console, made: RenderableType, width: int) -> None:
    """Without the blanks that tables end their lines with, which a narrow terminal would show as empty lines."""
    for line in console.render_lines(made, console.options.update(width=width), pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()
        console.print(text, highlight=False, soft_wrap=True)


def size(count: int) -> str:
    """Bytes as people read them."""
    return readable_size(count)


@contextmanager
def replacing(path: Path, mode: int) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends, with these permissions; where the block
    fails, `path` is as it was.

    Raises:
        OSError: it cannot be written, or not be put there.
    """
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=".", suffix=".tmp", delete=False) as part:
        try:
            yield cast(BinaryIO, part)
            part.flush()
            os.fsync(part.fileno())
            os.fchmod(part.fileno(), mode)
            Path(part.name).replace(path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise
