"""What runs a pipeline over a batch: the seam between the model, which knows requests, and its engines, which do not.

There are two engines: ThreadedEngine here works image by image on the CPU, `amd/engine.py` hands whole batches to
rocAL. `load` in `backend.py` chooses one and makes it of an EngineSetup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import cv2
import numpy as np

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.header import SourceImage
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions
from rocserve.backends.rocal.image import Extent, Image, Pixels, PixelsError, ResultExtent
from rocserve.backends.rocal.operations.base import Measurement, Operation, PairOperation, PipelineOperation
from rocserve.backends.rocal.pipeline import DECODED, Layout, Pipeline, Step
from rocserve.backends.rocal.schema import Binding, PipelineError
from rocserve.core.datatypes import DataType
from rocserve.core.tensors import Buffer

Arguments = Mapping[str, np.ndarray[Any, Any]]
"""By the names of the pipeline's inputs: one value for each image, [images], in the pipeline input's datatype."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """All that an engine is made of."""

    model_name: str
    pipeline: Pipeline
    decoder: DecoderOptions
    """The pipeline's, with `max_pixels` lowered to what the model's parameter allows."""
    color_format: ColorFormat
    formats: tuple[OutputFormat, ...]
    """How each output is handed out, in the order of the steps with is_output."""
    shapes: tuple[tuple[int, ...], ...]
    """Of one image of each output; -1 for a side that differs from image to image."""
    batch_size: int
    """How many images a batch usually has at most: max_batch_size, or 1 without batching. A single request of a model
    without batching may still bring more."""
    threads: int
    """How many CPU threads the engine may keep busy with the images of a batch."""
    device: int | None
    """The GPU's number as the model's configuration counts them; None = on the CPU. A worker sees only that one GPU."""


class BatchEngine(Protocol):
    """A pipeline ready to run. Several threads may call it at once (one for each instance of the model)."""

    def run(
        self, images: Sequence[SourceImage], arguments: Arguments, outputs: Sequence[np.ndarray[Any, Any] | None]
    ) -> Mapping[int, Exception]:
        """Write each image's results to its row of `outputs`; say which images failed, by their places.

        `outputs` has, in the pipeline's order, one array of [images, *shape] a output, None where it is not wanted. All
        shapes are fixed. One bad image never harms another: its rows may hold anything, all other rows are right.

        A failure is an ImageError, a PixelsError or an ArgumentError where the client is at fault, with a text that
        goes on after "image 3 of input 'X'"; any other exception where the engine is. What is raised instead of
        returned fails the whole batch.
        """

    def run_one(self, image: SourceImage, arguments: Arguments) -> Sequence[np.ndarray[Any, Any]]:
        """All results for one image, whose sizes may be its own; `arguments` have one row.

        Raises:
            Exception: the image failed, in the words of `run`.
        """

    def close(self) -> None:
        """End its threads and give back what it holds; nothing is called after it."""


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


class ThreadedEngine:
    """A BatchEngine. All instances of the model share its threads, so that they never are more than was asked for."""

    def __init__(self, setup: EngineSetup) -> None:
        """
        Raises:
            RuntimeError: libturbojpeg is not installed.
        """
        # Images are worked on side by side; threads within one would only get in each other's way.
        cv2.setNumThreads(0)
        decoder = Decoder(setup.color_format, setup.decoder)
        self._engine = PipelineEngine(setup.pipeline, decoder, setup.formats)
        # Decoding and resizing release the GIL, so threads spread a batch over the CPUs.
        self._pool = ThreadPoolExecutor(setup.threads, "rocal-image") if setup.threads > 1 else None

    def run(
        self, images: Sequence[SourceImage], arguments: Arguments, outputs: Sequence[np.ndarray[Any, Any] | None]
    ) -> Mapping[int, Exception]:
        """See BatchEngine."""

        def run_row(row: int) -> Exception | None:
            try:
                results = self._engine.run(images[row], {name: values[row] for name, values in arguments.items()})
                for output, result in zip(outputs, results, strict=True):
                    if output is not None:
                        np.copyto(output[row], result)
            except Exception as error:  # Whatever it is, it is this image's own.
                return error
            return None

        rows = range(len(images))
        faults = map(run_row, rows) if self._pool is None or len(images) == 1 else self._pool.map(run_row, rows)
        return {row: fault for row, fault in enumerate(faults) if fault is not None}

    def run_one(self, image: SourceImage, arguments: Arguments) -> Sequence[np.ndarray[Any, Any]]:
        """See BatchEngine."""
        return self._engine.run(image, {name: values[0] for name, values in arguments.items()})

    def close(self) -> None:
        """See BatchEngine."""
        if self._pool is not None:
            self._pool.shutdown()
