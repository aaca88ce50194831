"""Runs a pipeline on a batch, as the interface between the model, which knows requests, and the engines, which do not.

There are two engines. CpuEngine processes image after image on the CPU; `amd/engine.py` passes whole batches to
rocAL. `load` in `backend.py` chooses one and creates it from an EngineSetup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import cv2
import numpy as np

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.image_file import ImageError, SourceImage
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.image import Image, PixelsError
from rocserve.backends.rocal.operations.base import Measurement
from rocserve.backends.rocal.pipeline import DECODED, Layout, OutputFormat, Pipeline, Step
from rocserve.core.datatypes import DataType

Arguments = Mapping[str, np.ndarray[Any, Any]]
"""One flag per image, [images] BOOL, by the name of the pipeline's input."""

Put = Callable[[int, int, np.ndarray[Any, Any]], None]
"""Takes the image's index, the output's index in the pipeline's order, and the array, which is valid only during the
call. Raises PixelsError if the result does not have the declared shape."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is made for."""

    model_name: str
    pipeline: Pipeline
    color_format: ColorFormat
    formats: tuple[OutputFormat, ...]
    batch_size: int
    """Usual maximum of images in a batch: max_batch_size, or 1 without batching. A single request to a model without
    batching may still contain more."""
    threads: int
    """CPU threads for the images of a batch."""
    device: int | None
    """The GPU's number in the configuration; None = CPU. A worker sees only this GPU."""


class BatchEngine(Protocol):
    """Runs a pipeline. The threads of several instances may call it at the same time."""

    def run(self, images: Sequence[SourceImage], arguments: Arguments, put: Put) -> Mapping[int, Exception]:
        """Pass each image's results to `put`, also from several threads at a time. Return the errors by image index.
        A bad image does not affect the others. An error is an ImageError or a PixelsError if the client is at fault,
        with a text that continues "image 3 of input 'X'"; any other exception if the engine is. If `run` raises, the
        whole batch has failed."""

    def close(self) -> None:
        """End the threads and release all resources. Nothing is called afterwards."""


class CpuEngine:
    """Implements BatchEngine with threads, which all instances of the model share, so that `threads` bounds them."""

    def __init__(self, setup: EngineSetup) -> None:
        """Raises RuntimeError if libturbojpeg is not installed."""
        # Images are processed in parallel. OpenCV's threads within one image would only compete with each other.
        cv2.setNumThreads(0)
        self._pipeline, self._formats = setup.pipeline, setup.formats
        self._decoder = Decoder(setup.color_format, setup.pipeline.decoder)
        # Decoding and resizing release the GIL, so threads distribute a batch over the CPUs.
        self._threads = setup.threads
        self._pool = ThreadPoolExecutor(setup.threads, "rocal-image") if setup.threads > 1 else None

    def run(self, images: Sequence[SourceImage], arguments: Arguments, put: Put) -> Mapping[int, Exception]:
        faults: dict[int, Exception] = {}
        # All threads take images from one iterator, because a request may contain a million empty images.
        rows = iter(range(len(images)))

        def hand_out(row: int, results: Sequence[np.ndarray[Any, Any]]) -> None:
            for output, result in enumerate(results):
                put(row, output, result)

        def work() -> None:
            for row in rows:
                try:
                    # No variable may keep one image's results while the next image is processed.
                    hand_out(
                        row, self.run_image(images[row], {name: bool(one[row]) for name, one in arguments.items()})
                    )
                except (ImageError, PixelsError) as error:
                    # The traceback is not needed and would keep its frames alive.
                    faults[row] = error.with_traceback(None)
                except Exception as error:  # Any other exception belongs to this image alone, too.
                    faults[row] = error

        if self._pool is None or len(images) == 1:
            work()
        else:
            for worker in [self._pool.submit(work) for _ in range(min(self._threads, len(images)))]:
                worker.result()
        return faults

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run_image(
        self, encoded: SourceImage, flags: Mapping[str, bool] = MappingProxyType({})
    ) -> list[np.ndarray[Any, Any]]:
        """Return one image's outputs in their datatypes and layouts; the arrays may be non-contiguous. `flags`: the
        values of the pipeline's inputs. Raises ImageError if the image cannot be decoded, PixelsError if it cannot be
        processed."""
        images, measured = self._decode(encoded)
        outputs: list[np.ndarray[Any, Any]] = []
        for index, step in enumerate(self._pipeline.steps):
            if isinstance(step, Measurement):
                outputs.append(measured[index])
                continue
            if step.is_read:
                # The next operation works on bytes, as in rocAL, whatever the datatype of this output is.
                images[step.index] = step.run(images, flags, as_float=False)
            if step.is_output:
                outputs.append(self._output(step, self._formats[len(outputs)], images, flags))
            # Every step's copy of a large image is large, so an image is freed after its last use.
            for source in step.read_last:
                del images[source]
        return outputs

    def _decode(self, encoded: SourceImage) -> tuple[dict[int, Image], dict[int, np.ndarray[Any, Any]]]:
        """Decode the image and run all measurements, so that no later step needs the decoded image for them."""
        decoded = self._decoder.decode(encoded)
        measured = {
            index: step.measure(decoded)
            for index, step in enumerate(self._pipeline.steps)
            if isinstance(step, Measurement)
        }
        return {DECODED: Image.whole(decoded.pixels)}, measured

    @staticmethod
    def _output(
        step: Step, form: OutputFormat, images: Mapping[int, Image], flags: Mapping[str, bool]
    ) -> np.ndarray[Any, Any]:
        """Return a step's output. If a later step reads the step's image, `images` already contains it."""
        if step.is_read and form.datatype is DataType.UINT8:
            result = images[step.index]
        else:
            result = step.run(images, flags, as_float=form.datatype is not DataType.UINT8)
        pixels = result.padded
        if form.datatype is DataType.FP16:
            pixels = pixels.astype(np.float16)
        return pixels if form.layout is Layout.NHWC else pixels.transpose(2, 0, 1)
