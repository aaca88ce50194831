"""A request whose body is nothing but the one input of its model: what it leaves out is deduced."""

from __future__ import annotations

import math

from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import NO_PARAMETERS, InferRequest, InputHead
from rocserve.core.tensors import Buffer, encode_bytes_elements
from rocserve.frontends.http.infer_request import RequestHeads

_UNKNOWN_ID = request_prefix([""])


def raw_request(body: Buffer, config: ModelConfig, model_version: str, heads: RequestHeads) -> InferRequest:
    """The request that the bytes mean.

    Raises:
        ServeError: INVALID_ARGUMENT when the model has several inputs, or the input's shape cannot be deduced.
    """
    if len(config.inputs) != 1:
        raise invalid_argument(
            f"{_UNKNOWN_ID}Raw request must only have 1 input (found 1) to be deduced but got {len(config.inputs)}"
            f" inputs in '{config.name}' model configuration"
        )
    entry = config.inputs[0]
    shape = [1, *entry.dims] if config.max_batch_size > 0 else list(entry.dims)
    variable = [axis for axis, size in enumerate(shape) if size == -1]
    fixed = math.prod(size for size in shape if size != -1)
    if len(variable) > 1:
        raise invalid_argument(
            f"{_UNKNOWN_ID}The shape of the raw input '{entry.name}' can not be deduced because there are more than one"
            " variable-sized dimension"
        )
    data = body
    if entry.datatype is DataType.BYTES:
        if variable or fixed != 1:
            raise invalid_argument(
                f"{_UNKNOWN_ID}For BYTE datatype raw input '{entry.name}', the model must have input shape [1]"
            )
        data = encode_bytes_elements([memoryview(body)])
    elif variable:
        shape[variable[0]] = len(body) // (fixed * entry.datatype.itemsize) if fixed else 0
    inputs = [InputHead(entry.name, entry.datatype.value, tuple(shape), NO_PARAMETERS)]
    return InferRequest(heads.head(config.name, model_version, inputs, (), NO_PARAMETERS), "", [data])
