"""Builds a rocAL pipeline of one batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.amd.node import Node, Tensor
from rocserve.backends.rocal.amd.plan import Flags, Plan, PlannedStep
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.image import ResultExtent
from rocserve.backends.rocal.pipeline import DECODED, Layout
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, unavailable

_PREFETCH_DEPTH = 2
"""Batches that rocAL holds at once; the least that it allows. More are never under way."""


_THREADS = 1
"""Of rocAL's CPU mode. RPP's kernels write some bytes past the end of an image, which are the first of the next one of
the batch: with more threads these are sometimes written after their right values."""


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What all rocAL pipelines of a model have in common."""

    binding: Binding
    plan: Plan
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
        """That of what is fed, and of all images between operations: rocAL has grey images as planes."""
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
    _verify(binding, pipeline, handle)
    return Graph(pipeline, handle, source, batch_size)


def _add_nodes(settings: GraphSettings, handle: Any, source: Tensor, batch_size: int, flags: Flags) -> list[Tensor]:
    """The tensors of the outputs that are images, in their order."""
    types = settings.binding.types
    images: dict[int, Tensor] = {DECODED: source}
    outputs: list[Tensor] = []
    for step in settings.plan.steps:
        sources = [images[source] for source in step.sources]

        def node(layout: Any, datatype: Any, source: ResultExtent = step.source) -> Node:
            return Node(settings.binding, handle, layout, datatype, source, settings.is_grey, batch_size)

        if step.is_read:
            # The next operation works on bytes, whatever is handed out here.
            images[step.index] = _add(node(settings.source_layout, types.UINT8), step, flags, sources)
        if step.output is not None:
            layout, datatype = output_type(settings, step)
            shared = step.is_read and (layout, datatype) == (settings.source_layout, types.UINT8)
            outputs.append(images[step.index] if shared else _add(node(layout, datatype), step, flags, sources))
    return outputs


def output_type(settings: GraphSettings, step: PlannedStep) -> tuple[Any, Any]:
    """The layout and the datatype in which rocAL gives an output; what remains is done here.

    FP16 is made of FP32, as on the CPU.
    """
    types = settings.binding.types
    assert step.format is not None
    as_float = step.format.datatype is not DataType.UINT8 and step.expression.gives_floats
    as_asked = step.expression.gives_layouts and not settings.is_grey
    as_planes = step.format.layout is Layout.NCHW or step.expression.only_planes
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


def _add(node: Node, step: PlannedStep, flags: Flags, sources: Sequence[Tensor]) -> Tensor:
    where = f"pipeline[{step.index}] ({step.operation.name})"
    try:
        tensor = step.expression.make(node, step.operation_for(flags), sources)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise unavailable(f"rocAL (version {node.binding.version}) refuses {where}: {error}") from error
    return _made(node.binding, node.handle, tensor, where)


def _made(binding: Binding, handle: Any, tensor: Tensor, what: str) -> Tensor:
    """rocAL gives None in place of a node that it refuses."""
    if tensor is None:
        raise _refused(binding, handle, what)
    return tensor


def _verify(binding: Binding, pipeline: Any, handle: Any) -> None:
    try:
        pipeline.build()
    except SystemExit:
        # Pipeline.build leaves the program, with status 0, where rocAL finds the graph wrong.
        raise _refused(binding, handle, "the pipeline as a whole") from None
    if binding.fault(handle) is not None:
        raise _refused(binding, handle, "the pipeline as a whole")


def _refused(binding: Binding, handle: Any, what: str) -> ServeError:
    return unavailable(
        f"rocAL (version {binding.version}) refuses {what}: {binding.fault(handle) or 'rocAL gives no reason'}"
    )
