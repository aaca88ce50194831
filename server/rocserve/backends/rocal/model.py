"""A rocAL pipeline as a worker sees it: batches of requests in, tensors out, each bad image to its own request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import cv2
import numpy as np

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.rocal.batch_engine import Arguments, BatchEngine, EngineSetup
from rocserve.backends.rocal.decoding.faults import ImageError
from rocserve.backends.rocal.decoding.options import InputKind
from rocserve.backends.rocal.decoding.source import SourceImage
from rocserve.backends.rocal.engine import ArgumentError
from rocserve.backends.rocal.image import PixelsError
from rocserve.backends.rocal.interface import Interface, Output
from rocserve.backends.rocal.request_images import arguments_of, images_of
from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.requests import Signature

_LOG = logging.getLogger(__name__)

_WARM_UP_SIDE = 64
"""Pixels of the image that is run before the first request."""


class RocalModel:
    """A pipeline over the images of a batch, by either engine."""

    def __init__(
        self,
        engine: BatchEngine,
        setup: EngineSetup,
        interface: Interface,
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`properties`: see backends.base.model_properties."""
        self.properties = properties
        self._engine = engine
        self._setup = setup
        self._pipeline = setup.pipeline
        self._interface = interface

    @property
    def signature(self) -> Signature:
        return self._interface.signature

    def warm_up(self, samples: Sequence[Batch]) -> None:
        for sample in samples:
            failures = self.execute(sample).failures
            if failures:
                raise next(iter(failures.values()))
        if not samples:
            image = self._sample_image()
            try:
                self._engine.run_one(image, self._sample_arguments())
            except (ImageError, PixelsError) as error:
                # Clients' images may be of another size.
                _LOG.info("not warmed up: an image of %d pixels a side does not do (%s)", _WARM_UP_SIDE, error)
            except Exception as error:
                raise self._fault(error, None) from error

    def execute(self, batch: Batch) -> BatchResult:
        image = self._interface.image
        images = images_of(batch.inputs[image.spec.name], image)
        arguments = arguments_of(batch.inputs, self._pipeline.inputs, len(images))
        if not self._interface.holds_several:
            return self._execute_one(images, arguments, batch.requested_outputs)
        return self._execute_all(images, arguments, batch)

    def close(self) -> None:
        self._engine.close()

    def _execute_one(self, images: Sequence[SourceImage], arguments: Arguments, wanted: tuple[str, ...]) -> BatchResult:
        if len(images) != 1:
            name = self._interface.image.spec.name
            raise invalid_argument(f"expected one image in input '{name}', got {len(images)}")
        try:
            results = self._engine.run_one(images[0], arguments)
        except Exception as error:
            raise self._fault(error, None) from None
        outputs = {}
        for output, result in zip(self._interface.outputs, results, strict=True):
            _check_shape(output, result)
            if output.name in wanted:
                outputs[output.name] = np.ascontiguousarray(result)
        return BatchResult(outputs)

    def _execute_all(self, images: Sequence[SourceImage], arguments: Arguments, batch: Batch) -> BatchResult:
        arrays = [
            np.empty((len(images), *output.shape), dtype=output.format.datatype.numpy_dtype)
            if output.name in batch.requested_outputs
            else None
            for output in self._interface.outputs
        ]
        faults = self._engine.run(images, arguments, arrays)
        # Without batching there is one request, which may still bring several images.
        sizes = batch.request_sizes if sum(batch.request_sizes) == len(images) else (len(images),)
        outputs = {
            output.name: array
            for output, array in zip(self._interface.outputs, arrays, strict=True)
            if array is not None
        }
        return BatchResult(outputs, self._failures(faults, sizes))

    def _failures(self, faults: Mapping[int, Exception], sizes: Sequence[int]) -> dict[int, ServeError]:
        """Each request's first fault, by the request's place."""
        failures: dict[int, ServeError] = {}
        places = [(request, index) for request, size in enumerate(sizes) for index in range(size)]
        for row in sorted(faults):
            request, index = places[row]
            if request not in failures:
                failures[request] = self._fault(faults[row], index if sizes[request] > 1 else None)
        return failures

    def _fault(self, error: Exception, index: int | None) -> ServeError:
        """What the client is told; `index` is the image's place among those of its request."""
        if isinstance(error, ServeError):
            return error
        which = "the image in" if index is None else f"image {index} of"
        what = f"{which} input '{self._interface.image.spec.name}'"
        if isinstance(error, ImageError):
            is_raw = self._pipeline.decoder.input is InputKind.RAW
            return invalid_argument(f"{what} cannot be {'used' if is_raw else 'decoded'}: {error}")
        if isinstance(error, ArgumentError | PixelsError):
            return invalid_argument(f"{what} cannot be processed: {error}")
        _LOG.error("%s could not be processed", what, exc_info=error)
        return internal(f"{what} could not be processed: {str(error) or type(error).__name__}")

    def _sample_image(self) -> SourceImage:
        extent = self._interface.image.extent
        shape = (extent.height or _WARM_UP_SIDE, extent.width or _WARM_UP_SIDE, self._setup.color_format.channels)
        pixels = np.zeros(shape, dtype=np.uint8)
        if self._pipeline.decoder.input is InputKind.RAW:
            return pixels
        return cast(SourceImage, cv2.imencode(".jpg", pixels)[1])

    def _sample_arguments(self) -> Arguments:
        """The defaults of the keys that take them."""
        values = {
            binding.input: getattr(step.operation, binding.key)
            for step in self._pipeline.steps
            for binding in step.bindings
        }
        return {one.name: np.array([values[one.name]], dtype=one.datatype.numpy_dtype) for one in self._pipeline.inputs}


def _check_shape(output: Output, result: np.ndarray[Any, Any]) -> None:
    if any(declared not in (-1, actual) for declared, actual in zip(output.shape, result.shape, strict=True)):
        raise invalid_argument(
            f"output '{output.name}' must have shape {list(output.shape)}, but this image gives"
            f" {list(result.shape)}; resize images to a fixed size in the pipeline"
        )
