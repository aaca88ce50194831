"""Runs batches of images through a model's rocAL pipelines: decodes, sorts, pads, and gives each image its results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

from rocserve.backends.rocal.amd.feeding import Canvas
from rocserve.backends.rocal.amd.graph import GraphSettings
from rocserve.backends.rocal.amd.outputs import BatchOutput
from rocserve.backends.rocal.amd.plan import Flags, Plan
from rocserve.backends.rocal.amd.runner import BrokenPipelineError, PipelineRunner
from rocserve.backends.rocal.batch_engine import Arguments
from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.faults import ImageError
from rocserve.backends.rocal.decoding.source import SourceImage
from rocserve.backends.rocal.engine import OutputFormat
from rocserve.backends.rocal.image import DecodedImage, Pixels, PixelsError
from rocserve.backends.rocal.pipeline import Layout


class RocalEngine:
    """A pipeline on rocAL. Threads that call it at once wait for each other, since rocAL runs one batch at a time."""

    def __init__(
        self,
        settings: GraphSettings,
        decoder: Decoder,
        formats: tuple[OutputFormat, ...],
        runners: Mapping[Flags, Sequence[PipelineRunner]],
        canvas: Canvas,
        threads: int,
        on_broken: Callable[[str], NoReturn],
    ) -> None:
        """
        `runners`: for each combination of flags, by their batch sizes; all fed from `canvas`.
        `on_broken`: called with rocAL's reason when it can go on no more.
        """
        self._settings = settings
        self._decoder = decoder
        self._formats = formats
        self._runners = runners
        self._canvas = canvas
        self._on_broken = on_broken
        self._lock = threading.Lock()
        # Decoding releases the GIL, so threads spread a batch over the CPUs.
        self._pool = ThreadPoolExecutor(threads, "rocal-decode") if threads > 1 else None

    def run(
        self, images: Sequence[SourceImage], arguments: Arguments, outputs: Sequence[np.ndarray[Any, Any] | None]
    ) -> Mapping[int, Exception]:
        failures: dict[int, Exception] = {}

        def write(row: int, output: int, result: np.ndarray[Any, Any]) -> None:
            array = outputs[output]
            if array is None:
                return
            if result.shape != array.shape[1:]:
                failures[row] = RuntimeError(f"rocAL gave shape {list(result.shape)}, not {list(array.shape[1:])}")
            else:
                np.copyto(array[row], result)

        failures.update(self._process(images, arguments, write))
        return failures

    def run_one(self, image: SourceImage, arguments: Arguments) -> Sequence[np.ndarray[Any, Any]]:
        results: dict[int, np.ndarray[Any, Any]] = {}

        def keep(row: int, output: int, result: np.ndarray[Any, Any]) -> None:
            results[output] = np.array(result, order="C")

        failures = self._process([image], arguments, keep)
        if failures:
            raise failures[0]
        return [results[output] for output in range(len(self._formats))]

    def close(self) -> None:
        # rocAL's pipelines are left to the end of the process: releasing one waits for its threads, and they wait for
        # the next batch.
        if self._pool is not None:
            self._pool.shutdown()

    def _process(
        self,
        images: Sequence[SourceImage],
        arguments: Arguments,
        take: Callable[[int, int, np.ndarray[Any, Any]], None],
    ) -> dict[int, Exception]:
        """Gives `take` each result: the image's place, the output's, and the array, good for this call only."""
        failures: dict[int, Exception] = {}
        decoded: dict[int, DecodedImage] = {}
        taken = map(self._taken_in, images) if self._pool is None else self._pool.map(self._taken_in, images)
        for row, image in enumerate(taken):
            if isinstance(image, Exception):
                failures[row] = image
            else:
                decoded[row] = image
                for measurement in self._settings.plan.measurements:
                    take(row, measurement.output, measurement.operation.measure(image))
        with self._lock:
            for flags, rows in _grouped(self._settings.plan, arguments, list(decoded)).items():
                for chunk in _chunks(rows, self._canvas.capacity):
                    self._run_chunk(flags, chunk, [decoded[row].pixels for row in chunk], take, failures)
        return failures

    def _run_chunk(
        self,
        flags: Flags,
        rows: Sequence[int],
        pixels: Sequence[Pixels],
        take: Callable[[int, int, np.ndarray[Any, Any]], None],
        failures: dict[int, Exception],
    ) -> None:
        if flags not in self._runners:
            return  # No output is an image.
        runner = next(runner for runner in self._runners[flags] if runner.batch_size >= len(rows))
        self._canvas.place(pixels)
        try:
            results = runner.run(len(rows))
        except BrokenPipelineError as error:
            self._on_broken(str(error))
        for index, row in enumerate(rows):
            try:
                for result in results:
                    self._take_result(result, index, row, take)
            except RuntimeError as error:
                failures[row] = error

    def _take_result(
        self, result: BatchOutput, index: int, row: int, take: Callable[[int, int, np.ndarray[Any, Any]], None]
    ) -> None:
        output = result.step.output
        assert output is not None
        image = result.image(index)
        output_format = self._formats[output]
        image = image.astype(output_format.datatype.numpy_dtype, copy=False)
        take(row, output, image if output_format.layout is Layout.NHWC else image.transpose(2, 0, 1))

    def _taken_in(self, image: SourceImage) -> DecodedImage | Exception:
        """The image decoded, or what is wrong with it: rocAL gets to see good images only."""
        try:
            decoded = self._decoder.decode(image)
            height, width = decoded.pixels.shape[:2]
            settings = self._settings
            if height > settings.max_height or width > settings.max_width:
                return ImageError(
                    f"its {width}x{height} pixels are more than the {settings.max_width}x{settings.max_height} that"
                    " rocAL has memory for; send it smaller, or have it scaled: max_width and max_height of the"
                    ' pipeline\'s "decoder"'
                )
            misfit = settings.plan.misfit(height, width)
            return decoded if misfit is None else PixelsError(misfit)
        except Exception as error:
            return error


def _grouped(plan: Plan, arguments: Arguments, rows: Sequence[int]) -> dict[Flags, list[int]]:
    """The images that have the same flags, since rocAL has one value for a whole batch."""
    groups: dict[Flags, list[int]] = {}
    for row in rows:
        flags = tuple(bool(arguments[name][row]) for name in plan.flag_inputs)
        groups.setdefault(flags, []).append(row)
    return groups


def _chunks(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
