"""Runs a campaign: starts the servers, the clients and the actions, and checks everything at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaign.action import Action, Kind
from campaign.course import Course
from campaign.findings import Findings, Tally
from campaign.honest.client import HonestClient
from campaign.honest.population import population
from campaign.running import running
from campaign.stage import Stage, open_stage
from campaign.watch import ending
from campaign.watch.health import HealthWatch, health_watches
from campaign.watch.resources import ResourceWatch, look

SETTLING_SECONDS = 3.0
"""Seconds until the clients have connected and everything has been used once."""


@dataclass(frozen=True, slots=True)
class Options:
    seconds: float
    seed: int
    lanes: int = 2
    rest_seconds: float = 0.2
    """Pause of each lane between two actions."""
    pace_seconds: float = 0.1
    """Mean pause of each honest client between two requests."""
    health_seconds: float = 12.0
    most_mib: float = 2048.0
    """Memory limit of each server with its workers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    findings: Findings
    tally: Tally
    course: Course
    clients: Sequence[HonestClient]
    health: Sequence[HealthWatch]
    resources: Sequence[ResourceWatch]
    seconds: float


def run(options: Options, actions: Iterable[Action], kinds: Sequence[Kind], folder: Path) -> Outcome:
    """`folder`: an empty folder, in which the run leaves its logs, its repositories and the record of the actions."""
    findings = Findings()
    shared_before = ending.shared_files()
    with open_stage(folder, findings) as stage:
        begun = time.monotonic()
        course = Course(
            stage,
            actions,
            {kind.name: kind for kind in kinds},
            folder / "actions.jsonl",
            lanes=options.lanes,
            rest_seconds=options.rest_seconds,
        )
        indexes = {name: ending.index_rows(server) for name, server in stage.servers.items()}
        with (
            running(
                [ResourceWatch(name, server, stage, options.most_mib) for name, server in stage.servers.items()]
            ) as resources,
            running(health_watches(stage, options.health_seconds)) as health,
            running(population(stage, options.pace_seconds, options.seed)) as clients,
        ):
            time.sleep(SETTLING_SECONDS)
            for watch in resources:
                watch.settled = look(stage.servers[watch.name])
            course.run(options.seconds)
            _look_again(stage, indexes, resources)
        seconds = time.monotonic() - begun
        for watch in resources:
            watch.check_trend()
            ending.end(stage, watch)
            ending.check_log(stage, watch.name)
        ending.check_files(stage, shared_before, resources)
        stage.canaries.check()
        for text in stage.damage.excess():
            findings.add("too much lost", text)
    return Outcome(findings, stage.tally, course, clients, health, resources, seconds)


def _look_again(stage: Stage, indexes: dict[str, ending.IndexRows], resources: Sequence[ResourceWatch]) -> None:
    """Check the servers again: no action runs any more, the clients still ask."""
    for watch in resources:
        if stage.servers[watch.name].process.poll() is None:  # type: ignore[union-attr]
            ending.check_recovery(stage, watch.name, indexes[watch.name])
            watch.compare()
