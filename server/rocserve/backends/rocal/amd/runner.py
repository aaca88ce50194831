"""Runs whole batches through one rocAL pipeline, and ends the worker when rocAL does not come back.

A call into rocAL holds Python's global lock until it returns, so no thread of this process could notice, let alone
interrupt, one that never does: not the one that watches the server, not a timer. The faulthandler module has the one
timer that needs no lock. It writes where every thread is and ends the process, which the server then starts again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
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
    """Raises: ServeError: INVALID_ARGUMENT, rocAL cannot run the pipeline; the text says which operation and why."""
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
    """Raises: ServeError: UNAVAILABLE, rocAL refuses the pipeline; with its reason."""
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
        types = binding.types
        formats = {ColorFormat.RGB24: types.RGB, ColorFormat.BGR24: types.BGR, ColorFormat.U8: types.GRAY}
        tensor, _ = binding.functions.external_source(
            # Batches are fed by hand; what would be asked for them is never asked.
            source=(),
            color_format=formats[settings.color_format],
            mode=types.EXTSOURCE_RAW_UNCOMPRESSED,
            max_width=settings.max_width,
            max_height=settings.max_height,
        )
        source = _made(binding, handle, tensor, "its source of images")
        values = dict(zip(settings.inputs, flags, strict=True))
        images: dict[int, Tensor] = {DECODED: source}
        outputs: list[Tensor] = []
        for planned in settings.plan.steps:
            step = planned.step
            sources, grey = [images[each] for each in step.sources], settings.is_grey
            as_source = settings.source_layout, types.UINT8
            if planned.is_read:
                # The next operation works on bytes, whatever is handed out here.
                node = Node(binding, handle, *as_source, sources, planned.source, grey, batch_size)
                images[step.index] = _add(node, step, values)
            if planned.output is not None:
                wanted = output_type(settings, planned)
                node = Node(binding, handle, *wanted, sources, planned.source, grey, batch_size)
                shared = planned.is_read and wanted == as_source
                outputs.append(images[step.index] if shared else _add(node, step, values))
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


class Canvas:
    """Memory for a batch of images, each at the top left of a field of the largest size.

    rocAL takes the fields' addresses and reads them at some time before the batch's outputs are there. So a canvas
    lives as long as the pipelines that are fed from it, and is filled anew only when those outputs have been read.
    """

    def __init__(self, settings: GraphSettings, count: int) -> None:
        channels = settings.color_format.channels
        self.capacity = count
        """How many images it holds."""
        self._fields = np.zeros((count, settings.max_height, settings.max_width, channels), dtype=np.uint8)
        self.sizes = [(0, 0)] * count
        """Height and width of each image that was placed last."""

    def place(self, images: Sequence[Pixels]) -> None:
        """Put images in the first fields; none is larger than a field."""
        for index, pixels in enumerate(images):
            height, width = pixels.shape[:2]
            last_height, last_width = self.sizes[index]
            if height < last_height or width < last_width:
                # Kernels that read a little past an image must not find another client's.
                self._fields[index, :last_height, :last_width] = 0
            self._fields[index, :height, :width] = pixels
            self.sizes[index] = height, width

    def buffers(self, count: int, total: int) -> list[np.ndarray[Any, Any]]:
        """The first `count` fields and the first once more, again and again, up to `total`: 1-D, UINT8."""
        flat = self._fields.reshape(len(self._fields), -1)
        return [flat[index if index < count else 0] for index in range(total)]

    def sizes_of(self, count: int, total: int) -> list[tuple[int, int]]:
        """As `buffers`, the heights and widths."""
        return [self.sizes[index if index < count else 0] for index in range(total)]


class OutputReader:
    """Copies one output of one rocAL pipeline: the results of a batch, good until the next is read."""

    def __init__(self, settings: GraphSettings, planned: PlannedStep, batch_size: int) -> None:
        self.planned = planned
        layout, datatype = output_type(settings, planned)
        self._planes = layout == settings.binding.types.NCHW
        self._datatype = np.dtype(np.float32 if datatype == settings.binding.types.FLOAT else np.uint8)
        self._channels = settings.color_format.channels
        self._batch_size = batch_size
        self._data: np.ndarray[Any, Any] | None = None
        """Of rocAL's largest size; only a part of each image is its result."""
        self._regions = np.zeros((batch_size, 4), dtype=np.uint32)
        """x, y, width, height of the part that rocAL calls valid, for each image."""

    def read(self, tensor: Any) -> None:
        """Raises: RuntimeError: the tensor is not what the graph was built to give."""
        if self._data is None:
            dimensions = tuple(int(side) for side in tensor.dimensions())
            channels = dimensions[1 if self._planes else -1]
            if len(dimensions) != 4 or dimensions[0] != self._batch_size or channels != self._channels:
                raise RuntimeError(f"expected {self._batch_size} images of {self._channels} channels, got {dimensions}")
            if np.dtype(tensor.dtype()) != self._datatype:
                raise RuntimeError(f"expected {self._datatype}, got {tensor.dtype()}")
            self._data = np.empty(dimensions, dtype=self._datatype)
        # Also from a GPU's memory; what copy_data fills must be as large as the tensor, to the byte.
        tensor.copy_data(self._data)
        tensor.copy_roi(self._regions)

    def image(self, index: int) -> Pixels:
        """The result for one image, height x width x channels; zeros where rocAL wrote nothing. Raises: RuntimeError:
        rocAL calls a part valid that is not in the result."""
        assert self._data is not None
        size = self.planned.result.size
        image: Pixels = self._data[index].transpose(1, 2, 0) if self._planes else self._data[index]
        if self.planned.call.operation.amd.fills_result:
            return image[: size.height, : size.width]
        _, _, width, height = (int(number) for number in self._regions[index])
        valid = image[:height, :width]
        full_height, full_width = size.height or height, size.width or width
        if valid.shape[:2] != (height, width) or height > full_height or width > full_width:
            raise RuntimeError(
                f"rocAL gives {self.planned.step.name} a valid part of {width}x{height} pixels, but its result is"
                f" {full_width}x{full_height}"
            )
        return Image(valid, ResultExtent(Extent(full_height, full_width), Extent(height, width))).padded


_STANDARD_ERROR = 2
"""The descriptor, which leads to the server's log whatever has become of sys.stderr."""


@contextlib.contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """For calls that must return within this time; one at a time in a process."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


_LONGEST_RUN_SECONDS = 120.0
"""Far more than any batch takes. A rocAL pipeline that waits for something will not stop."""


class BrokenPipelineError(RuntimeError):
    """A rocAL pipeline that can run nothing any more; the text is rocAL's reason."""


class PipelineRunner:
    """One rocAL pipeline, which has a fixed batch size. One thread at a time."""

    def __init__(self, settings: GraphSettings, graph: Graph, canvas: Canvas) -> None:
        self._settings = settings
        self._graph = graph
        self._readers = [OutputReader(settings, step, graph.batch_size) for step in settings.plan.image_outputs]
        self._canvas = canvas
        # rocAL takes no feed without labels, and keeps their address.
        self._labels = np.zeros(graph.batch_size, dtype=np.int32)
        self._regions = np.zeros((graph.batch_size, 4), dtype=np.uint32)
        """x, y, width, height of the images loaded last."""
        self._started = False

    @property
    def batch_size(self) -> int:
        return self._graph.batch_size

    def run(self, count: int) -> Sequence[OutputReader]:
        """The outputs that are images, for the canvas's first `count` images. Raises: BrokenPipelineError: rocAL
        failed. Its output may be an earlier batch's, so nothing of it is returned."""
        with limited_to(_LONGEST_RUN_SECONDS):
            self._feed(count)
            if not self._started:
                # Waits for the first batch, and keeps it. Every later call lets go of a batch, see below.
                self._advance()
                self._started = True
            tensors = self._settings.binding.native.getOutputTensors(self._graph.handle)
            if len(tensors) != len(self._readers):
                raise BrokenPipelineError(f"expected {len(self._readers)} output tensors, got {len(tensors)}")
            try:
                for reader, tensor in zip(self._readers, tensors, strict=True):
                    reader.read(tensor)
            except RuntimeError as error:
                raise BrokenPipelineError(str(error)) from error
            # rocAL hands out old memory when its processing thread has died, and says nothing. Only the next call of
            # run reports that; it lets go of the batch that has been read and waits for none.
            self._advance()
            # rocAL's loader does not look whether there is an image when it is woken. Woken too early, it takes what
            # lies on its stack for one, at best the image before, and all later images move by one place, to other
            # requests.
            self._graph.source.copy_roi(self._regions)
            sizes = [(height, width) for _, _, width, height in self._regions.tolist()]
            if sizes != self._canvas.sizes_of(count, self.batch_size):
                raise BrokenPipelineError("it worked on other images than it was given")
        return self._readers

    def _feed(self, count: int) -> None:
        """Hands over the canvas's first `count` images, always a whole batch: rocAL would wait for the rest forever."""
        batch_size = self._graph.batch_size
        binding = self._settings.binding
        regions = []
        for height, width in self._canvas.sizes_of(count, batch_size):
            region = binding.native.ROIxywh()
            region.x, region.y, region.w, region.h = 0, 0, width, height
            regions.append(region)
        binding.native.externalSourceFeedInput(
            self._graph.handle,
            [],
            self._labels,
            self._canvas.buffers(count, batch_size),
            regions,
            self._settings.max_width,
            self._settings.max_height,
            self._settings.color_format.channels,
            binding.types.EXTSOURCE_RAW_UNCOMPRESSED,
            self._settings.source_layout,
            # Not the end of the data: after that rocAL would run no further batch.
            False,
        )
        fault = binding.fault(self._graph.handle)
        if fault is not None:
            raise BrokenPipelineError(fault)

    def _advance(self) -> None:
        binding = self._settings.binding
        if self._graph.pipeline.rocal_run() != binding.types.OK:
            raise BrokenPipelineError(binding.fault(self._graph.handle) or "its processing thread ended")
