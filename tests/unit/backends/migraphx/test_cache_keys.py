"""The digests that identify programs, and what is remembered of users' own programs."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
from support.cached_programs import a_recipe, cache_at, printed_lines, start

from rocserve.backends.migraphx.compiling import program_cache as module
from rocserve.backends.migraphx.compiling.program_cache import LoadTrial, LoadTrials, load_trial_key
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, SourceKind
from rocserve.backends.migraphx.options import CompileOptions, Precision, Target
from rocserve.cache.digests import file_digest, folder_digest
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.plain import from_json, to_json


def test_the_key_is_of_what_the_program_depends_on() -> None:
    base = a_recipe()
    options, environment = base.options, base.environment
    others = [
        a_recipe("another file"),
        dataclasses.replace(base, source=dataclasses.replace(base.source, kind=SourceKind.TENSORFLOW)),
        a_recipe(batch_size=2),
        a_recipe(input_shapes={"x": (1, 4)}),
        a_recipe(input_shapes={"y": (1, 3)}),
        a_recipe(rebatched=True),
        a_recipe(output_names=("y",)),
        a_recipe(calibration_digest="c"),
        *(
            a_recipe(options=dataclasses.replace(options, **change))
            for change in (
                {"target": Target.CPU},
                {"precision": Precision.FP16},
                {"fast_math": False},
                {"exhaustive_tune": True},
                {"miopen_tuning": True},
                {"calibration_samples": 3},
            )
        ),
        *(
            a_recipe(environment=dataclasses.replace(environment, **change))
            for change in (
                {"migraphx_version": "2.15.0"},
                {"rocm_version": "7.1.1"},
                {"gpu_architecture": "gfx90a"},
                {"variables": {"MIGRAPHX_ENABLE_NHWC": "1"}},
            )
        ),
    ]
    keys = [one.key for one in (base, *others)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)


def test_the_key_is_of_nothing_else() -> None:
    base = a_recipe(input_shapes={"x": (1, 3), "y": (1, 4)}, environment=ProgramEnvironment("2", variables={}))
    moved = dataclasses.replace(base, source=dataclasses.replace(base.source, path="/elsewhere/renamed.onnx"))
    calibrated = CompileOptions(Target.REF, calibration_data="samples", calibration_pipeline="p.json")
    assert moved.key == base.key
    assert dataclasses.replace(base, input_shapes={"y": (1, 4), "x": (1, 3)}).key == base.key
    assert dataclasses.replace(base, options=calibrated).key == base.key
    assert dataclasses.replace(base, sizes={"length": 3}).key == base.key
    assert from_json(type(base), to_json(base)).key == base.key


def test_titles() -> None:
    assert a_recipe(batch_size=4).title == "batch size 4"
    assert a_recipe(batch_size=0).title == "the program"
    assert a_recipe(batch_size=4, sizes={"h": 32, "w": 48}).title == "batch size 4, h 32, w 48"
    assert a_recipe(batch_size=4, sizes={"h": 32, "w": 48}).short_title == "4x32x48"
    assert a_recipe(batch_size=0, sizes={"length": 3}).title == "length 3"


def test_the_digest_of_a_file_and_its_external_data(tmp_path: Path) -> None:
    model, first, second = (tmp_path / name for name in ("model.onnx", "weights.bin", "more.bin"))
    for file, content in ((model, b"graph"), (first, b"1"), (second, b"2")):
        file.write_bytes(content)
    assert file_digest(model) == hashlib.sha256(b"graph").hexdigest()
    digests = {file_digest(model), file_digest(model, [first, second]), file_digest(model, [second, first])}
    assert len(digests) == 3
    renamed = first.rename(tmp_path / "renamed.bin")
    assert file_digest(model, [renamed, second]) in digests
    renamed.write_bytes(b"changed")
    assert file_digest(model, [renamed, second]) not in digests


def test_the_digest_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    (folder / "more").mkdir(parents=True)
    (folder / "a.npy").write_bytes(b"a")
    (folder / "more/b.npy").write_bytes(b"b")
    before = folder_digest(folder)
    (folder / ".half-copied").write_bytes(b"x")
    (folder / ".git").mkdir()
    (folder / ".git/index").write_bytes(b"x")
    assert folder_digest(folder) == before
    (folder / "a.npy").rename(folder / "c.npy")
    assert folder_digest(folder) != before
    assert folder_digest(folder / "c.npy") == hashlib.sha256(b"a").hexdigest()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"file .*/none\.onnx cannot be read: No such file") as caught:
        file_digest(tmp_path / "none.onnx")
    assert caught.value.code is StatusCode.UNAVAILABLE
    with pytest.raises(ServeError, match=r"expected a file, or a folder of files, at .*, found none"):
        folder_digest(tmp_path)


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


def test_a_changed_file_or_environment_is_tried_again() -> None:
    keys = {
        load_trial_key("d1", HERE, "gpu"),
        load_trial_key("d2", HERE, "gpu"),
        load_trial_key("d1", HERE, "ref"),
        load_trial_key("d1", ProgramEnvironment("2.15.0", "7.1.1", "gfx90a"), "gpu"),
        load_trial_key("d1", ProgramEnvironment("2.14.0", "7.1.1", "gfx1100"), "gpu"),
        load_trial_key("d1", ProgramEnvironment("2.14.0", "7.1.1", "gfx90a", {"MIGRAPHX_X": "1"}), "gpu"),
    }
    assert len(keys) == 6


def test_processes_share_load_trials(tmp_path: Path) -> None:
    script = """
from rocserve.backends.migraphx.compiling.program_cache import *
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
    monkeypatch.setattr(module, "_MOST_TRIALS", 3)
    known = LoadTrials(tmp_path)
    for number in range(6):
        known.remember(f"{number:064}", a_trial())
    assert len(known.entries()) == 3
    assert known.find(f"{5:064}") is not None
