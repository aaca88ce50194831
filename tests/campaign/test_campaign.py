"""The campaign itself: its clients get answers, and a deliberately broken promise is reported."""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.models import add_constant
from support.processes import send
from support.shared_memory import FOLDER as SHARED_MEMORY
from support.waiting import PATIENCE_SECONDS, wait_until

from campaign import models
from campaign.action import Action, Kind
from campaign.actions.swaps import file_of
from campaign.course import read_record
from campaign.run import Options, Outcome, run
from campaign.stage import Stage
from campaign.watch import ending

HEALTH_SECONDS = 1.0
OPTIONS = Options(seconds=10 * PATIENCE_SECONDS, seed=1, lanes=1, pace_seconds=0.2, health_seconds=HEALTH_SECONDS)
"""A run ends with its list of actions."""
CLIENTS = 16
"""Honest clients."""
ANSWERS = 5
"""Right answers that each of them has had at the end."""
LEFT_BEHIND = SHARED_MEMORY / "left_by_a_campaign_on_purpose"


def wrong_answer(stage: Stage, random: random.Random) -> None:
    """Swap files without a record until a client gets their answer; then restore the right ones."""
    file = file_of(stage, models.COPIED[0])
    file.write_bytes(add_constant(123.0))
    wait_until(lambda: stage.findings.counts["wrong answer"], "the report of a wrong answer")
    file.write_bytes(add_constant(models.FIRST))


def opened_canary(stage: Stage, random: random.Random) -> None:
    stage.canaries.text.read_bytes()


def told_secret(stage: Stage, random: random.Random) -> None:
    stage.canaries.search("a test", b"..." + stage.canaries.secret.encode())


def stopped_server(stage: Stage, random: random.Random) -> None:
    process = stage.explicit.server_process()
    process.suspend()
    time.sleep(3 * HEALTH_SECONDS)
    process.resume()


def is_replaced(stage: Stage, gone: psutil.Process) -> bool:
    workers = stage.poll.workers(models.PYTHON)
    return len(workers) == 1 and gone not in workers


def killed_worker(stage: Stage, random: random.Random) -> None:
    """Kill a worker with a request inside, without a record. Requests that the worker has not taken yet run elsewhere,
    so the model is made slow first: then a request is inside at nearly every moment."""
    script = stage.copied / models.PYTHON / "1" / "model.py"
    quick, slow = "responses = []", "time.sleep(0.5)\n        responses = []"
    assert quick in script.read_text()
    (gone,) = stage.poll.workers(models.PYTHON)
    script.write_text("import time\n" + script.read_text().replace(quick, slow))
    wait_until(lambda: is_replaced(stage, gone), "the next worker")
    while "honest request failed" not in stage.findings.counts:
        time.sleep(0.3)
        for one in stage.poll.workers(models.PYTHON):
            send(one, signal.SIGKILL)
        time.sleep(0.3)


def left_behind(stage: Stage, random: random.Random) -> None:
    LEFT_BEHIND.touch()
    (stage.folder / "temporary" / "left").touch()
    (stage.copied / "half" / "1").mkdir(parents=True)
    (stage.copied / "half" / "1" / "model.onnx").write_bytes(b"half")
    wait_until(lambda: any(model == "half" for model, _ in ending.index_rows(stage.poll)), "the row of a half model")


def failing(stage: Stage, random: random.Random) -> None:
    raise AssertionError("on purpose")


def run_only(folder: Path, *breaks: Callable[[Stage, random.Random], None], **changes: float) -> Outcome:
    kinds = [Kind(f"break.{one.__name__}", one) for one in breaks]
    return run(dataclasses.replace(OPTIONS, **changes), [Action(kind.name, 1) for kind in kinds], kinds, folder)  # type: ignore[arg-type]


def answered_clients(stage: Stage, random: random.Random) -> None:
    """Wait until each client has had right answers."""

    def have_answers() -> bool:
        rows = [outcomes for _, _, outcomes in stage.tally.rows() if "right" in outcomes]
        return sum(outcomes["right"] > ANSWERS for outcomes in rows) == CLIENTS

    wait_until(have_answers, "right answers for each client")


def test_clients_get_answers_and_what_is_broken_on_purpose_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "RECOVERY_SECONDS", 3.0)
    monkeypatch.setattr(ending, "SHARED_SECONDS", 1.0)
    breaks = (wrong_answer, opened_canary, told_secret, stopped_server, killed_worker, left_behind, failing)
    kinds = [Kind(f"break.{one.__name__}", one) for one in (answered_clients, *breaks)]
    actions = [Action(kind.name, 1) for kind in kinds]
    try:
        outcome = run(OPTIONS, actions, kinds, tmp_path)
    finally:
        LEFT_BEHIND.unlink(missing_ok=True)
    # Nothing else was found.
    assert set(outcome.findings.counts) == {
        "wrong answer",
        "canary touched",
        "secret told",
        "health slow",
        "honest request failed",
        "shared memory left",
        "temporary files left",
        "not recovered",
        "action failed",
    }
    texts = [finding.text for finding in outcome.findings.kept]
    for part in ("first added [123.0], expected one of [7.0]", "killed by signal 9", "on purpose"):
        assert any(part in text for text in texts), part
    # Each finding names the action that caused it.
    suspects = {finding.kind: outcome.course.suspects(finding) for finding in outcome.findings.kept}
    assert Action("break.failing", 1) in suspects["action failed"]
    assert Action("break.wrong_answer", 1) in suspects["wrong answer"]
    asked = {who: outcomes for who, _, outcomes in outcome.tally.rows()}
    assert len(outcome.clients) == CLIENTS
    assert all(asked[client.name].get("right", 0) > ANSWERS for client in outcome.clients)
    # Recorded actions can be repeated.
    assert [done.action for done in outcome.course.done] == actions == read_record(tmp_path / "actions.jsonl")
