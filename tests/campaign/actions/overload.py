"""Overload: clients with a deadline of 0.2 s send more than a model can do. Each answer is right, and the model still
does much of what it can, unless the machine keeps the clients themselves waiting."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.waiting import PATIENCE_SECONDS

from campaign import models
from campaign.action import Kind
from campaign.requests import OWN_CONNECTION
from campaign.stage import Stage

MODEL_MS = 10
DEADLINE_SECONDS = 0.2
LASTS_SECONDS = 3.0
LEAST_SHARE = 0.1
"""The share of the model's capacity that it must still serve, on the worst machine; an idle machine serves far more."""
MOST_LAG_SECONDS = DEADLINE_SECONDS / 4
"""A machine on which a request is sent so late has no processor time for answers in time either."""
BY_DESIGN = ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.RESOURCE_EXHAUSTED", "StatusCode.UNAVAILABLE")


def offered(stage: Stage, random: random.Random) -> None:
    rate = random.choice((1.3, 2.0, 4.0)) * 1000 / MODEL_MS
    with stage.locks[models.PACED]:
        outcomes, lag = _offer(stage, rate, round(rate * LASTS_SECONDS))
    for status, count in outcomes.items():
        stage.tally.count("overload", status, count)
        if status not in ("right", *BY_DESIGN):
            stage.findings.add("overload answered by a failure", f"{count} times {status} at {rate:.0f}/s")
    if lag > MOST_LAG_SECONDS:
        stage.tally.count("overload", "not judged: the machine was too busy")
        return
    least = round(LEAST_SHARE * LASTS_SECONDS * 1000 / MODEL_MS)
    if outcomes["right"] < least:
        stage.findings.add("overload collapses", f"{dict(outcomes)} at {rate:.0f}/s, at least {least} expected")


def _offer(stage: Stage, rate: float, count: int) -> tuple[Counter[str], float]:
    """Send at the rate, whatever the server answers; return the outcomes, and by how much the latest request was
    late."""
    entry = infer_input("MS", np.array([MODEL_MS], np.int32))
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()
    told = threading.Semaphore(0)
    lag = 0.0

    def note(result: Any, error: Exception | None) -> None:
        with lock:
            outcomes[_judged(result, error)] += 1
        told.release()

    with triton.InferenceServerClient(stage.poll.address, channel_args=list(OWN_CONNECTION)) as client:
        begun = time.monotonic()
        for number in range(count):
            due = begun + number / rate
            time.sleep(max(0.0, due - time.monotonic()))
            lag = max(lag, time.monotonic() - due)
            client.async_infer(models.PACED, [entry], note, client_timeout=DEADLINE_SECONDS)
        for _ in range(count):
            is_told = told.acquire(timeout=PATIENCE_SECONDS)
            assert is_told, f"{count - sum(outcomes.values())} of {count} requests never ended"
    return outcomes, lag


def _judged(result: Any, error: Exception | None) -> str:
    if error is not None:
        return str(error.status())  # type: ignore[attr-defined]
    began, ended = result.as_numpy("SPAN")
    return "right" if ended - began >= MODEL_MS * 1_000_000 else f"wrong: it ran {ended - began} ns"


KINDS = (Kind("overload.offered", offered, 4),)
