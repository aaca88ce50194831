"""Serves a rocAL pipeline in a worker: batches of requests in, tensors out, each bad image to its own request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

import cv2
import numpy as np

from rocserve.backends.base import Batch, BatchResult
from rocserve.backends.rocal.decoding.header import ImageError, SourceImage
from rocserve.backends.rocal.decoding.options import InputKind
from rocserve.backends.rocal.engine import Arguments, BatchEngine, EngineSetup
from rocserve.backends.rocal.image import PixelsError
from rocserve.backends.rocal.interface import ImageInput, Interface
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal, invalid_argument
from rocserve.core.requests import Signature
from rocserve.core.tensors import Tensor, bytes_elements

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
                self._engine.run_one(image, {name: np.zeros(1, dtype=bool) for name in self._pipeline.inputs})
            except (ImageError, PixelsError) as error:
                # Clients' images may be of another size.
                _LOG.info("not warmed up: an image of %d pixels a side does not do (%s)", _WARM_UP_SIDE, error)
            except Exception as error:
                raise self._fault(error, None) from error

    def execute(self, batch: Batch) -> BatchResult:
        image = self._interface.image
        images = images_of(batch.inputs[image.spec.name], image)
        arguments = flags_of(batch.inputs, self._pipeline.inputs, len(images))
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
            if any(declared not in (-1, actual) for declared, actual in zip(output.shape, result.shape, strict=True)):
                raise invalid_argument(
                    f"output '{output.name}' must have shape {list(output.shape)}, but this image gives"
                    f" {list(result.shape)}; resize images to a fixed size in the pipeline"
                )
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
        """The error for the client; `index` is the image's place among those of its request."""
        if isinstance(error, ServeError):
            return error
        which = "the image in" if index is None else f"image {index} of"
        what = f"{which} input '{self._interface.image.spec.name}'"
        if isinstance(error, ImageError):
            is_raw = self._pipeline.decoder.input is InputKind.RAW
            return invalid_argument(f"{what} cannot be {'used' if is_raw else 'decoded'}: {error}")
        if isinstance(error, PixelsError):
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


def images_of(tensor: Tensor, image: ImageInput) -> Sequence[SourceImage]:
    """The images in a tensor, as views.

    Raises:
        ServeError: INVALID_ARGUMENT when a row of BYTES holds several, or the data is no BYTES tensor's.
    """
    shape = tensor.shape
    if tensor.datatype is DataType.BYTES:
        if len(shape) == 2 and shape[1] != 1:
            raise invalid_argument(f"expected one image in each row of input '{tensor.name}', got shape {list(shape)}")
        return bytes_elements(tensor.data, tensor.element_count, tensor.name)
    array = tensor.numpy()
    return list(array) if array.ndim > image.image_rank else [array]


def flags_of(tensors: Mapping[str, Tensor], names: Sequence[str], images: int) -> Arguments:
    """Of each input one flag for each image; all but 0 is true.

    Raises:
        ServeError: INVALID_ARGUMENT when there are more or fewer values than images.
    """
    flags = {}
    for name in names:
        values = tensors[name].numpy().reshape(-1)
        if len(values) != images:
            raise invalid_argument(
                f"input '{name}' must have one value for each of the {images} images, got {len(values)}"
            )
        flags[name] = values != 0
    return flags
