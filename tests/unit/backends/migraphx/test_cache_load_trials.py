"""What is remembered of users' own programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cached_programs import cache_at, printed_lines, start

from rocserve.backends.migraphx import program_cache as module
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment
from rocserve.backends.migraphx.program_cache import LoadTrial, LoadTrials, load_trial_key

HERE = ProgramEnvironment("2.14.0", "7.1.1", "gfx90a")


def a_trial(crash: str = "it crashed") -> LoadTrial:
    return LoadTrial("m", "model.mxr", "2.14.0", crash)


def test_a_load_trial_is_found_again(tmp_path: Path) -> None:
    known = cache_at(tmp_path / "cache").load_trials
    key = load_trial_key("d1", HERE, "gpu")
    assert known.find(key) is None
    trial = a_trial()
    known.remember(key, trial)
    assert known.find(key) == trial
    better = a_trial("")
    known.remember(key, better)
    assert known.entries() == [(key, better)]
    known.forget(key)
    known.forget(key)
    assert known.find(key) is None and known.entries() == []


def test_a_changed_file_or_environment_is_tried_anew() -> None:
    keys = {
        load_trial_key("d1", HERE),
        load_trial_key("d2", HERE),
        load_trial_key("d1", HERE, "ref"),
        load_trial_key("d1", ProgramEnvironment("2.15.0", "7.1.1", "gfx90a")),
        load_trial_key("d1", ProgramEnvironment("2.14.0", "7.1.1", "gfx1100")),
        load_trial_key("d1", ProgramEnvironment("2.14.0", "7.1.1", "gfx90a", {"MIGRAPHX_X": "1"})),
    }
    assert len(keys) == 6


def test_processes_share_load_trials(tmp_path: Path) -> None:
    script = """
from rocserve.backends.migraphx.program_cache import *
known = cache_at(Path(sys.argv[1])).load_trials
for turn in range(100):
    known.remember("a" * 64, LoadTrial("m", "f", "2", sys.argv[2] * 1000))
    assert len(known.find("a" * 64).crash) == 1000
print("done")
"""
    processes = [start(script, tmp_path / "cache", text) for text in "xy"]
    assert [printed_lines(process) for process in processes] == [["done"], ["done"]]
    assert [path.name for path in (tmp_path / "cache/load-trials").iterdir()] == ["a" * 64]


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    (tmp_path / ("a" * 64)).write_text("{")
    known = LoadTrials(tmp_path)
    assert known.find("a" * 64) is None and known.entries() == []


def test_where_nothing_can_be_written_the_spare_folder_remembers(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    spare.mkdir()
    known = LoadTrials(tmp_path / "none", spare)
    known.remember("a" * 64, a_trial())
    assert known.find("a" * 64) is not None
    known = LoadTrials(tmp_path / "none")
    known.remember("a" * 64, a_trial())
    assert known.find("a" * 64) is None and known.entries() == []


def test_the_oldest_are_forgotten_where_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    known = LoadTrials(tmp_path)
    for number in range(6):
        known.remember(f"{number:064}", a_trial())
    assert len(known.entries()) == 3
    assert known.find(f"{5:064}") is not None
