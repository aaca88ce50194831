"""Loads a pipeline in a worker and serves it: joins it to its model's configuration, chooses rocAL itself or the CPU
engine that gives its numbers, and gives each bad image to its own request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import cv2
import numpy as np

from rocserve.backends.base import Batch, BatchResult, LoadedModel, ModelSource
from rocserve.backends.installed import is_installed
from rocserve.backends.parameters import MOST_THREADS, read_choice, read_integer, usable_cpus
from rocserve.backends.rocal import ROCAL_MODULE
from rocserve.backends.rocal.decoding.header import ImageError, SourceImage
from rocserve.backends.rocal.decoding.options import DEFAULT_MAX_PIXELS, ColorFormat, InputKind
from rocserve.backends.rocal.engine import Arguments, BatchEngine, EngineSetup, ThreadedEngine
from rocserve.backends.rocal.image import Extent, PixelsError
from rocserve.backends.rocal.operations.base import Measurement
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, Pipeline, Step, output_extents, parse_pipeline
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument, unavailable
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import Tensor, bytes_elements


class OutputContradiction(ServeError):
    """INVALID_ARGUMENT: the pipeline gives an output of another shape or datatype than is declared."""

    def __init__(self, config: ModelConfig, name: str, declared: str, given: str) -> None:
        """`given`: "the pipeline gives [8, 8, 3]"."""
        text = f"model '{config.name}': output '{name}' is configured {declared}, but {given}"
        super().__init__(StatusCode.INVALID_ARGUMENT, text)
        self.given = given


DEFAULT_OUTPUT_NAME = "image"
DEFAULT_NAMES = {InputKind.ENCODED: "encoded", InputKind.RAW: "pixels"}

_RAW_HINT = '; for pixels instead of files give the pipeline "decoder": {"input": "raw"}'

_FLAG_DATATYPES = (DataType.BOOL, DataType.UINT8, DataType.INT32)
"""What may be declared for a pipeline's input. Clients of other servers send flags as numbers."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    spec: TensorSpec
    """Encoded: BYTES [images] or [images, 1], UINT8 [length] (one image) or [images, length] (padded with zeros).
    Raw: UINT8 [height, width, channels] or [images, height, width, channels]; of one channel also without that dim."""
    image_rank: int
    """How many dims one image has in a UINT8 tensor; 0 for BYTES."""

    @property
    def extent(self) -> Extent:
        """The size of each image, as far as it is declared."""
        if self.image_rank < 2:
            return Extent(None, None)
        height, width = (None if side == -1 else side for side in self.spec.shape[-self.image_rank :][:2])
        return Extent(height, width)


@dataclass(frozen=True, slots=True)
class Output:
    name: str
    format: OutputFormat
    shape: tuple[int, ...]
    """Of one image; -1 for a side that differs from image to image."""


@dataclass(frozen=True, slots=True)
class Interface:
    image: ImageInput
    arguments: tuple[TensorSpec, ...]
    """The inputs that bring the pipeline's values, one for each image, in the pipeline's order."""
    outputs: tuple[Output, ...]
    holds_several: bool
    """Whether a tensor may hold several images; then the outputs have a first dimension that counts them."""
    supports_batching: bool

    @property
    def signature(self) -> Signature:
        lead = (-1,) if self.holds_several else ()
        outputs = tuple(TensorSpec(output.name, output.format.datatype, lead + output.shape) for output in self.outputs)
        return Signature((self.image.spec, *self.arguments), outputs, self.supports_batching)


def join(pipeline: Pipeline, config: ModelConfig, channels: int) -> Interface:
    """The interface by the configuration and, where that is silent, the pipeline. Raises: PipelineError: configuration
    and pipeline contradict each other. OutputContradiction."""
    image = _image_input(pipeline, config, channels)
    extents = output_extents(pipeline, Extent(None, None) if image is None else image.extent)
    steps = pipeline.outputs
    declared = config.outputs or (None,) * len(steps)
    if len(declared) != len(steps):
        raise PipelineError(f"{len(declared)} outputs are configured, but the pipeline has {len(steps)}")
    outputs = tuple(
        _output(config, step, extent, channels, DEFAULT_OUTPUT_NAME + (f"_{index}" if index else ""), output)
        for index, (step, extent, output) in enumerate(zip(steps, extents, declared, strict=True))
    )
    varying = ", ".join(f"'{output.name}'" for output in outputs if -1 in output.shape)
    holds_several = config.max_batch_size > 0
    if not holds_several and config.outputs:
        ranks = (len(step.shape) if isinstance(step, Measurement) else 3 for step in steps)
        leads = {len(output.model_dims) - rank for output, rank in zip(config.outputs, ranks, strict=True)}
        if len(leads) != 1:
            raise PipelineError("its outputs must all have a batch dimension or none of them")
        holds_several = leads == {1}
    elif not holds_several:
        # Whether the first dim counts images.
        counts = image is not None and len(image.spec.shape) > image.image_rank and image.spec.shape != (1,)
        holds_several = counts if image is not None else not varying
    if holds_several and varying:
        raise PipelineError(
            f"the size of output {varying} differs from image to image, so images cannot share a batch: resize them to"
            " a fixed size, or set max_batch_size to 0 and leave out the outputs' batch dimension"
        )
    if image is None:
        lead = (-1,) if holds_several else ()
        raw, name = pipeline.decoder.input is InputKind.RAW, DEFAULT_NAMES[pipeline.decoder.input]
        pixels = TensorSpec(name, DataType.UINT8, (*lead, -1, -1, channels))
        image = ImageInput(pixels, 3) if raw else ImageInput(TensorSpec(name, DataType.BYTES, (*lead, 1)), 0)
    configured = {tensor.name: tensor for tensor in config.inputs}
    arguments = []
    for name in pipeline.inputs:
        # One of the pipeline's flags: one for each image.
        flag = TensorSpec(name, DataType.BOOL, (-1, 1) if holds_several else (1,))
        if (tensor := configured.get(name)) is not None:
            flag = TensorSpec(name, tensor.datatype, _full_shape(config, tensor))
            if tensor.datatype not in _FLAG_DATATYPES:
                allowed = " or ".join(f"TYPE_{datatype.value}" for datatype in _FLAG_DATATYPES)
                raise PipelineError(f"input '{name}' must be {allowed}, not {tensor.datatype.value}")
            if len(flag.shape) not in (1, 2) or (len(flag.shape) == 2 and flag.shape[1] not in (1, -1)):
                dims = list(tensor.model_dims)
                raise PipelineError(f"dims of input '{name}' must be [ 1 ], a value for each image, not {dims}")
        arguments.append(flag)
    if image.spec.name in pipeline.inputs:
        raise PipelineError(f"the pipeline's input '{image.spec.name}' has the name of the image's; name it otherwise")
    batches = all(spec.shape[0] == -1 for spec in (image.spec, *arguments))
    return Interface(image, tuple(arguments), outputs, holds_several, holds_several and batches)


def _output(
    config: ModelConfig,
    step: Step | Measurement,
    extent: Extent | None,
    channels: int,
    name: str,
    declared: OutputConfig | None,
) -> Output:
    """`name`: where the configuration has none."""
    if isinstance(step, Measurement):
        return _measurement(config, step, name, declared)
    assert extent is not None
    if declared is None:
        chosen = OutputFormat(step.datatype or step.default_datatype, step.layout or Layout.NHWC)
        return Output(name, chosen, chosen.shape(extent, channels))
    if declared.datatype not in (DataType.UINT8, DataType.FP32, DataType.FP16):
        raise PipelineError(
            f"output '{declared.name}' must be TYPE_UINT8, TYPE_FP32 or TYPE_FP16, not {declared.datatype.value}"
        )
    if step.datatype not in (None, declared.datatype):
        assert step.datatype is not None
        given = f'the pipeline\'s "dtype" says {step.datatype.value}'
        raise OutputContradiction(config, declared.name, f"as {declared.datatype.value}", given)
    dims = declared.model_dims
    if len(dims) == 4 and config.max_batch_size == 0:
        dims = dims[1:]
    if len(dims) != 3:
        raise PipelineError(
            f"output '{declared.name}' must have the three dims of an image (height, width, channels in the"
            f" order of its layout), not {list(dims)}"
        )
    # NCHW only where the channels can be nowhere but in front.
    seeming = Layout.NCHW if dims[0] == channels and dims[2] != channels else Layout.NHWC
    chosen = OutputFormat(declared.datatype, step.layout or seeming)
    known = chosen.shape(extent, channels)
    if any(-1 not in pair and pair[0] != pair[1] for pair in zip(dims, known, strict=True)):
        given = f"the pipeline gives {list(known)}"
        raise OutputContradiction(config, declared.name, f"with dims {list(dims)}", given)
    # The declared dims where the pipeline leaves a side open.
    shape = tuple(theirs if ours == -1 else ours for theirs, ours in zip(dims, known, strict=True))
    return Output(declared.name, chosen, shape)


def _measurement(config: ModelConfig, operation: Measurement, name: str, declared: OutputConfig | None) -> Output:
    if declared is not None:
        name, dims = declared.name, declared.model_dims
        one = dims[1:] if config.max_batch_size == 0 and len(dims) == len(operation.shape) + 1 else dims
        fits = len(one) == len(operation.shape) and _fits(operation.shape, one)
        if declared.datatype is not operation.datatype or not fits:
            raise PipelineError(
                f"output '{name}' is the pipeline's {operation.name}: it must be TYPE_{operation.datatype.value} with"
                f" dims {list(operation.shape)}, not {declared.datatype.value} with {list(dims)}"
            )
    return Output(name, OutputFormat(operation.datatype, Layout.NHWC), operation.shape)


def _image_input(pipeline: Pipeline, config: ModelConfig, channels: int) -> ImageInput | None:
    """The configured input that brings the image: the one that is not the pipeline's own."""
    if not config.inputs:
        return None
    configured = [tensor.name for tensor in config.inputs]
    missing = [name for name in pipeline.inputs if name not in configured]
    if missing:
        raise PipelineError(f"the pipeline takes values from input '{missing[0]}', which is not among the inputs")
    images = [tensor for tensor in config.inputs if tensor.name not in pipeline.inputs]
    if len(images) != 1:
        besides = f" besides {', '.join(pipeline.inputs)}" if pipeline.inputs else ""
        raise PipelineError(f"a pipeline has one input of images{besides}, but {len(images)} are configured")
    spec = TensorSpec(images[0].name, images[0].datatype, _full_shape(config, images[0]))
    batching = config.max_batch_size > 0
    # How many dims one image has, whether those of the input can be, and which were expected.
    dims, hint = len(spec.shape), _RAW_HINT
    if pipeline.decoder.input is InputKind.RAW:
        if spec.datatype is not DataType.UINT8:
            raise PipelineError(f"input '{spec.name}' must be TYPE_UINT8 (raw pixels), not {spec.datatype.value}")
        # Colour images end with their channels; grey ones may leave out a dim of one.
        rank = 3 if dims >= 3 and spec.shape[-1] == channels else 2
        fits = (dims == rank + 1 or (dims == rank and not batching)) and (rank == 3 or channels == 1)
        expected, hint = f"[ height, width, {channels} ]", ""
    elif spec.datatype is DataType.BYTES:
        rank, fits, expected = 0, dims == 1 or (dims == 2 and spec.shape[1] in (1, -1)), "[ 1 ]"
    elif spec.datatype is DataType.UINT8:
        # The last dim is the length in bytes.
        rank, fits, expected = 1, dims == 2 or (dims == 1 and not batching), "[ -1 ]"
    else:
        raise PipelineError(
            f"input '{spec.name}' must be TYPE_STRING or TYPE_UINT8 (encoded images), not"
            f" {spec.datatype.value}{_RAW_HINT}"
        )
    if not fits:
        given = spec.shape[1:] if batching else spec.shape
        raise PipelineError(f"dims of input '{spec.name}' must be {expected}, not {list(given)}{hint}")
    return ImageInput(spec, rank)


def _full_shape(config: ModelConfig, tensor: InputConfig) -> tuple[int, ...]:
    """The dims that the pipeline itself deals with, behind the batch dim where there is one."""
    return ((-1,) if config.max_batch_size > 0 else ()) + tensor.model_dims


_LOG = logging.getLogger(__name__)

_WARM_UP_SIDE = 64
"""Pixels of the image that is run before the first request."""


@dataclass(eq=False)
class RocalModel:
    """A pipeline over the images of a batch, by either engine."""

    _engine: BatchEngine
    _setup: EngineSetup
    _interface: Interface
    properties: Mapping[str, str] = field(default_factory=dict)
    """See backends.base.model_properties."""

    @property
    def signature(self) -> Signature:
        return self._interface.signature

    def warm_up(self, samples: Sequence[Batch]) -> None:
        for sample in samples:
            failures = self.execute(sample).failures
            if failures:
                raise next(iter(failures.values()))
        if not samples:
            extent, is_raw = self._interface.image.extent, self._setup.pipeline.decoder.input is InputKind.RAW
            shape = (extent.height or _WARM_UP_SIDE, extent.width or _WARM_UP_SIDE, self._setup.color_format.channels)
            pixels = np.zeros(shape, dtype=np.uint8)
            image = pixels if is_raw else cast(SourceImage, cv2.imencode(".jpg", pixels)[1])
            flags = {name: np.zeros(1, dtype=bool) for name in self._setup.pipeline.inputs}
            fault = self._engine.run([image], flags, lambda row, output, result: None).get(0)
            if isinstance(fault, ImageError | PixelsError):
                # Clients' images may be of another size.
                _LOG.info("not warmed up: an image of %d pixels a side does not do (%s)", _WARM_UP_SIDE, fault)
            elif fault is not None:
                raise self._fault(fault, None) from fault

    def execute(self, batch: Batch) -> BatchResult:
        interface, wanted = self._interface, batch.requested_outputs
        image = interface.image
        images = images_of(batch.inputs[image.spec.name], image)
        arguments = flags_of(batch.inputs, self._setup.pipeline.inputs, len(images))
        if not interface.holds_several and len(images) != 1:
            raise invalid_argument(f"expected one image in input '{image.spec.name}', got {len(images)}")
        arrays = {
            output.name: np.empty((len(images), *output.shape), dtype=output.format.datatype.numpy_dtype)
            for output in interface.outputs
            if output.name in wanted and interface.holds_several
        }

        def put(row: int, place: int, result: np.ndarray[Any, Any]) -> None:
            output = interface.outputs[place]
            if output.name not in wanted:
                return
            if result.shape != output.shape and not _fits(result.shape, output.shape):
                text = (
                    f"output '{output.name}' must have shape {list(output.shape)}, but this image gives"
                    f" {list(result.shape)}; resize images to a fixed size in the pipeline"
                )
                raise PixelsError(text) if interface.holds_several else invalid_argument(text)
            if interface.holds_several:
                _copy(result, arrays[output.name][row])
            else:
                arrays[output.name] = np.empty(result.shape, result.dtype)
                _copy(result, arrays[output.name])

        faults = self._engine.run(images, arguments, put)
        if faults and not interface.holds_several:
            raise self._fault(faults[0], None) from None
        # Without batching there is one request, which may still bring several images.
        sizes = batch.request_sizes if sum(batch.request_sizes) == len(images) else (len(images),)
        return BatchResult(arrays, self._failures(faults, sizes))

    def close(self) -> None:
        self._engine.close()

    def _failures(self, faults: Mapping[int, Exception], sizes: Sequence[int]) -> dict[int, ServeError]:
        """Each request's first fault, by the request's place."""
        failures: dict[int, ServeError] = {}
        places = [(request, index) for request, size in enumerate(sizes) for index in range(size)] if faults else []
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
            is_raw = self._setup.pipeline.decoder.input is InputKind.RAW
            return invalid_argument(f"{what} cannot be {'used' if is_raw else 'decoded'}: {error}")
        if isinstance(error, PixelsError):
            return invalid_argument(f"{what} cannot be processed: {error}")
        _LOG.error("%s could not be processed", what, exc_info=error)
        return internal(f"{what} could not be processed: {str(error) or type(error).__name__}")


def _fits(actual: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    return all(side in (-1, known) for side, known in zip(declared, actual, strict=True))


def _copy(result: np.ndarray[Any, Any], row: np.ndarray[Any, Any]) -> None:
    """Copy an output, from pixels to planes or from planes to pixels by OpenCV, which is several times faster."""
    is_image = result.ndim == 3 and result.dtype == row.dtype
    if is_image and result.shape[0] == 3 and result.strides[0] == result.itemsize:
        cv2.split(result.transpose(1, 2, 0), list(row))
    elif is_image and result.shape[2] == 3 and result.strides[1] == result.itemsize:
        cv2.merge(list(result.transpose(2, 0, 1)), row)
    else:
        np.copyto(row, result)


def images_of(tensor: Tensor, image: ImageInput) -> Sequence[SourceImage]:
    """The images in a tensor, as views. Raises: ServeError: INVALID_ARGUMENT when a row of BYTES holds several, or the
    data is no BYTES tensor's."""
    shape = tensor.shape
    if tensor.datatype is DataType.BYTES:
        if len(shape) == 2 and shape[1] != 1:
            raise invalid_argument(f"expected one image in each row of input '{tensor.name}', got shape {list(shape)}")
        return bytes_elements(tensor.data, tensor.element_count, tensor.name)
    array = tensor.numpy()
    return list(array) if array.ndim > image.image_rank else [array]


def flags_of(tensors: Mapping[str, Tensor], names: Sequence[str], images: int) -> Arguments:
    """Of each input one flag for each image; all but 0 is true. Raises: ServeError: INVALID_ARGUMENT when there are
    more or fewer values than images."""
    flags = {}
    for name in names:
        values = tensors[name].numpy().reshape(-1)
        if len(values) != images:
            raise invalid_argument(
                f"input '{name}' must have one value for each of the {images} images, got {len(values)}"
            )
        flags[name] = values != 0
    return flags


_CPU, _ROCAL = "cpu", "rocal"


def choose_engine(model: ModelSource) -> tuple[str, str, bool]:
    """The engine, why, and whether the CPU's may take its place when rocAL turns out to be unable to run the pipeline.

    They follow from parameter `engine` (auto, cpu, rocal) and the kind of the instance.

    rocAL runs where it is asked for by name, on the GPU or in its own CPU mode, and on KIND_GPU. KIND_GPU is never
    served by the CPU engine unless `engine` is written as "auto".

    Raises:
        ServeError: INVALID_ARGUMENT when the parameter contradicts the kind, UNAVAILABLE when rocAL is not installed.
    """
    wanted = read_choice(model.config, "engine", "", ("", "auto", _CPU, _ROCAL))
    on_gpu = model.instance_kind is InstanceKind.GPU
    kind = model.instance_kind.value
    # It may have been given the CPU because there is no other.
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


_DEFAULT_MAX_THREADS = 4
_MOST_PIXELS = 1 << 32
"""Of an image: a JPEG cannot have more."""


def load(model: ModelSource) -> LoadedModel:
    """Parameters: `color_format` (RGB24, BGR24, U8), `threads`, `max_pixels`, `engine` (auto, cpu, rocal). Raises:
    ServeError: the pipeline or the configuration is wrong, or a library of the engine is not installed."""
    config = model.config
    chosen, reason, accepts_cpu = choose_engine(model)
    formats = tuple(color_format.value for color_format in ColorFormat)
    color_format = ColorFormat(read_choice(config, "color_format", ColorFormat.RGB24.value, formats))
    threads = read_integer(config, "threads", min(_DEFAULT_MAX_THREADS, usable_cpus()), 1, MOST_THREADS)
    max_pixels = read_integer(config, "max_pixels", DEFAULT_MAX_PIXELS, 1, _MOST_PIXELS)
    try:
        pipeline = parse_pipeline(model.model_file.read_bytes(), color_format.channels)
    except OSError as error:
        raise invalid_argument(f"cannot read {model.model_file}: {error.strerror}") from None
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
        decoder=pipeline.decoder.at_most(max_pixels),
        color_format=color_format,
        formats=tuple(output.format for output in interface.outputs),
        batch_size=max(1, config.max_batch_size),
        threads=threads,
        device=model.device,
    )
    engine: BatchEngine | None = None
    if chosen == _ROCAL:
        # Only here: importing it loads rocAL, which must never happen in a process that does not need it.
        from rocserve.backends.rocal.amd.engine import RocalEngine

        try:
            engine = RocalEngine(setup)
        except Exception as error:
            # Of another version of amd.rocal anything may come.
            fault = error if isinstance(error, ServeError) else unavailable(f"rocAL fails: {error!r}")
            if not accepts_cpu:
                raise fault from (None if fault is error else error)
            reason = f"rocAL cannot run it ({fault.text}); parameter 'engine' is \"auto\", which accepts the CPU"
            chosen = _CPU
    if engine is None:
        try:
            engine = ThreadedEngine(setup)
        except RuntimeError as error:
            raise unavailable(str(error)) from None
    _LOG.info("%s runs on engine %s: %s", model.model_file.name, chosen, reason)
    # The server knows the backend's engine only, not which of the two it is.
    return RocalModel(engine, setup, interface, {"engine": chosen, "engine_reason": reason})
