"""Shows what a tool is at, on standard error: a line that moves on a terminal, lines in a file or pipe."""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from rocserve.tools.printing import console_on, say


class _Steps(MofNCompleteColumn):
    """Nothing while it is not known how many there are."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class ToolProgress:
    """A context."""

    def __init__(self, console: Console | None = None) -> None:
        """`console`: standard error's when left out."""
        self._console = console or console_on(sys.stderr)
        self._bar: Progress | None = None
        self._last = ""
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=16),
                _Steps(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
                console=self._console,
                expand=True,
                transient=True,
            )
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def steps(self, total: int) -> None:
        """So many steps are to be done from now on."""
        if self._bar is not None:
            self._bar.reset(self._task, total=total)

    def done(self) -> None:
        """One of them is."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def report(self, text: str) -> None:
        """What goes on now, in a line. May be called from any thread."""
        if not text or text == self._last:
            return
        self._last = text
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            say(self._console, text)
