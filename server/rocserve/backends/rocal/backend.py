"""The rocal backend's engine, as a worker loads it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np

from rocserve.backends.base import Batch, BatchResult, LoadedModel, ModelSource
from rocserve.backends.parameters import read_choice, read_integer, require_cpu, usable_cpus
from rocserve.backends.rocal.decoder import DEFAULT_MAX_PIXELS, ColorFormat, Decoder, ImageError
from rocserve.backends.rocal.engine import PipelineEngine
from rocserve.backends.rocal.interface import Interface, Output, join
from rocserve.backends.rocal.pipeline import parse_pipeline
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.core.requests import Signature
from rocserve.core.tensors import Buffer, Tensor, bytes_elements

_LOG = logging.getLogger(__name__)

_DEFAULT_MAX_THREADS = 4

Encoded = Buffer | np.ndarray[Any, Any]
"""One image's file as it came from the client, a view."""


def load(model: ModelSource) -> LoadedModel:
    """Parameters: `color_format` (RGB24, BGR24, U8), `threads`, `max_pixels`, `engine` (auto, cpu).

    Raises:
        ServeError: the pipeline or the configuration is wrong, or libturbojpeg is missing.
    """
    require_cpu(model, cpu_engines=("cpu",), device_engines=("rocal",))
    config = model.config
    formats = tuple(color_format.value for color_format in ColorFormat)
    color_format = ColorFormat(read_choice(config, "color_format", ColorFormat.RGB24.value, formats))
    threads = read_integer(config, "threads", min(_DEFAULT_MAX_THREADS, usable_cpus()), least=1)
    max_pixels = read_integer(config, "max_pixels", DEFAULT_MAX_PIXELS, least=1)
    try:
        pipeline = parse_pipeline(model.model_file.read_bytes(), color_format.channels)
    except OSError as error:
        raise invalid_argument(f"cannot read {model.model_file}: {error.strerror}") from None
    except PipelineError as error:
        raise invalid_argument(f"{model.model_file.name}: {error}") from None
    for note in pipeline.notes:
        _LOG.warning("%s: %s", model.model_file.name, note)
    interface = join(pipeline, config, color_format.channels)
    try:
        decoder = Decoder(color_format, pipeline.decoder.limits, max_pixels)
    except RuntimeError as error:
        raise unavailable(str(error)) from None
    # Images are worked on side by side; threads within one would only get in each other's way.
    cv2.setNumThreads(0)
    engine = PipelineEngine(pipeline, decoder, tuple(output.format for output in interface.outputs))
    return RocalModel(engine, interface, threads)


class RocalModel:
    """A pipeline over the images of a batch."""

    def __init__(self, engine: PipelineEngine, interface: Interface, threads: int) -> None:
        self._engine = engine
        self._interface = interface
        # Decoding and resizing release the GIL, so threads spread a batch over the CPUs.
        self._pool = ThreadPoolExecutor(threads, "rocal-image") if threads > 1 else None

    @property
    def signature(self) -> Signature:
        return self._interface.signature

    def warm_up(self, samples: Sequence[Batch]) -> None:
        for sample in samples:
            failures = self.execute(sample).failures
            if failures:
                raise next(iter(failures.values()))
        if not samples:
            self._run(cv2.imencode(".jpg", np.zeros((64, 64, 3), dtype=np.uint8))[1], None)

    def execute(self, batch: Batch) -> BatchResult:
        images = self._images(batch.inputs[self._interface.input.name])
        if not self._interface.holds_several:
            return self._execute_one(images, batch.requested_outputs)
        return self._execute_all(images, batch)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _execute_one(self, images: Sequence[Encoded], wanted: tuple[str, ...]) -> BatchResult:
        if len(images) != 1:
            raise invalid_argument(f"expected one image in input '{self._interface.input.name}', got {len(images)}")
        results = self._run(images[0], None)
        outputs = {}
        for output, result in zip(self._interface.outputs, results, strict=True):
            _check_shape(output, result)
            if output.name in wanted:
                outputs[output.name] = np.ascontiguousarray(result)
        return BatchResult(outputs)

    def _execute_all(self, images: Sequence[Encoded], batch: Batch) -> BatchResult:
        # Without batching there is one request, which may still bring several images.
        sizes = batch.request_sizes if sum(batch.request_sizes) == len(images) else (len(images),)
        places = [(request, index) for request, size in enumerate(sizes) for index in range(size)]
        arrays = {
            output.name: np.empty((len(images), *output.shape), dtype=output.format.datatype.numpy_dtype)
            for output in self._interface.outputs
            if output.name in batch.requested_outputs
        }

        def run(row: int) -> ServeError | None:
            request, index = places[row]
            try:
                results = self._run(images[row], index if sizes[request] > 1 else None)
            except ServeError as error:
                return error
            for output, result in zip(self._interface.outputs, results, strict=True):
                if output.name in arrays:
                    np.copyto(arrays[output.name][row], result)
            return None

        rows = range(len(images))
        faults = map(run, rows) if self._pool is None or len(images) == 1 else self._pool.map(run, rows)
        failures: dict[int, ServeError] = {}
        for (request, _), fault in zip(places, faults, strict=True):
            if fault is not None:
                failures.setdefault(request, fault)
        return BatchResult(arrays, failures)

    def _run(self, image: Encoded, index: int | None) -> list[np.ndarray[Any, Any]]:
        """
        Raises:
            ServeError: INVALID_ARGUMENT with the image's fault and, when it is one of several, its index.
        """
        what = "the image in input" if index is None else f"image {index} of input"
        try:
            return self._engine.run(image)
        except ImageError as error:
            raise invalid_argument(
                f"{what} '{self._interface.input.name}' cannot be decoded as a JPEG: {error}"
            ) from None
        except (cv2.error, MemoryError) as error:
            raise internal(f"{what} '{self._interface.input.name}' could not be processed: {error}") from None

    def _images(self, tensor: Tensor) -> Sequence[Encoded]:
        """The encoded images, as views."""
        shape = tensor.shape
        if tensor.datatype is DataType.BYTES:
            if len(shape) == 2 and shape[1] != 1:
                raise invalid_argument(
                    f"expected one image in each row of input '{tensor.name}', got shape {list(shape)}"
                )
            return bytes_elements(tensor.data, tensor.element_count, tensor.name)
        array = tensor.numpy()
        return list(array) if array.ndim == 2 else [array]


def _check_shape(output: Output, result: np.ndarray[Any, Any]) -> None:
    if any(declared not in (-1, actual) for declared, actual in zip(output.shape, result.shape, strict=True)):
        raise invalid_argument(
            f"output '{output.name}' must have shape {list(output.shape)}, but this image gives"
            f" {list(result.shape)}; resize images to a fixed size in the pipeline"
        )
