"""Opens a model in the two engines that a check compares."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.migraphx.mxr_file import sibling_model
from rocserve.backends.pytorch.engine_choice import EAGER
from rocserve.config.definition import ModelDefinition, complete_definition
from rocserve.core.datatypes import DataType
from rocserve.core.load_check import LoadCheckMode
from rocserve.core.model_config import with_sequence_tensors
from rocserve.core.tensors import Tensor, bfloat16_values
from rocserve.load_check.recorded import compare_recorded, read_recorded, recorded_request
from rocserve.load_check.tensors import Array, Feed
from rocserve.verbs.engines import CPU, ONNXRUNTIME, engine_description, is_pytorch, prepare
from rocserve.verbs.model_choice import ToolModel
from rocserve.verbs.workers import LoadedWorkers, ToolWorkers


@dataclass(frozen=True, slots=True)
class Side:
    """A model in an engine, loaded in a worker as a server loads it."""

    engine: str
    description: str
    """Such as "ONNX Runtime 1.31.1 (CPUExecutionProvider)"."""
    workers: LoadedWorkers
    _loop: asyncio.AbstractEventLoop

    def run(self, feed: Feed) -> Mapping[str, Array]:
        """Run the model and return its outputs. Never on the asyncio loop's thread, because it waits. Raises ServeError
        if the engine refuses the inputs or has ended, TimeoutError if it hangs."""
        answer = asyncio.run_coroutine_threadsafe(self.workers.answer(feed), self._loop)
        # An engine may hang.
        outputs = answer.result(600.0)
        bf16 = {spec.name for spec in self.workers.signature.outputs if spec.datatype is DataType.BF16}
        return {name: bfloat16_values(array) if name in bf16 else array for name, array in outputs.items()}

    @property
    def precision(self) -> str:
        """The precision in which the engine computes."""
        return self.workers.properties.get("precision", "") or "fp32"


async def open_side(model: ToolModel, engine: str, workers: ToolWorkers, mode: LoadCheckMode) -> Side:
    """Load the model in the engine, and check it as a server would in this mode. Raises ServeError."""
    placed = prepare(model.with_parameters(load_check=mode.value), engine)
    order, plan = placed.planned()
    loaded = await workers.open(order, plan, placed.title)
    return Side(engine, engine_description(plan.engine, loaded), loaded, asyncio.get_running_loop())


def compare_with_recorded(side: Side, file: Path, definition: ModelDefinition) -> str:
    """Run the recorded request, and return what was found. Raises LoadCheckFailed if the model answers otherwise, or if
    the file is wrong; ServeError if the model fails."""
    config = with_sequence_tensors(complete_definition(definition, side.workers.signature).config)
    recorded = read_recorded(file)
    request = recorded_request(recorded, config)
    inputs = {
        entry.name: Tensor(entry.name, entry.datatype, entry.shape, data).numpy()
        for entry, data in zip(request.plan.inputs, request.data, strict=True)
    }
    return compare_recorded(recorded, side.run(inputs), config)


def onnx_file(model: ToolModel) -> Path | None:
    """Return the model's ONNX file, or the one beside a .mxr file; None = there is none."""
    file = model.source.model_file
    if file.suffix == ".mxr":
        return sibling_model(file)
    return file if model.backend.name == "onnx" else None


def reference_of(model: ToolModel, engine: str, properties: Mapping[str, str]) -> str:
    """Return the engine whose answers count; "" = no other engine computes this model. `properties`: of the model in
    `engine`."""
    if is_pytorch(model):
        reference = EAGER.name
    elif onnx_file(model) is not None:
        reference = CPU
    else:
        return ""
    is_on_cpu = engine == ONNXRUNTIME and properties.get("execution_providers") == "CPUExecutionProvider"
    return "" if engine == reference or is_on_cpu else reference
