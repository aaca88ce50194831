"""Responses with typed contents, which are all that AMD Inference Server's clients read."""

from __future__ import annotations

from rocserve.core.datatypes import DataType
from rocserve.core.errors import unimplemented
from rocserve.core.requests import InferResponse
from rocserve.core.tensors import Tensor, bytes_elements
from rocserve.protocol.grpc_service_pb2 import InferTensorContents, ModelInferResponse
from rocserve.protocol.parameters import write_parameters

_FIELDS = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP16: "fp32_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
}


def typed_answer(response: InferResponse) -> ModelInferResponse:
    """
    Raises:
        ServeError: UNIMPLEMENTED for a datatype without a field of its own.
    """
    head = response.head
    message = ModelInferResponse(model_name=head.model_name, model_version=head.model_version, id=response.id)
    write_parameters(response.parameters, message.parameters)
    for tensor in response.outputs:
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype.value, shape=tensor.shape)
        if tensor.name not in response.in_shared_memory:
            _fill(output.contents, tensor)
    return message


def _fill(contents: InferTensorContents, tensor: Tensor) -> None:
    if tensor.datatype is DataType.BYTES:
        elements = bytes_elements(tensor.data, tensor.element_count, tensor.name)
        contents.bytes_contents.extend(bytes(element) for element in elements)
        return
    field = _FIELDS.get(tensor.datatype)
    if field is None:
        raise unimplemented(
            f"output '{tensor.name}' is of datatype {tensor.datatype.value}, which has no typed contents; send the"
            " inputs as raw_input_contents, and it comes as raw_output_contents"
        )
    getattr(contents, field).extend(tensor.numpy().ravel().tolist())
