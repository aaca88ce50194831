"""Takes the images, and the values that go with them, out of a batch's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rocserve.backends.rocal.batch_engine import Arguments
from rocserve.backends.rocal.decoding.source import SourceImage
from rocserve.backends.rocal.input_specs import ImageInput
from rocserve.backends.rocal.pipeline import PipelineInput
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.tensors import Tensor, bytes_elements


def images_of(tensor: Tensor, image: ImageInput) -> Sequence[SourceImage]:
    """The images in a tensor, as views.

    Raises:
        ServeError: INVALID_ARGUMENT when a row of BYTES holds several, or the data is no BYTES tensor's.
    """
    shape = tensor.shape
    if tensor.datatype is DataType.BYTES:
        if len(shape) == 2 and shape[1] != 1:
            raise invalid_argument(f"expected one image in each row of input '{tensor.name}', got shape {list(shape)}")
        return bytes_elements(tensor.data, tensor.element_count, tensor.name)
    array = tensor.numpy()
    return list(array) if array.ndim > image.image_rank else [array]


def arguments_of(tensors: Mapping[str, Tensor], inputs: Sequence[PipelineInput], images: int) -> Arguments:
    """One value for each image, in the pipeline's datatype; of a flag all but 0 is true.

    Raises:
        ServeError: INVALID_ARGUMENT when there are more or fewer values than images.
    """
    arguments = {}
    for one in inputs:
        values = tensors[one.name].numpy().reshape(-1)
        if len(values) != images:
            raise invalid_argument(
                f"input '{one.name}' must have one value for each of the {images} images, got {len(values)}"
            )
        arguments[one.name] = values != 0 if one.datatype is DataType.BOOL else values
    return arguments
