"""Writes the tools' output: tables to a terminal, plain lines into a pipe, errors to standard error."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from rocserve.core.plain import to_json
from rocserve.core.printable import printable

UNWRAPPED_WIDTH = 10_000
"""Columns for output into a file or a pipe, where no line should be wrapped."""


def console_on(file: IO[str] | None = None) -> Console:
    """Return a console for `file` (None = standard output); without colours and wrapping if it is not a terminal."""
    console = Console(file=file)
    if console.is_terminal:
        return console
    return Console(file=console.file, width=UNWRAPPED_WIDTH, no_color=True)


def say(console: Console, text: str = "", style: str = "") -> None:
    """Print one line literally, without style markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def say_json(console: Console, value: object) -> None:
    """Print a value as one line of JSON. Infinities and NaN become null, because JSON cannot express them."""
    say(console, json.dumps(json.loads(to_json(value), parse_constant=lambda _: None), separators=(",", ":")))


def complain(text: str) -> None:
    """Print a text as one line on standard error; control characters are made printable."""
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
    """Return a table. The first `left` columns are aligned left, the others right, and no cell is folded; a Column
    object brings its own layout. A str cell is printed literally, without style markup. `title`: "" = no title."""
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
    """Print a table. It keeps its full width: on a narrow terminal its lines wrap, so that no figure is lost. If
    `is_folded`, its columns are folded to the width of the terminal."""
    width = console.width if is_folded else UNWRAPPED_WIDTH
    for line in console.render_lines(made, console.options.update(width=width), pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        # A table ends its lines with blanks, which a narrow terminal would show as empty lines.
        text.rstrip()
        console.print(text, highlight=False, soft_wrap=True)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` after the block, if the block raises no error. `mode`: permissions;
    None = the default ones. Raises OSError if the file cannot be written or cannot replace `path`."""
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
    """Shows "done/total"; nothing while the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class ToolProgress(Progress):
    """Shows a tool's progress on standard error: a bar on a terminal, else lines. Used as a context manager."""

    def __init__(self) -> None:
        console = console_on(sys.stderr)
        super().__init__(
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
        self._last_report = ""
        self._task = self.add_task("", total=None)

    def steps(self, total: int) -> None:
        """Start counting from 0 to `total` steps."""
        self.reset(self._task, total=total)

    def done(self) -> None:
        self.advance(self._task)

    def report(self, text: str) -> None:
        """Show one line that says what the tool is doing. Can be called from any thread."""
        if not text or text == self._last_report:
            return
        self._last_report = text
        if self.disable:
            say(self.console, text)
        else:
            self.update(self._task, description=text)
