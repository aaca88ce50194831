"""Runs a pipeline over a batch on the CPU: image by image, on threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np

from rocserve.backends.rocal.batch_engine import Arguments, EngineSetup
from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.source import SourceImage
from rocserve.backends.rocal.engine import PipelineEngine


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
