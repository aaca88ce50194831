"""Runs a pipeline on one image."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.image import Extent, Image, Pixels, PixelsError, ResultExtent
from rocserve.backends.rocal.operations.base import Measurement, Operation, PairOperation, PipelineOperation
from rocserve.backends.rocal.pipeline import DECODED, Layout, Pipeline, Step
from rocserve.backends.rocal.schema import Binding, PipelineError
from rocserve.core.datatypes import DataType
from rocserve.core.tensors import Buffer

_NO_ARGUMENTS: Mapping[str, Any] = {}

_VARIANTS = 16
"""Operations kept ready for the values that inputs bring: both of a flag, the last ones of numbers."""


class ArgumentError(ValueError):
    """An input's value that an operation cannot take; the text says which, what was expected and what came."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How an output of the pipeline is handed out."""

    datatype: DataType
    """UINT8, FP32 or FP16; of a measurement its own."""
    layout: Layout
    """Of no meaning for a measurement."""

    def shape(self, extent: Extent, channels: int) -> tuple[int, int, int]:
        """The shape of one image, -1 for a side that is not known."""
        height = -1 if extent.height is None else extent.height
        width = -1 if extent.width is None else extent.width
        return (height, width, channels) if self.layout is Layout.NHWC else (channels, height, width)


def output_extents(pipeline: Pipeline, decoded: Extent) -> list[Extent | None]:
    """The size of each output, as far as it is the same for every image; None for a measurement.

    `decoded` is what is known of the size of the decoder's images.

    Raises:
        PipelineError: two images that are read together can never fit each other, or a result would be too large.
    """
    extents: list[Extent | None] = []
    known = {DECODED: ResultExtent(decoded, decoded)}
    for index, step in enumerate(pipeline.steps):
        size = None
        if not isinstance(step.operation, Measurement):
            sources = [known[source] for source in step.sources]
            try:
                result = _result_extent(step.operation, sources)
                result.check()
            except ValueError as error:
                raise PipelineError(f"pipeline[{index}] ({step.operation.name}): {error}") from None
            size, known[index] = result.size, result
        if step.is_output:
            extents.append(size)
    return extents


def _result_extent(operation: PipelineOperation, sources: list[ResultExtent]) -> ResultExtent:
    if isinstance(operation, PairOperation):
        return operation.extent_of_pair(sources[0].valid, sources[1].valid)
    return cast(Operation, operation).result_extent(sources[0])


class PipelineEngine:
    """A pipeline ready to run; safe to use on several threads at once."""

    def __init__(self, pipeline: Pipeline, decoder: Decoder, formats: tuple[OutputFormat, ...]) -> None:
        """`formats` are those of the pipeline's outputs, in their order."""
        self._decoder = decoder
        self._steps = _planned(pipeline.steps, formats)

    def run(
        self, encoded: Buffer | np.ndarray[Any, Any], arguments: Mapping[str, Any] = _NO_ARGUMENTS
    ) -> list[np.ndarray[Any, Any]]:
        """The outputs for one image, each in its datatype and layout (the arrays need not be contiguous).

        `arguments` are the values of the pipeline's inputs for this image, by their names.

        Raises:
            ImageError: the image cannot be decoded.
            ArgumentError: an argument is not what an operation takes.
            PixelsError: an operation cannot be done with this image.
        """
        # What can be refused without decoding is refused first.
        operations = [step.operation(arguments) for step in self._steps]
        decoded = self._decoder.decode(encoded)
        images = {DECODED: Image.whole(decoded.pixels)}
        outputs: list[np.ndarray[Any, Any]] = []
        for step, operation in zip(self._steps, operations, strict=True):
            if isinstance(operation, Measurement):
                outputs.append(operation.measure(decoded))
                continue
            sources = [images[source] for source in step.sources]
            if not step.has_known_size:
                _check_size(operation, sources)
            if step.is_read:
                # The next operation works on bytes, as in rocAL, whatever is handed out here.
                images[step.index] = _run(operation, sources, as_float=False)
            if step.output is not None:
                as_float = step.output.datatype is not DataType.UINT8
                result = images[step.index] if step.is_read and not as_float else _run(operation, sources, as_float)
                outputs.append(_formatted(result.pixels, step.output))
        return outputs


class _PlannedStep:
    """A step with what the engine must do for it; safe to use on several threads at once."""

    def __init__(
        self, index: int, step: Step, is_read: bool, output: OutputFormat | None, has_known_size: bool
    ) -> None:
        self.index = index
        self.sources = step.sources
        self.has_known_size = has_known_size
        """Whether its results are all of one size, which was checked when the pipeline was loaded."""
        self.is_read = is_read
        """Whether a later step reads the image."""
        self.output = output
        self._operation = step.operation
        self._bindings = step.bindings
        # Kept, so that an operation's tables are not made anew for every image.
        self._variant = lru_cache(_VARIANTS)(self._with)

    def operation(self, arguments: Mapping[str, Any]) -> PipelineOperation:
        """The operation with the values that its inputs bring.

        Raises:
            ArgumentError: it cannot take one of them.
        """
        if not self._bindings:
            return self._operation
        return self._variant(*(_argument(binding, arguments[binding.input]) for binding in self._bindings))

    def _with(self, *values: Any) -> PipelineOperation:
        changes = dict(zip((binding.key for binding in self._bindings), values, strict=True))
        try:
            return cast(PipelineOperation, dataclasses.replace(cast(Any, self._operation), **changes))
        except ValueError as error:
            raise ArgumentError(f"{self._operation.name}: {error}") from None


_PYTHON_TYPES: dict[DataType, type] = {DataType.BOOL: bool, DataType.INT32: int, DataType.FP32: float}


def _argument(binding: Binding, value: Any) -> Any:
    value = _PYTHON_TYPES[binding.datatype](value)
    try:
        return binding.read(value)
    except ValueError as error:
        raise ArgumentError(f"input '{binding.input}' must be {error}, not {value!r}") from None


def _planned(steps: tuple[Step, ...], formats: tuple[OutputFormat, ...]) -> tuple[_PlannedStep, ...]:
    """The steps that outputs depend on, each with what it is for."""
    remaining_formats = list(formats)
    fixed = _steps_of_known_size(steps)
    read: set[int] = set()
    planned = []
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        output = remaining_formats.pop() if step.is_output else None
        if output is not None or index in read:
            planned.append(_PlannedStep(index, step, index in read, output, index in fixed))
            read.update(step.sources)
    return tuple(reversed(planned))


def _steps_of_known_size(steps: tuple[Step, ...]) -> set[int]:
    """The steps whose results have one size, whatever the images and the values of inputs are."""
    unknown = ResultExtent(Extent(None, None), Extent(None, None))
    known = {DECODED: unknown}
    fixed: set[int] = set()
    for index, step in enumerate(steps):
        known[index] = unknown
        if isinstance(step.operation, Operation) and not step.bindings:
            known[index] = step.operation.result_extent(known[step.sources[0]])
            if known[index].size.height is not None and known[index].size.width is not None:
                fixed.add(index)
    return fixed


def _check_size(operation: PipelineOperation, sources: list[Image]) -> None:
    """
    Raises:
        PixelsError: the images do not fit each other, or the result would be too large.
    """
    try:
        _result_extent(operation, [image.extent for image in sources]).check()
    except ValueError as error:
        raise PixelsError(f"{operation.name}: {error}") from None


def _run(operation: PipelineOperation, sources: list[Image], as_float: bool) -> Image:
    if isinstance(operation, PairOperation):
        first, second = sources
        return operation.run_pair(first, second, as_float)
    return cast(Operation, operation).run(sources[0], as_float)


def _formatted(pixels: Pixels, output: OutputFormat) -> Pixels:
    if output.datatype is DataType.FP16:
        pixels = pixels.astype(np.float16)
    return pixels if output.layout is Layout.NHWC else pixels.transpose(2, 0, 1)
