"""Prepares a model for an engine that a verb names: finds the engine, configures the model for it and for one place."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace

from rocserve.backends.base import EngineChoice, EngineSpec
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.migraphx.mxr_file import sibling_model
from rocserve.backends.onnx import BACKEND as ONNX_BACKEND
from rocserve.backends.onnx.engine_choice import ONNXRUNTIME as ONNXRUNTIME_ENGINE
from rocserve.backends.pytorch.engine_choice import EAGER
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InstanceGroup
from rocserve.repository.engine_plan import EnginePlan, plan_engine, plan_workers
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.machine import ThisMachine
from rocserve.verbs.model_choice import ToolModel
from rocserve.verbs.workers import LoadedWorkers

MIGRAPHX, ONNXRUNTIME, CPU = "migraphx", "onnxruntime", "cpu"
ENGINES = (MIGRAPHX, ONNXRUNTIME, CPU, EAGER.name, "inductor", "migraphx-onnx")
"""Engines that a server can use; cpu is ONNX Runtime's provider for the CPU."""


def main_engine(model: ToolModel, wanted: str) -> str:
    """Return the name of the `wanted` engine; for "auto", of the engine that a server here would choose. Raises
    ServeError if no engine can run the model, or if the wanted one is unavailable here."""
    if is_pytorch(model):
        return _pytorch_choice(model, wanted).engine.name
    if model.backend.name in ("migraphx", "tensorflow"):
        if wanted in (ONNXRUNTIME, CPU):
            raise invalid_argument(f"a model of backend '{model.backend.name}' runs on MIGraphX only; remove --engine")
        return MIGRAPHX
    if wanted != "auto":
        return wanted
    if "target" in model.source.config.parameters:
        return MIGRAPHX
    config = model.source.config
    return model.backend.engine_for(config, ThisMachine(model.source.settings)).engine.name


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model that is configured for one engine and one place."""

    model: ToolModel
    title: str
    """Prefix of error texts."""

    def planned(self, instances: int = 1) -> tuple[LoadOrder, EnginePlan]:
        """Return what a server's workers would load, and where. Raises ServeError."""
        source = self.model.source
        (group,) = source.config.instance_groups
        order = self.model.with_config(instance_groups=(replace(group, count=instances),)).order
        return order, plan_engine(order.definition, order.folder, ThisMachine(source.settings))


def prepare(model: ToolModel, name: str) -> PlacedModel:
    """Return the model in the named engine. Raises ServeError if the engine is unavailable."""
    if is_pytorch(model):
        return _on(name, model, _pytorch_choice(model, name))
    if name not in (MIGRAPHX, ONNXRUNTIME, CPU):
        raise invalid_argument(f"{name} runs PyTorch files, and {model.source.model_file.name} is not one")
    if name == MIGRAPHX:
        # If MIGraphX is missing, this error comes first: a server's would advise another engine.
        find_installation(model.source.settings)
        return on_migraphx(model, MIGRAPHX)
    beside, title = with_onnx_file(model, name)
    placed = _on_cpu(beside) if name == CPU else _onnxruntime(beside)
    return replace(placed, title=title)


def with_onnx_file(model: ToolModel, engine: str) -> tuple[ToolModel, str]:
    """Return the model with the ONNX file that an engine other than MIGraphX runs, and the prefix of error texts.
    Raises ServeError (INVALID_ARGUMENT) if there is no such file."""
    file = model.source.model_file
    onnx_file = sibling_model(file) if file.suffix == ".mxr" else file
    if onnx_file is None or model.backend.name == "tensorflow":
        raise invalid_argument(
            f"{file.name} can only be measured on MIGraphX; other engines need the ONNX file of the model"
        )
    if onnx_file == file:
        return model, engine
    title = f"{engine}: {file.name} runs on MIGraphX only, so {onnx_file.name} next to it is measured"
    return model.with_file(onnx_file, ONNX_BACKEND), title


def on_migraphx(model: ToolModel, title: str) -> PlacedModel:
    config = model.with_parameters(engine=MIGRAPHX).source.config
    return _on(MIGRAPHX, model, model.backend.engine_for(config, ThisMachine(model.source.settings)), title)


def _on(engine: str, model: ToolModel, choice: EngineChoice, title: str = "") -> PlacedModel:
    """Return the model on the first of the places where a server would run this choice."""
    place = plan_workers(model.source.config, choice, ThisMachine(model.source.settings), 0)[0][0]
    group = InstanceGroup("", place.kind, 1, () if place.device is None else (place.device,))
    return PlacedModel(model.with_parameters(engine=engine).with_config(instance_groups=(group,)), title or engine)


def _onnxruntime(model: ToolModel) -> PlacedModel:
    machine = ThisMachine(model.source.settings)
    choice = ONNX_BACKEND.engine_for(model.source.config, machine)
    if choice.engine is not ONNXRUNTIME_ENGINE:
        takes_gpus = ONNXRUNTIME_ENGINE.has_gpu_parts(machine)
        choice = EngineChoice(ONNXRUNTIME_ENGINE, "it is to be measured", auto_takes_gpus=takes_gpus)
    return _on(ONNXRUNTIME, model, choice)


def _on_cpu(model: ToolModel) -> PlacedModel:
    choice = EngineChoice(ONNXRUNTIME_ENGINE, "it is the reference")
    return _on(CPU, model.with_config(instance_groups=(), cpu_accelerators=(), gpu_accelerators=()), choice)


def is_pytorch(model: ToolModel) -> bool:
    return EAGER in model.backend.engines


def _pytorch_choice(model: ToolModel, wanted: str) -> EngineChoice:
    configured = model if wanted == "auto" else model.with_parameters(engine=wanted)
    return configured.backend.engine_for(configured.source.config, ThisMachine(configured.source.settings))


def engine_description(engine: EngineSpec, loaded: LoadedWorkers) -> str:
    properties = loaded.properties
    title, module = ("ONNX Runtime", "onnxruntime") if engine == ONNXRUNTIME_ENGINE else ("PyTorch", "torch")
    if engine.needs_migraphx:
        title, version = "MIGraphX", properties.get("migraphx_version", "")
    else:
        distributions = importlib.metadata.packages_distributions().get(module, ())
        version = importlib.metadata.version(distributions[0]) if distributions else ""
    names = ("execution_providers", "program", "migraphx_binding", "device", "target", "precision", "file")
    facts = ", ".join(properties[name] for name in names if name in properties)
    return " ".join(filter(None, (title, version, f"({facts})" if facts else "")))
