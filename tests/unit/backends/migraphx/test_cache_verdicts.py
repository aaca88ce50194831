"""What is remembered of users' own programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cached_programs import cache_at, said, start

from rocserve.backends.migraphx.binding.interface import ProgramTensor
from rocserve.backends.migraphx.cache import verdicts as module
from rocserve.backends.migraphx.cache.verdicts import Outcome, Verdict, Verdicts, new_verdict, verdict_key
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment

HERE = ProgramEnvironment("2.14.0", "7.1.1", "gfx90a")


def a_verdict(outcome: Outcome = Outcome.CRASHED, text: str = "it crashed") -> Verdict:
    tensor = ProgramTensor("x", "float", (1, 3))
    return new_verdict(
        outcome, text=text, model="m", file="model.mxr", migraphx_version="2.14.0", inputs=[tensor], outputs=[tensor]
    )


def test_a_verdict_is_found_again(tmp_path: Path) -> None:
    known = cache_at(tmp_path / "cache").verdicts
    key = verdict_key("d1", HERE, "gpu")
    assert known.find(key) is None
    verdict = a_verdict()
    assert known.remember(key, verdict)
    assert known.find(key) == verdict
    assert verdict.quarantined and not a_verdict(Outcome.GOOD).quarantined and a_verdict(Outcome.REFUSED).quarantined
    better = a_verdict(Outcome.GOOD, "")
    known.remember(key, better)
    assert known.entries() == [(key, better)]
    known.forget(key)
    known.forget(key)
    assert known.find(key) is None and known.entries() == []


def test_a_changed_file_or_environment_is_tried_anew() -> None:
    keys = {
        verdict_key("d1", HERE),
        verdict_key("d2", HERE),
        verdict_key("d1", HERE, "ref"),
        verdict_key("d1", ProgramEnvironment("2.15.0", "7.1.1", "gfx90a")),
        verdict_key("d1", ProgramEnvironment("2.14.0", "7.1.1", "gfx1100")),
        verdict_key("d1", ProgramEnvironment("2.14.0", "7.1.1", "gfx90a", {"MIGRAPHX_X": "1"})),
    }
    assert len(keys) == 6


def test_processes_share_verdicts(tmp_path: Path) -> None:
    script = """
from rocserve.backends.migraphx.cache.verdicts import *
known = cache_at(Path(sys.argv[1])).verdicts
for turn in range(100):
    verdict = new_verdict(Outcome.CRASHED, text=sys.argv[2] * 1000, model="m", file="f", migraphx_version="2")
    assert known.remember("a" * 64, verdict)
    assert len(known.find("a" * 64).text) == 1000
print("done")
"""
    processes = [start(script, tmp_path / "cache", text) for text in "xy"]
    assert [said(process) for process in processes] == [["done"], ["done"]]
    assert [path.name for path in (tmp_path / "cache/verdicts").iterdir()] == ["a" * 64]


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    (tmp_path / ("a" * 64)).write_text("{")
    known = Verdicts(tmp_path)
    assert known.find("a" * 64) is None and known.entries() == []


def test_where_nothing_can_be_written_the_spare_folder_remembers(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    spare.mkdir()
    known = Verdicts(tmp_path / "none", spare)
    assert known.remember("a" * 64, a_verdict())
    assert known.find("a" * 64) is not None
    assert not Verdicts(tmp_path / "none").remember("a" * 64, a_verdict())


def test_the_oldest_are_forgotten_where_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    known = Verdicts(tmp_path)
    for number in range(6):
        known.remember(f"{number:064}", a_verdict())
    assert len(known.entries()) == 3
    assert known.find(f"{5:064}") is not None
