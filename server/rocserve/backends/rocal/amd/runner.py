"""Runs whole batches through one rocAL pipeline, and ends the worker when rocAL does not come back.

A call into rocAL holds Python's global lock until it returns, so no thread of this process could notice, let alone
interrupt, one that never does: not the one that watches the server, not a timer. The faulthandler module has the one
timer that needs no lock. It writes where every thread is and ends the process, which the server then starts again.
"""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rocserve.backends.rocal.amd.graph import Graph, GraphSettings, output_type
from rocserve.backends.rocal.image import Extent, Image, Pixels, ResultExtent
from rocserve.backends.rocal.pipeline import PlannedStep


class Canvas:
    """Memory for a batch of images, each at the top left of a field of the largest size.

    rocAL takes the fields' addresses and reads them at some time before the batch's outputs are there. So a canvas
    lives as long as the pipelines that are fed from it, and is filled anew only when those outputs have been read.
    """

    def __init__(self, settings: GraphSettings, count: int) -> None:
        channels = settings.color_format.channels
        self._fields = np.zeros((count, settings.max_height, settings.max_width, channels), dtype=np.uint8)
        self.sizes = [(0, 0)] * count
        """Height and width of each image that was placed last."""

    @property
    def capacity(self) -> int:
        """How many images it holds."""
        return len(self._fields)

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
        """
        Raises:
            RuntimeError: the tensor is not what the graph was built to give.
        """
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
        """The result for one image, height x width x channels; zeros where rocAL wrote nothing.

        Raises:
            RuntimeError: rocAL calls a part valid that is not in the result.
        """
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
        """The outputs that are images, for the canvas's first `count` images.

        Raises:
            BrokenPipelineError: rocAL failed. Its output may be an earlier batch's, so nothing of it is returned.
        """
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
            self._check_order(count)
        return self._readers

    def _feed(self, count: int) -> None:
        """Hands over the canvas's first `count` images, always a whole batch: rocAL would wait for the rest forever."""
        batch_size = self._graph.batch_size
        binding = self._settings.binding
        binding.native.externalSourceFeedInput(
            self._graph.handle,
            [],
            self._labels,
            self._canvas.buffers(count, batch_size),
            [self._region(height, width) for height, width in self._canvas.sizes_of(count, batch_size)],
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

    def _region(self, height: int, width: int) -> Any:
        region = self._settings.binding.native.ROIxywh()
        region.x, region.y, region.w, region.h = 0, 0, width, height
        return region

    def _check_order(self, count: int) -> None:
        """rocAL's loader does not look whether there is an image when it is woken. Woken too early, it takes what lies
        on its stack for one, at best the image before, and all later images move by one place, to other requests."""
        self._graph.source.copy_roi(self._regions)
        if [(height, width) for _, _, width, height in self._regions.tolist()] != self._canvas.sizes_of(
            count, self.batch_size
        ):
            raise BrokenPipelineError("it worked on other images than it was given")

    def _advance(self) -> None:
        binding = self._settings.binding
        if self._graph.pipeline.rocal_run() != binding.types.OK:
            raise BrokenPipelineError(binding.fault(self._graph.handle) or "its processing thread ended")
