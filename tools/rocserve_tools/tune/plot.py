"""Draws the sweep: throughput over latency, one line for each number of instances, and another where it is padded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rocserve.verbs.printing import counted
from rocserve_tools.measuring.curves import (
    COLOURS,
    MARGIN,
    SOFT,
    Label,
    draw_labels,
    new_curves,
    scale_from_zero,
    write_png,
)
from rocserve_tools.tune.sweep import Measurement, setting


def draw(
    measurements: Sequence[Measurement],
    recommended: Measurement,
    title: str,
    latency_budget_ms: float | None,
    path: Path,
) -> None:
    """Write the PNG. Raises ServeError (UNAVAILABLE) if it cannot be written."""
    figure, axes = new_curves(title)
    labels: list[Label] = []
    lines: list[list[tuple[float, float]]] = []
    by_line = sorted(measurements, key=lambda one: (*_line(one), one.batch_size))
    for number, (_, members) in enumerate(groupby(by_line, key=_line)):
        group, colour = list(members), COLOURS[number % len(COLOURS)]
        lines.append([_point(one) for one in group])
        name = counted(group[0].instances, "instance") + (", padded" if group[0].sizes else "")
        axes.plot(
            *zip(*lines[-1], strict=True), marker="o", markersize=5, linewidth=1.6, color=colour, label=name, zorder=3
        )
        labels += [Label(str(one.batch_size), _point(one), colour) for one in group if one.batch_size]
    slowest = max(one.latency.p95 for one in measurements)
    if latency_budget_ms is not None and latency_budget_ms <= MARGIN * slowest:
        axes.axvline(latency_budget_ms, color=SOFT, linewidth=1, linestyle="--", zorder=1)
        axes.annotate(
            f"budget {latency_budget_ms:g} ms",
            (latency_budget_ms, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -4),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            color=SOFT,
            fontsize=8,
        )
    axes.plot(
        [recommended.latency.p95],
        [recommended.throughput],
        linestyle="none",
        marker="o",
        markersize=12,
        markerfacecolor="none",
        markeredgecolor="#111827",
        markeredgewidth=1.8,
        label="recommended:\n" + setting(recommended).replace(", ", ",\n"),
        zorder=5,
    )
    scale_from_zero(axes, [one.latency.p95 for one in measurements])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1.12 * max(one.throughput for one in measurements))
    axes.set_xlabel("p95 latency of a batch, ms (the numbers at the points are batch sizes)")
    axes.set_ylabel("throughput, rows/s")
    axes.yaxis.set_major_formatter("{x:,.6g}")
    # Beside the curves, where no label lies under it.
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    draw_labels(figure, axes, labels, lines)
    write_png(figure, path, "rocserve tune")


def _line(one: Measurement) -> tuple[int, str]:
    """Return what the measurements on one line have in common."""
    return one.instances, one.sizes


def _point(one: Measurement) -> tuple[float, float]:
    return one.latency.p95, one.throughput
