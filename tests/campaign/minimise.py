"""Minimises: finds the fewest actions around a finding that cause it again."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from campaign import catalogue
from campaign.action import Action
from campaign.run import Options, run

SECONDS = 120.0
"""All actions of one trial begin within this time."""


def smallest(suspects: Sequence[Action], is_found_with: Callable[[Sequence[Action]], bool]) -> list[Action]:
    """Leave out one action after another while the rest still causes the finding. Returns nothing if all together do
    not cause it."""
    actions = list(suspects)
    if not actions or not is_found_with(actions):
        return []
    for action in suspects:
        fewer = [other for other in actions if other is not action]
        if fewer and is_found_with(fewer):
            actions = fewer
    return actions


def trials(options: Options, kind: str, console: Console) -> Callable[[Sequence[Action]], bool]:
    """Make the function that runs actions alone and returns whether they cause a finding of this kind."""

    def is_found_with(actions: Sequence[Action]) -> bool:
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            trial = dataclasses.replace(options, seconds=SECONDS)
            outcome = run(trial, actions, catalogue.KINDS, Path(folder))
        found = kind in outcome.findings.counts
        listed = ",".join(str(action) for action in actions)
        console.print(f"minimising: {'found again' if found else 'not found'} with {listed}", highlight=False)
        return found

    return is_found_with
