"""Opens a model in the engines that are measured, and determines the inputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rocserve.backends.base import EngineSpec
from rocserve.backends.batch_sizes import LARGEST_WITHOUT_CONFIGURATION, default_batch_sizes
from rocserve.backends.migraphx.options import serving_options
from rocserve.backends.onnx import BACKEND as ONNX_BACKEND
from rocserve.backends.written_sizes import open_dimensions
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.load_check import LoadCheckMode
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig
from rocserve.core.padding import Buckets
from rocserve.core.requests import Signature
from rocserve.load_check.tensors import Array
from rocserve.settings.flag import LARGEST_INT32
from rocserve.verbs import engines
from rocserve.verbs.engines import PlacedModel, engine_description, is_pytorch, with_onnx_file
from rocserve.verbs.model_choice import ToolModel
from rocserve.verbs.workers import LoadedWorkers, ToolWorkers
from rocserve_tools.measuring.lengths import Law, WrittenLengths, by_dimension
from rocserve_tools.measuring.timed_runs import open_timed

TORCH = "torch"
"""Not an engine of the server's: the file in a bare loop of PyTorch."""


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
    """Each run of the engine is timed."""
    laws: Mapping[str, Law]
    """Of the dimensions whose lengths are drawn, by label."""
    keeps_order: bool
    """Whether a server of the model lets no request pass another."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model in an engine that is to be measured."""

    placed: PlacedModel
    order: tuple[str, ...] | None = None
    """For an engine that takes inputs by position: it gets the first candidate's inputs, in this order of names. None =
    the engine names its inputs."""

    async def open(
        self, workers: ToolWorkers, first: Inputs, instances: int = 1, lengths: Sequence[WrittenLengths] = ()
    ) -> OpenCandidate:
        """Load and warm up the model. `first`: the first candidate's inputs. Raises ServeError."""
        # What is measured may be wrong: the tools show how far it is from another engine or precision.
        model, title = self.placed.model, self.placed.title
        unchecked = replace(self.placed, model=model.with_parameters(load_check=LoadCheckMode.OFF.value))
        order, plan = unchecked.planned(instances)
        timed = await open_timed(workers, order, plan, title)
        signature = timed.signature
        config = model.source.config
        laws: Mapping[str, Law] = {}
        if self.order is None:
            _refuse_texts(signature)
            if lengths:
                laws = by_dimension(lengths, [*_open_places(config, signature)], title)
                _check_lengths(laws, signature)
            inputs = _inputs_of(model, signature, laws)
        else:
            places = {name: place for place, name in enumerate(self.order)}
            inputs = {size: tuple(sorted(of, key=lambda one: places.get(one.name, 0))) for size, of in first.items()}
        keeps_order = config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering
        return OpenCandidate(engine_description(plan.engine, timed), inputs, timed, laws, keeps_order)


def prepare(model: ToolModel, name: str) -> Candidate:
    """Return the model in the named engine, or in bare PyTorch. Raises ServeError if the engine is unavailable."""
    if name != TORCH:
        return Candidate(engines.prepare(model, name))
    if is_pytorch(model):
        return _in_torch(model, TORCH)
    beside, title = with_onnx_file(model, TORCH)
    # A file in PyTorch's formats is preferred to the converted ONNX file.
    files = [] if model.is_bare else [model.source.version_folder / item for item in ("model.pt2", "model.pt")]
    torch_file = next((path for path in files if path.is_file()), None)
    if torch_file is None:
        return _in_torch(beside, title)
    order = tuple(one.name for one in model.source.config.inputs)
    return _in_torch(beside.with_file(torch_file, ONNX_BACKEND), title, order)


def _in_torch(model: ToolModel, title: str, order: tuple[str, ...] = ()) -> Candidate:
    is_on_gpu = model.source.config.parameters.get("target", "") in ("", "gpu")
    group = InstanceGroup("", InstanceKind.MODEL if is_on_gpu else InstanceKind.CPU, 1)
    module = "rocserve_tools.measuring.bare_torch"
    engine = EngineSpec(TORCH, module, thread_safe=False, forks_from_zygote=False, takes_kind_model=True)
    backend = replace(model.backend, engines=(engine,), choose_engine=None)
    model = replace(model, definition=replace(model.definition, backend=backend))
    return Candidate(PlacedModel(model.with_config(instance_groups=(group,)), title), order)


def _refuse_texts(signature: Signature) -> None:
    for spec in signature.inputs:
        if spec.datatype is DataType.BYTES:
            raise invalid_argument(
                f"input '{spec.name}' holds text, for which there are no measurements; give a model that takes numbers,"
                " such as the ids of tokens"
            )


def _open_places(config: ModelConfig, signature: Signature) -> Mapping[str, Mapping[str, Sequence[int]]]:
    """Return by label the places of the dimensions in which requests may have unlike lengths, by input."""
    padded = {one.label: one.inputs for one in signature.padding.dimensions}
    taken = {(name, place) for inputs in padded.values() for name, places in inputs.items() for place in places}
    # An engine that pads may have forgotten the names in the model's file.
    others = {
        one.label: one.inputs
        for one in open_dimensions(config, signature)
        if taken.isdisjoint((name, place) for name, places in one.inputs.items() for place in places)
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
