"""Minimising: the fewest of the actions around a finding that bring it about again."""

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
"""Within it all actions of one trial begin."""


def smallest(suspects: Sequence[Action], is_found_with: Callable[[Sequence[Action]], bool]) -> list[Action]:
    """Leaves out one action after the other while the rest brings it about; nothing when all of them do not."""
    actions = list(suspects)
    if not actions or not is_found_with(actions):
        return []
    for action in suspects:
        fewer = [other for other in actions if other is not action]
        if fewer and is_found_with(fewer):
            actions = fewer
    return actions


def trials(options: Options, kind: str, console: Console) -> Callable[[Sequence[Action]], bool]:
    """Whether actions bring about a kind of finding, by a run of them alone."""

    def is_found_with(actions: Sequence[Action]) -> bool:
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            trial = dataclasses.replace(options, seconds=SECONDS)
            outcome = run(trial, actions, catalogue.KINDS, Path(folder))
        found = kind in outcome.findings.counts
        listed = ",".join(str(action) for action in actions)
        console.print(f"minimising: {'found again' if found else 'not found'} with {listed}", highlight=False)
        return found

    return is_found_with
