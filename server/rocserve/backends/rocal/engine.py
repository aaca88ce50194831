"""Runs a pipeline on one image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.backends.rocal.decoder import Decoder
from rocserve.backends.rocal.image import Extent, Image
from rocserve.backends.rocal.pipeline import Layout, Pipeline
from rocserve.core.datatypes import DataType
from rocserve.core.tensors import Buffer


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How an output of the pipeline is handed out."""

    datatype: DataType
    """UINT8, FP32 or FP16."""
    layout: Layout

    def shape(self, extent: Extent, channels: int) -> tuple[int, int, int]:
        """The shape of one image, -1 for a side that is not known."""
        height = -1 if extent.height is None else extent.height
        width = -1 if extent.width is None else extent.width
        return (height, width, channels) if self.layout is Layout.NHWC else (channels, height, width)


def output_extents(pipeline: Pipeline) -> list[Extent]:
    """The size of each output, as far as it is the same for every image."""
    extents = []
    valid = Extent(None, None)
    for step in pipeline.steps:
        result = step.operation.extent(valid)
        valid = result.valid
        if step.is_output:
            extents.append(result.size)
    return extents


class PipelineEngine:
    """A pipeline ready to run; safe to use on several threads at once."""

    def __init__(self, pipeline: Pipeline, decoder: Decoder, formats: tuple[OutputFormat, ...]) -> None:
        """`formats` are those of the pipeline's outputs, in their order."""
        self._decoder = decoder
        self._formats = formats
        last_output = max(index for index, step in enumerate(pipeline.steps) if step.is_output)
        self._steps = pipeline.steps[: last_output + 1]

    def run(self, encoded: Buffer | np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The outputs for one JPEG, each in its datatype and layout (the arrays need not be contiguous).

        Raises:
            ImageError: the image cannot be decoded.
        """
        image = Image.whole(self._decoder.decode(encoded))
        outputs: list[np.ndarray[Any, Any]] = []
        last = len(self._steps) - 1
        for index, step in enumerate(self._steps):
            source = image
            as_float = step.is_output and self._formats[len(outputs)].datatype is not DataType.UINT8
            if not as_float or index < last:
                # The next operation works on bytes, as in rocAL, whatever is handed out here.
                image = step.operation.run(source, as_float=False)
            if step.is_output:
                result = step.operation.run(source, as_float=True) if as_float else image
                outputs.append(_formatted(result.pixels, self._formats[len(outputs)]))
        return outputs


def _formatted(pixels: np.ndarray[Any, Any], output: OutputFormat) -> np.ndarray[Any, Any]:
    if output.datatype is DataType.FP16:
        pixels = pixels.astype(np.float16)
    return pixels if output.layout is Layout.NHWC else pixels.transpose(2, 0, 1)
