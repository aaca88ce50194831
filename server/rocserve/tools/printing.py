"""Where the tools write: tables for people on a terminal, plain lines into a pipe, complaints on standard error."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Self, cast

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from rocserve.core.plain import to_json
from rocserve.core.printable import printable, readable_size

UNWRAPPED_WIDTH = 10_000
"""Columns for a file or a pipe, whose lines nobody wants broken."""


def console_on(file: IO[str] | None = None) -> Console:
    """A console on `file` (standard output when left out), plain where that is no terminal."""
    console = Console(file=file)
    if console.is_terminal:
        return console
    return Console(file=console.file, width=UNWRAPPED_WIDTH, no_color=True)


def say(console: Console, text: str = "", style: str = "") -> None:
    """A line as it is: nothing in it is a style."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def say_json(console: Console, value: object) -> None:
    """A line of JSON; infinities and NaN, for which that has no form, are null."""
    say(console, json.dumps(json.loads(to_json(value), parse_constant=lambda _: None), separators=(",", ":")))


def complain(text: str) -> None:
    """One line on standard error, even of a text that has several, or what a terminal would obey."""
    print(printable(" ".join(text.split())), file=sys.stderr)


def table(
    title: str,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[RenderableType]],
    *,
    left: int = 1,
    box: Box | None = SIMPLE_HEAD,
    has_header: bool = True,
) -> Table:
    """The first `left` columns hold text, the others figures, none of them folded; a Column says so itself. Nothing in
    a cell that is a str is a style. No title: ""."""
    made = Table(
        *(
            Column(one, justify="left" if number < left else "right", no_wrap=True) if isinstance(one, str) else one
            for number, one in enumerate(columns)
        ),
        title=title or None,
        title_justify="left",
        box=box,
        pad_edge=box not in (None, SIMPLE_HEAD),
        show_header=has_header,
    )
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def show(console: Console, made: RenderableType, *, is_folded: bool = False) -> None:
    """A table in its full width: on a narrow terminal its lines go on in the next, rather than lose figures.
    `is_folded`: it may be folded to be as narrow as the terminal."""
    width = console.width if is_folded else UNWRAPPED_WIDTH
    for line in console.render_lines(made, console.options.update(width=width), pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        # A narrow terminal would show the blanks that tables end their lines with as empty lines.
        text.rstrip()
        console.print(text, highlight=False, soft_wrap=True)


size = readable_size


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends, with these permissions (None = those of
    any new file); where the block fails, `path` is as it was. Raises: OSError: it cannot be written, or not be put
    there."""
    if mode is None:
        mask = os.umask(0o022)
        os.umask(mask)
        mode = 0o666 & ~mask
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


class _Steps(MofNCompleteColumn):
    """Nothing while it is not known how many there are."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class ToolProgress:
    """On standard error. A context."""

    def __init__(self) -> None:
        console = console_on(sys.stderr)
        self._last = ""
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=16),
            _Steps(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def steps(self, total: int) -> None:
        """So many steps are to be done from now on."""
        self._bar.reset(self._task, total=total)

    def done(self) -> None:
        """One of them is."""
        self._bar.advance(self._task)

    def report(self, text: str) -> None:
        """What goes on now, in a line. May be called from any thread."""
        if not text or text == self._last:
            return
        self._last = text
        if self._bar.disable:
            say(self._bar.console, text)
        else:
            self._bar.update(self._task, description=text)
