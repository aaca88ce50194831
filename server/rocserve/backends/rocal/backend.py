"""Loads a rocAL pipeline in a worker, chooses rocAL or the CPU engine, and assigns bad images to their requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import cv2
import numpy as np

from rocserve.backends.base import Batch, BatchResult, LoadedModel, ModelSource
from rocserve.backends.installed import is_installed
from rocserve.backends.parameters import MOST_THREADS, load_check_mode, read_choice, read_integer, usable_cpus
from rocserve.backends.rocal import ROCAL_MODULE
from rocserve.backends.rocal.decoding.image_file import ImageError, SourceImage
from rocserve.backends.rocal.decoding.options import DEFAULT_MAX_PIXELS, ColorFormat
from rocserve.backends.rocal.engine import BatchEngine, CpuEngine, EngineSetup
from rocserve.backends.rocal.image import PixelsError
from rocserve.backends.rocal.interface import Interface, flags_of, images_of, join, matches
from rocserve.backends.rocal.pipeline import parse_pipeline
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument, unavailable, unreadable
from rocserve.core.load_check import NOT_CHECKED, REFERENCE, LoadCheckFailed, LoadCheckMode, LoadCheckReport
from rocserve.core.model_config import InstanceKind
from rocserve.core.requests import Signature

if TYPE_CHECKING:
    from rocserve.backends.rocal.amd.engine import Comparison

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class RocalModel:
    """A loaded pipeline with its engine."""

    _engine: BatchEngine
    _setup: EngineSetup
    _interface: Interface
    properties: Mapping[str, str] = field(default_factory=dict)
    """See backends.base.model_properties."""
    load_check: LoadCheckReport = NOT_CHECKED

    @property
    def signature(self) -> Signature:
        return self._interface.signature

    def warm_up(self, samples: Sequence[Batch]) -> None:
        for sample in samples:
            failures = self.execute(sample).failures
            if failures:
                raise next(iter(failures.values()))
        if not samples:
            side = 64  # Pixels, if the model declares no size.
            extent, is_raw = self._interface.image.extent, self._setup.pipeline.decoder.is_raw
            shape = (extent.height or side, extent.width or side, self._setup.color_format.channels)
            pixels = np.zeros(shape, dtype=np.uint8)
            image = pixels if is_raw else cast(SourceImage, cv2.imencode(".jpg", pixels)[1])
            flags = {name: np.zeros(1, dtype=bool) for name in self._setup.pipeline.inputs}
            fault = self._engine.run([image], flags, lambda row, output, result: None).get(0)
            if isinstance(fault, ImageError | PixelsError):
                # This is not a failure, because clients' images may have another size.
                _LOG.debug("not warmed up: an image of %d pixels a side does not fit (%s)", side, fault)
            elif fault is not None:
                raise self._fault(fault, None) from fault

    def execute(self, batch: Batch) -> BatchResult:
        interface, wanted = self._interface, batch.requested_outputs
        image = interface.image
        images = images_of(batch.inputs[image.spec.name], image)
        arguments = flags_of(batch.inputs, self._setup.pipeline.inputs, len(images))
        if not interface.holds_several and len(images) != 1:
            raise invalid_argument(f"expected one image in input '{image.spec.name}', got {len(images)}")
        try:
            arrays = {
                output.name: np.empty((len(images), *output.shape), dtype=output.format.datatype.numpy_dtype)
                for output in interface.outputs
                if output.name in wanted and interface.holds_several
            }
        except MemoryError as error:
            text = f"no memory for the results of {len(images)} images: {error}"
            raise ServeError(StatusCode.RESOURCE_EXHAUSTED, text) from None

        def put(row: int, place: int, result: np.ndarray[Any, Any]) -> None:
            output = interface.outputs[place]
            if output.name not in wanted:
                return
            if result.shape != output.shape and not matches(result.shape, output.shape):
                text = (
                    f"output '{output.name}' must have shape {list(output.shape)}, but this image gives"
                    f" {list(result.shape)}; resize images to a fixed size in the pipeline"
                )
                raise PixelsError(text) if interface.holds_several else invalid_argument(text)
            if not interface.holds_several:
                arrays[output.name] = np.empty(result.shape, result.dtype)
            _copy(result, arrays[output.name][row] if interface.holds_several else arrays[output.name])

        faults = self._engine.run(images, arguments, put)
        if faults and not interface.holds_several:
            raise self._fault(faults[0], None) from None
        # A model without batching gets one request, which may still contain several images.
        sizes = batch.request_sizes if sum(batch.request_sizes) == len(images) else (len(images),)
        return BatchResult(arrays, self._failures(faults, sizes))

    def close(self) -> None:
        self._engine.close()

    def _failures(self, faults: Mapping[int, Exception], sizes: Sequence[int]) -> dict[int, ServeError]:
        """Return the first error of each request that has errors, by the request's index."""
        failures: dict[int, ServeError] = {}
        places = [(request, index) for request, size in enumerate(sizes) for index in range(size)] if faults else []
        for row in sorted(faults):
            request, index = places[row]
            if request not in failures:
                failures[request] = self._fault(faults[row], index if sizes[request] > 1 else None)
        return failures

    def _fault(self, error: Exception, index: int | None) -> ServeError:
        """Return the error for the client. `index`: the image's position in its request; None = the only one."""
        if isinstance(error, ServeError):
            return error
        which = "the image in" if index is None else f"image {index} of"
        what = f"{which} input '{self._interface.image.spec.name}'"
        if isinstance(error, ImageError):
            is_raw = self._setup.pipeline.decoder.is_raw
            return invalid_argument(f"{what} cannot be {'used' if is_raw else 'decoded'}: {error}")
        if isinstance(error, PixelsError):
            return invalid_argument(f"{what} cannot be processed: {error}")
        _LOG.error("%s could not be processed", what, exc_info=error)
        return internal(f"{what} could not be processed: {str(error) or type(error).__name__}")


def _copy(result: np.ndarray[Any, Any], row: np.ndarray[Any, Any]) -> None:
    """Copy an output. OpenCV converts between pixels and planes several times faster than numpy."""
    is_image = result.ndim == 3 and result.dtype == row.dtype
    if is_image and result.shape[0] == 3 and result.strides[0] == result.itemsize:
        cv2.split(result.transpose(1, 2, 0), list(row))
    elif is_image and result.shape[2] == 3 and result.strides[1] == result.itemsize:
        cv2.merge(list(result.transpose(2, 0, 1)), row)
    else:
        np.copyto(row, result)


_CPU, _ROCAL = "cpu", "rocal"


def choose_engine(model: ModelSource) -> tuple[str, str, bool]:
    """Return the engine's name, the reason, and whether the CPU engine may replace rocAL if rocAL cannot run the
    pipeline. The parameter `engine` (auto, cpu, rocal) and the instance's kind decide. rocAL, on the GPU or in its CPU
    mode, runs if the parameter names it or the kind is KIND_GPU. The CPU engine serves KIND_GPU only if the parameter
    is "auto". Raises ServeError: INVALID_ARGUMENT if the parameter contradicts the kind, UNAVAILABLE if rocAL is
    required but not installed, or KIND_GPU is required and there is no GPU."""
    wanted = read_choice(model.config, "engine", "", ("", "auto", _CPU, _ROCAL))
    on_gpu = model.instance_kind is InstanceKind.GPU
    kind = model.instance_kind.value
    # A model for GPUs gets a CPU instance if the machine has no GPU.
    groups = model.config.instance_groups
    meant_for_gpu = on_gpu or (bool(groups) and all(group.kind is InstanceKind.GPU for group in groups))
    if wanted == _CPU:
        if on_gpu:
            raise invalid_argument(
                f"model '{model.name}' asks for KIND_GPU, but its parameter 'engine' is \"cpu\"; use KIND_CPU, or leave"
                " the parameter out"
            )
        return _CPU, "parameter 'engine' says so", False
    if wanted != _ROCAL and not meant_for_gpu:
        return _CPU, f"the instance is {kind}", False
    if is_installed(ROCAL_MODULE) and (on_gpu or wanted == _ROCAL):
        reason = f"parameter 'engine' says so, {kind}" if wanted == _ROCAL else "the instance is KIND_GPU"
        return _ROCAL, reason, wanted == "auto"
    if wanted == "auto":
        reason = (
            f"KIND_GPU is asked for, but {ROCAL_MODULE} is not installed or there is no GPU; parameter 'engine' is"
            ' "auto", which accepts the CPU'
        )
        return _CPU, reason, False
    why, remedy = "its parameter 'engine' is \"rocal\"", 'set the parameter to "cpu"'
    if not wanted:
        why = "it asks for KIND_GPU"
        remedy = "use KIND_CPU, or set parameter 'engine' to \"auto\" to accept the CPU"
    raise unavailable(
        f"model '{model.name}' needs rocAL, because {why}, but the Python module {ROCAL_MODULE} is not installed;"
        f" install amd-rocal, or {remedy}"
    )


def load(model: ModelSource) -> LoadedModel:
    """Load a pipeline, with the parameters `color_format` (RGB24, BGR24, U8), `threads`, `max_pixels` and `engine`
    (auto, cpu, rocal). Raises ServeError if the pipeline or the configuration is wrong, or if the engine's library is
    not installed."""
    config = model.config
    chosen, reason, accepts_cpu = choose_engine(model)
    formats = tuple(color_format.value for color_format in ColorFormat)
    color_format = ColorFormat(read_choice(config, "color_format", ColorFormat.RGB24.value, formats))
    threads = read_integer(config, "threads", min(4, usable_cpus()), 1, MOST_THREADS)
    # No JPEG has so many pixels.
    max_pixels = read_integer(config, "max_pixels", DEFAULT_MAX_PIXELS, 1, 1 << 32)
    try:
        pipeline = parse_pipeline(model.model_file.read_bytes(), color_format.channels)
        pipeline = replace(pipeline, decoder=pipeline.decoder.at_most(max_pixels))
    except OSError as error:
        raise unreadable(f"cannot read {model.model_file}: {error.strerror}", error) from None
    except PipelineError as error:
        raise invalid_argument(f"{model.model_file.name}: {error}") from None
    for note in pipeline.notes:
        _LOG.warning("%s: %s", model.model_file.name, note)
    try:
        interface = join(pipeline, config, color_format.channels)
    except PipelineError as error:
        raise invalid_argument(f"model '{config.name}': {error}") from None
    setup = EngineSetup(
        model_name=model.name,
        pipeline=pipeline,
        color_format=color_format,
        formats=tuple(output.format for output in interface.outputs),
        batch_size=max(1, config.max_batch_size),
        threads=threads,
        device=model.device,
    )
    engine: BatchEngine | None = None
    report = NOT_CHECKED
    if chosen == _ROCAL:
        # Importing the module loads rocAL, which a process that does not use rocAL must never do.
        from rocserve.backends.rocal.amd.engine import RocalEngine

        try:
            rocal = RocalEngine(setup)
            report = _checked(model, rocal.compare)
            engine = rocal
        except Exception as error:
            # Another version of amd.rocal may raise any exception.
            fault = error if isinstance(error, ServeError) else unavailable(f"rocAL fails: {error!r}")
            if not accepts_cpu:
                raise fault from (None if fault is error else error)
            if isinstance(fault, LoadCheckFailed):
                report = LoadCheckReport((fault.text,), f"served by the CPU engine: {fault.text}", (fault.kind,))
            reason = f"rocAL cannot run it ({fault.text}); parameter 'engine' is \"auto\", which accepts the CPU"
            chosen = _CPU
    if engine is None:
        try:
            engine = CpuEngine(setup)
        except RuntimeError as error:
            raise unavailable(str(error)) from None
    _LOG.debug("%s runs on engine %s: %s", model.model_file.name, chosen, reason)
    # The properties tell the server which engine runs, because it only knows the backend's one engine.
    return RocalModel(engine, setup, interface, {"engine": chosen, "engine_reason": reason}, report)


def _checked(model: ModelSource, compare: Callable[[], Comparison | None]) -> LoadCheckReport:
    """Check rocAL against the CPU engine, as the model's mode asks. Raises LoadCheckFailed if they differ."""
    mode = load_check_mode(model.config, model.settings)
    if mode is LoadCheckMode.OFF:
        return NOT_CHECKED
    began = time.monotonic()
    with model.checking("running a picture on rocAL and on the CPU engine"):
        found = compare()
    seconds = time.monotonic() - began
    if found is None:
        return LoadCheckReport(
            ("not checked: no picture of a common size fits the pipeline; give check.npz",), "", (), seconds
        )
    if not found.fault:
        part = f"1 picture on rocAL and the CPU engine, largest error {found.largest_error:.2g}"
        return LoadCheckReport((part,), seconds=seconds)
    text = f"rocAL does not give what the CPU engine does: {found.fault}"
    if mode is not LoadCheckMode.WARN:
        raise LoadCheckFailed(REFERENCE, text)
    return LoadCheckReport((text,), text, (REFERENCE,), seconds)
