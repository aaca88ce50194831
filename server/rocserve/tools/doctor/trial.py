"""The job of trying an engine: a tiny model is loaded, run once, and its answer compared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig
from rocserve.jobs.messages import Report
from rocserve.settings import EngineSettings
from rocserve.tools.measuring.child import open_engine
from rocserve.tools.measuring.messages import WorkerEngine

SHAPE = (2, 4)
WEIGHTS = (-1.0, -0.5, 0.5, 1.0)
TINY_ONNX = bytes.fromhex(
    "08083a690a0e0a01780a017712017322034164640a0c0a0173120179220452656c75120474696e792a19080410014201774a10000080bf"
    "000000bf0000003f0000803f5a130a0178120e0a0c080112080a0208020a02080462130a0179120e0a0c080112080a0208020a02080442"
    "02100d"
)
"""y = relu(x + WEIGHTS), floats of SHAPE, as an ONNX file: a doctor must not need the packages that it checks."""


def expected(values: Sequence[float]) -> list[float]:
    """What the model makes of the eight values."""
    return [max(0.0, value + WEIGHTS[place % len(WEIGHTS)]) for place, value in enumerate(values)]


Array = np.ndarray[Any, Any]

_PIPELINE = """{"pipeline": [{"operation": "Resize", "dest_width": 8, "dest_height": 8, "is_output": true}]}"""
_GREY = 90
_TOLERANCE = 1e-3
_GREY_TOLERANCE = 3


@dataclass(frozen=True, slots=True)
class TrialJob:
    kind: str
    """onnx or rocal: which model."""
    engine: str
    """The engine's module."""
    folder: str
    """Where the model may be written."""
    parameters: Mapping[str, str]
    """Of the model: which target, which engine."""
    device: int | None
    settings: EngineSettings

    @property
    def title(self) -> str:
        return "trying a tiny model"


@dataclass(frozen=True, slots=True)
class TrialResult:
    seconds: float
    """From loading the model to its answer."""


def perform(job: TrialJob, report: Report) -> TrialResult:
    """
    Raises:
        ServeError: the answer is wrong, or the engine says why it gives none.
    """
    report("running it")
    started = time.monotonic()
    fault = _try_pipeline(job) if job.kind == "rocal" else _try_network(job)
    if fault:
        raise internal(fault)
    return TrialResult(time.monotonic() - started)


def _try_network(job: TrialJob) -> str:
    config = ModelConfig(
        name="tiny",
        backend="onnx",
        inputs=(InputConfig("x", DataType.FP32, SHAPE),),
        outputs=(OutputConfig("y", DataType.FP32, SHAPE),),
        parameters=job.parameters,
    )
    values = [0.25 * place - 1 for place in range(SHAPE[0] * SHAPE[1])]
    x = np.array(values, np.float32).reshape(SHAPE)
    y = _answer(job, config, "model.onnx", TINY_ONNX, {"x": x})
    difference = float(np.abs(y - np.array(expected(values)).reshape(SHAPE)).max())
    return "" if difference <= _TOLERANCE else f"its answer is wrong by {difference:.3g}"


def _try_pipeline(job: TrialJob) -> str:
    import cv2

    _, encoded = cv2.imencode(".jpg", np.full((16, 16, 3), _GREY, np.uint8))
    config = ModelConfig(
        name="tiny",
        backend="rocal",
        max_batch_size=1,
        inputs=(InputConfig("ENCODED", DataType.BYTES, (1,)),),
        outputs=(OutputConfig("IMAGE", DataType.UINT8, (8, 8, 3)),),
        parameters=job.parameters,
    )
    image = np.array([[encoded.tobytes()]], dtype=np.object_)
    y = _answer(job, config, "pipeline.json", _PIPELINE.encode(), {"ENCODED": image})
    difference = float(np.abs(y.astype(np.int32) - _GREY).max())
    return "" if difference <= _GREY_TOLERANCE else f"its image is wrong by {difference:.0f} of 255 levels"


def _answer(job: TrialJob, config: ModelConfig, filename: str, content: bytes, inputs: Mapping[str, Array]) -> Array:
    file = Path(job.folder) / "1" / filename
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    engine = WorkerEngine(
        title=job.title,
        library="",
        module=job.engine,
        model_folder=job.folder,
        model_file=str(file),
        config=config,
        instance_kind=InstanceKind.CPU if job.device is None else InstanceKind.GPU,
        device=job.device,
        instance_count=1,
        settings=job.settings,
    )
    (output,) = open_engine(engine).run(inputs)
    return output
