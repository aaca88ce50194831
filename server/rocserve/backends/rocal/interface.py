"""Joins a pipeline with its model's configuration to inputs and outputs, and reads the images and flags of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocserve.backends.rocal.decoding.image_file import SourceImage
from rocserve.backends.rocal.engine import Arguments
from rocserve.backends.rocal.image import Extent
from rocserve.backends.rocal.operations.base import Measurement
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, Pipeline, Step, output_extents
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import Tensor, bytes_elements


class OutputContradiction(ServeError):
    """Reports (INVALID_ARGUMENT) that the pipeline's output has another shape or datatype than the configuration."""

    def __init__(self, config: ModelConfig, name: str, declared: str, actual: str) -> None:
        """`actual`: a text such as "the pipeline gives [8, 8, 3]"."""
        text = f"model '{config.name}': output '{name}' is configured {declared}, but {actual}"
        super().__init__(StatusCode.INVALID_ARGUMENT, text)
        self.actual = actual


_RAW_HINT = '; for pixels instead of files give the pipeline "decoder": {"input": "raw"}'


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The input with the images."""

    spec: TensorSpec
    """Encoded: BYTES [images] or [images, 1], UINT8 [length] (one image) or [images, length] (padded with zeros).
    Raw: UINT8 [height, width, channels] or [images, height, width, channels]; a single channel's dimension may be
    missing."""
    image_rank: int
    """Number of dimensions of one image in a UINT8 tensor; 0 for BYTES."""

    @property
    def count(self) -> int:
        """Number of images per request; -1 = any."""
        return self.spec.shape[0] if len(self.spec.shape) > self.image_rank else 1

    @property
    def extent(self) -> Extent:
        """Each image's size, as far as it is declared."""
        if self.image_rank < 2:
            return Extent(None, None)
        height, width = (None if side == -1 else side for side in self.spec.shape[-self.image_rank :][:2])
        return Extent(height, width)


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a pipeline."""

    name: str
    format: OutputFormat
    shape: tuple[int, ...]
    """Shape of one image; -1 = the side differs between images."""


@dataclass(frozen=True, slots=True)
class Interface:
    """The tensors of a model that runs a pipeline."""

    image: ImageInput
    outputs: tuple[Output, ...]
    holds_several: bool
    """Whether a tensor may contain several images. The outputs then have a first dimension for them."""
    signature: Signature
    """Its inputs are the image, then the pipeline's inputs in the pipeline's order."""


def join(pipeline: Pipeline, config: ModelConfig, channels: int) -> Interface:
    """Return the interface that the configuration declares, or else the pipeline. Raises PipelineError if they
    contradict each other, OutputContradiction if they contradict each other about an output."""
    image = _image_input(pipeline, config, channels)
    extents = output_extents(pipeline, Extent(None, None) if image is None else image.extent)
    steps = pipeline.outputs
    declared = config.outputs or (None,) * len(steps)
    if len(declared) != len(steps):
        raise PipelineError(f"{len(declared)} outputs are configured, but the pipeline has {len(steps)}")
    outputs = tuple(
        _output(config, step, extent, channels, f"image_{index}" if index else "image", output)
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
        # Whether the first dimension is the number of images.
        counts = image is not None and len(image.spec.shape) > image.image_rank and image.spec.shape != (1,)
        holds_several = counts if image is not None else not varying
    if holds_several and varying:
        raise PipelineError(
            f"the size of output {varying} differs from image to image, so images cannot share a batch: resize them to"
            " a fixed size, or set max_batch_size to 0 and leave out the outputs' batch dimension"
        )
    if not holds_several and image is not None and image.count > 1:
        expected, given = list(image.spec.shape[1:]) or [1], list(image.spec.shape)
        raise PipelineError(
            f"dims of input '{image.spec.name}' must be {expected}, one image, since the outputs' have no batch"
            f" dimension, not {given}, {image.count} images: give one image, or put {image.count} in front of the dims"
            " of each output"
        )
    lead = (-1,) if holds_several else ()
    if image is None:
        if pipeline.decoder.is_raw:
            image = ImageInput(TensorSpec("pixels", DataType.UINT8, (*lead, -1, -1, channels)), 3)
        else:
            image = ImageInput(TensorSpec("encoded", DataType.BYTES, (*lead, 1)), 0)
    configured = {tensor.name: tensor for tensor in config.inputs}
    inputs = [image.spec]
    # Datatypes that a pipeline's input may have. Clients of other servers send flags as numbers.
    flag_datatypes = (DataType.BOOL, DataType.UINT8, DataType.INT32)
    for name in pipeline.inputs:
        # The flag of a pipeline's input: one value per image.
        flag = TensorSpec(name, DataType.BOOL, (*lead, 1))
        if (tensor := configured.get(name)) is not None:
            flag = TensorSpec(name, tensor.datatype, _full_shape(config, tensor))
            if tensor.datatype not in flag_datatypes:
                allowed = " or ".join(f"TYPE_{datatype.value}" for datatype in flag_datatypes)
                raise PipelineError(f"input '{name}' must be {allowed}, not {tensor.datatype.value}")
            if len(flag.shape) not in (1, 2) or (len(flag.shape) == 2 and flag.shape[1] not in (1, -1)):
                dims = list(tensor.model_dims)
                raise PipelineError(f"dims of input '{name}' must be [ 1 ], a value for each image, not {dims}")
        inputs.append(flag)
    if image.spec.name in pipeline.inputs:
        raise PipelineError(f"the pipeline's input '{image.spec.name}' has the name of the image's input; rename it")
    batches = holds_several and all(spec.shape[0] == -1 for spec in inputs)
    specs = tuple(TensorSpec(output.name, output.format.datatype, lead + output.shape) for output in outputs)
    return Interface(image, outputs, holds_several, Signature(tuple(inputs), specs, batches))


def _output(
    config: ModelConfig,
    step: Step | Measurement,
    extent: Extent | None,
    channels: int,
    name: str,
    declared: OutputConfig | None,
) -> Output:
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
    # The layout is NCHW only if the channels can be nowhere but first.
    seeming = Layout.NCHW if dims[0] == channels and dims[2] != channels else Layout.NHWC
    chosen = OutputFormat(declared.datatype, step.layout or seeming)
    known = chosen.shape(extent, channels)
    if any(-1 not in pair and pair[0] != pair[1] for pair in zip(dims, known, strict=True)):
        given = f"the pipeline gives {list(known)}"
        raise OutputContradiction(config, declared.name, f"with dims {list(dims)}", given)
    # The declared dimension is used if the pipeline leaves a side open.
    shape = tuple(theirs if ours == -1 else ours for theirs, ours in zip(dims, known, strict=True))
    return Output(declared.name, chosen, shape)


def _measurement(config: ModelConfig, operation: Measurement, name: str, declared: OutputConfig | None) -> Output:
    if declared is not None:
        name, dims = declared.name, declared.model_dims
        one = dims[1:] if config.max_batch_size == 0 and len(dims) == len(operation.shape) + 1 else dims
        fits = len(one) == len(operation.shape) and matches(operation.shape, one)
        if declared.datatype is not operation.datatype or not fits:
            raise PipelineError(
                f"output '{name}' is the pipeline's {operation.name}: it must be TYPE_{operation.datatype.value} with"
                f" dims {list(operation.shape)}, not {declared.datatype.value} with {list(dims)}"
            )
    return Output(name, OutputFormat(operation.datatype, Layout.NHWC), operation.shape)


def _image_input(pipeline: Pipeline, config: ModelConfig, channels: int) -> ImageInput | None:
    """Return the configured input that contains the image: the only one that the pipeline does not name."""
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
    # `rank`: dimensions of one image. `fits`: whether the input's dimensions are possible. `expected`: for the error.
    dims, hint = len(spec.shape), _RAW_HINT
    if pipeline.decoder.is_raw:
        if spec.datatype is not DataType.UINT8:
            raise PipelineError(f"input '{spec.name}' must be TYPE_UINT8 (raw pixels), not {spec.datatype.value}")
        # A colour image ends with its channels. A grey image may lack this dimension.
        rank = 3 if dims >= 3 and spec.shape[-1] == channels else 2
        fits = (dims == rank + 1 or (dims == rank and not batching)) and (rank == 3 or channels == 1)
        expected, hint = f"[ height, width, {channels} ]", ""
    elif spec.datatype is DataType.BYTES:
        rank, fits, expected = 0, dims == 1 or (dims == 2 and spec.shape[1] in (1, -1)), "[ 1 ]"
    elif spec.datatype is DataType.UINT8:
        # The last dimension is the length in bytes.
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
    """Return a tensor's configured dimensions, after the batch dimension if there is one."""
    return ((-1,) if config.max_batch_size > 0 else ()) + tensor.model_dims


def matches(actual: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    """Return whether a shape is as declared; -1 = any side."""
    return all(side in (-1, known) for side, known in zip(declared, actual, strict=True))


def images_of(tensor: Tensor, image: ImageInput) -> Sequence[SourceImage]:
    """Return views of a tensor's images. Raises ServeError (INVALID_ARGUMENT) if a row of BYTES has several elements,
    or if the data are not a valid BYTES tensor."""
    shape = tensor.shape
    if tensor.datatype is DataType.BYTES:
        if len(shape) == 2 and shape[1] != 1:
            raise invalid_argument(f"expected one image in each row of input '{tensor.name}', got shape {list(shape)}")
        return bytes_elements(tensor.data, tensor.element_count, tensor.name)
    array = tensor.numpy()
    return list(array) if array.ndim > image.image_rank else [array]


def flags_of(tensors: Mapping[str, Tensor], names: Sequence[str], images: int) -> Arguments:
    """Return each input's flags, one per image; any value but 0 is true. Raises ServeError (INVALID_ARGUMENT) if the
    number of values is not the number of images."""
    flags = {}
    for name in names:
        values = tensors[name].numpy().reshape(-1)
        if len(values) != images:
            raise invalid_argument(
                f"input '{name}' must have one value for each of the {images} images, got {len(values)}"
            )
        flags[name] = values != 0
    return flags
