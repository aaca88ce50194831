"""Reports what was tried, what was lost and why, what was found, and how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from campaign.run import Outcome

SUSPECTS_SHOWN = 8


def show(outcome: Outcome, console: Console) -> None:
    console.print(_counts("actions and requests", outcome))
    console.print(_health(outcome))
    console.print(_resources(outcome))
    for name, count in sorted(outcome.findings.counts.items()):
        console.print(f"FOUND {name}: {count}", style="bold red")
    for finding in outcome.findings.kept:
        console.print(f"  {finding.kind}: {finding.text}", markup=False, highlight=False, soft_wrap=True)
        if suspects := outcome.course.suspects(finding):
            shown = ",".join(str(action) for action in suspects[-SUSPECTS_SHOWN:])
            console.print(f"    meanwhile: {shown}", markup=False, highlight=False, soft_wrap=True)


def _counts(title: str, outcome: Outcome) -> Table:
    table = Table("who or what", "tries", "outcomes", "slowest", title=title)
    slowest = {client.name: client.slowest for client in outcome.clients}
    for done in outcome.course.done:
        kind = done.action.kind
        slowest[kind] = max(slowest.get(kind, 0.0), done.ended - done.begun)
    for who, tries, outcomes in outcome.tally.rows():
        counts = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
        table.add_row(who, str(tries), counts, f"{slowest[who]:.1f} s" if who in slowest else "")
    return table


def _health(outcome: Outcome) -> Table:
    table = Table("health", "probes", "slowest")
    for watch in outcome.health:
        table.add_row(watch.name, str(watch.probes), f"{watch.slowest:.2f} s")
    return table


def _resources(outcome: Outcome) -> Table:
    table = Table("server", "", "settled", "most", "end")
    for watch in outcome.resources:
        for name, values in _figures(watch.name, outcome):
            table.add_row(watch.name, name, *values)
    return table


def _figures(name: str, outcome: Outcome) -> Iterator[tuple[str, Sequence[str]]]:
    (watch,) = [watch for watch in outcome.resources if watch.name == name]
    samples = watch.samples
    if watch.settled is None or watch.final is None or not samples:
        return
    settled, final = watch.settled, watch.final
    yield (
        "server's own MiB",
        [f"{settled.server_mib:.0f}", f"{max(s.server_mib for s in samples):.0f}", f"{final.server_mib:.0f}"],
    )
    yield (
        "MiB with workers",
        [f"{settled.all_mib:.0f}", f"{max(s.all_mib for s in samples):.0f}", f"{final.all_mib:.0f}"],
    )
    yield (
        "descriptors",
        [str(settled.descriptors), str(max(s.descriptors for s in samples)), str(final.descriptors)],
    )
    yield ("processes", [str(settled.processes), str(max(s.processes for s in samples)), str(final.processes)])
