"""Runs a pipeline over a batch: the seam between the model, which knows requests, and its engines, which do not.

There are two engines: ThreadedEngine here works image by image on the CPU, `amd/engine.py` hands whole batches to
rocAL. `load` in `backend.py` chooses one and makes it of an EngineSetup.
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
from rocserve.backends.rocal.decoding.header import ImageError, SourceImage
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.image import Image, PixelsError
from rocserve.backends.rocal.operations.base import Measurement
from rocserve.backends.rocal.pipeline import DECODED, Layout, OutputFormat, Pipeline, Step
from rocserve.core.datatypes import DataType

Arguments = Mapping[str, np.ndarray[Any, Any]]
"""By the names of the pipeline's inputs: one flag for each image, [images], BOOL."""

Put = Callable[[int, int, np.ndarray[Any, Any]], None]
"""Takes a result: the image's place, the output's in the pipeline's order, and the array, which is good until it
returns. Raises: PixelsError: the image's result is not as it was declared."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """All that an engine is made of."""

    model_name: str
    pipeline: Pipeline
    color_format: ColorFormat
    formats: tuple[OutputFormat, ...]
    """How each output is handed out, in the pipeline's order."""
    batch_size: int
    """How many images a batch usually has at most: max_batch_size, or 1 without batching. A single request of a model
    without batching may still bring more."""
    threads: int
    """How many CPU threads the engine may keep busy with the images of a batch."""
    device: int | None
    """The GPU's number as the model's configuration counts them; None = on the CPU. A worker sees only that one GPU."""


class BatchEngine(Protocol):
    """A pipeline ready to run. Several threads may call it at once (one for each instance of the model)."""

    def run(self, images: Sequence[SourceImage], arguments: Arguments, put: Put) -> Mapping[int, Exception]:
        """Give each image's results to `put`, which several threads may call at once; say which images failed, by their
        places. One bad image never harms another.

        A failure is an ImageError or a PixelsError where the client is at fault, with a text that goes on after
        "image 3 of input 'X'"; any other exception where the engine is. An exception that is raised
        fails the whole batch.
        """

    def close(self) -> None:
        """End its threads and give back what it holds; nothing is called after it."""


@dataclass(frozen=True, slots=True)
class PipelineEngine:
    """A pipeline ready to run image by image on the CPU; safe to use on several threads at once."""

    pipeline: Pipeline
    decoder: Decoder
    formats: Sequence[OutputFormat]
    """Those of the pipeline's outputs, in their order."""

    def run(
        self, encoded: SourceImage, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> list[np.ndarray[Any, Any]]:
        """The outputs for one image, each in its datatype and layout (the arrays need not be contiguous), with the
        values of the pipeline's inputs. Raises: ImageError: it cannot be decoded. PixelsError: nor worked on."""
        flags = {name: bool(value) for name, value in arguments.items()}
        images, measured = self._decode(encoded)
        outputs: list[np.ndarray[Any, Any]] = []
        for index, step in enumerate(self.pipeline.steps):
            if isinstance(step, Measurement):
                outputs.append(measured[index])
                continue
            if step.is_read:
                # The next operation works on bytes, as in rocAL, whatever is handed out here.
                images[step.index] = step.run(images, flags, as_float=False)
            if step.is_output:
                outputs.append(self._output(step, self.formats[len(outputs)], images, flags))
            # A large image is large in each step: what nobody reads any more makes room for what comes.
            for source in step.read_last:
                del images[source]
        return outputs

    def _decode(self, encoded: SourceImage) -> tuple[dict[int, Image], dict[int, np.ndarray[Any, Any]]]:
        """The decoder's image, as the first of those that steps read, and all measurements of it, by their places: it
        need not be kept for those that come late."""
        decoded = self.decoder.decode(encoded)
        measured = {
            index: step.measure(decoded)
            for index, step in enumerate(self.pipeline.steps)
            if isinstance(step, Measurement)
        }
        return {DECODED: Image.whole(decoded.pixels)}, measured

    @staticmethod
    def _output(
        step: Step, form: OutputFormat, images: Mapping[int, Image], flags: Mapping[str, bool]
    ) -> np.ndarray[Any, Any]:
        """What a step hands out, whose image is among the images if a later step reads it."""
        if step.is_read and form.datatype is DataType.UINT8:
            result = images[step.index]
        else:
            result = step.run(images, flags, as_float=form.datatype is not DataType.UINT8)
        pixels = result.padded
        if form.datatype is DataType.FP16:
            pixels = pixels.astype(np.float16)
        return pixels if form.layout is Layout.NHWC else pixels.transpose(2, 0, 1)


class ThreadedEngine:
    """A BatchEngine. All instances of the model share its threads, so that they never are more than was asked for."""

    def __init__(self, setup: EngineSetup) -> None:
        """Raises: RuntimeError: libturbojpeg is not installed."""
        # Images are worked on side by side; threads within one would only get in each other's way.
        cv2.setNumThreads(0)
        decoder = Decoder(setup.color_format, setup.pipeline.decoder)
        self._engine = PipelineEngine(setup.pipeline, decoder, setup.formats)
        # Decoding and resizing release the GIL, so threads spread a batch over the CPUs.
        self._threads = setup.threads
        self._pool = ThreadPoolExecutor(setup.threads, "rocal-image") if setup.threads > 1 else None

    def run(self, images: Sequence[SourceImage], arguments: Arguments, put: Put) -> Mapping[int, Exception]:
        faults: dict[int, Exception] = {}
        # All threads take their images from it: a request may have a million that are empty.
        rows = iter(range(len(images)))

        def hand_out(row: int, results: Sequence[np.ndarray[Any, Any]]) -> None:
            for output, result in enumerate(results):
                put(row, output, result)

        def work() -> None:
            for row in rows:
                try:
                    # No variable keeps the results of one image while the next one is worked on.
                    hand_out(row, self._engine.run(images[row], {name: each[row] for name, each in arguments.items()}))
                except (ImageError, PixelsError) as error:
                    # Nobody asks where it was raised, and the frames would be kept.
                    faults[row] = error.with_traceback(None)
                except Exception as error:  # Whatever it is, it is this image's own.
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
