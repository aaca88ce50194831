"""The screen of `rocserve status` on a terminal: a table that scrolls, is filtered and sorted, and opens models."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from rocserve.verbs import keys
from rocserve.verbs.keys import Keys
from rocserve.verbs.status_model import state_text
from rocserve.verbs.status_poll import DISPENSABLE, FIGURES, StatusRow
from rocserve.verbs.status_rows import ATTENTION, counts, in_order, matching, orders

_GAP = 2


@dataclass
class Screen:
    """What the terminal shows, and how keys change it. Knows no terminal and no server."""

    details: Callable[[StatusRow], Sequence[Text]]
    """Returns the lines that describe a version."""
    title: str = ""
    rows: Sequence[StatusRow] = ()
    problem: str = ""
    """Why the last poll failed. The rows are then those of an earlier poll."""
    order: str = ATTENTION
    words: str = ""
    """The filter."""
    is_typing: bool = False
    """Keys are added to the filter."""
    is_over: bool = False
    shown: list[StatusRow] = field(default_factory=list, init=False)
    """The rows that match, in order."""
    lines: Sequence[Text] | None = field(default=None, init=False)
    """The open model's description; None = the table is shown."""
    _chosen: tuple[str, str] | None = field(default=None, init=False)
    """Model and version of the chosen row, which stays chosen when the order changes."""
    _top: int = field(default=0, init=False)
    """The first visible row, or line of a model."""
    _table_top: int = field(default=0, init=False)
    """`_top` of the table while a model is open."""
    _count: int = field(default=0, init=False)
    """All rows, or all lines of the model, as drawn last."""
    _height: int = field(default=1, init=False)
    """Visible rows, as drawn last."""

    def take(self, title: str, rows: Sequence[StatusRow], problem: str = "") -> None:
        """Show the result of a poll."""
        self.title, self.rows, self.problem = title, rows, problem
        self._arrange()

    def press(self, key: str) -> None:
        if self.is_typing:
            self._type(key)
        elif key == "q":
            self.is_over = True
        elif self.lines is not None:
            if key in (keys.ESCAPE, keys.BACKSPACE, keys.LEFT):
                self.lines, self._top = None, self._table_top
            else:
                self._top = max(0, min(self._moved(key, self._top), self._count - self._height))
        elif key == "/":
            self.is_typing = True
        elif key == "s":
            choices = orders(FIGURES)
            self.order = choices[(choices.index(self.order) + 1) % len(choices)]
            self._chosen, self._top = None, 0
            self._arrange()
        elif key == keys.ESCAPE:
            self.words = ""
            self._arrange()
        elif key == keys.ENTER:
            self._open()
        else:
            self._choose(self._moved(key, self._place()))

    def _type(self, key: str) -> None:
        if key in (keys.ENTER, keys.ESCAPE):
            self.is_typing = False
        if key == keys.ESCAPE:
            self.words = ""
        elif key == keys.BACKSPACE:
            self.words = self.words[:-1]
        elif len(key) == 1:
            self.words += key
        self._chosen, self._top = None, 0
        self._arrange()

    def _moved(self, key: str, place: int) -> int:
        page = max(1, self._height - 1)
        steps = {keys.UP: -1, "k": -1, keys.DOWN: 1, "j": 1, keys.PAGE_UP: -page, keys.PAGE_DOWN: page, " ": page}
        if key == keys.HOME:
            return 0
        return max(self._count, len(self.shown)) if key == keys.END else place + steps.get(key, 0)

    def _arrange(self) -> None:
        self.shown = matching(in_order(self.rows, self.order), self.words)

    def _place(self) -> int:
        """Return the chosen row's place; the first row's if none is chosen, or if the chosen one has gone."""
        if self._chosen is None:
            return 0
        return next((place for place, row in enumerate(self.shown) if (row.model, row.version) == self._chosen), 0)

    def _choose(self, place: int) -> None:
        if self.shown:
            row = self.shown[max(0, min(place, len(self.shown) - 1))]
            self._chosen = row.model, row.version

    def _open(self) -> None:
        if self.shown:
            row = self.shown[self._place()]
            self._chosen = row.model, row.version
            self._table_top, self._top, self.lines = self._top, 0, self.details(row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = console.size
        head, body, foot = self._parts(console, width, height)
        body += [Text()] * (height - len(head) - len(body) - len(foot))
        for line in [*head, *body, *foot][:height]:
            line.truncate(width, overflow="ellipsis")
            yield line

    def _parts(self, console: Console, width: int, height: int) -> tuple[list[Text], list[Text], list[Text]]:
        title = Text(self.title, style="bold")
        if self.lines is not None:
            head = [title, Text()]
            wrapped = [part for line in self.lines for part in line.wrap(console, width)]
            self._height = max(1, height - len(head) - 1)
            self._count = len(wrapped)
            self._top = max(0, min(self._top, self._count - self._height))
            body = [line.copy() for line in wrapped[self._top : self._top + self._height]]
            return head, body, [self._foot("↑↓ scroll   esc back   q leave")]
        columns = _Columns.fitting(self.rows, width)
        matches = f"{len(self.shown)} of {len(self.rows)} match '{self.words}'; " if self.words else ""
        summary = Text(f"{matches}{counts(self.rows)}; sorted by {self.order}", style="dim")
        head = [title, summary, *([Text(self.problem, style="red")] if self.problem else []), Text(), columns.header()]
        self._height = max(1, height - len(head) - 1)
        place = self._place()
        # Row by row, so that the table stays where it is as long as the chosen row is visible.
        self._top = max(min(self._top, place, len(self.shown) - self._height), place - self._height + 1, 0)
        self._count = len(self.shown)
        body = []
        for number, row in enumerate(self.shown[self._top : self._top + self._height], start=self._top):
            line = columns.line(row)
            if number == place:
                line.stylize("reverse")
            body.append(line)
        table_help = "↑↓ move   enter open   / filter   s sort   q leave"
        return head, body, [self._foot(f"{table_help}   esc all" if self.words else table_help)]

    def _foot(self, help_text: str) -> Text:
        if self.is_typing:
            return Text(f"filter: {self.words}█   enter keep   esc clear")
        last = min(self._top + self._height, self._count)
        return Text(f"{help_text}   {min(self._top + 1, last)}-{last} of {self._count}", style="dim")


@dataclass(frozen=True)
class _Columns:
    """The columns that fit, and their widths, which do not change while one scrolls."""

    name: int
    version: int
    state: int
    figures: Sequence[tuple[str, int]]
    reason: int
    """0 = reasons are only shown when a model is opened."""

    @classmethod
    def fitting(cls, rows: Sequence[StatusRow], width: int) -> _Columns:
        figures = {name: max(len(name), *(len(str(row.figures.get(name, "-"))) for row in rows)) for name in FIGURES
                   if rows and (name != "engine" or any(name in row.figures for row in rows))}  # fmt: skip
        longest = max((cell_len(row.model) for row in rows), default=0)
        name = max(len("model"), min(longest, 40))
        version = max((len(row.version) for row in rows), default=0)
        version, state = max(version, len("version")), max((len(row.state) for row in rows), default=0)
        state = max(state, len("not loaded"))
        has_reasons = any(row.reason for row in rows)

        def left() -> int:
            return width - name - version - state - sum(size + _GAP for size in figures.values()) - 2 * _GAP

        for column in DISPENSABLE:
            if left() >= (24 + _GAP if has_reasons else 0):
                break
            figures.pop(column, None)
        if left() < 0:
            name = max(12, name + left())
        reason = left() - _GAP if has_reasons and left() - _GAP >= 24 else 0
        return cls(name, version, state, list(figures.items()), reason)

    def header(self) -> Text:
        parts = ["model", "version", "state", *(name for name, _ in self.figures), "reason" if self.reason else ""]
        return self._joined([Text(part) for part in parts], "bold")

    def line(self, row: StatusRow) -> Text:
        figures = [row.figures.get(name, "-") for name, _ in self.figures]
        texts = [one.copy() if isinstance(one, Text) else Text(one) for one in figures]
        return self._joined([Text(row.model), Text(row.version), state_text(row), *texts, Text(row.reason)], "")

    def _joined(self, parts: Sequence[Text], style: str) -> Text:
        line = Text(style=style)
        sizes = [self.name, self.version, self.state, *(size for _, size in self.figures), self.reason]
        kinds = ["", "", "", *(name for name, _ in self.figures), ""]
        for place, (part, size, kind) in enumerate(zip(parts, sizes, kinds, strict=True)):
            if not size:
                continue
            if cell_len(part.plain) > size:
                part.truncate(size, overflow="ellipsis")
            space = " " * (size - cell_len(part.plain))
            is_left = place < 3 or kind in ("engine", "")
            line.append(" " * _GAP if place else "")
            line.append_text(part + Text(space) if is_left else Text(space) + part)
        return line


@dataclass(frozen=True, slots=True)
class Polled:
    """The result of a poll."""

    title: str
    rows: Sequence[StatusRow]
    server: Mapping[str, object] = field(default_factory=dict)
    """What the server says of itself, as values of JSON."""
    problem: str = ""
    """Why the server gave no answer; all else is then empty."""


class _Poller:
    """Polls in a separate thread, because a poll may wait for the server while keys are pressed."""

    def __init__(self, poll: Callable[[], Polled], interval: float, wake: int) -> None:
        """`wake`: a descriptor to which a byte is written after each poll."""
        self._poll, self._interval, self._wake = poll, interval, wake
        self._newest: Polled | None = None
        self._over = threading.Event()

    def start(self) -> None:
        # A daemon, because a call to a server that hangs must not keep the command from ending.
        threading.Thread(target=self._run, name="status poll", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def take(self) -> Polled | None:
        """Return the newest result once; None = nothing is new."""
        newest, self._newest = self._newest, None
        return newest

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            newest = self._poll()
            if self._over.is_set():
                return
            self._newest = newest
            os.write(self._wake, b"1")


def _terminal_size(console: Console) -> ConsoleDimensions:
    """Return the terminal's own size. Rich prefers COLUMNS and LINES, which do not change with it."""
    return ConsoleDimensions(*os.get_terminal_size(console.file.fileno()))


def follow(console: Console, first: Polled, poll: Callable[[], Polled], interval: float, screen: Screen) -> None:
    """Show the screen on the terminal and poll every `interval` seconds, until a key ends it."""
    screen.take(first.title, first.rows)
    woken, wake = os.pipe()
    poller = _Poller(poll, interval, wake)
    try:
        with (
            Keys(sys.stdin.fileno(), woken) as terminal,
            Live(screen, console=console, screen=True, auto_refresh=False) as live,
        ):
            poller.start()
            console.size = size = _terminal_size(console)
            live.refresh()
            while not screen.is_over:
                # After this time without a key the terminal's size is looked at again.
                pressed = terminal.read(timeout=0.3)
                for key in pressed:
                    screen.press(key)
                newest = poller.take()
                if newest is not None and newest.problem:
                    screen.take(screen.title, screen.rows, newest.problem)
                elif newest is not None:
                    screen.take(newest.title, newest.rows)
                before, size = size, _terminal_size(console)
                if pressed or newest is not None or size != before:
                    console.size = size
                    live.refresh()
    except (KeyboardInterrupt, EOFError):
        pass
    finally:
        poller.stop()
