"""Measuring processes: their answers, and how they end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.migraphx_models import mlp, random_inputs

from rocserve.backends.migraphx.engine_choice import MIGRAPHX
from rocserve.backends.migraphx.installation import find_installation, python_command
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.settings import EngineSettings
from rocserve.tools.measuring.process import (
    Measure,
    Measured,
    MeasuredInput,
    MeasuringProcess,
    Timing,
    TorchModule,
    WorkerEngine,
    read_outputs,
    time_interleaved,
)
from rocserve.tools.measuring.process import random_inputs as seeded_inputs

_PYTHON = (sys.executable,)


def _engine(folder: Path) -> WorkerEngine:
    file = folder / "model.onnx"
    file.write_bytes(mlp())
    config = ModelConfig("m", backend="onnx", max_batch_size=4)
    names = ("ONNX Runtime", "onnxruntime", "rocserve.backends.onnx.backend")
    return WorkerEngine(*names, str(folder), str(file), config, InstanceKind.CPU, None, 1, EngineSettings())


def test_migraphx_is_open_once_all_its_batch_sizes_are_in_service(migraphx_root: Path, tmp_path: Path) -> None:
    file, cache = tmp_path / "model.onnx", tmp_path / "cache"
    file.write_bytes(mlp())
    config = ModelConfig("m", backend="onnx", max_batch_size=4, parameters={"target": "ref"})
    settings = EngineSettings(str(cache), migraphx_root=str(migraphx_root))
    names = ("MIGraphX", "", MIGRAPHX.module)
    engine = WorkerEngine(*names, str(tmp_path), str(file), config, InstanceKind.CPU, None, 1, settings)
    with MeasuringProcess("migraphx", python_command(find_installation(settings)), {}) as process:
        assert process.open(engine).description.startswith("MIGraphX 2.")
        assert len(list(cache.glob("programs/*/program.mxr"))) == len((1, 2, 4))


def _measure(rows: int) -> Measure:
    return Measure((MeasuredInput("x", "float32", (rows, 16)),))


@pytest.fixture
def process(tmp_path: Path) -> Iterator[MeasuringProcess]:
    with MeasuringProcess("onnxruntime", _PYTHON, {}, timeout_seconds=60) as process:
        assert process.open(_engine(tmp_path)).description.startswith("ONNX Runtime ")
        yield process


def test_as_many_runs_as_are_ordered_on_as_many_threads(process: MeasuringProcess) -> None:
    assert len(process.measure(_measure(2)).latencies) == 1
    many = Measure(_measure(2).inputs, repeats=3, threads=2)
    measured = process.measure(many)
    assert len(measured.latencies) == 6
    assert 0 < min(measured.latencies) <= measured.elapsed


def test_it_begins_when_it_is_told_to(process: MeasuringProcess) -> None:
    begin_at = time.monotonic() + 0.2
    process.measure(Measure(_measure(1).inputs, begin_at=begin_at))
    assert time.monotonic() >= begin_at


def test_inputs_and_outputs_in_files(process: MeasuringProcess, tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(inputs, **random_inputs(mlp(), 3))
    order = Measure(_measure(3).inputs, data_file=str(inputs), outputs_file=str(outputs), repeats=0)
    assert process.measure(order).latencies == ()
    (scores,) = read_outputs(str(outputs))
    assert scores.shape == (3, 10)
    assert np.allclose(scores.sum(axis=1), 1)


def test_a_run_that_fails_says_why_and_the_next_one_runs(process: MeasuringProcess) -> None:
    with pytest.raises(ServeError, match=r"(?s)^onnxruntime: onnx runtime error: .*Expected: 16"):
        process.measure(Measure((MeasuredInput("x", "float32", (1, 15)),)))
    assert len(process.measure(_measure(1)).latencies) == 1


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with MeasuringProcess("torch", _PYTHON, {}) as process, pytest.raises(ServeError, match=r"^torch: "):
        process.open(TorchModule(str(tmp_path / "absent.pt"), on_gpu=False))


def test_a_process_that_crashes_is_reported_with_its_last_words() -> None:
    crashing = ("/bin/sh", "-c", "echo alas >&2; kill -6 $$")
    end = r"^m: the process ended by signal 6 \(SIGABRT\): alas$"
    with MeasuringProcess("m", crashing, {}) as process, pytest.raises(ServeError, match=end):
        process.answer(Measured)


def test_a_process_that_cannot_be_started() -> None:
    with pytest.raises(ServeError, match=r"^m: no process could be started: .*'/absent/python'$"):
        MeasuringProcess("m", ("/absent/python",), {})


def test_an_answer_that_does_not_come_in_time() -> None:
    hanging = ("/bin/sh", "-c", "sleep 1000")
    late = r"^m took longer than --timeout-secs \(0\.1 s\) and was stopped; raise --timeout-secs \(0 = no limit\)$"
    with (
        MeasuringProcess("m", hanging, {}, timeout_seconds=0.1) as process,
        pytest.raises(ServeError, match=late),
    ):
        process.answer(Measured)


def test_a_time_that_no_poll_lasts(tmp_path: Path) -> None:
    with MeasuringProcess("onnxruntime", _PYTHON, {}, timeout_seconds=1e7) as process:
        assert process.open(_engine(tmp_path)).description.startswith("ONNX Runtime ")


def test_engines_take_turns(tmp_path: Path) -> None:
    with MeasuringProcess("a", _PYTHON, {}) as one, MeasuringProcess("b", _PYTHON, {}) as other:
        for process in (one, other):
            process.open(_engine(tmp_path))
        orders = {"a": _measure(1), "b": _measure(2)}
        latencies = time_interleaved({"a": one, "b": other}, orders, Timing(warm_up=1, repeats=7, seconds=0))
    assert {name: len(seconds) for name, seconds in latencies.items()} == {"a": 10, "b": 10}


def test_random_inputs_are_the_same_each_time_and_for_each_engine() -> None:
    inputs = (
        MeasuredInput("x", "float16", (2, 3)),
        MeasuredInput("index", "int64", (5,)),
        MeasuredInput("mask", "bool", (5,)),
    )
    first, second = seeded_inputs(inputs), seeded_inputs(inputs[::-1])
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert {name: str(array.dtype) for name, array in first.items()} == {
        "x": "float16", "index": "int64", "mask": "bool",
    }  # fmt: skip
    assert set(np.unique(first["index"])) <= {0, 1}
    assert not np.array_equal(first["x"], seeded_inputs(inputs, seed=1)["x"])
