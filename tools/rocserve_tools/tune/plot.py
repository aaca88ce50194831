"""Draws the sweep: throughput over latency, one line for each number of instances, and another where it is padded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from rocserve.core.errors import unavailable
from rocserve.verbs.printing import counted, replacing
from rocserve_tools.tune.sweep import Measurement, setting

_SIZE_INCHES = (9.0, 5.6)
_DOTS_PER_INCH = 140
_COLOURS = ("#2563a8", "#c4532d", "#3f8f4e", "#7a4fa3", "#9a7b1c", "#4b5563")
_RECOMMENDED = "#111827"
_SOFT = "#6b7280"
_LOGARITHMIC_FROM = 8.0
"""Ratio of the largest to the smallest latency above which the scale is logarithmic."""

_FURTHEST_BUDGET = 1.08
"""A budget beyond this multiple of the longest latency is not drawn."""


def draw(
    measurements: Sequence[Measurement],
    recommended: Measurement,
    title: str,
    latency_budget_ms: float | None,
    path: Path,
) -> None:
    """Write the PNG. Raises ServeError (UNAVAILABLE) if it cannot be written."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    by_line = sorted(measurements, key=lambda one: (*_line(one), one.batch_size))
    for number, (_, group) in enumerate(groupby(by_line, key=_line)):
        _draw_line(axes, list(group), _COLOURS[number % len(_COLOURS)], below=number % 2 == 1)
    slowest = max(one.latency.p95 for one in measurements)
    if latency_budget_ms is not None and latency_budget_ms <= _FURTHEST_BUDGET * slowest:
        axes.axvline(latency_budget_ms, color=_SOFT, linewidth=1, linestyle="--", zorder=1)
        axes.annotate(
            f"budget {latency_budget_ms:g} ms",
            (latency_budget_ms, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -4),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            color=_SOFT,
            fontsize=8,
        )
    axes.plot(
        [recommended.latency.p95],
        [recommended.throughput],
        linestyle="none",
        marker="o",
        markersize=12,
        markerfacecolor="none",
        markeredgecolor=_RECOMMENDED,
        markeredgewidth=1.8,
        label=f"recommended: {setting(recommended)}",
        zorder=5,
    )
    _set_up(axes, measurements, title)
    try:
        with replacing(path) as file:
            figure.savefig(file, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": "rocserve tune"})
    except OSError as error:
        raise unavailable(f"cannot write {path}: {error.strerror or error}") from None


def _line(one: Measurement) -> tuple[int, str]:
    """Return what the measurements on one line have in common."""
    return one.instances, one.sizes


def _draw_line(axes: Axes, group: Sequence[Measurement], colour: str, below: bool) -> None:
    """Draw a line. `below`: put the batch sizes below it, away from those of a neighbouring line."""
    axes.plot(
        [one.latency.p95 for one in group],
        [one.throughput for one in group],
        marker="o",
        markersize=5,
        linewidth=1.6,
        color=colour,
        label=counted(group[0].instances, "instance") + (", padded" if group[0].sizes else ""),
        zorder=3,
    )
    for one in group:
        if one.batch_size:
            axes.annotate(
                str(one.batch_size),
                (one.latency.p95, one.throughput),
                xytext=(7, -8) if below else (-7, 8),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=8,
                color=colour,
                zorder=4,
            )


def _set_up(axes: Axes, measurements: Sequence[Measurement], title: str) -> None:
    latencies = [one.latency.p95 for one in measurements]
    if max(latencies) > _LOGARITHMIC_FROM * min(latencies):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, _FURTHEST_BUDGET * max(latencies))
    axes.set_ylim(0, 1.12 * max(one.throughput for one in measurements))
    axes.set_xlabel("p95 latency of a batch, ms (the numbers at the points are batch sizes)")
    axes.set_ylabel("throughput, rows/s")
    axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, color="#e5e7eb", linewidth=0.8, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="best")
