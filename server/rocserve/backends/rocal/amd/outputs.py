"""Copies a batch's results out of rocAL's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.backends.rocal.amd.graph import GraphSettings, output_type
from rocserve.backends.rocal.amd.plan import PlannedStep
from rocserve.backends.rocal.image import Pixels


class OutputReader:
    """Reads one output of one rocAL pipeline into memory of its own."""

    def __init__(self, settings: GraphSettings, step: PlannedStep, batch_size: int) -> None:
        self._step = step
        layout, datatype = output_type(settings, step)
        self._planes = layout == settings.binding.types.NCHW
        self._datatype = np.dtype(np.float32 if datatype == settings.binding.types.FLOAT else np.uint8)
        self._channels = settings.color_format.channels
        self._batch_size = batch_size
        self._data: np.ndarray[Any, Any] | None = None
        self._regions = np.zeros((batch_size, 4), dtype=np.uint32)

    def read(self, tensor: Any) -> BatchOutput:
        """
        Raises:
            RuntimeError: the tensor is not what the graph was built to give.
        """
        if self._data is None:
            self._data = np.empty(self._checked(tensor), dtype=self._datatype)
        # Also from a GPU's memory; what copy_data fills must be as large as the tensor, to the byte.
        tensor.copy_data(self._data)
        tensor.copy_roi(self._regions)
        images = self._data.transpose(0, 2, 3, 1) if self._planes else self._data
        return BatchOutput(self._step, images, self._regions)

    def _checked(self, tensor: Any) -> tuple[int, ...]:
        dimensions = tuple(int(side) for side in tensor.dimensions())
        channels = dimensions[1 if self._planes else -1]
        if len(dimensions) != 4 or dimensions[0] != self._batch_size or channels != self._channels:
            raise RuntimeError(f"expected {self._batch_size} images of {self._channels} channels, got {dimensions}")
        if np.dtype(tensor.dtype()) != self._datatype:
            raise RuntimeError(f"expected {self._datatype}, got {tensor.dtype()}")
        return dimensions


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """A batch's results of one output; good until the next batch is read."""

    step: PlannedStep
    images: np.ndarray[Any, Any]
    """Images x height x width x channels, of rocAL's largest size; only a part of each is its result."""
    regions: np.ndarray[Any, Any]
    """x, y, width, height of the part that rocAL calls valid, for each image."""

    def image(self, index: int) -> Pixels:
        """The result for one image, height x width x channels; zeros where rocAL wrote nothing.

        Raises:
            RuntimeError: rocAL calls a part valid that is not in the result.
        """
        size = self.step.result.size
        image: Pixels = self.images[index]
        if self.step.expression.fills_result:
            return image[: size.height, : size.width]
        _, _, width, height = (int(number) for number in self.regions[index])
        valid = image[:height, :width]
        full_height, full_width = size.height or height, size.width or width
        if valid.shape[:2] == (full_height, full_width):
            return valid
        if valid.shape[:2] != (height, width) or height > full_height or width > full_width:
            raise RuntimeError(
                f"rocAL gives {self.step.operation.name} a valid part of {width}x{height} pixels, but its result is"
                f" {full_width}x{full_height}"
            )
        framed = np.zeros((full_height, full_width, image.shape[2]), dtype=image.dtype)
        framed[:height, :width] = valid
        return framed
