"""Builds rocAL pipelines of one batch size each, of a plan that rocAL can follow."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.image import Extent, ResultExtent
from rocserve.backends.rocal.operations.base import Node, Operation, Tensor
from rocserve.backends.rocal.pipeline import DECODED, Layout, Pipeline, Plan, PlannedStep, Step
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument, unavailable

_PREFETCH_DEPTH = 2
"""Batches that rocAL holds at once; the least that it allows. More are never under way."""


_THREADS = 1
"""Of rocAL's CPU mode. RPP's kernels write some bytes past the end of an image, which are the first of the next one of
the batch: with more threads these are sometimes written after their right values."""


_MOST_FLAGS = 2
"""Inputs that give a flag for each image. Each doubles the rocAL pipelines: one has the same flags for all images, and
its parameters cannot be changed once it is built (rocAL 2.3 takes the change and keeps the old value)."""

Flags = tuple[bool, ...]
"""The values of the pipeline's inputs for an image, in the pipeline's order."""


def variants(pipeline: Pipeline) -> list[Flags]:
    """All values that the inputs of an image can have."""
    return list(itertools.product((False, True), repeat=len(pipeline.inputs)))


def check(model_name: str, pipeline: Pipeline, plan: Plan, binding: Binding) -> None:
    """
    Raises:
        ServeError: INVALID_ARGUMENT, rocAL cannot run the pipeline; the text says which operation and why.
    """
    if len(pipeline.inputs) > _MOST_FLAGS:
        extra = pipeline.inputs[_MOST_FLAGS]
        step = next(step for step in pipeline.steps for entry in step.bindings if entry.input == extra)
        reason = (
            f"input '{extra}' is one flag too many: each image may have {_MOST_FLAGS} with rocAL, any number with the"
            " CPU engine"
        )
        raise _impossible(model_name, step, reason)
    for planned in plan.steps:
        operation = planned.call.operation
        refusal = operation.amd.refusal(planned.call.arguments, planned.source) or _lack(operation, binding)
        if refusal is not None:
            raise _impossible(model_name, planned.step, refusal)


def _impossible(model_name: str, step: Step, reason: str) -> ServeError:
    return invalid_argument(f"model '{model_name}' cannot run on rocAL: {step.where}: {reason}")


def _lack(operation: Operation, binding: Binding) -> str | None:
    """What this amd.rocal does not have of an operation that is a function of `fn`."""
    if operation.amd.make is not None and operation.amd.function is None:
        return None
    name = operation.amd.function or operation.name
    function = getattr(binding.functions, name, None)
    if function is None:
        return f"amd.rocal (version {binding.version}) has no such operation; use the CPU engine"
    accepted = inspect.signature(function).parameters
    unknown = next((key for key in operation.keys if key not in accepted), None)
    return None if unknown is None else f"fn.{name} of amd.rocal takes no '{unknown}'; use the CPU engine"


def misfit(plan: Plan, height: int, width: int) -> str | None:
    """Why an image of this decoded size cannot go through rocAL; None = it can."""
    results = {DECODED: ResultExtent.whole(Extent(height, width))}
    for planned in plan.steps:
        step, call = planned.step, planned.call
        valid = results[step.sources[0]].valid
        text = call.operation.amd.misfit(call.arguments, planned.source.valid, *valid.sides)
        if text is not None:
            return f"{step.name}: {text}"
        try:
            results[step.index] = call.extent(*(results[source] for source in step.sources))
        except ValueError as error:
            return f"{step.name}: {error}"
    return None


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What all rocAL pipelines of a model have in common."""

    binding: Binding
    plan: Plan
    inputs: tuple[str, ...]
    """The pipeline's, in its order."""
    color_format: ColorFormat
    max_height: int
    max_width: int
    """Of the pixels that are fed."""
    on_gpu: bool

    @property
    def is_grey(self) -> bool:
        return self.color_format is ColorFormat.U8

    @property
    def source_layout(self) -> Any:
        """Of the images that are fed, and of all between operations: rocAL has grey images as planes."""
        types = self.binding.types
        return types.NCHW if self.is_grey else types.NHWC


@dataclass(frozen=True, slots=True)
class Graph:
    """A rocAL pipeline, ready to be fed."""

    pipeline: Any
    handle: Any
    source: Tensor
    """Of the images that are fed."""
    batch_size: int


def build_graph(settings: GraphSettings, batch_size: int, flags: Flags) -> Graph:
    """
    Raises:
        ServeError: UNAVAILABLE, rocAL refuses the pipeline; with its reason.
    """
    binding = settings.binding
    try:
        # A worker sees one GPU only, so that it is always the first.
        pipeline = binding.pipeline.Pipeline(
            batch_size=batch_size,
            num_threads=_THREADS,
            device_id=0,
            prefetch_queue_depth=_PREFETCH_DEPTH,
            rocal_cpu=not settings.on_gpu,
        )
    except Exception as error:
        device = "an AMD GPU" if settings.on_gpu else "the CPU"
        raise unavailable(
            f"rocAL cannot make a pipeline on {device}: {error}; it wrote the reason to the log. If it does not load"
            " the extension vx_rpp, LD_LIBRARY_PATH must name ROCm's libraries, usually /opt/rocm/lib, when the server"
            " starts"
        ) from error
    handle = pipeline.get_handle()
    with pipeline:
        source = _add_source(settings, handle)
        outputs = _add_nodes(settings, handle, source, batch_size, flags)
        pipeline.set_outputs(*outputs)
    try:
        pipeline.build()
        fault = binding.fault(handle)
    except SystemExit:
        # Pipeline.build leaves the program, with status 0, where rocAL finds the graph wrong.
        fault = binding.fault(handle) or ""
    if fault is not None:
        raise _refused(binding, handle, "the pipeline as a whole")
    return Graph(pipeline, handle, source, batch_size)


def _add_nodes(settings: GraphSettings, handle: Any, source: Tensor, batch_size: int, flags: Flags) -> list[Tensor]:
    """The tensors of the outputs that are images, in their order."""
    types = settings.binding.types
    values = dict(zip(settings.inputs, flags, strict=True))
    images: dict[int, Tensor] = {DECODED: source}
    outputs: list[Tensor] = []
    for planned in settings.plan.steps:
        step = planned.step

        def add(layout: Any, datatype: Any, step: Step = step, source: ResultExtent = planned.source) -> Tensor:
            sources = [images[source] for source in step.sources]
            node = Node(settings.binding, handle, layout, datatype, sources, source, settings.is_grey, batch_size)
            return _add(node, step, values)

        if planned.is_read:
            # The next operation works on bytes, whatever is handed out here.
            images[step.index] = add(settings.source_layout, types.UINT8)
        if planned.output is not None:
            layout, datatype = output_type(settings, planned)
            shared = planned.is_read and (layout, datatype) == (settings.source_layout, types.UINT8)
            outputs.append(images[step.index] if shared else add(layout, datatype))
    return outputs


def output_type(settings: GraphSettings, step: PlannedStep) -> tuple[Any, Any]:
    """The layout and the datatype in which rocAL gives an output; the rest of the conversion is done here.

    FP16 is made of FP32, as on the CPU.
    """
    types = settings.binding.types
    assert step.format is not None
    form = step.call.operation.amd
    as_float = step.format.datatype is not DataType.UINT8 and form.gives_floats(step.call.arguments)
    as_asked = form.gives_layouts and not settings.is_grey
    as_planes = step.format.layout is Layout.NCHW or form.only_planes
    asked = types.NCHW if as_planes else types.NHWC
    return asked if as_asked else settings.source_layout, types.FLOAT if as_float else types.UINT8


def _add_source(settings: GraphSettings, handle: Any) -> Tensor:
    types = settings.binding.types
    formats = {ColorFormat.RGB24: types.RGB, ColorFormat.BGR24: types.BGR, ColorFormat.U8: types.GRAY}
    tensor, _ = settings.binding.functions.external_source(
        # Batches are fed by hand; what would be asked for them is never asked.
        source=(),
        color_format=formats[settings.color_format],
        mode=types.EXTSOURCE_RAW_UNCOMPRESSED,
        max_width=settings.max_width,
        max_height=settings.max_height,
    )
    return _made(settings.binding, handle, tensor, "its source of images")


def _add(node: Node, step: Step, values: Mapping[str, bool]) -> Tensor:
    call = step.call_with(values)
    form = call.operation.amd
    try:
        if form.make is not None:
            tensor = form.make(node, call)
        else:
            tensor = node.call(form.function or call.operation.name, call.values)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise unavailable(f"rocAL (version {node.binding.version}) refuses {step.where}: {error}") from error
    return _made(node.binding, node.handle, tensor, step.where)


def _made(binding: Binding, handle: Any, tensor: Tensor, what: str) -> Tensor:
    """rocAL gives None in place of a node that it refuses."""
    if tensor is None:
        raise _refused(binding, handle, what)
    return tensor


def _refused(binding: Binding, handle: Any, what: str) -> ServeError:
    return unavailable(
        f"rocAL (version {binding.version}) refuses {what}: {binding.fault(handle) or 'rocAL gives no reason'}"
    )
