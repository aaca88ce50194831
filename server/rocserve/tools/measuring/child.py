"""Runs as a measuring process: `python -m rocserve.tools.measuring.child ANSWERS PARENT_PIPE`, the numbers of two
descriptors. Orders come on its standard input."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.backends.base import Batch, LoadedModel, ModelSource, model_properties
from rocserve.backends.migraphx.serving.model import MigraphxModel
from rocserve.backends.pytorch.model_file import FileKind, file_kind
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.core.plain import from_json, to_json
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve.tools.measuring.process import (
    Answer,
    Array,
    Measure,
    Measured,
    MeasuredInput,
    Opened,
    Order,
    TorchModule,
    WorkerEngine,
    random_inputs,
)

Run = Callable[[Mapping[str, Array]], Sequence[Array]]
"""Runs the model once. Can be called from several threads at a time only if the engine allows it."""

_FACTS = ("execution_providers", "program", "migraphx_binding", "device", "target", "precision")
"""A model's properties that describe the engine."""


def _open_worker_engine(engine: WorkerEngine) -> tuple[Opened, Run]:
    """Load the model as a worker of the server does: the same session or program, devices and batch sizes."""
    file = Path(engine.model_file)
    model: LoadedModel = importlib.import_module(engine.module).load(
        ModelSource(
            name=engine.config.name,
            version=1,
            model_folder=Path(engine.model_folder),
            version_folder=file.parent,
            model_file=file,
            config=engine.config,
            instance_kind=engine.instance_kind,
            device=engine.device,
            instance_count=engine.instance_count,
            settings=engine.settings,
        )
    )
    model.warm_up(())
    if isinstance(model, MigraphxModel):
        model.wait()
    outputs = tuple(spec.name for spec in model.signature.outputs)
    datatypes = {spec.name: spec.datatype for spec in model.signature.inputs}

    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        tensors = {name: tensor_from_numpy(name, array, datatypes.get(name)) for name, array in inputs.items()}
        result = model.execute(Batch(tensors, outputs, (1,)))
        for failure in result.failures.values():
            raise failure
        arrays = (result.outputs[name] for name in outputs)
        return [array.numpy() if isinstance(array, Tensor) else array for array in arrays]

    properties = model_properties(model)
    version = properties.get("migraphx_version", "")
    if engine.library:
        version = importlib.import_module(engine.library).__version__
    facts = ", ".join(properties[name] for name in _FACTS if name in properties)
    description = " ".join(filter(None, (engine.title, version, f"({facts})" if facts else "")))
    return Opened(description, model.signature), run


def _open_torch(engine: TorchModule) -> tuple[Opened, Run]:
    torch = _needed("torch", "PyTorch is not installed; install torch (for ROCm: from pytorch.org's ROCm index)")
    module = _torch_module(torch, engine.torch_file)
    from torch.utils._pytree import tree_leaves

    # PyTorch names AMD's GPUs "cuda" too.
    device = torch.device("cuda" if engine.on_gpu and torch.cuda.is_available() else "cpu")
    module = module.to(device) if hasattr(module, "to") else module

    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        # Copies to and from the GPU are timed, as for the other engines.
        with torch.inference_mode():
            results = module(*(torch.from_numpy(array).to(device) for array in inputs.values()))
            return [result.cpu().numpy() for result in tree_leaves(results)]

    return Opened(f"PyTorch {torch.__version__} ({device.type}, {Path(engine.torch_file).name})"), run


def _torch_module(torch: Any, file: str) -> Any:
    if file.endswith(".onnx"):
        converter = _needed(
            "onnx2torch",
            "PyTorch does not read ONNX files; install onnx2torch, which converts them, or put the model into its"
            " version folder as model.pt (TorchScript) or model.pt2 (torch.export)",
        )
        return converter.convert(file).eval()
    from rocserve.backends.pytorch.program import read_exported

    match file_kind(Path(file)):
        case FileKind.EXPORTED:
            return read_exported(Path(file)).module()
        case FileKind.PACKAGE:
            return torch._inductor.aoti_load_package(file)
        case FileKind.SCRIPT:
            return torch.jit.load(file, map_location="cpu").eval()


def _needed(module: str, advice: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise unavailable(f"{advice} ({error})") from None


_STANDARD_INPUT = 0


def main(answers: int, parent_pipe: int) -> None:
    """Answer each order until standard input ends."""
    for descriptor in (answers, parent_pipe):
        os.set_inheritable(descriptor, False)
    held = exit_with_parent(parent_pipe)
    run: Run | None = None
    with open(_STANDARD_INPUT, "rb") as orders, os.fdopen(answers, "wb", buffering=0) as writing:
        for line in orders:
            action = from_json(Order, line).action
            result: Opened | Measured | str
            try:
                if isinstance(action, Measure):
                    assert run is not None, "it is opened before"
                    result = measure(run, action)
                else:
                    result, run = (
                        _open_torch(action) if isinstance(action, TorchModule) else _open_worker_engine(action)
                    )
            except ServeError as error:
                result = error.text
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            writing.write(to_json(Answer(result)) + b"\n")
    os.close(held)


def measure(run: Run, order: Measure) -> Measured:
    inputs = _inputs(order.inputs, order.data_file)
    if order.outputs_file:
        outputs = map(np.asarray, run(inputs))
        np.savez(order.outputs_file, *(output for output in outputs if output.dtype.kind in "biuf"))
    time.sleep(max(0.0, order.begin_at - time.monotonic()))
    begun = time.monotonic()
    gate = threading.Barrier(order.threads)

    def timed_runs() -> list[float]:
        gate.wait()
        latencies: list[float] = []
        end = begun + order.seconds
        while len(latencies) < order.repeats or time.monotonic() < end:
            before = time.perf_counter()
            run(inputs)
            latencies.append(time.perf_counter() - before)
        return latencies

    if order.threads == 1:
        latencies = timed_runs()
    else:
        with ThreadPoolExecutor(order.threads) as pool:
            runs = [pool.submit(timed_runs) for _ in range(order.threads)]
            latencies = [latency for one in runs for latency in one.result()]
    return Measured(tuple(latencies), time.monotonic() - begun)


@lru_cache(maxsize=1)
def _inputs(inputs: tuple[MeasuredInput, ...], data_file: str) -> Mapping[str, Array]:
    """Return the inputs. `data_file`: an .npz file, which may lack inputs that no output depends on; "" = random
    inputs. They are cached: the warm-up loads them, so that they are ready when the measurement begins."""
    if not data_file:
        return random_inputs(inputs)
    with np.load(data_file, allow_pickle=False) as file:
        return {one.name: np.ascontiguousarray(file[one.name]) for one in inputs if one.name in file}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
