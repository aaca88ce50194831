"""The campaign's parts: the drawing of actions, the right answers, the excuses, and how a list of actions gets
shorter."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

from campaign import catalogue
from campaign.action import Action, Kind, drawn
from campaign.command import main
from campaign.course import Course
from campaign.findings import INSIDE_EACH_KILL, RECONNECT_SECONDS, Damage, Findings, Tally
from campaign.honest.client import HonestClient, WrongAnswer
from campaign.minimise import smallest
from campaign.stage import Stage
from campaign.truth import Constants
from campaign.watch.ending import check_json, moment_of, plain, tracebacks
from campaign.watch.resources import ResourceWatch


def test_a_seed_draws_the_same_actions_and_each_has_a_name():
    first, again = (list(itertools.islice(drawn(5, catalogue.KINDS), 2000)) for _ in range(2))
    assert first == again
    assert {action.kind for action in first} == {kind.name for kind in catalogue.KINDS}
    assert [Action.parse(str(action)) for action in first] == first
    assert first != list(itertools.islice(drawn(6, catalogue.KINDS), 2000))


def test_kinds_are_chosen_by_subject_and_by_name():
    assert {kind.name.partition(".")[0] for kind in catalogue.chosen(["swap"])} == {"swap"}
    assert [kind.name for kind in catalogue.chosen(["kill.stop"])] == ["kill.stop"]
    with pytest.raises(ValueError, match="no actions are called nothing"):
        catalogue.chosen(["nothing"])


def test_an_unknown_kind_is_an_error_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--kinds=swap,nothing"])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert "error: argument --kinds: no actions are called nothing; there are swap.rename, " in told


def test_the_old_constant_is_right_until_the_new_one_was_seen():
    constants = Constants(1.0)
    constants.offer(2.0)
    between = time.monotonic()
    assert constants.allowed(between, between) == {1.0, 2.0}
    constants.settle(2.0)
    after = time.monotonic() + 0.001
    assert constants.allowed(after, after) == {2.0}
    assert constants.allowed(between, after) == {1.0, 2.0}, "the request was under way during the swap"


def test_a_kill_excuses_what_was_inside_and_no_more():
    text = "worker of model 'm' version 1 ended unexpectedly (killed by signal 9); the request was in it; ..."
    inside, others = InferenceServerException(text), InferenceServerException(text.replace("'m'", "'n'"))
    damage = Damage()
    now = time.monotonic()
    assert damage.excuse("poll", inside, now, now) is None, "nobody was killed"
    damage.killed("m")
    later = time.monotonic()
    assert damage.excuse("poll", inside, now, later) == "inside a killed worker"
    assert damage.excuse("poll", others, now, later) is None, "another model's worker"
    assert damage.excuse("poll", InferenceServerException("no worker"), now, later) is None
    late = "model '{}' has no worker: restarting: worker ended unexpectedly (killed by signal 9)"
    assert damage.excuse("poll", InferenceServerException(late.format("m")), now, later) == "next worker was late"
    assert damage.excuse("poll", InferenceServerException(late.format("n")), now, later) is None, "another model"
    assert damage.excess() == []
    for _ in range(INSIDE_EACH_KILL):
        damage.excuse("poll", inside, now, later)
    assert damage.excess() == [f"{INSIDE_EACH_KILL + 1} requests were lost in 1 kills of rocserve:m"]


def test_a_killed_server_excuses_connections_that_end_and_what_went_with_it():
    cut_off = InferenceServerException("Socket closed", "StatusCode.UNAVAILABLE")
    region = InferenceServerException("Unable to find shared memory region: 'honest'", "StatusCode.NOT_FOUND")
    wrong = InferenceServerException("no such model", "StatusCode.NOT_FOUND")
    in_stream = InferenceServerException("Request for unknown model: 'honest' has no available versions")
    damage = Damage()
    before = time.monotonic()
    assert damage.excuse("poll", cut_off, before, before) is None
    with damage.outage("poll"):
        now = time.monotonic()
        assert damage.excuse("poll", cut_off, before, now) == "connection to a killed process"
        assert damage.excuse("poll", ConnectionResetError(), now, now) == "connection to a killed process"
        by_http = InferenceServerException("has no available versions", "503")
        assert damage.excuse("poll", by_http, now, now) == "connection to a killed process"
        assert damage.excuse("explicit", cut_off, before, now) is None, "another server's"
        assert damage.excuse("poll", wrong, before, now) is None
        assert damage.excuse("poll", in_stream, before, now) == "connection to a killed process"
        assert damage.excuse("poll", InferenceServerException("what else"), before, now) is None
    back = time.monotonic() + RECONNECT_SECONDS
    assert damage.excuse("poll", cut_off, back + 0.1, back + 0.2) is None, "it has been back for long"
    assert damage.excuse("poll", region, back + 0.1, back + 0.2) == "gone with a killed server"


def test_an_action_that_has_to_be_alone_is(tmp_path: Path):
    under_way: list[int] = []
    seen: list[tuple[bool, int]] = []

    def note(is_alone: bool) -> None:
        under_way.append(1)
        time.sleep(0.01)
        seen.append((is_alone, len(under_way)))
        under_way.pop()

    kinds = {
        "alone": Kind("alone", lambda stage, random: note(True), is_alone=True),
        "beside": Kind("beside", lambda stage, random: note(False)),
    }
    stage = SimpleNamespace(findings=Findings(), tally=Tally(), ending=threading.Event())
    taken: list[Action] = []

    def actions() -> Iterator[Action]:
        # On a busy machine lanes may run one after another for a while.
        names = itertools.cycle(("beside", "beside", "beside", "alone"))
        while len(taken) < 20 or max((count for is_alone, count in list(seen) if not is_alone), default=0) < 2:
            taken.append(Action(next(names), 0))
            yield taken[-1]

    course = Course(cast(Stage, stage), actions(), kinds, tmp_path / "record", lanes=3, rest_seconds=0.0)
    course.run(PATIENCE_SECONDS)
    assert {count for is_alone, count in seen if is_alone} == {1}
    assert max(count for is_alone, count in seen if not is_alone) > 1
    assert len(seen) == len(taken)


def test_a_server_that_takes_too_much_ends_the_course(repository: Path, tmp_path: Path):
    def waiting(stage: Stage, random: random.Random) -> None:
        wait_until(stage.ending.is_set, "the end of the course")

    stage = cast(Stage, SimpleNamespace(findings=Findings(), tally=Tally(), damage=Damage(), ending=threading.Event()))
    actions = [Action("wait", number) for number in range(3)]
    course = Course(stage, actions, {"wait": Kind("wait", waiting)}, tmp_path / "record", lanes=1, rest_seconds=0.0)
    drop(repository, "m", add_constant(1.0))
    with RocserveProcess([repository], log=tmp_path / "log") as server:
        watch = ResourceWatch("small", server, stage, most_mib=1.0)
        watch.start()
        try:
            course.run(10 * PATIENCE_SECONDS)
        finally:
            watch.stop()
    assert set(stage.findings.counts) == {"too much taken"}
    assert [done.action for done in course.done] == actions[:1]


def test_the_smallest_list_has_only_what_it_takes():
    actions = [Action("kind", seed) for seed in range(8)]

    def takes(guilty: set[int]) -> list[int]:
        def is_found_with(tried: Sequence[Action]) -> bool:
            return guilty <= {action.seed for action in tried}

        return [action.seed for action in smallest(actions, is_found_with)]

    assert takes({3}) == [3]
    assert takes({1, 6}) == [1, 6]
    assert takes({9}) == [], "it does not come again"


def test_tracebacks_are_found_in_a_log():
    log = (
        'I1 a line"\nE1 it failed\nTraceback (most recent call last):\n  File "a.py", line 1\n'
        "    boom()\nKeyError: 3\nI1 on\n"
    )
    assert list(tracebacks(log)) == [
        'E1 it failed\nTraceback (most recent call last):\n  File "a.py", line 1\n    boom()\nKeyError: 3'
    ]
    assert list(tracebacks("I1 quiet\n")) == []


def test_a_traceback_of_a_worker_is_whole_though_others_speak():
    head = "E1122 16:24:59.604205 23802 worker_output.py:150] "
    mine = [
        f"{head}m:1: the model failed to load",
        f"{head}m:1: Traceback (most recent call last):",
        f'{head}m:1:   File "a.py", line 1',
        f"{head}m:1:     boom()",
        f"{head}m:1: KeyError: 3",
    ]
    others = [f"{head}n:1: a line", "I1122 16:24:59.604205 23802 server.py:1] a line"]
    log = [mine[0], mine[1], others[0], *mine[2:4], others[1], mine[4], f"{head}m:1: on"]
    assert list(tracebacks("\n".join(log))) == ["\n".join(mine)]


def test_a_log_of_json_is_read_as_the_other_form_and_each_line_is_whole():
    line = {"time": "2026-01-02T03:04:05.123456Z", "level": "ERROR", "process": 7, "place": "a.py:1"}
    trace = "Traceback (most recent call last):\n  x\nKeyError: 3"
    ours = json.dumps({**line, "text": "it failed", "traceback": trace})
    theirs = [
        json.dumps({**line, "model": "m", "worker": 8, "text": text})
        for text in ("Traceback (most recent call last):", "  y", "KeyError: 4")
    ]
    other = json.dumps({**line, "text": "a line"})
    log = "\n".join([ours, other, theirs[0], other, *theirs[1:], other])
    found = list(tracebacks(plain(log)))
    assert len(found) == 2
    assert f"it failed\n{trace}" in found[0]
    assert moment_of(found[0]) is not None
    assert found[1].endswith("m:8: KeyError: 4")
    findings = Findings()
    check_json(findings, "poll", log)
    assert not findings.counts
    check_json(findings, "poll", f"{log}\n{other[:-5]}{other}\nTraceback\n3")
    assert findings.counts == {"line of the log": 3}


def test_a_client_that_cannot_begin_anew_is_reported_and_asks_on():
    class Broken:
        asked = 0

        def ask(self, random: random.Random) -> None:
            self.asked += 1
            raise WrongAnswer("on purpose")

        def reopen(self) -> None:
            raise ConnectionError("reopen")

        def close(self) -> None:
            raise ConnectionError("close")

    stage = SimpleNamespace(findings=Findings(), tally=Tally(), damage=Damage())
    asker = Broken()
    client = HonestClient("broken", "poll", asker, cast(Stage, stage), pace_seconds=0.001, seed=1)
    client.start()
    wait_until(lambda: asker.asked >= 3, "the third request")
    client.stop()
    texts = {finding.text for finding in stage.findings.kept if finding.kind == "honest client broke"}
    assert "broken: ConnectionError: reopen" in texts
    assert stage.findings.counts["honest client broke"] == asker.asked + 1, "each time, and at the close"
