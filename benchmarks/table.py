"""The comparison as Markdown: absolute numbers, ratios with their spread, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.cases import Case, Quantity
from benchmarks.comparison import Comparison
from benchmarks.ratios import BARE, Spread, added_seconds, ratio

IDLE_SHARE_LIMIT = 0.05
"""If an idle contender uses more than this of a core, the other's numbers are doubtful."""


def render(
    comparisons: Sequence[Comparison], subject: str, title: str, facts: Sequence[str], others: Sequence[str] = ()
) -> str:
    """The whole page. `subject`: the contender that the others are compared with; `others`: further sections."""
    sections = [f"# {title}", "\n".join(f"- {fact}" for fact in facts), *others]
    if not comparisons:
        return "\n\n".join(sections).rstrip() + "\n"
    sections += ["## Rates", rate_table(comparisons, subject)]
    sections += ["## Latencies, milliseconds", latency_table(comparisons, subject)]
    sections += ["## CPU time of the server, microseconds a request", cpu_table(comparisons, subject)]
    with_bare = [comparison for comparison in comparisons if BARE in comparison.measurements]
    if with_bare:
        sections += ["## Time a request at the rates above, microseconds", added_time_table(with_bare, subject)]
    sections.append(idle_note(comparisons))
    return "\n\n".join(sections) + "\n"


def rate_table(comparisons: Sequence[Comparison], subject: str) -> str:
    rows = []
    for comparison in comparisons:
        case = comparison.case
        ours = comparison.measurements[subject]
        mine = f"{median(measurement.rate for measurement in ours):,.0f}"
        for peer in peers(comparison, subject):
            theirs = comparison.measurements[peer]
            spread = ratio(Quantity.RATE, ours, theirs)
            rate = f"{median(measurement.rate for measurement in theirs):,.0f}"
            rows.append([case.title, case.unit, mine, peer, rate, *ratio_cells(case, Quantity.RATE, peer, spread)])
        if len(comparison.measurements) == 1:
            rows.append([case.title, case.unit, mine, "-", "-", "-", "-", "-"])
    return markdown_table(["what", "unit", subject, "peer", "peer's", "ratio", "least to most", "target"], rows)


def latency_table(comparisons: Sequence[Comparison], subject: str) -> str:
    rows = []
    for comparison in comparisons:
        case = comparison.case
        ours = comparison.measurements[subject]
        mine = [scaled([m.p50 for m in ours], 1e3, 3), scaled([m.p99 for m in ours], 1e3, 3)]
        compared = False
        for peer in peers(comparison, subject):
            theirs = comparison.measurements[peer]
            spread = ratio(Quantity.P50, ours, theirs)
            if spread is None:
                continue
            compared = True
            cells = [scaled([m.p50 for m in theirs], 1e3, 3), scaled([m.p99 for m in theirs], 1e3, 3)]
            rows.append([case.title, *mine, peer, *cells, *ratio_cells(case, Quantity.P50, peer, spread)])
        if not compared:
            rows.append([case.title, *mine, "-", "-", "-", "-", "-", "-"])
    header = [
        "what",
        f"{subject} p50",
        "p99",
        "peer",
        "peer's p50",
        "p99",
        "ratio of p50 (peer / ours)",
        "least to most",
        "target",
    ]
    return markdown_table(header, rows)


def cpu_table(comparisons: Sequence[Comparison], subject: str) -> str:
    rows = []
    for comparison in comparisons:
        ours = comparison.measurements[subject]
        mine = scaled([m.cpu for m in ours], 1e6, 0)
        for peer in peers(comparison, subject):
            theirs = comparison.measurements[peer]
            cells = ratio_cells(comparison.case, Quantity.CPU, peer, ratio(Quantity.CPU, ours, theirs))
            rows.append([comparison.case.title, mine, peer, scaled([m.cpu for m in theirs], 1e6, 0), *cells[:2]])
        if len(comparison.measurements) == 1:
            rows.append([comparison.case.title, mine, "-", "-", "-", "-"])
    return markdown_table(["what", subject, "peer", "peer's", "ratio (peer / ours)", "least to most"], rows)


def added_time_table(comparisons: Sequence[Comparison], subject: str) -> str:
    """What serving adds to the bare engine; a ratio does not show it for an engine that takes almost no time."""
    rows = []
    for comparison in comparisons:
        units = comparison.case.units_per_request
        ours, bare = comparison.measurements[subject], comparison.measurements[BARE]
        added = added_seconds(ours, bare, units)
        times = [scaled([units / m.rate for m in measurements], 1e6, 0) for measurements in (ours, bare)]
        span = f"{added.least * 1e6:,.0f} to {added.most * 1e6:,.0f}"
        rows.append([comparison.case.title, *times, f"{added.median * 1e6:,.0f}", span])
    return markdown_table(["what", subject, BARE, "added", "least to most"], rows)


def peers(comparison: Comparison, subject: str) -> list[str]:
    return [name for name in comparison.measurements if name != subject]


def ratio_cells(case: Case, quantity: Quantity, peer: str, spread: Spread | None) -> list[str]:
    """Ratio, spread and target, with "held" or "missed" for the median."""
    if spread is None:
        return ["-", "-", "-"]
    cells = [f"{spread.median:.2f}", f"{spread.least:.2f} to {spread.most:.2f}"]
    for target in case.targets:
        if (target.quantity, target.peer) == (quantity, peer):
            verdict = "held" if spread.median >= target.at_least else "missed"
            return [*cells, f"{target.at_least:.2f}: {verdict}"]
    return [*cells, "-"]


def scaled(values: Sequence[float | None], factor: float, digits: int) -> str:
    """The median times `factor`; "-" if nothing was measured."""
    known = [value for value in values if value is not None]
    return f"{median(known) * factor:,.{digits}f}" if known else "-"


def idle_note(comparisons: Sequence[Comparison]) -> str:
    """What the contenders used of the machine while others were measured."""
    most: dict[str, float] = {}
    for comparison in comparisons:
        for name, share in comparison.idle_share.items():
            most[name] = max(most.get(name, 0.0), share)
    shares = ", ".join(f"{name} {share:.1%}" for name, share in most.items())
    note = f"While another was measured, each used at most this share of one core: {shares}."
    if any(share > IDLE_SHARE_LIMIT for share in most.values()):
        note += " **That is too much: the ratios above are doubtful.**"
    return note


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are aligned in plain text, too."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)
