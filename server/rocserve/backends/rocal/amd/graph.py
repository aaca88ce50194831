"""Builds a rocAL pipeline of one batch size, feeds it from a canvas of images, runs it and reads its outputs.

A call into rocAL holds the GIL until it returns. If it never returns, no Python thread can notice, neither the one that
watches the server nor a timer. The faulthandler module has the one timer that needs no GIL. It writes each thread's
stack and ends the process, which the server then starts again.
"""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.backends.rocal.amd.binding import Binding
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.engine import EngineSetup
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.operations.base import Node, Tensor
from rocserve.backends.rocal.pipeline import DECODED, Layout, OutputFormat, Step
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, unavailable

Flags = tuple[bool, ...]
"""The values of the pipeline's inputs for an image, in the pipeline's order."""


@dataclass(frozen=True, slots=True)
class Graph:
    binding: Binding
    setup: EngineSetup
    known: Mapping[int, ResultExtent]
    """Extents of the decoder's image and of each step's, as far as they are the same for all images."""
    max_height: int
    max_width: int
    """Largest size of the images that are fed."""

    @property
    def is_grey(self) -> bool:
        return self.setup.color_format is ColorFormat.U8

    @property
    def steps(self) -> list[Step]:
        """Steps whose image is an output, or is read for one."""
        return [step for step in self.setup.pipeline.images if step.is_read or step.is_output]

    @property
    def outputs(self) -> list[tuple[int, Step, OutputFormat]]:
        """Outputs that are images: index among all outputs, step and format."""
        entries = enumerate(zip(self.setup.pipeline.outputs, self.setup.formats, strict=True))
        return [(place, step, output_format) for place, (step, output_format) in entries if isinstance(step, Step)]

    @property
    def source_layout(self) -> Any:
        """Layout of the fed images and of all images between operations. In rocAL grey images are planes."""
        types = self.binding.types
        return types.NCHW if self.is_grey else types.NHWC

    def output_type(self, step: Step, output_format: OutputFormat) -> tuple[Any, Any]:
        """Return the layout and the datatype in which rocAL makes an output. OutputReader converts the rest; FP16 is
        made from FP32, as on the CPU."""
        types, form = self.binding.types, step.call.operation.amd
        as_float = output_format.datatype is not DataType.UINT8 and form.gives_floats(step.call.arguments)
        layout = self.source_layout
        if form.gives_layouts and not self.is_grey:
            layout = types.NCHW if output_format.layout is Layout.NCHW or form.only_planes else types.NHWC
        return layout, types.FLOAT if as_float else types.UINT8


def _refused(binding: Binding, handle: Any, what: str) -> ServeError:
    reason = binding.fault(handle) or "rocAL gives no reason"
    return unavailable(f"rocAL (version {binding.version}) refuses {what}: {reason}")


def _add(node: Node, step: Step, values: Mapping[str, bool]) -> Tensor:
    call = step.call_with(values)
    form = call.operation.amd
    try:
        if form.make is not None:
            tensor = form.make(node, call)
        else:
            tensor = node.call(form.function or call.operation.name, call.keywords)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise unavailable(f"rocAL (version {node.binding.version}) refuses {step.where}: {error}") from error
    # rocAL returns None if it refuses a node.
    if tensor is None:
        raise _refused(node.binding, node.handle, step.where)
    return tensor


class Canvas:
    """Holds memory for a batch of images, each at the top left of a field of the largest size. rocAL takes the
    fields' addresses and reads them at any time until the batch's outputs exist. Therefore a canvas lives as long as
    the pipelines that read it, and is refilled only after those outputs have been read."""

    def __init__(self, graph: Graph, count: int) -> None:
        channels = graph.setup.color_format.channels
        self.fields = np.zeros((count, graph.max_height, graph.max_width, channels), dtype=np.uint8)
        self.sizes = [(0, 0)] * count
        """Height and width of the image that was last copied into each field."""

    def place(self, images: Sequence[Pixels]) -> None:
        """Copy images into the first fields; none may be larger than a field."""
        for index, pixels in enumerate(images):
            height, width = pixels.shape[:2]
            last_height, last_width = self.sizes[index]
            if height < last_height or width < last_width:
                # Some kernels read slightly past an image. They must not find another client's pixels there.
                self.fields[index, :last_height, :last_width] = 0
            self.fields[index, :height, :width] = pixels
            self.sizes[index] = height, width


class OutputReader:
    """Copies one output of one rocAL pipeline. The results of a batch are valid until the next batch is read."""

    def __init__(self, graph: Graph, place: int, step: Step, output_format: OutputFormat, batch_size: int) -> None:
        self.place = place
        self._step, self._format, self._size = step, output_format, graph.known[step.index].size
        layout, datatype = graph.output_type(step, output_format)
        self._planes = layout == graph.binding.types.NCHW
        self._datatype = np.dtype(np.float32 if datatype == graph.binding.types.FLOAT else np.uint8)
        self._channels = graph.setup.color_format.channels
        self._batch_size = batch_size
        self._data: np.ndarray[Any, Any] | None = None
        """The batch's images, each in rocAL's largest size, of which its result is a part; None = nothing read."""
        self._regions = np.zeros((batch_size, 4), dtype=np.uint32)
        """x, y, width and height of each image's valid part, according to rocAL."""

    def read(self, tensor: Any) -> None:
        """Copy a tensor. Raises RuntimeError if the tensor is not what the graph was built for."""
        if self._data is None:
            dimensions = tuple(int(side) for side in tensor.dimensions())
            channels = dimensions[1 if self._planes else -1]
            if len(dimensions) != 4 or dimensions[0] != self._batch_size or channels != self._channels:
                raise RuntimeError(f"expected {self._batch_size} images of {self._channels} channels, got {dimensions}")
            if np.dtype(tensor.dtype()) != self._datatype:
                raise RuntimeError(f"expected {self._datatype}, got {tensor.dtype()}")
            self._data = np.empty(dimensions, dtype=self._datatype)
        # copy_data also reads a GPU's memory. Its target must have exactly the tensor's size in bytes.
        tensor.copy_data(self._data)
        tensor.copy_roi(self._regions)

    def result(self, index: int) -> np.ndarray[Any, Any]:
        """Return one image in the output's format. Raises RuntimeError if rocAL's valid part exceeds the result."""
        pixels = self._pixels(index).astype(self._format.datatype.numpy_dtype, copy=False)
        return pixels if self._format.layout is Layout.NHWC else pixels.transpose(2, 0, 1)

    def _pixels(self, index: int) -> Pixels:
        """Return height x width x channels, with zeros where rocAL wrote nothing."""
        assert self._data is not None
        size = self._size
        image: Pixels = self._data[index].transpose(1, 2, 0) if self._planes else self._data[index]
        if self._step.call.operation.amd.fills_result:
            return image[: size.height, : size.width]
        _, _, width, height = (int(number) for number in self._regions[index])
        valid = image[:height, :width]
        full_height, full_width = size.height or height, size.width or width
        if valid.shape[:2] != (height, width) or height > full_height or width > full_width:
            raise RuntimeError(
                f"rocAL gives {self._step.name} a valid part of {width}x{height} pixels, but its result is"
                f" {full_width}x{full_height}"
            )
        return Image(valid, ResultExtent(Extent(full_height, full_width), Extent(height, width))).padded


@contextlib.contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer. Only one such block may run at a time in a process."""
    # Descriptor 2 leads to the server's log even if sys.stderr was replaced.
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


_LONGEST_RUN_SECONDS = 120.0
"""Far more than any batch takes. A rocAL pipeline that waits for something never ends."""


class BrokenPipelineError(RuntimeError):
    """Reports a rocAL pipeline that cannot run any more; the text is rocAL's reason."""


def _built(graph: Graph, batch_size: int, flags: Flags) -> tuple[Any, Tensor]:
    """Build a rocAL pipeline; return it and its source of images. Raises ServeError as PipelineRunner does."""
    binding, setup = graph.binding, graph.setup
    try:
        # A worker sees only one GPU, so it is always the first.
        pipeline = binding.pipeline.Pipeline(
            batch_size=batch_size,
            # RPP's kernels write some bytes past the end of an image, into the batch's next image. With more threads
            # these bytes are sometimes written after the right ones.
            num_threads=1,
            device_id=0,
            # The least that rocAL allows; only one batch is ever in progress.
            prefetch_queue_depth=2,
            rocal_cpu=setup.device is None,
        )
    except Exception as error:
        device = "the CPU" if setup.device is None else "an AMD GPU"
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
            # Batches are fed through externalSourceFeedInput, so rocAL never asks this source.
            source=(),
            color_format=formats[setup.color_format],
            mode=types.EXTSOURCE_RAW_UNCOMPRESSED,
            max_width=graph.max_width,
            max_height=graph.max_height,
        )
        if tensor is None:
            raise _refused(binding, handle, "its source of images")
        values = dict(zip(setup.pipeline.inputs, flags, strict=True))
        output_types = {step.index: graph.output_type(step, form) for _, step, form in graph.outputs}
        images: dict[int, Tensor] = {DECODED: tensor}
        outputs: list[Tensor] = []
        for step in graph.steps:
            sources, as_source = [images[one] for one in step.sources], (graph.source_layout, types.UINT8)
            known = graph.known[step.sources[0]]
            if step.is_read:
                # The next operation works on bytes, whatever the datatype of this output is.
                node = Node(binding, handle, *as_source, sources, known, graph.is_grey, batch_size)
                images[step.index] = _add(node, step, values)
            if step.is_output:
                node = Node(binding, handle, *output_types[step.index], sources, known, graph.is_grey, batch_size)
                shared = step.is_read and output_types[step.index] == as_source
                outputs.append(images[step.index] if shared else _add(node, step, values))
        pipeline.set_outputs(*outputs)
    try:
        pipeline.build()
        fault = binding.fault(handle)
    except SystemExit:
        # Pipeline.build exits the program, with status 0, if rocAL finds a fault in the graph.
        fault = binding.fault(handle) or ""
    if fault is not None:
        raise _refused(binding, handle, "the pipeline as a whole")
    return pipeline, tensor


class PipelineRunner:
    """Runs one rocAL pipeline, which has a fixed batch size. Only one thread may call it at a time."""

    def __init__(self, graph: Graph, batch_size: int, flags: Flags, canvas: Canvas) -> None:
        """Build the pipeline. Raises ServeError (UNAVAILABLE) with rocAL's reason if rocAL refuses it."""
        self._graph, self._canvas, self.batch_size = graph, canvas, batch_size
        self._pipeline, self._source = _built(graph, batch_size, flags)
        self._handle = self._pipeline.get_handle()
        self._readers = [OutputReader(graph, *output, batch_size) for output in graph.outputs]
        # rocAL requires labels with each feed, and keeps their address.
        self._labels = np.zeros(batch_size, dtype=np.int32)
        self._regions = np.zeros((batch_size, 4), dtype=np.uint32)
        """x, y, width and height of the images that rocAL loaded last."""
        self._started = False

    def run(self, count: int) -> Sequence[OutputReader]:
        """Run the canvas's first `count` images and return the outputs that are images. Raises BrokenPipelineError if
        rocAL failed; an output could then be an earlier batch's."""
        with limited_to(_LONGEST_RUN_SECONDS):
            # Always feed a whole batch, filled up with the first image. rocAL would wait for missing images forever.
            fields = [index if index < count else 0 for index in range(self.batch_size)]
            self._feed(fields)
            if not self._started:
                # The first call waits for the first batch and keeps it. Every later call releases a batch, see below.
                self._advance()
                self._started = True
            tensors = self._graph.binding.native.getOutputTensors(self._handle)
            if len(tensors) != len(self._readers):
                raise BrokenPipelineError(f"expected {len(self._readers)} output tensors, got {len(tensors)}")
            try:
                for reader, tensor in zip(self._readers, tensors, strict=True):
                    reader.read(tensor)
            except RuntimeError as error:
                raise BrokenPipelineError(str(error)) from error
            # If rocAL's processing thread has died, rocAL silently returns old memory. Only the next call of
            # `rocal_run` reports it. That call releases the batch that has been read, and does not wait.
            self._advance()
            # rocAL's loader does not check whether an image exists when it wakes up. If it wakes too early, it takes
            # what is on its stack, at best the previous image, and moves all later images to other requests.
            self._source.copy_roi(self._regions)
            sizes = [(height, width) for _, _, width, height in self._regions.tolist()]
            if sizes != [self._canvas.sizes[field] for field in fields]:
                raise BrokenPipelineError("it worked on other images than it was given")
        return self._readers

    def _feed(self, fields: Sequence[int]) -> None:
        graph, canvas, binding = self._graph, self._canvas, self._graph.binding
        regions = []
        for field in fields:
            region = binding.native.ROIxywh()
            region.x, region.y, (region.h, region.w) = 0, 0, canvas.sizes[field]
            regions.append(region)
        binding.native.externalSourceFeedInput(
            self._handle,
            [],
            self._labels,
            [canvas.fields[field].reshape(-1) for field in fields],
            regions,
            graph.max_width,
            graph.max_height,
            graph.setup.color_format.channels,
            binding.types.EXTSOURCE_RAW_UNCOMPRESSED,
            graph.source_layout,
            # False = not the end of the data. After the end rocAL would run no further batch.
            False,
        )
        fault = binding.fault(self._handle)
        if fault is not None:
            raise BrokenPipelineError(fault)

    def _advance(self) -> None:
        binding = self._graph.binding
        if self._pipeline.rocal_run() != binding.types.OK:
            raise BrokenPipelineError(binding.fault(self._handle) or "its processing thread ended")
