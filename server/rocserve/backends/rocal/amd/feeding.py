"""Hands batches of pixels to a rocAL pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rocserve.backends.rocal.amd.graph import Graph, GraphSettings
from rocserve.backends.rocal.image import Pixels


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


class Feeder:
    """Feeds one rocAL pipeline, always a whole batch: rocAL would wait for the rest of it for ever."""

    def __init__(self, settings: GraphSettings, graph: Graph, canvas: Canvas) -> None:
        self._settings = settings
        self._graph = graph
        self._canvas = canvas
        # rocAL takes no feed without labels, and keeps their address.
        self._labels = np.zeros(graph.batch_size, dtype=np.int32)

    def feed(self, count: int) -> str | None:
        """Hand over the canvas's first `count` images, at most a batch; returns why rocAL does not take them.

        A batch that was not taken must not be waited for.
        """
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
        return binding.fault(self._graph.handle)

    def _region(self, height: int, width: int) -> Any:
        region = self._settings.binding.native.ROIxywh()
        region.x, region.y, region.w, region.h = 0, 0, width, height
        return region
