"""Joins a pipeline to its model's configuration: what the input holds, what each output is called and looks like."""

from __future__ import annotations

from dataclasses import dataclass

from rocserve.backends.rocal.engine import OutputFormat, output_extents
from rocserve.backends.rocal.image import Extent
from rocserve.backends.rocal.pipeline import Layout, Pipeline, Step
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import Signature, TensorSpec

DEFAULT_INPUT_NAME = "encoded"
DEFAULT_OUTPUT_NAME = "image"


@dataclass(frozen=True, slots=True)
class Output:
    name: str
    format: OutputFormat
    shape: tuple[int, int, int]
    """Of one image; -1 for a side that differs from image to image."""


@dataclass(frozen=True, slots=True)
class Interface:
    input: TensorSpec
    """UINT8 [length] (one image), UINT8 [images, length] (padded with zeros), BYTES [images] or [images, 1]."""
    outputs: tuple[Output, ...]
    holds_several: bool
    """Whether a tensor may hold several images; then the outputs have a first dimension that counts them."""
    supports_batching: bool

    @property
    def signature(self) -> Signature:
        lead = (-1,) if self.holds_several else ()
        outputs = tuple(TensorSpec(output.name, output.format.datatype, lead + output.shape) for output in self.outputs)
        return Signature((self.input,), outputs, self.supports_batching)


def join(pipeline: Pipeline, config: ModelConfig, channels: int) -> Interface:
    """What the configuration leaves out comes from the pipeline.

    Raises:
        ServeError: INVALID_ARGUMENT when configuration and pipeline contradict each other.
    """
    try:
        extents = output_extents(pipeline)
    except PipelineError as error:
        raise _error(config, str(error)) from None
    steps = [step for step in pipeline.steps if step.is_output]
    declared = config.outputs
    if declared and len(declared) != len(steps):
        raise _error(config, f"{len(declared)} outputs are configured, but the pipeline has {len(steps)}")
    if len(config.inputs) > 1:
        raise _error(config, f"a pipeline has one input, but {len(config.inputs)} are configured")
    outputs = tuple(
        _output(config, step, extent, channels, index, declared[index] if declared else None)
        for index, (step, extent) in enumerate(zip(steps, extents, strict=True))
    )
    sizes_fixed = all(-1 not in output.shape for output in outputs)
    holds_several = _holds_several(config, sizes_fixed)
    if holds_several and not sizes_fixed:
        names = ", ".join(f"'{output.name}'" for output in outputs if -1 in output.shape)
        raise _error(
            config,
            f"the size of output {names} differs from image to image, so images cannot share a batch: resize them"
            " to a fixed size, or set max_batch_size to 0 and leave out the outputs' batch dimension",
        )
    spec = _input_spec(config, holds_several)
    return Interface(spec, outputs, holds_several, holds_several and spec.shape[0] == -1)


def _holds_several(config: ModelConfig, sizes_fixed: bool) -> bool:
    if config.max_batch_size > 0:
        return True
    if config.outputs:
        ranks = {len(_dims(output)) for output in config.outputs}
        if len(ranks) != 1:
            raise _error(config, "its outputs must all have a batch dimension or none of them")
        return ranks == {4}
    if config.inputs:
        dims = _dims(config.inputs[0])
        return len(dims) == 2 or (config.inputs[0].datatype is DataType.BYTES and dims != (1,))
    return sizes_fixed


def _input_spec(config: ModelConfig, holds_several: bool) -> TensorSpec:
    if not config.inputs:
        return TensorSpec(DEFAULT_INPUT_NAME, DataType.BYTES, (-1, 1) if holds_several else (1,))
    declared = config.inputs[0]
    if declared.datatype not in (DataType.BYTES, DataType.UINT8):
        raise _error(
            config,
            f"input '{declared.name}' must be TYPE_STRING or TYPE_UINT8 (encoded images),"
            f" not {declared.datatype.value}",
        )
    shape = ((-1,) if config.max_batch_size > 0 else ()) + _dims(declared)
    # The last dimension of UINT8 is the length in bytes; that of BYTES holds one image.
    fits = (
        len(shape) in (1, 2)
        if declared.datatype is DataType.UINT8
        else len(shape) == 1 or (len(shape) == 2 and shape[1] in (1, -1))
    )
    if not fits:
        expected = "[ 1 ]" if declared.datatype is DataType.BYTES else "[ -1 ]"
        raise _error(config, f"dims of input '{declared.name}' must be {expected}, not {list(_dims(declared))}")
    return TensorSpec(declared.name, declared.datatype, shape)


def _output(
    config: ModelConfig, step: Step, extent: Extent, channels: int, index: int, declared: OutputConfig | None
) -> Output:
    if declared is None:
        name = DEFAULT_OUTPUT_NAME if index == 0 else f"{DEFAULT_OUTPUT_NAME}_{index}"
        chosen = OutputFormat(step.datatype or step.default_datatype, step.layout or Layout.NHWC)
        return Output(name, chosen, chosen.shape(extent, channels))
    if declared.datatype not in (DataType.UINT8, DataType.FP32, DataType.FP16):
        raise _error(
            config,
            f"output '{declared.name}' must be TYPE_UINT8, TYPE_FP32 or TYPE_FP16, not {declared.datatype.value}",
        )
    if step.datatype not in (None, declared.datatype):
        assert step.datatype is not None
        raise _error(
            config,
            f"output '{declared.name}' is configured as {declared.datatype.value}, but the pipeline's \"dtype\" says"
            f" {step.datatype.value}",
        )
    dims = _image_dims(config, declared)
    chosen = OutputFormat(declared.datatype, step.layout or _layout_of(dims, channels))
    return Output(declared.name, chosen, _merged(config, declared.name, dims, chosen.shape(extent, channels)))


def _image_dims(config: ModelConfig, declared: OutputConfig) -> tuple[int, ...]:
    """The declared dims of one image."""
    dims = _dims(declared)
    if len(dims) == 4 and config.max_batch_size == 0:
        return dims[1:]
    if len(dims) != 3:
        raise _error(
            config,
            f"output '{declared.name}' must have the three dims of an image (height, width, channels in the"
            f" order of its layout), not {list(dims)}",
        )
    return dims


def _layout_of(dims: tuple[int, ...], channels: int) -> Layout:
    """NCHW only where the channels can stand nowhere but in front."""
    return Layout.NCHW if dims[0] == channels and dims[2] != channels else Layout.NHWC


def _merged(
    config: ModelConfig, name: str, declared: tuple[int, ...], known: tuple[int, int, int]
) -> tuple[int, int, int]:
    """The declared dims where the pipeline leaves a side open, else the pipeline's."""
    for declared_side, known_side in zip(declared, known, strict=True):
        if -1 not in (declared_side, known_side) and declared_side != known_side:
            raise _error(
                config,
                f"output '{name}' is configured with dims {list(declared)}, but the pipeline gives {list(known)}",
            )
    height, width, depth = (
        declared_side if known_side == -1 else known_side
        for declared_side, known_side in zip(declared, known, strict=True)
    )
    return height, width, depth


def _dims(tensor: InputConfig | OutputConfig) -> tuple[int, ...]:
    """The dims that the pipeline itself deals with."""
    return tensor.dims if tensor.reshape is None else tensor.reshape


def _error(config: ModelConfig, text: str) -> ServeError:
    return invalid_argument(f"model '{config.name}': {text}")
