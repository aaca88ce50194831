"""Installs the stand-in for amd.rocal, and builds what tests of the rocAL engine need."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rocserve.backends.rocal.amd.engine import RocalEngine
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.engine import BatchEngine, CpuEngine, EngineSetup
from rocserve.backends.rocal.operations.base import Measurement
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, parse_pipeline

STAND_IN = Path(__file__).parent / "amd_rocal_stand_in"


@contextmanager
def stand_in() -> Iterator[ModuleType]:
    """Make amd.rocal importable, and return its module rocal_pybind."""
    sys.path.insert(0, str(STAND_IN))
    try:
        yield importlib.import_module("rocal_pybind")
    finally:
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("amd", "rocal_pybind")]:
            del sys.modules[name]


def setup_for(
    document: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    batch_size: int = 4,
    color_format: ColorFormat = ColorFormat.RGB24,
    threads: int = 2,
    device: int | None = None,
) -> EngineSetup:
    """The set-up of a pipeline file, or of its list of operations. The outputs are those of the pipeline."""
    file = document if isinstance(document, Mapping) else {"pipeline": document, "mean_std_range": "pixel"}
    pipeline = parse_pipeline(json.dumps(file), color_format.channels)
    formats = tuple(
        OutputFormat(step.datatype, Layout.NHWC)
        if isinstance(step, Measurement)
        else OutputFormat(step.datatype or step.default_datatype, step.layout or Layout.NHWC)
        for step in pipeline.outputs
    )
    return EngineSetup("model", pipeline, color_format, formats, batch_size, threads, device)


def engines(setup: EngineSetup) -> tuple[RocalEngine, BatchEngine]:
    """The engine on amd.rocal and the engine on the CPU."""
    return RocalEngine(setup), CpuEngine(setup)


def run_batch(
    engine: BatchEngine,
    setup: EngineSetup,
    images: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    arguments: Mapping[str, Any] | None = None,
) -> tuple[list[np.ndarray], Mapping[int, Exception]]:
    """Run a batch; return its outputs and its failures. `shapes`: an image's shape in each output."""
    outputs = [
        np.full((len(images), *shape), 7, dtype=output.datatype.numpy_dtype)
        for shape, output in zip(shapes, setup.formats, strict=True)
    ]
    given = {name: np.asarray(values) for name, values in (arguments or {}).items()}

    def put(row: int, output: int, result: np.ndarray) -> None:
        assert result.shape == outputs[output].shape[1:]
        outputs[output][row] = result

    return outputs, engine.run(images, given, put)


def run_one(engine: BatchEngine, image: Any, arguments: Mapping[str, np.ndarray] | None = None) -> list[np.ndarray]:
    """Run one image; return all its results, each with its own size. Raises the image's failure."""
    results: dict[int, np.ndarray] = {}
    failures = engine.run([image], arguments or {}, lambda row, output, result: results.update({output: result.copy()}))
    if failures:
        raise failures[0]
    return [results[output] for output in sorted(results)]
