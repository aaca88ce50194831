"""Joins a pipeline to its model's configuration: the content of the input, the names and shapes of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.backends.rocal.decoding.options import InputKind
from rocserve.backends.rocal.image import Extent
from rocserve.backends.rocal.operations.base import Measurement
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, Pipeline, Step, output_extents
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import Signature, TensorSpec


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
    def is_stacked(self) -> bool:
        """Whether the first dim counts images."""
        return len(self.spec.shape) > self.image_rank

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
    """The interface by the configuration and, where that is silent, the pipeline.

    Raises:
        ServeError: INVALID_ARGUMENT when configuration and pipeline contradict each other.
    """
    kind = pipeline.decoder.input
    image = None
    declared_image = _declared_image(config, pipeline)
    if declared_image is not None:
        spec = TensorSpec(declared_image.name, declared_image.datatype, _full_shape(config, declared_image))
        image = _raw_input(config, spec, channels) if kind is InputKind.RAW else _encoded_input(config, spec)
    try:
        extents = output_extents(pipeline, Extent(None, None) if image is None else image.extent)
    except PipelineError as error:
        raise _wrong(config, str(error)) from None
    steps = [step for step in pipeline.steps if step.is_output]
    declared = config.outputs
    if declared and len(declared) != len(steps):
        raise _wrong(config, f"{len(declared)} outputs are configured, but the pipeline has {len(steps)}")
    outputs = tuple(
        _output(config, step, extent, channels, index, declared[index] if declared else None)
        for index, (step, extent) in enumerate(zip(steps, extents, strict=True))
    )
    sizes_fixed = all(-1 not in output.shape for output in outputs)
    holds_several = _holds_several(config, image, steps, sizes_fixed)
    if holds_several and not sizes_fixed:
        names = ", ".join(f"'{output.name}'" for output in outputs if -1 in output.shape)
        raise _wrong(
            config,
            f"the size of output {names} differs from image to image, so images cannot share a batch: resize them"
            " to a fixed size, or set max_batch_size to 0 and leave out the outputs' batch dimension",
        )
    image = image or _default_image_input(kind, channels, holds_several)
    arguments = _flag_inputs(config, pipeline.inputs, holds_several)
    if image.spec.name in (spec.name for spec in arguments):
        raise _wrong(config, f"the pipeline's input '{image.spec.name}' has the name of the image's; name it otherwise")
    batches = all(spec.shape[0] == -1 for spec in (image.spec, *arguments))
    return Interface(image, arguments, outputs, holds_several, holds_several and batches)


def _holds_several(config: ModelConfig, image: ImageInput | None, steps: Sequence[Step], sizes_fixed: bool) -> bool:
    if config.max_batch_size > 0:
        return True
    if config.outputs:
        leads = {len(_dims(output)) - len(_one_shape(step)) for output, step in zip(config.outputs, steps, strict=True)}
        if len(leads) != 1:
            raise _wrong(config, "its outputs must all have a batch dimension or none of them")
        return leads == {1}
    if image is not None:
        return image.is_stacked and image.spec.shape != (1,)
    return sizes_fixed


def _one_shape(step: Step) -> tuple[int, ...]:
    """Of one image's output; sides that may be any are -1."""
    return step.call.shape if isinstance(step.call, Measurement) else (-1, -1, -1)


def _output(
    config: ModelConfig, step: Step, extent: Extent | None, channels: int, index: int, declared: OutputConfig | None
) -> Output:
    name = _default_name(index) if declared is None else declared.name
    if isinstance(step.call, Measurement):
        return _measurement(config, step.call, name, declared)
    assert extent is not None
    if declared is None:
        chosen = OutputFormat(step.datatype or step.default_datatype, step.layout or Layout.NHWC)
        return Output(name, chosen, chosen.shape(extent, channels))
    if declared.datatype not in (DataType.UINT8, DataType.FP32, DataType.FP16):
        raise _wrong(
            config,
            f"output '{declared.name}' must be TYPE_UINT8, TYPE_FP32 or TYPE_FP16, not {declared.datatype.value}",
        )
    if step.datatype not in (None, declared.datatype):
        assert step.datatype is not None
        given = f'the pipeline\'s "dtype" says {step.datatype.value}'
        raise OutputContradiction(config, declared.name, f"as {declared.datatype.value}", given)
    dims = _image_dims(config, declared)
    chosen = OutputFormat(declared.datatype, step.layout or _layout_of(dims, channels))
    return Output(declared.name, chosen, _merged(config, declared.name, dims, chosen.shape(extent, channels)))


def _default_name(index: int) -> str:
    return DEFAULT_OUTPUT_NAME if index == 0 else f"{DEFAULT_OUTPUT_NAME}_{index}"


def _measurement(config: ModelConfig, operation: Measurement, name: str, declared: OutputConfig | None) -> Output:
    chosen = OutputFormat(operation.datatype, Layout.NHWC)
    if declared is not None:
        dims = _dims(declared)
        one = dims[1:] if config.max_batch_size == 0 and len(dims) == len(operation.shape) + 1 else dims
        fits = len(one) == len(operation.shape) and all(
            side in (-1, known) for side, known in zip(one, operation.shape, strict=True)
        )
        if declared.datatype is not operation.datatype or not fits:
            raise _wrong(
                config,
                f"output '{name}' is the pipeline's {operation.name}: it must be TYPE_{operation.datatype.value} with"
                f" dims {list(operation.shape)}, not {declared.datatype.value} with {list(dims)}",
            )
    return Output(name, chosen, operation.shape)


def _image_dims(config: ModelConfig, declared: OutputConfig) -> tuple[int, ...]:
    """The declared dims of one image."""
    dims = _dims(declared)
    if len(dims) == 4 and config.max_batch_size == 0:
        return dims[1:]
    if len(dims) != 3:
        raise _wrong(
            config,
            f"output '{declared.name}' must have the three dims of an image (height, width, channels in the"
            f" order of its layout), not {list(dims)}",
        )
    return dims


def _layout_of(dims: tuple[int, ...], channels: int) -> Layout:
    """NCHW only where the channels can be nowhere but in front."""
    return Layout.NCHW if dims[0] == channels and dims[2] != channels else Layout.NHWC


def _merged(
    config: ModelConfig, name: str, declared: tuple[int, ...], known: tuple[int, int, int]
) -> tuple[int, int, int]:
    """The declared dims where the pipeline leaves a side open, else the pipeline's."""
    for declared_side, known_side in zip(declared, known, strict=True):
        if -1 not in (declared_side, known_side) and declared_side != known_side:
            raise OutputContradiction(config, name, f"with dims {list(declared)}", f"the pipeline gives {list(known)}")
    height, width, depth = (
        declared_side if known_side == -1 else known_side
        for declared_side, known_side in zip(declared, known, strict=True)
    )
    return height, width, depth


def _declared_image(config: ModelConfig, pipeline: Pipeline) -> InputConfig | None:
    """The configured input that brings the image: the one that is not the pipeline's own.

    Raises:
        ServeError: INVALID_ARGUMENT when there are none or several, or when one of the pipeline's is missing.
    """
    if not config.inputs:
        return None
    configured = [tensor.name for tensor in config.inputs]
    missing = [name for name in pipeline.inputs if name not in configured]
    if missing:
        raise _wrong(config, f"the pipeline takes values from input '{missing[0]}', which is not among the inputs")
    images = [tensor for tensor in config.inputs if tensor.name not in pipeline.inputs]
    if len(images) != 1:
        besides = f" besides {', '.join(pipeline.inputs)}" if pipeline.inputs else ""
        raise _wrong(config, f"a pipeline has one input of images{besides}, but {len(images)} are configured")
    return images[0]


def _default_image_input(kind: InputKind, channels: int, holds_several: bool) -> ImageInput:
    """The input of a model that declares none."""
    lead = (-1,) if holds_several else ()
    if kind is InputKind.RAW:
        return ImageInput(TensorSpec(DEFAULT_NAMES[kind], DataType.UINT8, (*lead, -1, -1, channels)), 3)
    return ImageInput(TensorSpec(DEFAULT_NAMES[kind], DataType.BYTES, (*lead, 1)), 0)


def _flag_inputs(config: ModelConfig, names: Sequence[str], holds_several: bool) -> tuple[TensorSpec, ...]:
    """The inputs that bring the pipeline's flags: one for each image.

    Raises:
        ServeError: INVALID_ARGUMENT when a declared one cannot.
    """
    declared = {tensor.name: tensor for tensor in config.inputs}
    specs = []
    for name in names:
        tensor = declared.get(name)
        if tensor is None:
            specs.append(TensorSpec(name, DataType.BOOL, (-1, 1) if holds_several else (1,)))
            continue
        shape = _full_shape(config, tensor)
        if tensor.datatype not in _FLAG_DATATYPES:
            allowed = " or ".join(f"TYPE_{datatype.value}" for datatype in _FLAG_DATATYPES)
            raise _wrong(config, f"input '{name}' must be {allowed}, not {tensor.datatype.value}")
        if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] not in (1, -1)):
            dims = list(_dims(tensor))
            raise _wrong(config, f"dims of input '{name}' must be [ 1 ], a value for each image, not {dims}")
        specs.append(TensorSpec(name, tensor.datatype, shape))
    return tuple(specs)


def _full_shape(config: ModelConfig, tensor: InputConfig | OutputConfig) -> tuple[int, ...]:
    """The dims that the pipeline itself deals with, behind the batch dim where there is one."""
    return ((-1,) if config.max_batch_size > 0 else ()) + _dims(tensor)


def _wrong(config: ModelConfig, text: str) -> ServeError:
    return invalid_argument(f"model '{config.name}': {text}")


def _encoded_input(config: ModelConfig, spec: TensorSpec) -> ImageInput:
    shape = spec.shape
    batching = config.max_batch_size > 0
    if spec.datatype is DataType.BYTES:
        fits, expected = len(shape) == 1 or (len(shape) == 2 and shape[1] in (1, -1)), "[ 1 ]"
    elif spec.datatype is DataType.UINT8:
        # The last dim is the length in bytes.
        fits, expected = len(shape) == 2 or (len(shape) == 1 and not batching), "[ -1 ]"
    else:
        raise _wrong(
            config,
            f"input '{spec.name}' must be TYPE_STRING or TYPE_UINT8 (encoded images), not {spec.datatype.value}"
            + _RAW_HINT,
        )
    if not fits:
        raise _wrong_dims(config, spec, expected, _RAW_HINT)
    return ImageInput(spec, 0 if spec.datatype is DataType.BYTES else 1)


def _raw_input(config: ModelConfig, spec: TensorSpec, channels: int) -> ImageInput:
    if spec.datatype is not DataType.UINT8:
        raise _wrong(config, f"input '{spec.name}' must be TYPE_UINT8 (raw pixels), not {spec.datatype.value}")
    rank = 3 if _ends_with_channels(spec.shape, channels) else 2
    stacked = len(spec.shape) == rank + 1
    fits = stacked or (len(spec.shape) == rank and config.max_batch_size == 0)
    if not fits or (rank == 2 and channels != 1):
        raise _wrong_dims(config, spec, f"[ height, width, {channels} ]")
    return ImageInput(spec, rank)


def _ends_with_channels(shape: tuple[int, ...], channels: int) -> bool:
    """Colour images always do; grey ones may leave out a dim of one."""
    return len(shape) >= 3 and shape[-1] == channels


def _wrong_dims(config: ModelConfig, spec: TensorSpec, expected: str, hint: str = "") -> ServeError:
    dims = spec.shape[1:] if config.max_batch_size > 0 else spec.shape
    return _wrong(config, f"dims of input '{spec.name}' must be {expected}, not {list(dims)}{hint}")


def _dims(tensor: InputConfig | OutputConfig) -> tuple[int, ...]:
    return tensor.dims if tensor.reshape is None else tensor.reshape
