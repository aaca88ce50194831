"""The command: `python -m tests.campaign --minutes 30 --seed N`."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from campaign import catalogue, report
from campaign.action import SEED_BITS, Action, Kind, drawn
from campaign.course import read_record
from campaign.minimise import smallest, trials
from campaign.run import Options, run

COMMAND = "python -m tests.campaign"
REPETITION_SECONDS = 300.0
"""All actions of a repeated list begin within this time."""


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    console = Console(width=140)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(SEED_BITS)
    kinds = arguments.kinds
    given = _given(arguments)
    options = Options(
        seconds=REPETITION_SECONDS if given else arguments.minutes * 60,
        seed=seed,
        lanes=arguments.lanes,
        rest_seconds=arguments.rest,
        pace_seconds=arguments.pace,
        health_seconds=arguments.health_secs,
        most_mib=arguments.memory_mib,
    )
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    console.print(f"campaign: seed {seed}, {options.seconds:.0f} s, in {folder}", highlight=False)
    outcome = run(options, given or drawn(seed, kinds), catalogue.KINDS if given else kinds, folder)
    report.show(outcome, console)
    if not outcome.findings.counts:
        shutil.rmtree(folder)
        console.print(f"campaign: seed {seed}: all promises kept", style="bold green", highlight=False)
        return 0
    console.print(f"campaign: seed {seed}: broken promises; logs and record in {folder}", highlight=False)
    console.print(
        f"repeat: python -m tests.campaign --replay {folder}/actions.jsonl --until {len(outcome.course.done)}"
    )
    if arguments.minimise:
        for finding in outcome.findings.kept:
            if actions := smallest(outcome.course.suspects(finding), trials(options, finding.kind, console)):
                listed = ",".join(str(action) for action in actions)
                console.print(f"smallest repetition of {finding.kind!r}: {COMMAND} --only {listed}")
                break
    return 1


def _given(arguments: argparse.Namespace) -> list[Action]:
    """The actions to repeat."""
    if arguments.only:
        return [Action.parse(text) for text in arguments.only.split(",")]
    if arguments.replay:
        return read_record(arguments.replay)[arguments.start : arguments.until]
    return []


def _kinds(text: str) -> tuple[Kind, ...]:
    try:
        return catalogue.chosen(text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long actions begin (3)")
    parser.add_argument("--seed", type=int, help="of all actions and requests (a new one, which is printed)")
    parser.add_argument("--kinds", type=_kinds, default=catalogue.KINDS, help="subjects or kinds of actions")
    parser.add_argument("--lanes", type=int, default=2, help="actions that run at a time (2)")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds of a lane between two actions (0.2)")
    parser.add_argument("--pace", type=float, default=0.1, help="mean seconds between a client's requests (0.1)")
    parser.add_argument("--health-secs", type=float, default=12.0, help="within which health answers (12)")
    parser.add_argument("--memory-mib", type=float, default=2048.0, help="that a server may take with workers (2048)")
    parser.add_argument("--only", metavar="ACTION,...", help="just these actions, as the report names them")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="the actions of a record")
    parser.add_argument("--start", type=int, default=0, help="of the record: the first ones to leave out")
    parser.add_argument("--until", type=int, help="of the record: how many to go up to")
    parser.add_argument("--minimise", action="store_true", help="look for the fewest actions that repeat a failure")
    return parser
