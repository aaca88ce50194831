"""Tries an engine: loads a tiny model in a worker, runs it once and compares its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from rocserve.backends.registry import discover_backends
from rocserve.cache.temporary_folder import temporary_folder
from rocserve.config.definition import FolderReading
from rocserve.core.errors import internal, unavailable
from rocserve.core.load_check import LoadCheckMode
from rocserve.load_check.tensors import Array
from rocserve.repository.engine_plan import plan_engine
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.machine import ThisMachine
from rocserve.settings import EngineSettings
from rocserve.verbs.workers import ToolWorkers

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
    config: str
    filename: str
    content: bytes
    inputs: Mapping[str, Array]
    answer: Array
    tolerance: float
    unit: str = ""


_VALUES = (0.25 * np.arange(np.prod(SHAPE)) - 1).reshape(SHAPE)
NETWORK = TinyModel(
    """backend: "onnx"
    input { name: "x" data_type: TYPE_FP32 dims: [ 2, 4 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 2, 4 ] }
    """,
    "model.onnx",
    TINY_ONNX,
    {"x": _VALUES.astype(np.float32)},
    np.maximum(_VALUES + WEIGHTS, 0.0),
    1e-3,
)
PIPELINE = TinyModel(
    """backend: "rocal" max_batch_size: 1
    input { name: "ENCODED" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 8, 8, 3 ] }
    """,
    "pipeline.json",
    b"""{"pipeline": [{"operation": "Resize", "dest_width": 8, "dest_height": 8, "is_output": true}]}""",
    {"ENCODED": np.array([[GREY_JPEG]])},
    np.full((1, 8, 8, 3), GREY),
    3,
    " of 255 levels",
)


def try_engine(
    model: TinyModel,
    parameters: Mapping[str, str],
    settings: EngineSettings,
    timeout_seconds: float,
    device: int | None = None,
) -> float:
    """Run the model in a worker with these parameters, and return the seconds until its answer. `device`: a GPU; None =
    the CPU. Raises ServeError if the answer is wrong or missing."""
    started = time.monotonic()
    group = "kind: KIND_CPU" if device is None else f"kind: KIND_GPU gpus: {device}"
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    with temporary_folder("rocserve-doctor-") as temporary:
        folder = temporary / "tiny"
        file = folder / "1" / model.filename
        file.parent.mkdir(parents=True)
        file.write_bytes(model.content)
        (folder / "config.pbtxt").write_text("\n".join((model.config, f"instance_group {{ {group} }}", *lines)))
        # A separate cache makes the trial compile, and leaves nothing behind. The trial compares the answer itself: an
        # engine that computes another number for a special value, as MIGraphX's Relu for NaN, is not broken.
        own = replace(settings, cache_directory=f"{temporary}/cache", load_check=LoadCheckMode.OFF.value)
        (definition,) = FolderReading(folder, discover_backends()).definitions()
        answer = asyncio.run(_answer(LoadOrder(definition, 1, file.parent), model, own, timeout_seconds))
    difference = float(np.abs(answer.astype(np.float64) - model.answer).max())
    if not difference <= model.tolerance:
        raise internal(f"its answer is wrong by {difference:.3g}{model.unit}")
    return time.monotonic() - started


async def _answer(order: LoadOrder, model: TinyModel, settings: EngineSettings, timeout_seconds: float) -> Array:
    title = "trying a tiny model"
    try:
        async with (
            asyncio.timeout(timeout_seconds or None),
            ToolWorkers(settings) as workers,
        ):
            plan = plan_engine(order.definition, order.folder, ThisMachine(settings))
            loaded = await workers.open(order, plan, title)
            return next(iter((await loaded.answer(model.inputs)).values()))
    except TimeoutError:
        limit = f"--timeout-secs ({timeout_seconds:g} s)"
        raise unavailable(
            f"{title} took longer than {limit} and was stopped; raise --timeout-secs (0 = no limit)"
        ) from None
