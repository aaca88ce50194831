"""Joins a pipeline to its model's configuration: what the input holds, what each output is called and looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.backends.rocal.engine import OutputFormat, output_extents
from rocserve.backends.rocal.image import Extent
from rocserve.backends.rocal.input_specs import (
    ImageInput,
    argument_inputs,
    declared_image,
    declared_image_input,
    default_image_input,
    wrong,
)
from rocserve.backends.rocal.operations.base import Measurement
from rocserve.backends.rocal.pipeline import Layout, Pipeline, Step
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ModelConfig, OutputConfig
from rocserve.core.requests import Signature, TensorSpec

DEFAULT_OUTPUT_NAME = "image"


class OutputContradiction(ServeError):
    """INVALID_ARGUMENT: the pipeline gives an output of another shape or datatype than is declared."""

    def __init__(self, config: ModelConfig, name: str, declared: str, given: str) -> None:
        """`given`: "the pipeline gives [8, 8, 3]"."""
        text = f"model '{config.name}': output '{name}' is configured {declared}, but {given}"
        super().__init__(StatusCode.INVALID_ARGUMENT, text)
        self.given = given


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
    """What the configuration leaves out comes from the pipeline.

    Raises:
        ServeError: INVALID_ARGUMENT when configuration and pipeline contradict each other.
    """
    kind = pipeline.decoder.input
    declared_input = declared_image(config, pipeline)
    image = None if declared_input is None else declared_image_input(config, kind, channels, declared_input)
    try:
        extents = output_extents(pipeline, Extent(None, None) if image is None else image.extent)
    except PipelineError as error:
        raise wrong(config, str(error)) from None
    steps = [step for step in pipeline.steps if step.is_output]
    declared = config.outputs
    if declared and len(declared) != len(steps):
        raise wrong(config, f"{len(declared)} outputs are configured, but the pipeline has {len(steps)}")
    outputs = tuple(
        _output(config, step, extent, channels, index, declared[index] if declared else None)
        for index, (step, extent) in enumerate(zip(steps, extents, strict=True))
    )
    sizes_fixed = all(-1 not in output.shape for output in outputs)
    holds_several = _holds_several(config, image, steps, sizes_fixed)
    if holds_several and not sizes_fixed:
        names = ", ".join(f"'{output.name}'" for output in outputs if -1 in output.shape)
        raise wrong(
            config,
            f"the size of output {names} differs from image to image, so images cannot share a batch: resize them"
            " to a fixed size, or set max_batch_size to 0 and leave out the outputs' batch dimension",
        )
    image = image or default_image_input(kind, channels, holds_several)
    arguments = argument_inputs(config, pipeline.inputs, holds_several)
    if image.spec.name in (spec.name for spec in arguments):
        raise wrong(config, f"the pipeline's input '{image.spec.name}' has the name of the image's; name it otherwise")
    batches = all(spec.shape[0] == -1 for spec in (image.spec, *arguments))
    return Interface(image, arguments, outputs, holds_several, holds_several and batches)


def _holds_several(config: ModelConfig, image: ImageInput | None, steps: Sequence[Step], sizes_fixed: bool) -> bool:
    if config.max_batch_size > 0:
        return True
    if config.outputs:
        leads = {len(_dims(output)) - len(_one_shape(step)) for output, step in zip(config.outputs, steps, strict=True)}
        if len(leads) != 1:
            raise wrong(config, "its outputs must all have a batch dimension or none of them")
        return leads == {1}
    if image is not None:
        return image.is_stacked and image.spec.shape != (1,)
    return sizes_fixed


def _one_shape(step: Step) -> tuple[int, ...]:
    """Of one image's output; sides that may be any are -1."""
    return step.operation.shape if isinstance(step.operation, Measurement) else (-1, -1, -1)


def _output(
    config: ModelConfig, step: Step, extent: Extent | None, channels: int, index: int, declared: OutputConfig | None
) -> Output:
    name = _default_name(index) if declared is None else declared.name
    if isinstance(step.operation, Measurement):
        return _measurement(config, step.operation, name, declared)
    assert extent is not None
    if declared is None:
        chosen = OutputFormat(step.datatype or step.default_datatype, step.layout or Layout.NHWC)
        return Output(name, chosen, chosen.shape(extent, channels))
    if declared.datatype not in (DataType.UINT8, DataType.FP32, DataType.FP16):
        raise wrong(
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
            raise wrong(
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
        raise wrong(
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
            raise OutputContradiction(config, name, f"with dims {list(declared)}", f"the pipeline gives {list(known)}")
    height, width, depth = (
        declared_side if known_side == -1 else known_side
        for declared_side, known_side in zip(declared, known, strict=True)
    )
    return height, width, depth


def _dims(output: OutputConfig) -> tuple[int, ...]:
    """The dims that the pipeline itself deals with."""
    return output.dims if output.reshape is None else output.reshape
