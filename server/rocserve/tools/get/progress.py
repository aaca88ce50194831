"""Shows how far a download is: a bar on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LINES = 10


class DownloadProgress(Protocol):
    """What a download tells of itself."""

    def at(self, done: int) -> None:
        """So many bytes of the file are there."""

    def note(self, text: str) -> None:
        """Something that the user may want to know, such as a broken connection."""


class ProgressBar:
    """A bar with the amount, the rate and the time left. As a context manager."""

    def __init__(self, console: Console, name: str, size: int) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(name, total=size)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def at(self, done: int) -> None:
        self._bar.update(self._task, completed=done)

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


class ProgressLines:
    """Lines for a log or a pipe. As a context manager, for which there is nothing to do."""

    def __init__(self, console: Console, name: str, size: int) -> None:
        self._console = console
        self._name = name
        self._size = size
        self._reported = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def at(self, done: int) -> None:
        tenths = done * _LINES // self._size
        if tenths > self._reported:
            self.note(f"{self._name}: {done / 1e6:.1f} of {self._size / 1e6:.1f} MB")
        self._reported = tenths

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def progress_on(console: Console, name: str, size: int) -> ProgressBar | ProgressLines:
    """The one that suits where the console writes."""
    return ProgressBar(console, name, size) if console.is_terminal else ProgressLines(console, name, size)
