"""Runs batches on amd.rocal: decodes, groups and pads images, and ends the worker if rocAL hangs.

The load check compares rocAL's result for one picture with the CPU engine's. That reveals a version of rocAL, a driver
or a GPU that behaves differently from the tested ones, before a model's answers get worse.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np

from rocserve.backends.batch_sizes import default_batch_sizes
from rocserve.backends.rocal.amd.binding import import_binding
from rocserve.backends.rocal.amd.graph import (
    BrokenPipelineError,
    Canvas,
    Flags,
    Graph,
    OutputReader,
    PipelineRunner,
    limited_to,
)
from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.image_file import ImageError, SourceImage
from rocserve.backends.rocal.decoding.options import DecoderOptions
from rocserve.backends.rocal.engine import Arguments, CpuEngine, EngineSetup, Put
from rocserve.backends.rocal.image import DecodedImage, Extent, PixelsError, ResultExtent
from rocserve.backends.rocal.operations.base import Measurement
from rocserve.backends.rocal.pipeline import DECODED, Step, known_extents
from rocserve.core.errors import ServeError, invalid_argument, unavailable

_MOST_FLAGS = 2
"""Maximum number of flags per image. Each doubles the number of rocAL pipelines: a pipeline has the same flags for all
images, and its parameters cannot be changed once it is built (rocAL 2.3 accepts the change and keeps the old value)."""


def check(graph: Graph) -> None:
    """Check the pipeline. Raises ServeError (INVALID_ARGUMENT), with operation and reason, if rocAL cannot run it."""
    pipeline, binding, name = graph.setup.pipeline, graph.binding, graph.setup.model_name
    if len(pipeline.inputs) > _MOST_FLAGS:
        extra = pipeline.inputs[_MOST_FLAGS]
        step = next(step for step in pipeline.images for entry in step.bindings if entry.input == extra)
        reason = (
            f"input '{extra}' is one flag too many: each image may have {_MOST_FLAGS} with rocAL, any number with the"
            " CPU engine"
        )
        raise _cannot_run(name, step, reason)
    for step in graph.steps:
        operation, amd = step.call.operation, step.call.operation.amd
        refusal = amd.refusal(step.call.arguments, graph.known[step.sources[0]])
        if refusal is None and (amd.make is None or amd.function is not None):
            # The operation is a function of `fn`, which this version of amd.rocal may lack.
            function_name = amd.function or operation.name
            function = getattr(binding.functions, function_name, None)
            accepted = inspect.signature(function).parameters if function is not None else {}
            unknown = next((key for key in step.call.keywords if key not in accepted), None)
            if function is None:
                refusal = f"amd.rocal (version {binding.version}) has no such operation; use the CPU engine"
            elif unknown is not None:
                refusal = f"fn.{function_name} of amd.rocal takes no '{unknown}'; use the CPU engine"
        if refusal is not None:
            raise _cannot_run(name, step, refusal)


def _cannot_run(model_name: str, step: Step, reason: str) -> ServeError:
    return invalid_argument(f"model '{model_name}' cannot run on rocAL: {step.where}: {reason}")


def image_refusal(graph: Graph, height: int, width: int) -> str | None:
    """Return the reason why rocAL cannot process an image of this decoded size; None = it can."""
    results = {DECODED: ResultExtent.whole(Extent(height, width))}
    for step in graph.steps:
        valid = results[step.sources[0]].valid
        known = graph.known[step.sources[0]].valid
        text = step.call.operation.amd.image_refusal(step.call.arguments, known, *valid.sides)
        if text is not None:
            return f"{step.name}: {text}"
        try:
            results[step.index] = step.extent(results)
        except ValueError as error:
            return f"{step.name}: {error}"
    return None


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a picture has shown on rocAL and on the CPU engine."""

    largest_error: float
    """Of any output, in parts of the deviation of its values."""
    fault: str
    """Which output differs too much, and by how much; "" = none."""


class RocalEngine:
    """Runs a pipeline on rocAL. Concurrent threads wait for each other, because rocAL runs one batch at a time."""

    def __init__(self, setup: EngineSetup) -> None:
        """Build the rocAL pipelines of all batch sizes, so that no request waits for a build. Raises ServeError if
        amd.rocal is not installed or refuses the pipeline, if the pipeline needs a feature that rocAL lacks, or if
        libturbojpeg is missing."""
        binding, pipeline, limits = import_binding(), setup.pipeline, setup.pipeline.decoder
        # Largest side of an image in pixels if the decoder has no limit, as in amd.rocal. There must be one, because
        # rocAL reserves memory for the largest image.
        unlimited_side = 2000
        height, width = limits.max_height or unlimited_side, limits.max_width or unlimited_side
        if pipeline.decoder.is_raw:
            height = width = unlimited_side
        self._graph = graph = Graph(binding, setup, known_extents(pipeline), height, width)
        check(graph)
        try:
            self._decoder = Decoder(setup.color_format, pipeline.decoder)
        except RuntimeError as error:
            raise unavailable(str(error)) from None
        sizes = default_batch_sizes(setup.batch_size)
        self._canvas = Canvas(graph, sizes[-1])
        self._lock = threading.Lock()
        self._is_loaded = False
        self._runners: dict[Flags, list[PipelineRunner]] = {}
        """Flags -> runners by ascending batch size; empty if no output is an image."""
        for flags in itertools.product((False, True), repeat=len(pipeline.inputs)) if graph.outputs else ():
            with limited_to(600.0):
                self._runners[flags] = [PipelineRunner(graph, size, flags, self._canvas) for size in sizes]
        # The first of these heights and widths that the pipeline can process is the trial picture's.
        tried = [
            (min(graph.max_height, height), min(graph.max_width, width))
            for height, width in ((240, 320), (64, 64), (512, 512), (65535, 65535))
        ]
        self._tried_size = next((size for size in tried if image_refusal(graph, *size) is None), None)
        """Height and width of the trial picture; None = the pipeline can process none of the possible ones."""
        self._try_out()
        _LOG.debug(
            "model '%s' runs on amd.rocal %s, %s, with batches of %s",
            setup.model_name,
            binding.version,
            "in its CPU mode" if setup.device is None else "on the GPU",
            ", ".join(str(size) for size in sizes),
        )
        self._is_loaded = True
        # Decoding releases the GIL, so threads distribute a batch over the CPUs.
        self._pool = ThreadPoolExecutor(setup.threads, "rocal-decode") if setup.threads > 1 else None

    def _try_out(self) -> None:
        """Run each rocAL pipeline once, if rocAL can process a trial picture, so that the first request is fast and a
        broken pipeline is found now."""
        if self._tried_size is not None:
            self._canvas.place([self._picture(self._tried_size)])
            for runners in self._runners.values():
                for runner in runners:
                    self._run(runner, 1)

    def _picture(self, size: tuple[int, int]) -> np.ndarray[Any, Any]:
        return picture(*size, self._graph.setup.color_format.channels)

    def compare(self) -> Comparison | None:
        """Compare with the CPU engine, with all flags false and at the largest batch size; None = no output is an
        image, or rocAL can process no trial picture."""
        setup = self._graph.setup
        flags = dict.fromkeys(setup.pipeline.inputs, False)
        runners = self._runners.get(tuple(flags.values()))
        if self._tried_size is None or not runners:
            return None
        pixels = self._picture(self._tried_size)
        reference = CpuEngine(
            replace(setup, pipeline=replace(setup.pipeline, decoder=DecoderOptions(is_raw=True)), threads=1)
        )
        expected = reference.run_image(pixels, flags)
        with self._lock:
            self._canvas.place([pixels])
            found = [_compared(one.place, one.result(0), expected[one.place]) for one in self._run(runners[-1], 1)]
        return Comparison(max(one.largest_error for one in found), "; ".join(filter(None, (e.fault for e in found))))

    def run(self, images: Sequence[SourceImage], arguments: Arguments, put: Put) -> Mapping[int, Exception]:
        failures: dict[int, Exception] = {}
        # Images are decoded in parallel, but in portions, because a request without batching may contain thousands.
        map_images = map if self._pool is None else self._pool.map
        most = max(len(self._canvas.sizes), self._graph.setup.threads)
        for start in range(0, len(images), most):
            decoded = map_images(self._decoded_or_error, images[start : start + most])
            failures.update(self._run_decoded(dict(enumerate(decoded, start)), arguments, put))
        return failures

    def close(self) -> None:
        # rocAL's pipelines are not released: that would wait for rocAL's threads, which wait for the next batch.
        if self._pool is not None:
            self._pool.shutdown()

    def _run_decoded(
        self, images: Mapping[int, DecodedImage | Exception], arguments: Arguments, put: Put
    ) -> Mapping[int, Exception]:
        pipeline = self._graph.setup.pipeline
        decoded: dict[int, DecodedImage] = {}
        failures: dict[int, Exception] = {}
        for row, image in images.items():
            if isinstance(image, Exception):
                failures[row] = image
                continue
            decoded[row] = image
            for output, step in enumerate(pipeline.outputs):
                if isinstance(step, Measurement):
                    put(row, output, step.measure(image))
        with self._lock:
            # Images are grouped by flags, because rocAL has one value of a flag for a whole batch.
            groups: dict[Flags, list[int]] = {}
            for row in decoded:
                groups.setdefault(tuple(bool(arguments[name][row]) for name in pipeline.inputs), []).append(row)
            most = len(self._canvas.sizes)
            for flags, rows in groups.items():
                runners = self._runners.get(flags, [])  # Empty if no output is an image.
                for start in range(0, len(rows) if runners else 0, most):
                    chunk = rows[start : start + most]
                    runner = next(runner for runner in runners if runner.batch_size >= len(chunk))
                    self._canvas.place([decoded[row].pixels for row in chunk])
                    results = self._run(runner, len(chunk))
                    for index, row in enumerate(chunk):
                        try:
                            for result in results:
                                put(row, result.place, result.result(index))
                        except Exception as error:  # Any exception belongs to this image alone.
                            failures[row] = error
        return failures

    def _run(self, runner: PipelineRunner, count: int) -> Sequence[OutputReader]:
        """Run the canvas's images. Ends the process if rocAL cannot continue."""
        try:
            return runner.run(count)
        except BrokenPipelineError as error:
            if not self._is_loaded:
                raise unavailable(f"rocAL cannot run the pipeline: {error}") from None
            # Nothing in this process can repair or even release the pipeline. The server starts a new worker.
            _LOG.critical("rocAL failed, the worker ends: %s", error)
            # The exit status of an instance that cannot continue.
            os._exit(70)

    def _decoded_or_error(self, image: SourceImage) -> DecodedImage | Exception:
        try:
            decoded = self._decoder.decode(image)
            height, width = decoded.pixels.shape[:2]
            graph = self._graph
            if height > graph.max_height or width > graph.max_width:
                return ImageError(
                    f"its {width}x{height} pixels are more than the {graph.max_width}x{graph.max_height} that"
                    " rocAL has memory for; send it smaller, or have it scaled: max_width and max_height of the"
                    ' pipeline\'s "decoder"'
                )
            why_not = image_refusal(graph, height, width)
            return decoded if why_not is None else PixelsError(why_not)
        except ImageError as error:
            # The traceback would keep its frames alive, for perhaps thousands of images.
            return error.with_traceback(None)
        except Exception as error:
            return error


def _compared(output: int, found: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> Comparison:
    if found.shape != right.shape:
        return Comparison(math.inf, f"output {output} has shape {list(found.shape)}, not {list(right.shape)}")
    right = right.astype(np.float64)
    mean = float(np.mean(np.abs(found - right)))
    # If all values are nearly the same, their size is the only scale.
    scale = float(np.std(right)) or float(np.mean(np.abs(right))) or 1.0
    # Share of the standard deviation of an output's values. Kernels with another rounding differ by a hundredth of it.
    # Exchanged channels, another part of the picture or an older picture differ by a third and more.
    tolerance = 0.05
    # Not `>`, which NaN never is.
    if mean <= tolerance * scale:
        return Comparison(mean / scale, "")
    place = np.unravel_index(int(np.argmax(np.abs(found - right))), right.shape)
    return Comparison(
        mean / scale,
        f"output {output} differs by {mean:.3g} on average, where its values have a deviation of {scale:.3g}: at"
        f" {[int(index) for index in place]} rocAL gives {float(found[place]):.5g}, the CPU engine"
        f" {float(right[place]):.5g}",
    )


def picture(height: int, width: int, channels: int) -> np.ndarray[Any, Any]:
    """Return a picture that differs everywhere: soft spots of all colours, the same in every run."""
    spots = np.random.default_rng(7).integers(0, 256, (6, 8, channels), dtype=np.uint8)
    return cv2.resize(spots, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, channels)
