"""Overload: clients with a deadline of 0.2 s send more than a model can do. Each answer is right and in time, and the
model still does much of what it can."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from support.infer_inputs import infer_input

from campaign import models
from campaign.action import Kind
from campaign.requests import OWN_CONNECTION
from campaign.stage import Stage

MODEL_MS = 10
DEADLINE_SECONDS = 0.2
LASTS_SECONDS = 3.0
LEAST_SHARE = 0.2
"""The share of the model's capacity that it must still serve, on the worst machine; an idle machine serves far more."""
BY_DESIGN = ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.RESOURCE_EXHAUSTED", "StatusCode.UNAVAILABLE")


def offered(stage: Stage, random: random.Random) -> None:
    rate = random.choice((1.3, 2.0, 4.0)) * 1000 / MODEL_MS
    with stage.locks[models.PACED]:
        outcomes = _offer(stage, rate, round(rate * LASTS_SECONDS))
    for status, count in outcomes.items():
        stage.tally.count("overload", status, count)
        if status not in ("right", *BY_DESIGN):
            stage.findings.add("overload answered by a failure", f"{count} times {status} at {rate:.0f}/s")
    least = LEAST_SHARE * LASTS_SECONDS * 1000 / MODEL_MS
    if outcomes["right"] < least:
        stage.findings.add("overload collapses", f"{dict(outcomes)} at {rate:.0f}/s, at least {least:.0f} expected")


def _offer(stage: Stage, rate: float, count: int) -> Counter[str]:
    """Send at the rate, whatever the server answers; return the outcomes."""
    entry = infer_input("MS", np.array([MODEL_MS], np.int32))
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()
    told = threading.Semaphore(0)

    def note(result: Any, error: Exception | None) -> None:
        with lock:
            outcomes[_judged(result, error)] += 1
        told.release()

    with triton.InferenceServerClient(stage.poll.address, channel_args=list(OWN_CONNECTION)) as client:
        begun = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, begun + number / rate - time.monotonic()))
            client.async_infer(models.PACED, [entry], note, client_timeout=DEADLINE_SECONDS)
        for _ in range(count):
            assert told.acquire(timeout=30.0), f"{count - sum(outcomes.values())} of {count} requests never ended"
    return outcomes


def _judged(result: Any, error: Exception | None) -> str:
    if error is not None:
        return str(error.status())  # type: ignore[attr-defined]
    began, ended = result.as_numpy("SPAN")
    return "right" if ended - began >= MODEL_MS * 1_000_000 else f"wrong: it ran {ended - began} ns"


KINDS = (Kind("overload.offered", offered, 4),)
