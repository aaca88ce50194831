"""Runs batches on amd.rocal: compares them with the CPU engine, then decodes, sorts and pads; ends the worker when
rocAL does not come back.

The comparison, on one picture when a model is loaded, shows a version of rocAL, a driver or a GPU that this was not
written against, before a model's answers are worse than they should be.

A call into rocAL holds Python's global lock until it returns, so no thread of this process could notice, let alone
interrupt, one that never does: not the one that watches the server, not a timer. The faulthandler module has the one
timer that needs no lock. It writes where every thread is and ends the process, which the server then starts again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import itertools
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn

import cv2
import numpy as np

from rocserve.backends.rocal.amd.binding import Binding, import_binding
from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.header import ImageError, SourceImage
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions, InputKind
from rocserve.backends.rocal.engine import Arguments, EngineSetup, PipelineEngine
from rocserve.backends.rocal.image import DecodedImage, Extent, Image, Pixels, PixelsError, ResultExtent
from rocserve.backends.rocal.operations.base import Node, Tensor
from rocserve.backends.rocal.pipeline import DECODED, Layout, Pipeline, Plan, PlannedStep, Step, make_plan
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument, unavailable

_PREFETCH_DEPTH = 2
"""Batches that rocAL holds at once; the least that it allows. More are never under way."""


_THREADS = 1
"""Of rocAL's CPU mode. RPP's kernels write some bytes past the end of an image, which are the first of the next one of
the batch: with more threads these are sometimes written after their right values."""


_MOST_FLAGS = 2
"""Inputs that give a flag for each image. Each doubles the rocAL pipelines: one has the same flags for all images, and
its parameters cannot be changed once it is built (rocAL 2.3 takes the change and keeps the old value)."""

Flags = tuple[bool, ...]
"""The values of the pipeline's inputs for an image, in the pipeline's order."""


def variants(pipeline: Pipeline) -> list[Flags]:
    """All values that the inputs of an image can have."""
    return list(itertools.product((False, True), repeat=len(pipeline.inputs)))


def check(model_name: str, pipeline: Pipeline, plan: Plan, binding: Binding) -> None:
    """Raises: ServeError: INVALID_ARGUMENT, rocAL cannot run the pipeline; the text says which operation and why."""
    if len(pipeline.inputs) > _MOST_FLAGS:
        extra = pipeline.inputs[_MOST_FLAGS]
        step = next(step for step in pipeline.steps for entry in step.bindings if entry.input == extra)
        reason = (
            f"input '{extra}' is one flag too many: each image may have {_MOST_FLAGS} with rocAL, any number with the"
            " CPU engine"
        )
        raise _impossible(model_name, step, reason)
    for planned in plan.steps:
        operation = planned.call.operation
        refusal, amd = operation.amd.refusal(planned.call.arguments, planned.source), operation.amd
        if refusal is None and (amd.make is None or amd.function is not None):
            # It is a function of `fn`, which this amd.rocal may not have.
            name = amd.function or operation.name
            function = getattr(binding.functions, name, None)
            accepted = inspect.signature(function).parameters if function is not None else {}
            unknown = next((key for key in operation.keys if key not in accepted), None)
            if function is None:
                refusal = f"amd.rocal (version {binding.version}) has no such operation; use the CPU engine"
            elif unknown is not None:
                refusal = f"fn.{name} of amd.rocal takes no '{unknown}'; use the CPU engine"
        if refusal is not None:
            raise _impossible(model_name, planned.step, refusal)


def _impossible(model_name: str, step: Step, reason: str) -> ServeError:
    return invalid_argument(f"model '{model_name}' cannot run on rocAL: {step.where}: {reason}")


def misfit(plan: Plan, height: int, width: int) -> str | None:
    """Why an image of this decoded size cannot go through rocAL; None = it can."""
    results = {DECODED: ResultExtent.whole(Extent(height, width))}
    for planned in plan.steps:
        step, call = planned.step, planned.call
        valid = results[step.sources[0]].valid
        text = call.operation.amd.misfit(call.arguments, planned.source.valid, *valid.sides)
        if text is not None:
            return f"{step.name}: {text}"
        try:
            results[step.index] = call.extent(*(results[source] for source in step.sources))
        except ValueError as error:
            return f"{step.name}: {error}"
    return None


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What all rocAL pipelines of a model have in common."""

    binding: Binding
    plan: Plan
    inputs: tuple[str, ...]
    """The pipeline's, in its order."""
    color_format: ColorFormat
    max_height: int
    max_width: int
    """Of the pixels that are fed."""
    on_gpu: bool

    @property
    def is_grey(self) -> bool:
        return self.color_format is ColorFormat.U8

    @property
    def source_layout(self) -> Any:
        """Of the images that are fed, and of all between operations: rocAL has grey images as planes."""
        types = self.binding.types
        return types.NCHW if self.is_grey else types.NHWC


def output_type(settings: GraphSettings, step: PlannedStep) -> tuple[Any, Any]:
    """The layout and the datatype in which rocAL gives an output; the rest of the conversion is done here.

    FP16 is made of FP32, as on the CPU.
    """
    types = settings.binding.types
    assert step.format is not None
    form = step.call.operation.amd
    as_float = step.format.datatype is not DataType.UINT8 and form.gives_floats(step.call.arguments)
    as_asked = form.gives_layouts and not settings.is_grey
    as_planes = step.format.layout is Layout.NCHW or form.only_planes
    asked = types.NCHW if as_planes else types.NHWC
    return asked if as_asked else settings.source_layout, types.FLOAT if as_float else types.UINT8


def _refused(binding: Binding, handle: Any, what: str) -> ServeError:
    reason = binding.fault(handle) or "rocAL gives no reason"
    return unavailable(f"rocAL (version {binding.version}) refuses {what}: {reason}")


def _add(node: Node, step: Step, values: Mapping[str, bool]) -> Tensor:
    call = step.call_with(values)
    form = call.operation.amd
    try:
        if form.make is not None:
            tensor = form.make(node, call)
        else:
            tensor = node.call(form.function or call.operation.name, call.values)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise unavailable(f"rocAL (version {node.binding.version}) refuses {step.where}: {error}") from error
    # rocAL gives None in place of a node that it refuses.
    if tensor is None:
        raise _refused(node.binding, node.handle, step.where)
    return tensor


class Canvas:
    """Memory for a batch of images, each at the top left of a field of the largest size.

    rocAL takes the fields' addresses and reads them at some time before the batch's outputs are there. So a canvas
    lives as long as the pipelines that are fed from it, and is filled anew only when those outputs have been read.
    """

    def __init__(self, settings: GraphSettings, count: int) -> None:
        channels = settings.color_format.channels
        self.capacity = count
        """How many images it holds."""
        self._fields = np.zeros((count, settings.max_height, settings.max_width, channels), dtype=np.uint8)
        self.sizes = [(0, 0)] * count
        """Height and width of each image that was placed last."""

    def place(self, images: Sequence[Pixels]) -> None:
        """Put images in the first fields; none is larger than a field."""
        for index, pixels in enumerate(images):
            height, width = pixels.shape[:2]
            last_height, last_width = self.sizes[index]
            if height < last_height or width < last_width:
                # Kernels that read a little past an image must not find another client's.
                self._fields[index, :last_height, :last_width] = 0
            self._fields[index, :height, :width] = pixels
            self.sizes[index] = height, width

    def buffers(self, count: int, total: int) -> list[np.ndarray[Any, Any]]:
        """The first `count` fields and the first once more, again and again, up to `total`: 1-D, UINT8."""
        flat = self._fields.reshape(len(self._fields), -1)
        return [flat[index if index < count else 0] for index in range(total)]

    def sizes_of(self, count: int, total: int) -> list[tuple[int, int]]:
        """As `buffers`, the heights and widths."""
        return [self.sizes[index if index < count else 0] for index in range(total)]


class OutputReader:
    """Copies one output of one rocAL pipeline: the results of a batch, good until the next is read."""

    def __init__(self, settings: GraphSettings, planned: PlannedStep, batch_size: int) -> None:
        self.planned = planned
        layout, datatype = output_type(settings, planned)
        self._planes = layout == settings.binding.types.NCHW
        self._datatype = np.dtype(np.float32 if datatype == settings.binding.types.FLOAT else np.uint8)
        self._channels = settings.color_format.channels
        self._batch_size = batch_size
        self._data: np.ndarray[Any, Any] | None = None
        """Of rocAL's largest size; only a part of each image is its result."""
        self._regions = np.zeros((batch_size, 4), dtype=np.uint32)
        """x, y, width, height of the part that rocAL calls valid, for each image."""

    def read(self, tensor: Any) -> None:
        """Raises: RuntimeError: the tensor is not what the graph was built to give."""
        if self._data is None:
            dimensions = tuple(int(side) for side in tensor.dimensions())
            channels = dimensions[1 if self._planes else -1]
            if len(dimensions) != 4 or dimensions[0] != self._batch_size or channels != self._channels:
                raise RuntimeError(f"expected {self._batch_size} images of {self._channels} channels, got {dimensions}")
            if np.dtype(tensor.dtype()) != self._datatype:
                raise RuntimeError(f"expected {self._datatype}, got {tensor.dtype()}")
            self._data = np.empty(dimensions, dtype=self._datatype)
        # Also from a GPU's memory; what copy_data fills must be as large as the tensor, to the byte.
        tensor.copy_data(self._data)
        tensor.copy_roi(self._regions)

    def image(self, index: int) -> Pixels:
        """The result for one image, height x width x channels; zeros where rocAL wrote nothing. Raises: RuntimeError:
        rocAL calls a part valid that is not in the result."""
        assert self._data is not None
        size = self.planned.result.size
        image: Pixels = self._data[index].transpose(1, 2, 0) if self._planes else self._data[index]
        if self.planned.call.operation.amd.fills_result:
            return image[: size.height, : size.width]
        _, _, width, height = (int(number) for number in self._regions[index])
        valid = image[:height, :width]
        full_height, full_width = size.height or height, size.width or width
        if valid.shape[:2] != (height, width) or height > full_height or width > full_width:
            raise RuntimeError(
                f"rocAL gives {self.planned.step.name} a valid part of {width}x{height} pixels, but its result is"
                f" {full_width}x{full_height}"
            )
        return Image(valid, ResultExtent(Extent(full_height, full_width), Extent(height, width))).padded


_STANDARD_ERROR = 2
"""The descriptor, which leads to the server's log whatever has become of sys.stderr."""


@contextlib.contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """For calls that must return within this time; one at a time in a process."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


_LONGEST_RUN_SECONDS = 120.0
"""Far more than any batch takes. A rocAL pipeline that waits for something will not stop."""


class BrokenPipelineError(RuntimeError):
    """A rocAL pipeline that can run nothing any more; the text is rocAL's reason."""


def _built(settings: GraphSettings, batch_size: int, flags: Flags) -> tuple[Any, Tensor]:
    """A rocAL pipeline, ready to be fed, and its source of images. Raises: ServeError: as PipelineRunner."""
    binding = settings.binding
    try:
        # A worker sees one GPU only, so that it is always the first.
        pipeline = binding.pipeline.Pipeline(
            batch_size=batch_size,
            num_threads=_THREADS,
            device_id=0,
            prefetch_queue_depth=_PREFETCH_DEPTH,
            rocal_cpu=not settings.on_gpu,
        )
    except Exception as error:
        device = "an AMD GPU" if settings.on_gpu else "the CPU"
        raise unavailable(
            f"rocAL cannot make a pipeline on {device}: {error}; it wrote the reason to the log. If it does not load"
            " the extension vx_rpp, LD_LIBRARY_PATH must name ROCm's libraries, usually /opt/rocm/lib, when the server"
            " starts"
        ) from error
    handle = pipeline.get_handle()
    with pipeline:
        types = binding.types
        formats = {ColorFormat.RGB24: types.RGB, ColorFormat.BGR24: types.BGR, ColorFormat.U8: types.GRAY}
        tensor, _ = binding.functions.external_source(
            # Batches are fed by hand; what would be asked for them is never asked.
            source=(),
            color_format=formats[settings.color_format],
            mode=types.EXTSOURCE_RAW_UNCOMPRESSED,
            max_width=settings.max_width,
            max_height=settings.max_height,
        )
        if tensor is None:
            raise _refused(binding, handle, "its source of images")
        values = dict(zip(settings.inputs, flags, strict=True))
        images: dict[int, Tensor] = {DECODED: tensor}
        outputs: list[Tensor] = []
        for planned in settings.plan.steps:
            step = planned.step
            sources, grey = [images[each] for each in step.sources], settings.is_grey
            as_source = settings.source_layout, types.UINT8
            if planned.is_read:
                # The next operation works on bytes, whatever is handed out here.
                node = Node(binding, handle, *as_source, sources, planned.source, grey, batch_size)
                images[step.index] = _add(node, step, values)
            if planned.output is not None:
                wanted = output_type(settings, planned)
                node = Node(binding, handle, *wanted, sources, planned.source, grey, batch_size)
                shared = planned.is_read and wanted == as_source
                outputs.append(images[step.index] if shared else _add(node, step, values))
        pipeline.set_outputs(*outputs)
    try:
        pipeline.build()
        fault = binding.fault(handle)
    except SystemExit:
        # Pipeline.build leaves the program, with status 0, where rocAL finds the graph wrong.
        fault = binding.fault(handle) or ""
    if fault is not None:
        raise _refused(binding, handle, "the pipeline as a whole")
    return pipeline, tensor


class PipelineRunner:
    """One rocAL pipeline, which has a fixed batch size. One thread at a time."""

    def __init__(self, settings: GraphSettings, batch_size: int, flags: Flags, canvas: Canvas) -> None:
        """Raises: ServeError: UNAVAILABLE, rocAL refuses the pipeline; with its reason."""
        self._settings, self._canvas, self.batch_size = settings, canvas, batch_size
        self._pipeline, self._source = _built(settings, batch_size, flags)
        self._handle = self._pipeline.get_handle()
        self._readers = [OutputReader(settings, step, batch_size) for step in settings.plan.image_outputs]
        # rocAL takes no feed without labels, and keeps their address.
        self._labels = np.zeros(batch_size, dtype=np.int32)
        self._regions = np.zeros((batch_size, 4), dtype=np.uint32)
        """x, y, width, height of the images loaded last."""
        self._started = False

    def run(self, count: int) -> Sequence[OutputReader]:
        """The outputs that are images, for the canvas's first `count` images. Raises: BrokenPipelineError: rocAL
        failed. Its output may be an earlier batch's, so nothing of it is returned."""
        with limited_to(_LONGEST_RUN_SECONDS):
            self._feed(count)
            if not self._started:
                # Waits for the first batch, and keeps it. Every later call lets go of a batch, see below.
                self._advance()
                self._started = True
            tensors = self._settings.binding.native.getOutputTensors(self._handle)
            if len(tensors) != len(self._readers):
                raise BrokenPipelineError(f"expected {len(self._readers)} output tensors, got {len(tensors)}")
            try:
                for reader, tensor in zip(self._readers, tensors, strict=True):
                    reader.read(tensor)
            except RuntimeError as error:
                raise BrokenPipelineError(str(error)) from error
            # rocAL hands out old memory when its processing thread has died, and says nothing. Only the next call of
            # run reports that; it lets go of the batch that has been read and waits for none.
            self._advance()
            # rocAL's loader does not look whether there is an image when it is woken. Woken too early, it takes what
            # lies on its stack for one, at best the image before, and all later images move by one place, to other
            # requests.
            self._source.copy_roi(self._regions)
            sizes = [(height, width) for _, _, width, height in self._regions.tolist()]
            if sizes != self._canvas.sizes_of(count, self.batch_size):
                raise BrokenPipelineError("it worked on other images than it was given")
        return self._readers

    def _feed(self, count: int) -> None:
        """Hands over the canvas's first `count` images, always a whole batch: rocAL would wait for the rest forever."""
        batch_size = self.batch_size
        binding = self._settings.binding
        regions = []
        for height, width in self._canvas.sizes_of(count, batch_size):
            region = binding.native.ROIxywh()
            region.x, region.y, region.w, region.h = 0, 0, width, height
            regions.append(region)
        binding.native.externalSourceFeedInput(
            self._handle,
            [],
            self._labels,
            self._canvas.buffers(count, batch_size),
            regions,
            self._settings.max_width,
            self._settings.max_height,
            self._settings.color_format.channels,
            binding.types.EXTSOURCE_RAW_UNCOMPRESSED,
            self._settings.source_layout,
            # Not the end of the data: after that rocAL would run no further batch.
            False,
        )
        fault = binding.fault(self._handle)
        if fault is not None:
            raise BrokenPipelineError(fault)

    def _advance(self) -> None:
        binding = self._settings.binding
        if self._pipeline.rocal_run() != binding.types.OK:
            raise BrokenPipelineError(binding.fault(self._handle) or "its processing thread ended")


_LOG = logging.getLogger(__name__)

_UNLIMITED_SIDE = 2000
"""The largest side of an image, in pixels, where the decoder has no limit; amd.rocal's own default. rocAL reserves
memory for the largest image, so there must be one."""

_CHECKED_HEIGHT, _CHECKED_WIDTH = 240, 320
"""Pixels of the picture by which rocAL is compared with the CPU engine."""

_FIRST_SIDES = (64, 512, 65535)
"""Of the image that is run before the first request, in pixels; the first that the pipeline can be done with."""

_LONGEST_BUILD_SECONDS = 600.0

_BROKEN_STATUS = 70
"""The worker's exit status; also that of an instance that cannot go on."""

_RAW_PIXELS = DecoderOptions(input=InputKind.RAW)
"""How the CPU engine takes the picture in."""

_TOLERANCE = 0.05
"""Of the deviation of an output's values. Kernels that round otherwise differ by a hundredth of it; exchanged channels,
another part of the picture or an older one by a third and more."""


class RocalEngine:
    """A pipeline on rocAL. Threads that call it at once wait for each other, since rocAL runs one batch at a time."""

    def __init__(self, setup: EngineSetup) -> None:
        """Builds the rocAL pipelines of all batch sizes, so that none is built when a request waits. Raises:
        ServeError: amd.rocal is not here or refuses the pipeline, the pipeline needs what rocAL does not have, or
        libturbojpeg is missing."""
        binding = import_binding()
        plan = make_plan(setup.pipeline, setup.formats)
        check(setup.model_name, setup.pipeline, plan, binding)
        try:
            self._decoder = Decoder(setup.color_format, setup.decoder)
        except RuntimeError as error:
            raise unavailable(str(error)) from None
        limits = setup.decoder.limits
        height, width = limits.max_height or _UNLIMITED_SIDE, limits.max_width or _UNLIMITED_SIDE
        if setup.decoder.input is InputKind.RAW:
            height = width = _UNLIMITED_SIDE
        self._settings = settings = GraphSettings(
            binding=binding,
            plan=plan,
            inputs=setup.pipeline.inputs,
            color_format=setup.color_format,
            max_height=height,
            max_width=width,
            on_gpu=setup.device is not None,
        )
        self._formats = setup.formats
        sizes = batch_sizes(setup.batch_size)
        self._canvas = Canvas(settings, sizes[-1])
        self._lock = threading.Lock()
        self._on_broken: Callable[[str], NoReturn] = _refuse_to_load
        self._runners: dict[Flags, list[PipelineRunner]] = {}
        """For each combination of flags, by their batch sizes; none where no output is an image."""
        for flags in variants(setup.pipeline) if plan.image_outputs else ():
            with limited_to(_LONGEST_BUILD_SECONDS):
                self._runners[flags] = [PipelineRunner(settings, size, flags, self._canvas) for size in sizes]
            self._run_each_once(self._runners[flags])
        _LOG.info(
            "model '%s' runs on amd.rocal %s, %s, with batches of %s",
            setup.model_name,
            binding.version,
            "on the GPU" if settings.on_gpu else "in its CPU mode",
            ", ".join(str(size) for size in sizes),
        )
        self._compare_with_cpu(setup)
        self._on_broken = end_worker
        # Decoding releases the GIL, so threads spread a batch over the CPUs.
        self._pool = ThreadPoolExecutor(setup.threads, "rocal-decode") if setup.threads > 1 else None

    def _run_each_once(self, runners: Sequence[PipelineRunner]) -> None:
        """So that the first request is as fast as the next, and that a pipeline which cannot run is found at once."""
        settings = self._settings
        sizes = [(min(settings.max_height, side), min(settings.max_width, side)) for side in _FIRST_SIDES]
        fitting = next((size for size in sizes if misfit(settings.plan, *size) is None), None)
        if fitting is None:
            return
        for runner in runners:
            self._canvas.place([np.zeros((*fitting, settings.color_format.channels), dtype=np.uint8)])
            self._run(runner, 1)

    def _compare_with_cpu(self, setup: EngineSetup) -> None:
        """Warns of each output that differs from the CPU engine's, for one picture; all flags are false."""
        settings = self._settings
        height, width = min(settings.max_height, _CHECKED_HEIGHT), min(settings.max_width, _CHECKED_WIDTH)
        if not self._runners or misfit(settings.plan, height, width) is not None:
            return
        pixels = picture(height, width, setup.color_format.channels)
        flags = {name: np.zeros(1, dtype=bool) for name in setup.pipeline.inputs}
        given = self._results_of_one([DecodedImage(pixels, height, width)], flags)
        reference = PipelineEngine(setup.pipeline, Decoder(setup.color_format, _RAW_PIXELS), setup.formats)
        expected = reference.run(pixels, dict.fromkeys(flags, False))
        for output, (found, right) in enumerate(zip(given, expected, strict=True)):
            if found.shape == right.shape:
                right = right.astype(np.float64)
                mean = float(np.mean(np.abs(found - right)))
                # Where all values are nearly the same there is nothing to measure by but themselves.
                scale = float(np.std(right)) or float(np.mean(np.abs(right))) or 1.0
                if mean <= _TOLERANCE * scale:
                    continue
                text = f"differs by {mean:.3g} on average, where its values have a deviation of {scale:.3g}"
            else:
                text = f"has shape {list(found.shape)}, not {list(right.shape)}"
            _LOG.warning(
                "model '%s': rocAL does not give what the CPU engine does: output %d %s", setup.model_name, output, text
            )

    def run(
        self, images: Sequence[SourceImage], arguments: Arguments, outputs: Sequence[np.ndarray[Any, Any] | None]
    ) -> Mapping[int, Exception]:
        failures: dict[int, Exception] = {}
        with closing(self._results(self._decoded(images), arguments, failures)) as results:
            for row, output, result in results:
                array = outputs[output]
                if array is not None and result.shape != array.shape[1:]:
                    failures[row] = RuntimeError(f"rocAL gave shape {list(result.shape)}, not {list(array.shape[1:])}")
                elif array is not None:
                    np.copyto(array[row], result)
        return failures

    def run_one(self, image: SourceImage, arguments: Arguments) -> Sequence[np.ndarray[Any, Any]]:
        return self._results_of_one(self._decoded([image]), arguments)

    def _results_of_one(
        self, decoded: Iterable[DecodedImage | Exception], arguments: Arguments
    ) -> list[np.ndarray[Any, Any]]:
        failures: dict[int, Exception] = {}
        with closing(self._results(decoded, arguments, failures)) as found:
            results = {output: np.array(result, order="C") for _, output, result in found}
        if failures:
            raise failures[0]
        return [results[output] for output in range(len(self._formats))]

    def close(self) -> None:
        # rocAL's pipelines are left to the end of the process: releasing one waits for its threads, and they wait for
        # the next batch.
        if self._pool is not None:
            self._pool.shutdown()

    def _decoded(self, images: Sequence[SourceImage]) -> Iterable[DecodedImage | Exception]:
        return map(self._taken_in, images) if self._pool is None else self._pool.map(self._taken_in, images)

    def _results(
        self, images: Iterable[DecodedImage | Exception], arguments: Arguments, failures: dict[int, Exception]
    ) -> Generator[tuple[int, int, np.ndarray[Any, Any]], None, None]:
        """An image's place, the output's, and the array, which is good until the next; what is wrong with each image
        that has none goes to `failures`. To be closed: the engine's lock is held meanwhile."""
        decoded: dict[int, DecodedImage] = {}
        for row, image in enumerate(images):
            if isinstance(image, Exception):
                failures[row] = image
                continue
            decoded[row] = image
            for output, measurement in self._settings.plan.measurements.items():
                yield row, output, measurement.measure(image)
        with self._lock:
            # The images that have the same flags, since rocAL has one value for a whole batch.
            groups: dict[Flags, list[int]] = {}
            for row in decoded:
                groups.setdefault(tuple(bool(arguments[name][row]) for name in self._settings.inputs), []).append(row)
            most = self._canvas.capacity
            for flags, rows in groups.items():
                runners = self._runners.get(flags, [])  # None where no output is an image.
                for start in range(0, len(rows) if runners else 0, most):
                    chunk = rows[start : start + most]
                    runner = next(runner for runner in runners if runner.batch_size >= len(chunk))
                    self._canvas.place([decoded[row].pixels for row in chunk])
                    results = self._run(runner, len(chunk))
                    for index, row in enumerate(chunk):
                        try:
                            for result in results:
                                place, form = result.planned.output, result.planned.format
                                assert place is not None and form is not None
                                pixels = result.image(index).astype(form.datatype.numpy_dtype, copy=False)
                                is_nhwc = form.layout is Layout.NHWC
                                yield row, place, pixels if is_nhwc else pixels.transpose(2, 0, 1)
                        except RuntimeError as error:
                            failures[row] = error

    def _run(self, runner: PipelineRunner, count: int) -> Sequence[OutputReader]:
        """The results of what lies on the canvas; does not return when rocAL can go on no more."""
        try:
            return runner.run(count)
        except BrokenPipelineError as error:
            self._on_broken(str(error))

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
            why_not = misfit(settings.plan, height, width)
            return decoded if why_not is None else PixelsError(why_not)
        except Exception as error:
            return error


def picture(height: int, width: int, channels: int) -> Pixels:
    """Something to see everywhere, and nothing twice: soft spots of all colours, the same each time."""
    spots = np.random.default_rng(7).integers(0, 256, (6, 8, channels), dtype=np.uint8)
    return cv2.resize(spots, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, channels)


def batch_sizes(largest: int) -> list[int]:
    """The powers of two up to the largest, and the largest."""
    return sorted({*(2**power for power in range(largest.bit_length()) if 2**power <= largest), largest})


def _refuse_to_load(reason: str) -> NoReturn:
    raise unavailable(f"rocAL cannot run the pipeline: {reason}")


def end_worker(reason: str) -> NoReturn:
    """rocAL cannot be put right within a process: it cannot even be released. The server starts a fresh worker."""
    _LOG.critical("rocAL failed, the worker ends: %s", reason)
    os._exit(_BROKEN_STATUS)
