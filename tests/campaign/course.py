"""Runs actions, several at a time, and records them, until the time is over or the list ends."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from campaign.action import Action, Kind
from campaign.findings import Finding
from campaign.stage import Stage

AFTERMATH_SECONDS = 5.0
"""An action that ended at most this long before a finding may have caused it."""


@dataclass(frozen=True, slots=True)
class Done:
    """An action that has run, and its times."""

    action: Action
    begun: float
    ended: float
    failure: str


class Course:
    """Takes actions from the list on several lanes, and records each before it begins."""

    def __init__(
        self,
        stage: Stage,
        actions: Iterable[Action],
        kinds: Mapping[str, Kind],
        record: Path,
        *,
        lanes: int,
        rest_seconds: float,
    ) -> None:
        self.done: list[Done] = []
        self._stage = stage
        self._actions = iter(actions)
        self._kinds = kinds
        self._record = record
        self._lock = threading.Lock()
        self._rest = rest_seconds
        self._lanes = lanes
        self._places = threading.Semaphore(lanes)
        """An action takes one of the places; an action that must run alone takes all."""
        self._taking_places = threading.Lock()
        self._threads = [threading.Thread(target=self._lane, name=f"lane {number}") for number in range(lanes)]

    def run(self, seconds: float) -> None:
        """Run actions until `seconds` have passed, the list ends or a finding ends the campaign; wait for them."""
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + seconds
        while any(thread.is_alive() for thread in self._threads) and not self._stage.ending.is_set():
            if self._stage.ending.wait(min(0.2, max(0.0, end - time.monotonic()))) or time.monotonic() >= end:
                break
        self._stage.ending.set()
        for thread in self._threads:
            thread.join()

    def suspects(self, finding: Finding) -> list[Action]:
        """The actions that were running or had just ended when something was found, in the order of their start."""
        return [
            done.action
            for done in sorted(self.done, key=lambda done: done.begun)
            if done.begun <= finding.moment <= done.ended + AFTERMATH_SECONDS
        ]

    def _lane(self) -> None:
        while not self._stage.ending.is_set() and (action := self._next()) is not None:
            kind = self._kinds[action.kind]
            places = self._lanes if kind.is_alone else 1
            with self._taking_places:
                for _ in range(places):
                    self._places.acquire()
            begun = time.monotonic()
            failure = ""
            try:
                kind.run(self._stage, random.Random(action.seed))
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                self._stage.findings.add("action failed", f"{action}: {failure}")
            ended = time.monotonic()
            self._places.release(places)
            with self._lock:
                self.done.append(Done(action, begun, ended, failure))
            self._stage.tally.count(action.kind, "failed" if failure else "done")
            self._stage.ending.wait(self._rest)

    def _next(self) -> Action | None:
        with self._lock:
            action = next(self._actions, None)
            if action is not None:
                with self._record.open("a") as file:
                    file.write(json.dumps({"action": str(action), "time": time.time()}) + "\n")
            return action


def read_record(path: Path) -> list[Action]:
    return [Action.parse(json.loads(line)["action"]) for line in path.read_text().splitlines()]
