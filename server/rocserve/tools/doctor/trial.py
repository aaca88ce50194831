"""A tiny model through one engine, in a process of its own: `python -m rocserve.tools.doctor.trial`.

The TrialOrder comes by standard input; the TrialResult goes to the descriptor that is the one argument.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, ModelSource
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig
from rocserve.core.plain import from_json, to_json
from rocserve.core.tensors import tensor_from_numpy
from rocserve.settings import EngineSettings
from rocserve.tools.doctor.tiny_model import SHAPE, expected, tiny_onnx

Array = np.ndarray[Any, Any]

_PIPELINE = """{"pipeline": [{"operation": "Resize", "dest_width": 8, "dest_height": 8, "is_output": true}]}"""
_GREY = 90
_TOLERANCE = 1e-3
_GREY_TOLERANCE = 3


@dataclass(frozen=True, slots=True)
class TrialOrder:
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


@dataclass(frozen=True, slots=True)
class TrialResult:
    seconds: float
    """From loading the model to its answer."""
    failure: str
    """"" = the answer was right."""


def try_engine(order: TrialOrder) -> TrialResult:
    """Load the model, run it once and compare the answer."""
    started = time.monotonic()
    try:
        fault = _try_pipeline(order) if order.kind == "rocal" else _try_network(order)
    except ServeError as error:
        fault = error.text
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    return TrialResult(time.monotonic() - started, fault)


def _try_network(order: TrialOrder) -> str:
    config = ModelConfig(
        name="tiny",
        backend="onnx",
        inputs=(InputConfig("x", DataType.FP32, SHAPE),),
        outputs=(OutputConfig("y", DataType.FP32, SHAPE),),
        parameters=order.parameters,
    )
    values = [0.25 * place - 1 for place in range(SHAPE[0] * SHAPE[1])]
    x = np.array(values, np.float32).reshape(SHAPE)
    y = _answer(order, config, "model.onnx", tiny_onnx(), "x", x, DataType.FP32)
    difference = float(np.abs(y - np.array(expected(values)).reshape(SHAPE)).max())
    return "" if difference <= _TOLERANCE else f"its answer is wrong by {difference:.3g}"


def _try_pipeline(order: TrialOrder) -> str:
    import cv2

    _, encoded = cv2.imencode(".jpg", np.full((16, 16, 3), _GREY, np.uint8))
    config = ModelConfig(
        name="tiny",
        backend="rocal",
        max_batch_size=1,
        inputs=(InputConfig("ENCODED", DataType.BYTES, (1,)),),
        outputs=(OutputConfig("IMAGE", DataType.UINT8, (8, 8, 3)),),
        parameters=order.parameters,
    )
    image = np.array([[encoded.tobytes()]], dtype=np.object_)
    y = _answer(order, config, "pipeline.json", _PIPELINE.encode(), "ENCODED", image, DataType.BYTES)
    difference = float(np.abs(y.astype(np.int32) - _GREY).max())
    return "" if difference <= _GREY_TOLERANCE else f"its image is wrong by {difference:.0f} of 255 levels"


def _answer(
    order: TrialOrder,
    config: ModelConfig,
    filename: str,
    content: bytes,
    input_name: str,
    values: Array,
    datatype: DataType,
) -> Array:
    folder = Path(order.folder)
    version_folder = folder / "1"
    version_folder.mkdir(exist_ok=True)
    (version_folder / filename).write_bytes(content)
    model = import_module(order.engine).load(
        ModelSource(
            name=config.name,
            version=1,
            model_folder=folder,
            version_folder=version_folder,
            model_file=version_folder / filename,
            config=config,
            instance_kind=InstanceKind.CPU if order.device is None else InstanceKind.GPU,
            device=order.device,
            instance_count=1,
            settings=order.settings,
        )
    )
    try:
        wanted = config.outputs[0].name
        batch = Batch({input_name: tensor_from_numpy(input_name, values, datatype)}, (wanted,), (1,))
        result = model.execute(batch)
        for failure in result.failures.values():
            raise failure
        output = result.outputs[wanted]
        return np.array(output if isinstance(output, np.ndarray) else output.numpy())
    finally:
        model.close()


def main(answer: int) -> None:
    order = from_json(TrialOrder, sys.stdin.buffer.read())
    data = to_json(try_engine(order))
    sys.stderr.flush()
    os.write(answer, data)
    # What a GPU's driver does at the end of a process is no part of the trial.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
