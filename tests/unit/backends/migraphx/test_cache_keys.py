"""Which programs are the same, and the digests that say so."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
from support.cached_programs import a_recipe

from rocserve.backends.migraphx.configuration.options import CompileOptions, Precision, Target
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment, SourceKind
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
        a_recipe(batch_size=0, largest_batch=8),
        a_recipe(input_shapes={"x": (1, 4)}),
        a_recipe(input_shapes={"y": (1, 3)}),
        a_recipe(rebatched=True),
        a_recipe(output_names=("y",)),
        a_recipe(calibration_digest="c"),
        a_recipe(offload_copy=False),
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
    assert from_json(type(base), to_json(base)).key == base.key


def test_titles() -> None:
    assert a_recipe(batch_size=4).title == "batch size 4"
    assert a_recipe(batch_size=0, largest_batch=8).title == "batch sizes 1 to 8"
    assert a_recipe(batch_size=0).title == "the program"


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
    with pytest.raises(ServeError, match=r"expected a file, or a folder of files, at .*; there is none"):
        folder_digest(tmp_path)
