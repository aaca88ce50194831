"""Draws what `rocserve bench` has measured: latency over load, one line for each engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rocserve.core.errors import unavailable
from rocserve_tools.measuring.candidates import TORCH
from rocserve_tools.measuring.curves import COLOURS, Label, draw_labels, new_curves, scale_from_zero, write_png

if TYPE_CHECKING:
    from rocserve_tools.bench import EngineTimes


def draw(times: Sequence[EngineTimes], title: str, path: Path) -> None:
    """Write the PNG. Raises ServeError (UNAVAILABLE) if no engine could run the model, or if it cannot be written."""
    figure, axes = new_curves(title)
    labels: list[Label] = []
    lines: list[list[tuple[float, float]]] = []
    shown = [(one, one.latency) for one in times if one.latency is not None]
    if not shown:
        raise unavailable("--plot: no engine could run the model, so there is nothing to draw")
    for number, engine in enumerate(dict.fromkeys(one.engine for one, _ in shown)):
        colour, is_bare = COLOURS[number % len(COLOURS)], engine == TORCH
        group = [(one, latency) for one, latency in shown if one.engine == engine]
        loads = [one.throughput for one, _ in group]
        lines.append([(one.throughput, latency.p50) for one, latency in group])
        name = f"{engine}, bare loop" if is_bare else engine
        axes.plot(
            loads, [latency.p50 for _, latency in group], marker="o", markersize=5, linewidth=1.6, color=colour,
            linestyle="--" if is_bare else "-", label=name, zorder=3,
        )  # fmt: skip
        axes.vlines(
            loads, [latency.p50 for _, latency in group], [latency.p95 for _, latency in group], color=colour,
            linewidth=1, zorder=2,
        )  # fmt: skip
        labels += [Label(str(one.batch_size), point, colour) for (one, _), point in zip(group, lines[-1], strict=True)
                   if one.batch_size]  # fmt: skip
    scale_from_zero(axes, [one.throughput for one, _ in shown])
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.set_ylim(0, 1.12 * max(latency.p95 for _, latency in shown))
    axes.set_xlabel("load that the engine carries, rows/s (the numbers at the points are batch sizes)")
    axes.set_ylabel("latency of a batch, ms: the point is p50, its bar ends at p95")
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    bars = [[(one.throughput, latency.p50), (one.throughput, latency.p95)] for one, latency in shown]
    draw_labels(figure, axes, labels, [*lines, *bars])
    write_png(figure, path, "rocserve bench")
