"""Tries an engine: loads a tiny model in a separate process, runs it once and compares its answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig
from rocserve.settings import EngineSettings
from rocserve.tools.measuring.process import Measure, MeasuredInput, MeasuringProcess, WorkerEngine, read_outputs

SHAPE = (2, 4)
WEIGHTS = (-1.0, -0.5, 0.5, 1.0)
TINY_ONNX = bytes.fromhex(
    "08083a690a0e0a01780a017712017322034164640a0c0a0173120179220452656c75120474696e792a19080410014201774a10000080bf"
    "000000bf0000003f0000803f5a130a0178120e0a0c080112080a0208020a02080462130a0179120e0a0c080112080a0208020a02080442"
    "02100d"
)
"""y = relu(x + WEIGHTS) on floats of SHAPE. As bytes, because the doctor must not need the packages that it checks."""
GREY = 90
GREY_JPEG = bytes.fromhex(
    "ffd8ffe000104a46494600010100000100010000ffdb004300100b0c0e0c0a100e0d0e1211101318281a181616183123251d283a333d3c39"
    "33383740485c4e404457453738506d51575f626768673e4d71797064785c656763ffdb0043011112121815182f1a1a2f6342384263636363"
    "63636363636363636363636363636363636363636363636363636363636363636363636363636363636363636363ffc00011080010001003"
    "012200021101031101ffc4001500010100000000000000000000000000000005ffc40014100100000000000000000000000000000000ffc4"
    "0014010100000000000000000000000000000000ffc40014110100000000000000000000000000000000ffda000c03010002110311003f00"
    "98003fffd9"
)
"""An image of 16 x 16 pixels of the level GREY."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    config: ModelConfig
    filename: str
    content: bytes
    input: np.ndarray[Any, Any]
    answer: np.ndarray[Any, Any]
    tolerance: float
    unit: str = ""


_VALUES = (0.25 * np.arange(np.prod(SHAPE)) - 1).reshape(SHAPE)
NETWORK = TinyModel(
    ModelConfig(
        name="tiny",
        backend="onnx",
        inputs=(InputConfig("x", DataType.FP32, SHAPE),),
        outputs=(OutputConfig("y", DataType.FP32, SHAPE),),
    ),
    "model.onnx",
    TINY_ONNX,
    _VALUES.astype(np.float32),
    np.maximum(_VALUES + WEIGHTS, 0.0),
    1e-3,
)
PIPELINE = TinyModel(
    ModelConfig(
        name="tiny",
        backend="rocal",
        max_batch_size=1,
        inputs=(InputConfig("ENCODED", DataType.BYTES, (1,)),),
        outputs=(OutputConfig("IMAGE", DataType.UINT8, (8, 8, 3)),),
    ),
    "pipeline.json",
    b"""{"pipeline": [{"operation": "Resize", "dest_width": 8, "dest_height": 8, "is_output": true}]}""",
    np.array([[GREY_JPEG]]),
    np.full((1, 8, 8, 3), GREY),
    3,
    " of 255 levels",
)


def try_engine(
    model: TinyModel,
    module: str,
    parameters: Mapping[str, str],
    settings: EngineSettings,
    timeout_seconds: float,
    device: int | None = None,
    python: Sequence[str] = (sys.executable,),
) -> float:
    """Run the model in the engine of this module, and return the seconds from the process's start to the answer.
    Raises ServeError if the answer is wrong or missing."""
    started = time.monotonic()
    environment = {} if device is None else {"HIP_VISIBLE_DEVICES": str(device)}
    kind = InstanceKind.CPU if device is None else InstanceKind.GPU
    config = replace(model.config, parameters=parameters)
    (entry,) = config.inputs
    with (
        TemporaryDirectory(prefix="rocserve-doctor-") as folder,
        MeasuringProcess("trying a tiny model", python, environment, timeout_seconds=timeout_seconds) as process,
    ):
        names = (f"1/{model.filename}", "in.npz", "out.npz")
        file, inputs_file, outputs_file = (Path(folder, name) for name in names)
        file.parent.mkdir()
        file.write_bytes(model.content)
        np.savez(inputs_file, **cast(Any, {entry.name: model.input}))
        # A separate cache makes the trial compile, and leaves nothing behind.
        own = replace(settings, cache_directory=f"{folder}/cache")
        process.open(WorkerEngine("", "", module, folder, str(file), config, kind, device, 1, own))
        inputs = (MeasuredInput(entry.name, model.input.dtype.name, model.input.shape),)
        process.measure(Measure(inputs, data_file=str(inputs_file), repeats=0, outputs_file=str(outputs_file)))
        (answer,) = read_outputs(str(outputs_file))
    difference = float(np.abs(answer.astype(np.float64) - model.answer).max())
    if not difference <= model.tolerance:
        raise internal(f"its answer is wrong by {difference:.3g}{model.unit}")
    return time.monotonic() - started
