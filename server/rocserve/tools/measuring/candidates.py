"""Prepares a model for the engines that are measured: configures it, opens workers, determines the inputs."""

from __future__ import annotations

import importlib.metadata
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rocserve.backends.base import EngineChoice, EngineSpec
from rocserve.backends.batch_sizes import LARGEST_WITHOUT_CONFIGURATION, default_batch_sizes
from rocserve.backends.migraphx.configuration.options import serving_options
from rocserve.backends.migraphx.installation import find_installation
from rocserve.backends.migraphx.model_files.mxr import sibling_model
from rocserve.backends.onnx import BACKEND as ONNX_BACKEND
from rocserve.backends.onnx.engine_choice import ONNXRUNTIME as ONNXRUNTIME_ENGINE
from rocserve.backends.pytorch.engine_choice import EAGER
from rocserve.backends.written_sizes import open_dimensions
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.load_check import LoadCheckMode
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig
from rocserve.core.padding import Buckets
from rocserve.core.requests import Signature
from rocserve.repository.engine_plan import EnginePlan, plan_engine, plan_workers
from rocserve.repository.loads import LoadOrder
from rocserve.repository.machine import ThisMachine
from rocserve.settings.flag import LARGEST_INT32
from rocserve.tools.measuring.figures import Array
from rocserve.tools.measuring.lengths import Law, WrittenLengths, by_dimension
from rocserve.tools.measuring.workers import LoadedWorkers, ToolWorkers
from rocserve.tools.model_choice import ToolModel

MIGRAPHX, ONNXRUNTIME, CPU, TORCH = "migraphx", "onnxruntime", "cpu", "torch"
ENGINES = (MIGRAPHX, ONNXRUNTIME, CPU, EAGER.name, "inductor", "migraphx-onnx")
"""Engines that a server can use; cpu is ONNX Runtime's provider for the CPU."""

_TORCH_FILES = ("model.pt2", "model.pt")


def main_engine(model: ToolModel, wanted: str) -> str:
    """Return the name of the `wanted` engine; for "auto", of the engine that a server here would choose. Raises
    ServeError if no engine can run the model, or if the wanted one is unavailable here."""
    if is_pytorch(model):
        return _pytorch_choice(model, wanted).engine.name
    if model.backend.name in ("migraphx", "tensorflow"):
        if wanted in (ONNXRUNTIME, CPU):
            raise invalid_argument(f"a model of backend '{model.backend.name}' runs on MIGraphX only")
        return MIGRAPHX
    if wanted != "auto":
        return wanted
    if "target" in model.source.config.parameters:
        return MIGRAPHX
    config = model.source.config
    return model.backend.engine_for(config, ThisMachine(model.source.settings)).engine.name


@dataclass(frozen=True, slots=True)
class MeasuredInput:
    name: str
    datatype: DataType
    shape: tuple[int, ...]
    """Shape with the batch dimension."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """Place in the shape -> the dimension, if requests have unlike lengths there; the shape has the law's largest."""


Inputs = Mapping[int, tuple[MeasuredInput, ...]]
"""Inputs by batch size; 0 = the model does not batch."""


def random_inputs(inputs: Sequence[MeasuredInput], seed: int = 0) -> dict[str, Array]:
    """Return the same inputs for the same names, shapes and seed: floats in 0..1 (like images; logarithms and roots
    exist), integers 0 or 1 (they may be indices, masks or counts)."""
    made: dict[str, Array] = {}
    for one in inputs:
        generator = np.random.default_rng((seed, zlib.crc32(one.name.encode())))
        dtype = one.datatype.numpy_dtype
        if dtype.kind == "f":
            made[one.name] = generator.random(one.shape, dtype=np.float32).astype(dtype)
        else:
            made[one.name] = generator.integers(0, 2, one.shape).astype(dtype)
    return made


@dataclass(frozen=True, slots=True)
class OpenCandidate:
    description: str
    """Engine, version and place: "MIGraphX 2.14.0 (c_api)", "ONNX Runtime 1.31.1 (CPUExecutionProvider)"."""
    inputs: Inputs
    workers: LoadedWorkers
    laws: Mapping[str, Law]
    """Of the dimensions whose lengths are drawn, by label."""
    keeps_order: bool
    """Whether a server of the model lets no request pass another."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is configured for one engine and one place."""

    model: ToolModel
    title: str
    """Prefix of error texts."""
    order: tuple[str, ...] | None = None
    """For an engine that takes inputs by position: it gets the first candidate's inputs, in this order of names. None =
    the engine names its inputs."""

    async def open(
        self, workers: ToolWorkers, first: Inputs, instances: int = 1, lengths: Sequence[WrittenLengths] = ()
    ) -> OpenCandidate:
        """Load and warm up the model. `first`: the first candidate's inputs. Raises ServeError."""
        # What is measured may be wrong: the tools show how far it is from another engine or precision.
        unchecked = replace(self, model=self.model.with_parameters(load_check=LoadCheckMode.OFF.value))
        order, plan = unchecked.planned(instances)
        loaded = await workers.open(order, plan, self.title)
        config = self.model.source.config
        laws: Mapping[str, Law] = {}
        if self.order is None:
            _refuse_texts(loaded.signature)
            if lengths:
                laws = by_dimension(lengths, [*_open_places(config, loaded.signature)], self.title)
                _check_lengths(laws, loaded.signature)
            inputs = _inputs_of(self.model, loaded.signature, laws)
        else:
            places = {name: place for place, name in enumerate(self.order)}
            inputs = {size: tuple(sorted(of, key=lambda one: places.get(one.name, 0))) for size, of in first.items()}
        keeps_order = config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering
        return OpenCandidate(engine_description(plan.engine, loaded), inputs, loaded, laws, keeps_order)

    def planned(self, instances: int = 1) -> tuple[LoadOrder, EnginePlan]:
        """Return what a server's workers would load, and where. Raises ServeError."""
        source = self.model.source
        (group,) = source.config.instance_groups
        order = self.model.with_config(instance_groups=(replace(group, count=instances),)).order
        return order, plan_engine(order.definition, order.folder, ThisMachine(source.settings))


_FACTS = ("execution_providers", "program", "migraphx_binding", "device", "target", "precision", "file")
"""A model's properties that describe the engine."""


def engine_description(engine: EngineSpec, loaded: LoadedWorkers) -> str:
    properties = loaded.properties
    title, module = ("ONNX Runtime", "onnxruntime") if engine == ONNXRUNTIME_ENGINE else ("PyTorch", "torch")
    if engine.needs_migraphx:
        title, version = "MIGraphX", properties.get("migraphx_version", "")
    else:
        distributions = importlib.metadata.packages_distributions().get(module, ())
        version = importlib.metadata.version(distributions[0]) if distributions else ""
    facts = ", ".join(properties[name] for name in _FACTS if name in properties)
    return " ".join(filter(None, (title, version, f"({facts})" if facts else "")))


def prepare(model: ToolModel, name: str) -> Candidate:
    """Return the model in the named engine. Raises ServeError if the engine is unavailable."""
    file = model.source.model_file
    if is_pytorch(model):
        return _torch(model) if name == TORCH else _on(name, model, _pytorch_choice(model, name))
    if name not in (MIGRAPHX, ONNXRUNTIME, CPU, TORCH):
        raise invalid_argument(f"{name} runs PyTorch's files, and {file.name} is none")
    if name == MIGRAPHX:
        # If MIGraphX is missing, this error comes first: a server's would advise another engine.
        find_installation(model.source.settings)
        return on_migraphx(model, MIGRAPHX)
    onnx_file = sibling_model(file) if file.suffix == ".mxr" else file
    if onnx_file is None or model.backend.name == "tensorflow":
        raise invalid_argument(
            f"{file.name} can only be measured on MIGraphX; other engines need the ONNX file of the model"
        )
    beside = model if onnx_file == file else model.with_file(onnx_file, ONNX_BACKEND)
    if name == TORCH:
        # A file in PyTorch's formats is preferred to the converted ONNX file.
        files = [] if model.is_bare else [model.source.version_folder / each for each in _TORCH_FILES]
        torch_file = next((path for path in files if path.is_file()), None)
        order = tuple(one.name for one in model.source.config.inputs) if torch_file else ()
        candidate = _torch(beside.with_file(torch_file, ONNX_BACKEND) if torch_file else beside, order)
    else:
        candidate = _on_cpu(beside) if name == CPU else _onnxruntime(beside)
    if onnx_file == file:
        return candidate
    title = f"{name}: {file.name} runs on MIGraphX only, so {onnx_file.name} next to it is measured"
    return replace(candidate, title=title)


def on_migraphx(model: ToolModel, title: str) -> Candidate:
    config = model.with_parameters(engine=MIGRAPHX).source.config
    return _on(MIGRAPHX, model, model.backend.engine_for(config, ThisMachine(model.source.settings)), title)


def _on(engine: str, model: ToolModel, choice: EngineChoice, title: str = "") -> Candidate:
    """Return the model on the first of the places where a server would run this choice."""
    place = plan_workers(model.source.config, choice, ThisMachine(model.source.settings), 0)[0][0]
    group = InstanceGroup("", place.kind, 1, () if place.device is None else (place.device,))
    return Candidate(model.with_parameters(engine=engine).with_config(instance_groups=(group,)), title or engine)


def _onnxruntime(model: ToolModel) -> Candidate:
    machine = ThisMachine(model.source.settings)
    choice = ONNX_BACKEND.engine_for(model.source.config, machine)
    if choice.engine is not ONNXRUNTIME_ENGINE:
        takes_gpus = ONNXRUNTIME_ENGINE.has_gpu_parts(machine)
        choice = EngineChoice(ONNXRUNTIME_ENGINE, "it is to be measured", auto_takes_gpus=takes_gpus)
    return _on(ONNXRUNTIME, model, choice)


def _on_cpu(model: ToolModel) -> Candidate:
    choice = EngineChoice(ONNXRUNTIME_ENGINE, "it is the reference")
    return _on(CPU, model.with_config(instance_groups=(), cpu_accelerators=(), gpu_accelerators=()), choice)


_BARE_TORCH = EngineSpec(
    TORCH, "rocserve.tools.measuring.bare_torch", thread_safe=False, forks_from_zygote=False, takes_kind_model=True
)


def _torch(model: ToolModel, order: tuple[str, ...] = ()) -> Candidate:
    is_on_gpu = model.source.config.parameters.get("target", "") in ("", "gpu")
    group = InstanceGroup("", InstanceKind.MODEL if is_on_gpu else InstanceKind.CPU, 1)
    backend = replace(model.backend, engines=(_BARE_TORCH,), choose_engine=None)
    model = replace(model, definition=replace(model.definition, backend=backend))
    return Candidate(model.with_config(instance_groups=(group,)), TORCH, order)


def is_pytorch(model: ToolModel) -> bool:
    return EAGER in model.backend.engines


def _pytorch_choice(model: ToolModel, wanted: str) -> EngineChoice:
    configured = model if wanted == "auto" else model.with_parameters(engine=wanted)
    return configured.backend.engine_for(configured.source.config, ThisMachine(configured.source.settings))


def _refuse_texts(signature: Signature) -> None:
    for spec in signature.inputs:
        if spec.datatype is DataType.BYTES:
            raise invalid_argument(
                f"input '{spec.name}' holds text, for which there are no measurements; give a model that takes numbers,"
                " such as the ids of tokens"
            )


def _open_places(config: ModelConfig, signature: Signature) -> Mapping[str, Mapping[str, Sequence[int]]]:
    """Return by label the places of the dimensions in which requests may have unlike lengths, by input."""
    padded = {each.label: each.inputs for each in signature.padding.dimensions}
    taken = {(name, place) for inputs in padded.values() for name, places in inputs.items() for place in places}
    # An engine that pads may have forgotten the names in the model's file.
    others = {
        each.label: each.inputs
        for each in open_dimensions(config, signature)
        if taken.isdisjoint((name, place) for name, places in each.inputs.items() for place in places)
    }
    return {**padded, **others}


def _check_lengths(laws: Mapping[str, Law], signature: Signature) -> None:
    """Raises ServeError (INVALID_ARGUMENT) if a length is beyond the sizes of a padded dimension."""
    for dimension in signature.padding.dimensions:
        if (law := laws.get(dimension.label)) is not None:
            try:
                dimension.size_for(law.largest)
            except ValueError as expected:
                raise invalid_argument(
                    f"--lengths: dimension '{dimension.label}' has lengths up to {law.largest}, expected {expected}"
                ) from None


def _inputs_of(model: ToolModel, signature: Signature, laws: Mapping[str, Law]) -> Inputs:
    """Return the inputs for each batch size of the configuration. `laws`, or else `input_shapes`, or else the
    configuration, gives the size of a dimension that the engine leaves open; one that is padded has the largest of its
    sizes."""
    config = model.source.config
    may_batch = config.has_open_batch and not signature.dependent_rows
    batches = signature.supports_batching and (config.max_batch_size > 0 or may_batch)
    most = model.backend.default_max_batch_size
    unconfigured = most if is_pytorch(model) else LARGEST_WITHOUT_CONFIGURATION
    largest = config.max_batch_size or min(most, signature.max_batch_size or unconfigured)
    serving = serving_options(replace(config, max_batch_size=largest if batches else 0))
    declared = {one.name: one.model_dims for one in config.inputs}
    padding = signature.padding
    buckets = Buckets(padding)
    drawn = {label: places for label, places in _open_places(config, signature).items() if label in laws}
    measured: list[MeasuredInput] = []
    for spec in signature.inputs:
        labels = {place: label for label, inputs in drawn.items() for place in inputs.get(spec.name, ())}
        shape = buckets.padded_shape(spec.name, spec.shape, padding.largest)
        shape = tuple(laws[labels[place]].largest if place in labels else size for place, size in enumerate(shape))
        dims = shape[1:] if batches else shape
        configured = serving.input_shapes.get(spec.name) or declared.get(spec.name)
        if -1 in dims and configured is None and not is_pytorch(model):
            raise invalid_argument(
                f"input '{spec.name}' has the shape {list(dims)}: give what the model leaves open a size in"
                f" 'input_shapes' (--input-shapes), or lengths (--lengths) to a model that takes several"
            )
        pairs = zip(dims, configured if configured is not None and len(configured) == len(dims) else dims, strict=True)
        shape = tuple(max(chosen, 1) if dim == -1 else dim for dim, chosen in pairs)
        if labels and (size := math.prod(shape) * spec.datatype.itemsize) > LARGEST_INT32:
            raise invalid_argument(
                f"--lengths: input '{spec.name}' has shapes up to {list(shape)}, {size} bytes, expected at most"
                f" {LARGEST_INT32}, the largest message of gRPC; draw shorter lengths"
            )
        measured.append(MeasuredInput(spec.name, spec.datatype, shape, labels))
    sizes: Sequence[int] = (0,)
    if batches:
        sizes = serving.batch_sizes or default_batch_sizes(largest)
    elif model.source.model_file.suffix == ".mxr":
        # The batch size for which the user compiled the program, if it can be inferred.
        first = {one.shape[0] for one in measured if one.shape}
        sizes = tuple(first) if len(first) == 1 else (0,)
    return {
        size: tuple(replace(one, shape=(size, *one.shape)) if batches else one for one in measured) for size in sizes
    }
