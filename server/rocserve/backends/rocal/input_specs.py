"""What a model's inputs hold: the image, and the values that the pipeline takes from further inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocserve.backends.rocal.decoding.options import InputKind
from rocserve.backends.rocal.image import Extent
from rocserve.backends.rocal.pipeline import Pipeline, PipelineInput
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import TensorSpec

DEFAULT_NAMES = {InputKind.ENCODED: "encoded", InputKind.RAW: "pixels"}

_RAW_HINT = '; for pixels instead of files give the pipeline "decoder": {"input": "raw"}'

_ARGUMENT_DATATYPES: Mapping[DataType, tuple[DataType, ...]] = {
    # Clients of other servers send flags as numbers.
    DataType.BOOL: (DataType.BOOL, DataType.UINT8, DataType.INT32),
    DataType.INT32: (DataType.INT32,),
    DataType.FP32: (DataType.FP32,),
}
"""What may be declared for a pipeline input."""


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


def declared_image(config: ModelConfig, pipeline: Pipeline) -> InputConfig | None:
    """The configured input that brings the image: the one that is not the pipeline's own.

    Raises:
        ServeError: INVALID_ARGUMENT when there are none or several, or when one of the pipeline's is missing.
    """
    if not config.inputs:
        return None
    own = [argument.name for argument in pipeline.inputs]
    configured = [tensor.name for tensor in config.inputs]
    missing = [name for name in own if name not in configured]
    if missing:
        raise wrong(config, f"the pipeline takes values from input '{missing[0]}', which is not among the inputs")
    images = [tensor for tensor in config.inputs if tensor.name not in own]
    if len(images) != 1:
        besides = f" besides {', '.join(own)}" if own else ""
        raise wrong(config, f"a pipeline has one input of images{besides}, but {len(images)} are configured")
    return images[0]


def declared_image_input(config: ModelConfig, kind: InputKind, channels: int, declared: InputConfig) -> ImageInput:
    """
    Raises:
        ServeError: INVALID_ARGUMENT when images cannot come in it.
    """
    spec = TensorSpec(declared.name, declared.datatype, full_shape(config, declared))
    return _raw_input(config, spec, channels) if kind is InputKind.RAW else _encoded_input(config, spec)


def default_image_input(kind: InputKind, channels: int, holds_several: bool) -> ImageInput:
    """What stands for an input that is not declared."""
    lead = (-1,) if holds_several else ()
    if kind is InputKind.RAW:
        return ImageInput(TensorSpec(DEFAULT_NAMES[kind], DataType.UINT8, (*lead, -1, -1, channels)), 3)
    return ImageInput(TensorSpec(DEFAULT_NAMES[kind], DataType.BYTES, (*lead, 1)), 0)


def argument_inputs(
    config: ModelConfig, arguments: Sequence[PipelineInput], holds_several: bool
) -> tuple[TensorSpec, ...]:
    """The inputs that bring the pipeline's values: one for each image.

    Raises:
        ServeError: INVALID_ARGUMENT when a declared one cannot.
    """
    declared = {tensor.name: tensor for tensor in config.inputs}
    specs = []
    for argument in arguments:
        tensor = declared.get(argument.name)
        if tensor is None:
            specs.append(TensorSpec(argument.name, argument.datatype, (-1, 1) if holds_several else (1,)))
            continue
        shape = full_shape(config, tensor)
        allowed = _ARGUMENT_DATATYPES[argument.datatype]
        if tensor.datatype not in allowed:
            names = " or ".join(f"TYPE_{datatype.value}" for datatype in allowed)
            raise wrong(config, f"input '{tensor.name}' must be {names}, not {tensor.datatype.value}")
        if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] not in (1, -1)):
            raise wrong(
                config,
                f"dims of input '{tensor.name}' must be [ 1 ], a value for each image, not {list(_dims(tensor))}",
            )
        specs.append(TensorSpec(tensor.name, tensor.datatype, shape))
    return tuple(specs)


def full_shape(config: ModelConfig, tensor: InputConfig | OutputConfig) -> tuple[int, ...]:
    """The dims that the pipeline itself deals with, behind the batch dim where there is one."""
    return ((-1,) if config.max_batch_size > 0 else ()) + _dims(tensor)


def wrong(config: ModelConfig, text: str) -> ServeError:
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
        raise wrong(
            config,
            f"input '{spec.name}' must be TYPE_STRING or TYPE_UINT8 (encoded images), not {spec.datatype.value}"
            + _RAW_HINT,
        )
    if not fits:
        raise _wrong_dims(config, spec, expected, _RAW_HINT)
    return ImageInput(spec, 0 if spec.datatype is DataType.BYTES else 1)


def _raw_input(config: ModelConfig, spec: TensorSpec, channels: int) -> ImageInput:
    if spec.datatype is not DataType.UINT8:
        raise wrong(config, f"input '{spec.name}' must be TYPE_UINT8 (raw pixels), not {spec.datatype.value}")
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
    return wrong(config, f"dims of input '{spec.name}' must be {expected}, not {list(dims)}{hint}")


def _dims(tensor: InputConfig | OutputConfig) -> tuple[int, ...]:
    return tensor.dims if tensor.reshape is None else tensor.reshape
