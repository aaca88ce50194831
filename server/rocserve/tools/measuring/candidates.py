"""Gets a model ready in the engines that are to be measured: programs compiled, inputs known, processes described."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rocserve.backends.base import EngineChoice, EngineSpec, ModelSource
from rocserve.backends.batch_sizes import default_batch_sizes
from rocserve.backends.migraphx.binding.interface import DimensionRange
from rocserve.backends.migraphx.configuration.options import CompileOptions, ServingOptions, Target, serving_options
from rocserve.backends.migraphx.installation import find_installation, python_command
from rocserve.backends.migraphx.jobs.probe import ProbeJob, ProbeResult
from rocserve.backends.migraphx.model_files.mxr import check_mxr, sibling_model
from rocserve.backends.migraphx.model_files.onnx_graph import read_onnx_graph
from rocserve.backends.migraphx.planning.plan import plan_programs
from rocserve.backends.migraphx.planning.recipe import ProgramEnvironment, ProgramRecipe
from rocserve.backends.onnx.engine_choice import ONNXRUNTIME as ONNXRUNTIME_ENGINE
from rocserve.backends.pytorch.engine_choice import EAGER
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InputConfig, InstanceGroup, ModelConfig
from rocserve.repository.engine_plan import plan_workers
from rocserve.repository.machine import ThisMachine
from rocserve.tools.measuring.comparing import Candidate, Inputs
from rocserve.tools.measuring.messages import (
    MeasuredInput,
    MigraphxPrograms,
    Opened,
    TorchModule,
    WorkerEngine,
)
from rocserve.tools.model_choice import ToolModel
from rocserve.tools.printing import ToolProgress
from rocserve.tools.tool_context import ToolContext, program_input, read_beside
from rocserve.workers.messages import WorkerPlan

MIGRAPHX, ONNXRUNTIME, TORCH = "migraphx", "onnxruntime", "torch"
ENGINES = (MIGRAPHX, ONNXRUNTIME, "eager", "inductor", "migraphx-onnx")
"""Those that a server may use."""

_TORCH_FILES = ("model.pt2", "model.pt")
_PROBE_SECONDS = 600.0


def main_engine(model: ToolModel, wanted: str) -> str:
    """The engine that is `wanted`, or ("auto") that a server here would take.

    Raises:
        ServeError: none can run the model, or the one that is asked for cannot be had here.
    """
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


@dataclass(frozen=True, slots=True)
class Candidates:
    """Who is to be measured."""

    available: tuple[Candidate, ...]
    """The first is what the others are compared with."""
    missing: Mapping[str, str]
    """By the names of the others that cannot have the model: why not."""


def prepare(model: ToolModel, names: Sequence[str], progress: ToolProgress, log: logging.Logger) -> Candidates:
    """The candidates of these names, in their order.

    Raises:
        ServeError: the first cannot be had.
    """
    first, *others = names
    candidates = [prepare_one(model, first, progress, log)]
    missing = {}
    for name in others:
        try:
            candidates.append(prepare_one(model, name, progress, log))
        except ServeError as error:
            missing[name] = f"{name}: {error.text}"
    return Candidates(tuple(candidates), missing)


def prepare_one(
    model: ToolModel, name: str, progress: ToolProgress, log: logging.Logger, instances: int = 1
) -> Candidate:
    """The model in the engine of this name; what MIGraphX has to compile is compiled.

    `instances`: how many threads are to run an engine that is safe on several.

    Raises:
        ServeError: it cannot be had.
    """
    if is_pytorch(model):
        if name != TORCH:
            return _pytorch(model, name, instances)
        return _torch(model, model.source.model_file, lambda _, first: first)
    if name not in (MIGRAPHX, ONNXRUNTIME, TORCH):
        raise invalid_argument(f"{name} runs PyTorch's files, and {model.source.model_file.name} is none")
    if name == MIGRAPHX:
        return _migraphx(model, progress, log)
    given, model = model.source.model_file, _on_onnx_file(model)
    read = model.source.model_file
    with read_beside(given, read, f"{given.name} runs on MIGraphX only, so {read.name} beside it is measured"):
        return _torch_beside(model) if name == TORCH else _onnxruntime(model, instances)


def _migraphx(model: ToolModel, progress: ToolProgress, log: logging.Logger) -> Candidate:
    context = ToolContext(model, progress.report, log)
    if model.source.model_file.suffix == ".mxr":
        programs, inputs = _brought_program(context)
    else:
        programs, inputs = _compiled_programs(context, progress)
    return Candidate(
        name=MIGRAPHX,
        engine=MigraphxPrograms(context.installation, context.serving.binding, programs),
        inputs=lambda *_: inputs,
        python=python_command(context.installation),
        environment=_on_device(context.device),
    )


def _compiled_programs(context: ToolContext, progress: ToolProgress) -> tuple[dict[int, str], Inputs]:
    recipes = context.plan().recipes
    progress.steps(len(recipes))
    programs: dict[int, str] = {}
    inputs: dict[int, tuple[MeasuredInput, ...]] = {}
    for recipe in recipes:
        program = context.program(recipe).program
        for size in _sizes(recipe):
            programs[size] = str(program.path)
            inputs[size] = tuple(program_input(tensor, size) for tensor in program.about.inputs)
        progress.done()
    return programs, inputs


def _brought_program(context: ToolContext) -> tuple[dict[int, str], Inputs]:
    """Of a .mxr: tried in a child before a process that is measured loads it."""
    file = context.model.source.model_file
    check_mxr(file, context.environment, context.options.target)
    job = ProbeJob(context.model.source.name, str(file))
    tensors = context.runner.run(job, ProbeResult, timeout_seconds=_PROBE_SECONDS, limit_name="the time for it").inputs
    first = {tensor.shape[0] for tensor in tensors if tensor.shape}
    rows = first.pop() if len(first) == 1 else 0
    if isinstance(rows, DimensionRange):
        sizes = tuple(size for size in default_batch_sizes(rows.most) if size >= rows.least)
    else:
        sizes = (rows,)
    return dict.fromkeys(sizes, str(file)), {
        size: tuple(program_input(tensor, size) for tensor in tensors) for size in sizes
    }


def _onnxruntime(model: ToolModel, instances: int) -> Candidate:
    """On the device where a server would have it."""
    source = model.source
    place = plan_workers(source.config, _onnxruntime_choice(model), ThisMachine(source.settings), 0)[0]
    on_gpu = place.device is not None
    config = model.with_parameters(engine=ONNXRUNTIME).source.config
    engine = _worker_engine(
        "ONNX Runtime", "onnxruntime", ONNXRUNTIME_ENGINE, source, config, place, 1 if on_gpu else instances
    )
    inputs = _planned_inputs(model)
    return Candidate(
        ONNXRUNTIME, engine, lambda *_: inputs, environment=_on_device(place.device), shares_a_process=not on_gpu
    )


def _onnxruntime_choice(model: ToolModel) -> EngineChoice:
    """What a server would choose, where that is ONNX Runtime; else it is chosen because it is measured."""
    machine = ThisMachine(model.source.settings)
    choice = model.backend.engine_for(model.source.config, machine)
    if choice.engine is ONNXRUNTIME_ENGINE:
        return choice
    has_gpu_provider = machine.is_installed(ONNXRUNTIME_ENGINE.gpu_module, ONNXRUNTIME_ENGINE.gpu_files)
    return EngineChoice(ONNXRUNTIME_ENGINE, "it is to be measured", auto_takes_gpus=has_gpu_provider)


def _worker_engine(
    title: str,
    library: str,
    engine: EngineSpec,
    source: ModelSource,
    config: ModelConfig,
    place: WorkerPlan,
    instances: int,
) -> WorkerEngine:
    return WorkerEngine(
        title=title,
        library=library,
        module=engine.module,
        model_folder=str(source.model_folder),
        model_file=str(source.model_file),
        config=config,
        instance_kind=place.kind,
        device=place.device,
        instance_count=instances,
        settings=source.settings,
    )


def is_pytorch(model: ToolModel) -> bool:
    return EAGER in model.backend.engines


def _pytorch_choice(model: ToolModel, wanted: str) -> EngineChoice:
    asked = model if wanted == "auto" else model.with_parameters(engine=wanted)
    return asked.backend.engine_for(asked.source.config, ThisMachine(asked.source.settings))


def _pytorch(model: ToolModel, name: str, instances: int) -> Candidate:
    """As many instances as are measured share the CPUs."""
    source, choice = model.source, _pytorch_choice(model, name)
    config = model.with_parameters(engine=name).source.config
    place = plan_workers(config, choice, ThisMachine(source.settings), 0)[0]
    config = replace(config, instance_groups=(InstanceGroup("", place.kind, instances),))
    with_migraphx = choice.engine.needs_migraphx
    python = python_command(find_installation(source.settings)) if with_migraphx else (sys.executable,)
    title, library = ("MIGraphX", "") if with_migraphx else ("PyTorch", "torch")
    engine = _worker_engine(title, library, choice.engine, source, config, place, 1)
    return Candidate(name, engine, lambda opened, _: _inputs_of(model, opened), python, _on_device(place.device))


def _inputs_of(model: ToolModel, opened: Opened) -> Inputs:
    signature = opened.signature
    assert signature is not None, "a worker's engine reports it"
    config, batches = model.source.config, signature.supports_batching
    most = model.backend.default_max_batch_size
    largest = config.max_batch_size or min(most, signature.max_batch_size or most)
    declared = {one.name: one for one in config.inputs}
    inputs = tuple(
        declared.get(spec.name) or InputConfig(spec.name, spec.datatype, spec.shape[1:] if batches else spec.shape)
        for spec in signature.inputs
    )
    completed = replace(config, inputs=inputs, max_batch_size=largest if batches else 0)
    return _planned_inputs(replace(model, source=replace(model.source, config=completed)))


def _on_device(device: int | None) -> Mapping[str, str]:
    return {} if device is None else {"HIP_VISIBLE_DEVICES": str(device)}


def _torch(model: ToolModel, file: Path, inputs: Callable[[Opened, Inputs], Inputs]) -> Candidate:
    on_gpu = model.source.config.parameters.get("target", "") in ("", "gpu")
    return Candidate(TORCH, TorchModule(str(file), on_gpu), inputs)


def _torch_beside(model: ToolModel) -> Candidate:
    """A file that PyTorch has written goes before the conversion of the ONNX file."""
    source = model.source
    files = [source.version_folder / name for name in _TORCH_FILES] if model.definition else []
    file = next((path for path in files if path.is_file()), source.model_file)
    inputs = _planned_inputs(model)
    if file == source.model_file:
        # What is converted takes its inputs by their places in the ONNX file.
        places = {
            tensor.name: place for place, tensor in enumerate(read_onnx_graph(file, (source.model_folder,)).inputs)
        }
        inputs = {
            size: tuple(sorted(measured, key=lambda one: places.get(one.name, 0))) for size, measured in inputs.items()
        }
    return _torch(model, file, lambda *_: inputs)


def _on_onnx_file(model: ToolModel) -> ToolModel:
    """The model by its ONNX file: what ONNX Runtime and PyTorch can be measured on.

    Raises:
        ServeError: there is none.
    """
    file: Path | None = model.source.model_file
    if file is not None and file.suffix == ".mxr":
        file = sibling_model(file)
    if file is None or model.backend.name == "tensorflow":
        raise invalid_argument(
            f"{model.source.model_file.name} can only be measured on MIGraphX; other engines need the ONNX file of the"
            " model"
        )
    return replace(model, source=replace(model.source, model_file=file))


def _planned_inputs(model: ToolModel) -> Inputs:
    """By what the configuration and the file say alone, for where there is no MIGraphX."""
    config = model.source.config
    serving = serving_options(config)
    if config.inputs:
        # They are enough, and the file may hold what only other engines have.
        sizes = serving.batch_sizes if config.max_batch_size else (0,)
        return {size: tuple(_declared_input(one, serving, size) for one in config.inputs) for size in sizes}
    plan = plan_programs(model.source, CompileOptions(Target.REF), serving, ProgramEnvironment(""))
    datatypes = {tensor.name: tensor.datatype for tensor in plan.inputs}
    return {
        size: tuple(
            MeasuredInput(name, _numpy_name(name, datatypes[name]), _sized(shape, recipe, size))
            for name, shape in recipe.input_shapes.items()
        )
        for recipe in plan.recipes
        for size in _sizes(recipe)
    }


def _declared_input(one: InputConfig, serving: ServingOptions, size: int) -> MeasuredInput:
    """What may be of any size is as `input_shapes` says, else 1."""
    dims = serving.input_shapes.get(one.name) or (one.dims if one.reshape is None else one.reshape)
    shape = tuple(1 if dim == -1 else dim for dim in dims)
    return MeasuredInput(one.name, _numpy_name(one.name, one.datatype), (size, *shape) if size else shape)


def _sizes(recipe: ProgramRecipe) -> Sequence[int]:
    return default_batch_sizes(recipe.largest_batch) if recipe.largest_batch else (recipe.batch_size,)


def _sized(shape: tuple[int, ...], recipe: ProgramRecipe, size: int) -> tuple[int, ...]:
    return (size, *shape[1:]) if recipe.largest_batch else shape


def _numpy_name(name: str, datatype: DataType | None) -> str:
    if datatype is None or datatype is DataType.BYTES:
        raise invalid_argument(f"input '{name}' holds text, for which there are no measurements")
    return str(np.dtype(datatype.numpy_dtype).name)
