"""Draws curves of measurements: the parts that all of them share, and labels that do not overlap."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.extras import install_command
from rocserve.verbs.printing import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 140
COLOURS = ("#2563a8", "#c4532d", "#3f8f4e", "#7a4fa3", "#9a7b1c", "#4b5563")
SOFT = "#6b7280"
_LOGARITHMIC_FROM = 8.0
"""Ratio of the largest to the smallest number above which a scale is logarithmic."""
MARGIN = 1.08
"""A linear scale ends at this multiple of its largest number."""


def check_plot(path: Path) -> None:
    """Check, before anything is measured, that a plot can be drawn into this file. Raises ServeError: UNAVAILABLE
    without matplotlib, INVALID_ARGUMENT for another name, or a folder that does not exist."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise unavailable(f"--plot needs matplotlib ({error}); run: {install_command('tools')}") from None
    if path.suffix.lower() != ".png":
        raise invalid_argument(f"--plot: expected a name that ends in .png, got '{path}'")
    if not path.absolute().parent.is_dir():
        raise invalid_argument(f"--plot: the folder {path.absolute().parent} does not exist")


def new_curves(title: str) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.6), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, color="#e5e7eb", linewidth=0.8, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def scale_from_zero(axes: Axes, numbers: Sequence[float]) -> None:
    """Scale the horizontal axis: from 0, or logarithmically if the numbers are far apart."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if max(numbers) > _LOGARITHMIC_FROM * min(numbers):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, MARGIN * max(numbers))


def write_png(figure: Figure, path: Path, software: str) -> None:
    """Raises ServeError (UNAVAILABLE) if the file cannot be written."""
    try:
        with replacing(path) as file:
            figure.savefig(file, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": software})
    except OSError as error:
        raise unavailable(f"cannot write {path}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    @classmethod
    def at(cls, middle: tuple[float, float], width: float, height: float) -> Box:
        (x, y), half, rise = middle, width / 2, height / 2
        return cls(x - half, y - rise, x + half, y + rise)

    def shared(self, other: Box) -> float:
        """Return the area that both have."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)

    def crossed(self, begin: tuple[float, float], end: tuple[float, float]) -> bool:
        """Return whether a line crosses the rectangle (Liang and Barsky)."""
        (x, y), (to_x, to_y) = begin, end
        first, last = 0.0, 1.0
        for step, before, behind in (
            (to_x - x, self.left - x, self.right - x),
            (to_y - y, self.bottom - y, self.top - y),
        ):
            if step == 0:
                if before > 0 or behind < 0:
                    return False
                continue
            enter, leave = sorted((before / step, behind / step))
            first, last = max(first, enter), min(last, leave)
        return first <= last


@dataclass(frozen=True, slots=True)
class Label:
    """A text at a point of a curve."""

    text: str
    at: tuple[float, float]
    colour: str


def draw_labels(
    figure: Figure, axes: Axes, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]]
) -> Sequence[Box]:
    """Write labels near their points, away from each other, from the points, and from `lines` as far as possible. Call
    this last: the places are computed for the layout as it is then. Returns the places."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    dots = figure.dpi / 72
    pixels = [[_pixel(axes, point) for point in line] for line in lines]
    # A marker is 7 points wide, with some space.
    points = [Box.at(point, 7 * dots, 7 * dots) for line in pixels for point in line]
    segments = [pair for line in pixels for pair in pairwise(line)]
    bounds = axes.get_window_extent()
    inside = Box(bounds.x0, bounds.y0, bounds.x1, bounds.y1)
    placed: list[Box] = []

    def cost(box: Box) -> float:
        """Return how bad a place is: a label that hides another, or leaves the picture, is worst."""
        area = (box.right - box.left) * (box.top - box.bottom)
        hidden = 100 * (sum(map(box.shared, placed)) / area + 1 - box.shared(inside) / area)
        crossings = sum(box.crossed(*segment) for segment in segments)
        return hidden + 30 * sum(map(box.shared, points)) / area + 2 * crossings

    for label in labels:
        note = axes.annotate(
            label.text, label.at, xytext=(0, 0), textcoords="offset points", ha="center", va="center", fontsize=8,
            color=label.colour, zorder=4,
        )  # fmt: skip
        extent, (x, y) = note.get_window_extent(), _pixel(axes, label.at)
        # 1.5 pixels stay free on each side.
        width, height = extent.width + 3, extent.height + 3
        boxes = {at: Box.at((x + at[0] * dots, y + at[1] * dots), width, height) for at in _offsets()}
        costs = {at: cost(box) + math.hypot(*at) / 10 for at, box in boxes.items()}
        best = min(costs, key=costs.__getitem__)
        note.set_position(best)
        placed.append(boxes[best])
        # A thin line leads from a point to a label that is farther than 20 points away.
        if math.hypot(*best) > 20:
            axes.annotate(
                "", label.at, xytext=best, textcoords="offset points", zorder=2,
                arrowprops={"arrowstyle": "-", "color": label.colour, "linewidth": 0.5, "shrinkA": 4, "shrinkB": 3},
            )  # fmt: skip
    return placed


def _pixel(axes: Axes, point: tuple[float, float]) -> tuple[float, float]:
    x, y = axes.transData.transform(point)
    return float(x), float(y)


def _offsets() -> Iterator[tuple[float, float]]:
    """Yield places of a label relative to its point, the nearest first: above to the left, and so on around it."""
    for distance in (10.0, 15.0, 22.0, 31.0, 42.0):
        for place in range(16):
            angle = math.pi * place / 8 + 0.75 * math.pi
            yield distance * math.cos(angle), distance * math.sin(angle)
