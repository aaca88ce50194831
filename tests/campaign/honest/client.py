"""Honest clients: each sends requests in its own thread and checks every answer by value."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

from support.waiting import PATIENCE_SECONDS
from tritonclient.utils import InferenceServerException

from campaign.findings import CUT_OFF
from campaign.stage import Stage
from rocserve_client import RocserveError

ANSWER_SECONDS = PATIENCE_SECONDS
"""Seconds within which an unexcused honest request is answered, on the busiest machine."""


ANEW_PAUSE_SECONDS = 0.1
"""Seconds between two tries to reopen."""


class WrongAnswer(Exception):
    """An answer with wrong values."""


class Asker(Protocol):
    """What one client asks, over and over."""

    def ask(self, random: random.Random) -> None:
        """Send one request. Raises WrongAnswer, or the error of the client library."""

    def reopen(self) -> None:
        """Reopen streams, sequences and regions after an error."""

    def close(self) -> None: ...


class HonestClient:
    """Runs an asker until it is stopped, counts the outcomes, and reports failures that no action explains."""

    def __init__(self, name: str, server: str, asker: Asker, stage: Stage, pace_seconds: float, seed: int) -> None:
        self.name = name
        self._server = server
        self._asker = asker
        self._stage = stage
        self._pace = pace_seconds
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self.slowest = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send no further request, and wait for the current one."""
        self._stopping.set()
        self._thread.join(2 * ANSWER_SECONDS)
        if self._thread.is_alive():
            self._stage.findings.add("no answer", f"{self.name} still waits for an answer at the end")

    def _run(self) -> None:
        while not self._stopping.wait(self._random.uniform(0, 2 * self._pace)):
            begun = time.monotonic()
            outcome = self._ask_once(begun)
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self._stage.tally.count(self.name, outcome)
            if outcome != "right":
                while not self._do(self._asker.reopen):
                    time.sleep(ANEW_PAUSE_SECONDS)
        self._do(self._asker.close)

    def _do(self, step: Callable[[], None]) -> bool:
        """Run a step that is not a request, and report its failure: a client that ended silently would find nothing
        more. Returns False if an action explains the failure, and the step must be tried again."""
        begun = time.monotonic()
        try:
            step()
        except Exception as error:
            if self._stage.damage.excuse(self._server, error, begun, time.monotonic()) is not None:
                return False
            self._broke(error)
        return True

    def _ask_once(self, begun: float) -> str:
        """Send one request. Returns "right", "wrong", "failed", or the reason of a loss that an action explains."""
        findings = self._stage.findings
        try:
            self._asker.ask(self._random)
        except WrongAnswer as error:
            findings.add("wrong answer", f"{self.name}: {error}")
            return "wrong"
        except (InferenceServerException, RocserveError, *CUT_OFF) as error:
            ended = time.monotonic()
            why = self._stage.damage.excuse(self._server, error, begun, ended)
            if why is None:
                findings.add("honest request failed", f"{self.name}, after {ended - begun:.1f} s: {error}")
            return why or "failed"
        except Exception as error:
            self._broke(error)
            return "failed"
        return "right"

    def _broke(self, error: Exception) -> None:
        self._stage.findings.add("honest client broke", f"{self.name}: {type(error).__name__}: {error}")
