"""Models in workers that time them: their runs, and how they fail."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.migraphx_models import mlp, random_inputs

from rocserve.backends.base import Batch, BatchResult
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.requests import Signature
from rocserve.core.tensors import tensor_from_numpy
from rocserve.settings import EngineSettings
from rocserve.verbs.model_choice import ModelOptions, find_model
from rocserve.verbs.workers import ToolWorkers
from rocserve_tools.measuring import timed_engine
from rocserve_tools.measuring.candidates import MeasuredInput, OpenCandidate, prepare
from rocserve_tools.measuring.candidates import random_inputs as seeded_inputs
from rocserve_tools.measuring.comparing import Comparison
from rocserve_tools.measuring.figures import Timing
from rocserve_tools.measuring.timed_engine import LATENCIES, ORDER, TimedModel
from rocserve_tools.measuring.timed_runs import timed_runs


def _opened(
    folder: Path,
    use: Callable[[OpenCandidate], Awaitable[None]],
    engine: str = "onnxruntime",
    settings: EngineSettings = EngineSettings(),  # noqa: B008
    **options: object,
) -> None:
    """Call `use` with the model, open in an engine."""
    file = folder / "model.onnx"
    file.write_bytes(mlp())
    instances = int(str(options.pop("instances", 1)))
    model = find_model(ModelOptions(file, engines=settings, **options))  # type: ignore[arg-type]

    async def run() -> None:
        async with ToolWorkers(settings) as workers:
            await use(await prepare(model, engine).open(workers, {}, instances))

    asyncio.run(run())


def test_migraphx_is_open_once_all_its_batch_sizes_are_in_service(migraphx_root: Path, tmp_path: Path) -> None:
    settings = EngineSettings(str(tmp_path / "cache"), migraphx_root=str(migraphx_root))

    async def use(opened: OpenCandidate) -> None:
        assert opened.description.startswith("MIGraphX 2.")
        assert opened.workers.properties["batch_sizes"] == "1, 2, 4"

    _opened(tmp_path, use, "migraphx", settings, target="ref")


def test_each_sample_runs_equally_often_on_each_instance_and_a_run_that_fails_says_why(tmp_path: Path) -> None:
    samples = [random_inputs(mlp(), rows) for rows in (1, 2, 3)]

    async def use(opened: OpenCandidate) -> None:
        assert opened.description.startswith("ONNX Runtime ")
        assert len((await timed_runs(opened.workers, [seeded_inputs(opened.inputs[2])], 3)).latencies) == 2 * 3
        for repeats, passes in ((1, 1), (3, 1), (4, 2)):
            ran = await timed_runs(opened.workers, samples, repeats)
            assert len(ran.latencies) == 2 * 3 * passes
            (scores,) = ran.outputs
            assert scores.shape == (3, 10), "those of the last one"
            assert np.allclose(scores.sum(axis=1), 1)
        with pytest.raises(ServeError, match=r"(?s)^onnxruntime: onnx runtime error: .*Expected: 16"):
            await timed_runs(opened.workers, [{"x": np.zeros((1, 15), np.float32)}], 1)
        assert len((await timed_runs(opened.workers, [seeded_inputs(opened.inputs[1])], 1)).latencies) == 2

    _opened(tmp_path, use, instances=2)


@pytest.mark.parametrize(("repeats", "seconds", "runs"), [(2, 0.0, 2), (1, 1.0, 4), (5, 1.0, 5), (1, 0.0, 1)])
def test_runs_go_on_for_the_seconds_that_are_ordered(
    monkeypatch: pytest.MonkeyPatch, repeats: int, seconds: float, runs: int
) -> None:
    now = 0.0

    class Engine:
        signature = Signature((), (), supports_batching=False)

        def execute(self, batch: Batch) -> BatchResult:
            nonlocal now
            now += 0.25
            return BatchResult({})

    monkeypatch.setattr(timed_engine, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))
    engine: Any = Engine()
    order = tensor_from_numpy(ORDER, np.array([repeats, seconds]))
    result = TimedModel(engine).execute(Batch({ORDER: order}, (), (1,)))
    assert np.asarray(result.outputs[LATENCIES]).tolist() == [0.25] * runs


def test_a_worker_that_crashes_is_reported(tmp_path: Path) -> None:
    async def use(opened: OpenCandidate) -> None:
        (pid,) = opened.workers.models_of_workers
        asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal.SIGKILL)
        with pytest.raises(ServeError, match=r"^onnxruntime: .* ended unexpectedly \(killed by signal 9\)"):
            await timed_runs(opened.workers, [seeded_inputs(opened.inputs[1])], 1, 600)

    _opened(tmp_path, use)


def test_engines_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(mlp())
    model = find_model(ModelOptions(file))

    async def run() -> None:
        comparison = Comparison()
        async with ToolWorkers(EngineSettings()) as workers:
            for name in ("a", "b"):
                await comparison.add(name, lambda: prepare(model, "onnxruntime"), workers)
            made = comparison.workload(1)
            compared = await comparison.compare(1, made, Timing(warm_up=1, repeats=7, seconds=0))
        assert [one.latency.runs for one in compared.values() if one.latency] == [10, 10]

    asyncio.run(run())


def test_random_inputs_are_the_same_each_time_and_for_each_engine() -> None:
    inputs = (
        MeasuredInput("x", DataType.FP16, (2, 3)),
        MeasuredInput("index", DataType.INT64, (5,)),
        MeasuredInput("mask", DataType.BOOL, (5,)),
    )
    first, second = seeded_inputs(inputs), seeded_inputs(inputs[::-1])
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert {name: str(array.dtype) for name, array in first.items()} == {
        "x": "float16", "index": "int64", "mask": "bool",
    }  # fmt: skip
    assert set(np.unique(first["index"])) <= {0, 1}
    assert not np.array_equal(first["x"], seeded_inputs(inputs, seed=1)["x"])
