"""Prepares a model for the engines that are measured: compiles programs, determines inputs, describes processes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rocserve.backends.base import EngineChoice, EngineSpec
from rocserve.backends.batch_sizes import LARGEST_WITHOUT_CONFIGURATION, default_batch_sizes
from rocserve.backends.migraphx.configuration.options import serving_options
from rocserve.backends.migraphx.engine_choice import MIGRAPHX as MIGRAPHX_ENGINE
from rocserve.backends.migraphx.installation import find_installation, python_command
from rocserve.backends.migraphx.model_files.mxr import check_mxr, sibling_model
from rocserve.backends.onnx.engine_choice import ONNXRUNTIME as ONNXRUNTIME_ENGINE
from rocserve.backends.pytorch.engine_choice import EAGER
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InstanceGroup, InstanceKind
from rocserve.repository.engine_plan import plan_workers
from rocserve.repository.machine import ThisMachine
from rocserve.tools.measuring.comparing import Candidate, Inputs
from rocserve.tools.measuring.process import MeasuredInput, Opened, TorchModule, WorkerEngine
from rocserve.tools.model_choice import ToolModel
from rocserve.tools.printing import ToolProgress
from rocserve.tools.tool_context import ToolContext

MIGRAPHX, ONNXRUNTIME, TORCH = "migraphx", "onnxruntime", "torch"
ENGINES = (MIGRAPHX, ONNXRUNTIME, "eager", "inductor", "migraphx-onnx")
"""Engines that a server can use."""

_TORCH_FILES = ("model.pt2", "model.pt")


def main_engine(model: ToolModel, wanted: str) -> str:
    """Return the name of the `wanted` engine; for "auto", of the engine that a server here would choose. Raises
    ServeError if no engine can run the model, or if the wanted one is unavailable here."""
    if is_pytorch(model):
        return _pytorch_choice(model, wanted).engine.name
    if model.backend.name in ("migraphx", "tensorflow"):
        if wanted == ONNXRUNTIME:
            raise invalid_argument(f"a model of backend '{model.backend.name}' runs on MIGraphX only")
        return MIGRAPHX
    if wanted != "auto":
        return wanted
    if "target" in model.source.config.parameters:
        return MIGRAPHX
    config = model.source.config
    return model.backend.engine_for(config, ThisMachine(model.source.settings)).engine.name


def prepare(model: ToolModel, name: str, progress: ToolProgress, log: logging.Logger, instances: int = 1) -> Candidate:
    """Return the model in the named engine, after compiling what MIGraphX needs. `instances`: threads that will run an
    engine that allows several. Raises ServeError if the engine is unavailable."""
    if is_pytorch(model):
        if name == TORCH:
            return _torch(model, model.source.model_file)
        source, choice = model.source, _pytorch_choice(model, name)
        config = model.with_parameters(engine=name).source.config
        place = plan_workers(config, choice, ThisMachine(source.settings), 0)[0][0]
        # All measured instances share the CPUs.
        config = replace(config, instance_groups=(InstanceGroup("", place.kind, instances),))
        grouped = replace(model, source=replace(source, config=config))
        return _worker_candidate(name, grouped, choice.engine, place.kind, place.device)
    if name not in (MIGRAPHX, ONNXRUNTIME, TORCH):
        raise invalid_argument(f"{name} runs PyTorch's files, and {model.source.model_file.name} is none")
    if name == MIGRAPHX:
        # All programs are compiled here, where their progress can be shown.
        context = ToolContext(model, progress.report, log)
        if model.source.model_file.suffix == ".mxr":
            check_mxr(model.source.model_file, context.environment, context.options.target)
        else:
            recipes = context.plan().recipes
            progress.steps(len(recipes))
            for recipe in recipes:
                context.program(recipe)
                progress.done()
        return migraphx_candidate(MIGRAPHX, model, context.device)
    file = model.source.model_file
    onnx_file = sibling_model(file) if file.suffix == ".mxr" else file
    if onnx_file is None or model.backend.name == "tensorflow":
        raise invalid_argument(
            f"{file.name} can only be measured on MIGraphX; other engines need the ONNX file of the model"
        )
    model = replace(model, source=replace(model.source, model_file=onnx_file))
    if name == TORCH:
        # A file in PyTorch's formats is preferred to the converted ONNX file.
        files = [model.source.version_folder / name for name in _TORCH_FILES] if model.definition else []
        torch_file = next((path for path in files if path.is_file()), None)
        order = [one.name for one in model.source.config.inputs] if torch_file else ()
        candidate = _torch(model, torch_file or onnx_file, order)
    else:
        candidate = _onnxruntime(model, instances)
    if onnx_file == file:
        return candidate
    title = f"{name}: {file.name} runs on MIGraphX only, so {onnx_file.name} next to it is measured"
    return replace(candidate, title=title)


def migraphx_candidate(name: str, model: ToolModel, device: int | None) -> Candidate:
    return _worker_candidate(name, model, MIGRAPHX_ENGINE, model.source.instance_kind, device)


def _onnxruntime(model: ToolModel, instances: int) -> Candidate:
    source = model.source
    machine = ThisMachine(source.settings)
    choice = model.backend.engine_for(source.config, machine)
    if choice.engine is not ONNXRUNTIME_ENGINE:
        has_gpu_provider = machine.is_installed(ONNXRUNTIME_ENGINE.gpu_module, ONNXRUNTIME_ENGINE.gpu_files)
        choice = EngineChoice(ONNXRUNTIME_ENGINE, "it is to be measured", auto_takes_gpus=has_gpu_provider)
    place = plan_workers(source.config, choice, machine, 0)[0][0]
    threads = instances if place.device is None else 1
    candidate = _worker_candidate(ONNXRUNTIME, model, ONNXRUNTIME_ENGINE, place.kind, place.device, threads)
    return replace(candidate, shares_a_process=place.device is None)


def _worker_candidate(
    name: str, model: ToolModel, engine: EngineSpec, kind: InstanceKind, device: int | None, instances: int = 1
) -> Candidate:
    source = model.source
    title, library, python = "PyTorch", "torch", tuple[str, ...]((sys.executable,))
    if engine.needs_migraphx:
        title, library, python = "MIGraphX", "", python_command(find_installation(source.settings))
    elif engine is ONNXRUNTIME_ENGINE:
        title, library = "ONNX Runtime", "onnxruntime"
    worker = WorkerEngine(
        title=title,
        library=library,
        module=engine.module,
        model_folder=str(source.model_folder),
        model_file=str(source.model_file),
        config=model.with_parameters(engine=engine.name).source.config,
        instance_kind=kind,
        device=device,
        instance_count=instances,
        settings=source.settings,
    )
    environment = {} if device is None else {"HIP_VISIBLE_DEVICES": str(device)}
    return Candidate(name, worker, lambda opened, _: _inputs_of(model, opened), python, environment)


def is_pytorch(model: ToolModel) -> bool:
    return EAGER in model.backend.engines


def _pytorch_choice(model: ToolModel, wanted: str) -> EngineChoice:
    configured = model if wanted == "auto" else model.with_parameters(engine=wanted)
    return configured.backend.engine_for(configured.source.config, ThisMachine(configured.source.settings))


def _inputs_of(model: ToolModel, opened: Opened) -> Inputs:
    """Return the inputs for each batch size of the configuration. `input_shapes`, or else the configuration, gives the
    size of a dimension that the engine leaves open."""
    signature, config = opened.signature, model.source.config
    assert signature is not None, "a worker's engine reports it"
    batches = signature.supports_batching and (config.max_batch_size > 0 or config.has_open_batch)
    most = model.backend.default_max_batch_size
    unconfigured = most if is_pytorch(model) else LARGEST_WITHOUT_CONFIGURATION
    largest = config.max_batch_size or min(most, signature.max_batch_size or unconfigured)
    serving = serving_options(replace(config, max_batch_size=largest if batches else 0))
    declared = {one.name: one.model_dims for one in config.inputs}
    inputs: list[MeasuredInput] = []
    for spec in signature.inputs:
        if spec.datatype is DataType.BYTES:
            raise invalid_argument(f"input '{spec.name}' holds text, for which there are no measurements")
        dims = spec.shape[1:] if batches else spec.shape
        configured = serving.input_shapes.get(spec.name) or declared.get(spec.name)
        if -1 in dims and configured is None and not is_pytorch(model):
            raise invalid_argument(
                f"input '{spec.name}' has the shape {list(dims)}: give what the model leaves open a size in"
                f" 'input_shapes' (--input-shapes)"
            )
        pairs = zip(dims, configured if configured is not None and len(configured) == len(dims) else dims, strict=True)
        shape = tuple(max(chosen, 1) if dim == -1 else dim for dim, chosen in pairs)
        inputs.append(MeasuredInput(spec.name, np.dtype(spec.datatype.numpy_dtype).name, shape))
    sizes: Sequence[int] = (0,)
    if batches:
        sizes = serving.batch_sizes or default_batch_sizes(largest)
    elif model.source.model_file.suffix == ".mxr":
        # The batch size for which the user compiled the program, if it can be inferred.
        first = {one.shape[0] for one in inputs if one.shape}
        sizes = tuple(first) if len(first) == 1 else (0,)
    return {size: tuple(replace(one, shape=(size, *one.shape)) if batches else one for one in inputs) for size in sizes}


def _torch(model: ToolModel, file: Path, order: Sequence[str] = ()) -> Candidate:
    """Return a candidate with the first candidate's inputs, sorted by `order`: a module takes them by position."""
    on_gpu = model.source.config.parameters.get("target", "") in ("", "gpu")
    places = {name: place for place, name in enumerate(order)}

    def inputs(_: Opened, first: Inputs) -> Inputs:
        return {
            size: tuple(sorted(measured, key=lambda one: places.get(one.name, 0))) for size, measured in first.items()
        }

    return Candidate(TORCH, TorchModule(str(file), on_gpu), inputs)
