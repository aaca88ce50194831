"""Triton's recorded outcomes: they are read back unchanged, and later changes are noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.parity.counting import Comparisons
from support.parity.differences import Difference
from support.parity.exchange import Call, Exchange, Local, Outcome
from support.parity.pair import Pair, Servers
from support.parity.recorded import RecordedTriton, folder_digest

from benchmarks.triton_peer import TRITON_VERSION

FOLDER = Path("/tmp/pytest-1/first")
ASKED = Exchange("asked", [Call("ModelInfer", b"request")])
OUTCOMES = [
    Outcome("OK", answer={"outputs": [{"name": "OUT"}], "raw_output_contents": [b"", b"\x00\xff", b"text"]}),
    Outcome("OK", answer=[{"infer_response": {}, "error_message": "no"}, {"infer_response": {"id": "ä\n\u2028"}}]),
    Outcome("200", answer={"headers": {}, "body": [1, 1.5, 2**64, float("inf"), None, True, {}], "binary": b"\x80"}),
    Outcome("INTERNAL", f'no "model.py" in {FOLDER}/models/a'),
    Outcome("DONE"),
    Outcome("DONE", answer=b"\x00" * 5000),
    Outcome("DONE", answer=[]),
]


@dataclass(frozen=True, slots=True)
class Server:
    """Gives these outcomes, whatever it is asked."""

    name: str
    outcomes: Sequence[Outcome]

    def take(self, exchange: Exchange) -> list[Outcome]:
        return list(self.outcomes)


def recorded(file: Path, exchange: Exchange, outcomes: Sequence[Outcome], *depends_on: str) -> None:
    recording = RecordedTriton(file, FOLDER, records=True)
    for digest in depends_on:
        recording.depend_on(digest)
    recording.confirm(exchange, outcomes)
    recording.write()


def pair(file: Path, ours: Outcome, triton: Outcome | None = None, differences: Sequence[Difference] = ()) -> Pair:
    """A pair. Without an outcome Triton is not running."""
    running: Any = None if triton is None else Server("triton", [triton])
    rocserve: Any = Server("rocserve", [ours])
    servers = Servers(running, rocserve, FOLDER, FOLDER / "scratch", "started")
    return Pair(servers, RecordedTriton(file, FOLDER), Comparisons(recorded=triton is None), differences)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "triton" / "module.json"


def test_outcomes_come_back_as_they_were(file: Path) -> None:
    recorded(file, ASKED, OUTCOMES)
    assert RecordedTriton(file, FOLDER).take(ASKED) == OUTCOMES


def test_the_order_of_entries_comes_back_too(file: Path) -> None:
    """Differences are searched in printed outcomes."""
    answer = {"z": 1, "a": {"y": 1, "b": 2}}
    recorded(file, ASKED, [Outcome("OK", answer=answer)])
    assert str(RecordedTriton(file, FOLDER).take(ASKED)[0].answer) == str(answer)


def test_paths_follow_the_folder_of_the_run(file: Path) -> None:
    recorded(file, ASKED, OUTCOMES)
    assert str(FOLDER) not in file.read_text()
    here = Path('/tmp/with "quotes"/second')
    assert RecordedTriton(file, here).take(ASKED)[3].text == f'no "model.py" in {here}/models/a'


def test_the_file_is_the_same_whatever_the_order_of_the_tests(file: Path) -> None:
    other = Exchange("another", [Call("ServerLive")])
    texts = []
    for exchanges in ([ASKED, other], [other, ASKED]):
        recording = RecordedTriton(file, FOLDER, records=True)
        for exchange in exchanges:
            recording.confirm(exchange, OUTCOMES[:1])
        recording.write()
        texts.append(file.read_text())
    assert texts[0] == texts[1]


def test_equal_answers_leave_the_file_as_it_is(file: Path) -> None:
    """The order of Triton's maps is undefined."""
    recorded(file, ASKED, [Outcome("OK", answer={"a": 1, "b": 2})])
    before = file.read_text()
    recorded(file, ASKED, [Outcome("OK", answer={"b": 2, "a": 1})])
    assert file.read_text() == before
    recorded(file, ASKED, [Outcome("OK", answer={"b": 2, "a": 3})])
    assert file.read_text() != before


def test_what_is_not_asked_again_goes(file: Path) -> None:
    recorded(file, ASKED, OUTCOMES[:1])
    other = Exchange("another", [Call("ServerLive")])
    recorded(file, other, OUTCOMES[:1])
    assert list(json.loads(file.read_text())) == ["another"]


@pytest.mark.parametrize(
    "changed",
    [
        Exchange("asked", [Call("ModelInfer", b"request!")]),
        Exchange("asked", [Call("ModelReady", b"request")]),
        Exchange("asked", [Call("ModelInfer", b"request"), Local(lambda server: None)]),
        Exchange("asked", [Call("ModelInfer", b"request")], ordered=False),
        Exchange("asked", [Call("ModelInfer", b"request")], about="another configuration"),
    ],
    ids=["message", "method", "steps", "order", "what is given"],
)
def test_a_changed_exchange_is_noticed(file: Path, changed: Exchange) -> None:
    recorded(file, ASKED, OUTCOMES[:1])
    with pytest.raises(AssertionError, match="'asked' was recorded for other requests, models or flags; record again"):
        RecordedTriton(file, FOLDER).take(changed)


def test_other_models_are_noticed(file: Path, repository: Path) -> None:
    (repository / "model.py").write_text("one")
    recorded(file, ASKED, OUTCOMES[:1], folder_digest(repository))
    now = RecordedTriton(file, FOLDER)
    now.depend_on(folder_digest(repository))
    assert now.take(ASKED) == OUTCOMES[:1]
    (repository / "model.py").write_text("two")
    later = RecordedTriton(file, FOLDER)
    later.depend_on(folder_digest(repository))
    with pytest.raises(AssertionError, match="other requests, models or flags"):
        later.take(ASKED)


def test_an_exchange_that_is_not_recorded_is_noticed(file: Path) -> None:
    recorded(file, ASKED, OUTCOMES[:1])
    with pytest.raises(AssertionError, match=r"'new' is not in .*module\.json; record again: make record-triton"):
        RecordedTriton(file, FOLDER).take(Exchange("new", ASKED.steps))


@pytest.mark.parametrize(
    "answer",
    [(1, 2), {1: "number"}, {"base64": "text"}, "<folder>/models"],
    ids=["tuple", "key that is not text", "like bytes", "like a path"],
)
def test_what_would_come_back_otherwise_is_not_recorded(file: Path, answer: object) -> None:
    with pytest.raises(AssertionError, match="'asked' has an outcome that cannot be recorded"):
        RecordedTriton(file, FOLDER, records=True).confirm(ASKED, [Outcome("OK", answer=answer)])


def test_two_exchanges_of_one_name_are_refused(file: Path) -> None:
    recording = RecordedTriton(file, FOLDER, records=True)
    recording.confirm(ASKED, OUTCOMES[:1])
    with pytest.raises(AssertionError, match="there are two exchanges 'asked' in module"):
        recording.confirm(ASKED, OUTCOMES[:1])


RIGHT, WRONG = Outcome("OK", answer={"value": b"\x01"}), Outcome("OK", answer={"value": b"\x02"})


def compare(file: Path, *args: Any) -> Mapping[str, Any]:
    compared = pair(file, *args)
    compared.compare(ASKED)
    return {"text": str(compared._comparisons)}


def test_rocserve_is_compared_with_what_is_recorded(file: Path) -> None:
    recorded(file, ASKED, [RIGHT], "started")
    assert "1 requests compared" in compare(file, RIGHT)["text"]
    assert compare(file, RIGHT)["text"].endswith(f"with recorded answers of Triton {TRITON_VERSION}")
    with pytest.raises(AssertionError, match=r"asked, step 0:\n  answer.value: triton b'.x01', rocserve b'.x02'"):
        compare(file, WRONG)


def test_known_differences_hold_for_recorded_answers(file: Path) -> None:
    recorded(file, ASKED, [RIGHT], "started")
    known = [Difference("a reason", ["asked"], r"x01", r"x02")]
    assert "1 deliberate differences" in compare(file, WRONG, None, known)["text"]
    with pytest.raises(AssertionError, match="this difference has gone"):
        compare(file, RIGHT, None, known)


def test_a_running_triton_must_answer_as_recorded(file: Path) -> None:
    recorded(file, ASKED, [RIGHT], "started")
    assert compare(file, RIGHT, RIGHT)["text"].endswith(f"with a running Triton {TRITON_VERSION}")
    with pytest.raises(AssertionError, match=r"Triton answers otherwise than recorded; record again") as failed:
        compare(file, WRONG, WRONG)
    assert "answer.value: recorded b'\\x01', triton b'\\x02'" in str(failed.value)


def test_recorded_answers_stand_for_a_triton_that_was_late(file: Path) -> None:
    timed = replace(ASKED, timed=True)
    recorded(file, timed, [RIGHT], "started")
    compared = pair(file, RIGHT, WRONG)
    compared.compare(timed)
    assert str(compared._comparisons).endswith("with recorded answers where Triton was late: asked")
    with pytest.raises(AssertionError, match="asked, step 0"):
        pair(file, WRONG, WRONG).compare(timed)


@pytest.mark.parametrize("times", [1, 100])
def test_a_timed_exchange_is_repeated_with_a_rocserve_that_was_late(file: Path, times: int) -> None:
    timed, again = replace(ASKED, timed=True), Exchange("again", [Call("ServerLive")])
    recorded(file, timed, [RIGHT], "started")
    asked: list[Exchange] = []

    class Late:
        def take(self, exchange: Exchange) -> list[Outcome]:
            asked.append(exchange)
            return [WRONG if asked.count(timed) <= times else RIGHT]

    late: Any = Late()
    servers = Servers(None, late, FOLDER, FOLDER / "scratch", "started")
    compared = Pair(servers, RecordedTriton(file, FOLDER), Comparisons(recorded=True), ())
    if times == 1:
        compared.compare(timed, anew=[again])
        assert asked == [timed, again, timed]
    else:
        with pytest.raises(AssertionError, match="asked, step 0"):
            compared.compare(timed, anew=[again])


def test_recorded_answers_stand_for_a_triton_that_gives_none(file: Path) -> None:
    class Silent:
        def take(self, exchange: Exchange) -> list[Outcome]:
            raise AssertionError("triton gives no answer")

    recorded(file, ASKED, [RIGHT], "started")
    triton: Any = Silent()
    rocserve: Any = Server("rocserve", [RIGHT])
    comparisons = Comparisons(recorded=False)
    servers = Servers(triton, rocserve, FOLDER, FOLDER / "scratch", "started")
    anew = Pair(servers, RecordedTriton(file, FOLDER, records=True), comparisons, ())
    with pytest.raises(AssertionError, match="triton gives no answer"):
        anew.compare(ASKED)
    Pair(servers, RecordedTriton(file, FOLDER), comparisons, ()).compare(ASKED)
    assert str(comparisons).endswith(
        f"a running Triton {TRITON_VERSION}, and with recorded answers since Triton failed at '{ASKED.name}'"
    )
