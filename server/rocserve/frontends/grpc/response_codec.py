"""InferResponse -> serialised ModelInferResponse or ModelStreamInferResponse, with one copy of the tensors.

All before the tensors' bytes depends on names, datatypes and shapes only, and is remembered; the id and the parameters
are put between.
"""

from __future__ import annotations

import io
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain

from rocserve.core.datatypes import DataType
from rocserve.core.errors import unimplemented
from rocserve.core.memo import Memo
from rocserve.core.requests import InferResponse, Parameters, ResponseHead
from rocserve.core.tensors import Buffer, Tensor, bytes_elements
from rocserve.core.wire_format import length_prefix
from rocserve.plane.heap import copy_in_steps, no_memory
from rocserve.protocol.grpc_service_pb2 import InferTensorContents, ModelInferResponse, ModelStreamInferResponse
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


_FINAL_RESPONSE = "triton_final_response"
_ID = ModelInferResponse.ID_FIELD_NUMBER
_RAW = ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_ID_PREFIXES = tuple(length_prefix(_ID, length) for length in range(128))


@dataclass(frozen=True, slots=True, eq=False)
class _EncodedHead:
    model: bytes
    """The fields before the id: name and version."""
    outputs: bytes
    """The fields behind the parameters: the outputs' names, datatypes and shapes."""
    alone: bytes
    """Both, where nothing comes between them."""
    sizes: list[int]
    """How many bytes each output should have."""
    prefixes: list[bytes]
    """The tag and the length before each of these sizes."""


def join_large(parts: Sequence[Buffer]) -> Generator[None, None, bytes]:
    """The parts as one message, a step at a time. Raises: ServeError: RESOURCE_EXHAUSTED, there is no memory for it."""
    nbytes = sum(map(_nbytes, parts))
    try:
        # What the stream holds becomes the message without a copy.
        stream = io.BytesIO(bytes(nbytes))
    except MemoryError:
        raise no_memory(nbytes) from None
    end = 0
    with stream.getbuffer() as view:
        for part in parts:
            yield from copy_in_steps(view, end, part)
            end += _nbytes(part)
    return stream.getvalue()


class ResponseEncoder:
    """Encodes responses and remembers their heads. May be called from several threads."""

    def __init__(self) -> None:
        # Threads may both build a head that is new; the dict's own operations are atomic.
        self._heads = Memo[ResponseHead, _EncodedHead]()
        self._finality = {final: _parameters({_FINAL_RESPONSE: final}) for final in (False, True)}

    def parts(self, response: InferResponse, further_parameter: bytes = b"") -> list[Buffer]:
        """The pieces of a serialised ModelInferResponse. Raises: ServeError: INTERNAL for a parameter that has no form
        on the wire."""
        head = self._heads.get(response.head) or self._build_head(response.head)
        lead = head.alone
        if response.id or response.parameters or further_parameter:
            request_id = b""
            if response.id:
                request_id = response.id.encode(errors="replace")
                length = len(request_id)
                request_id = (_ID_PREFIXES[length] if length < 128 else length_prefix(_ID, length)) + request_id
            parameters = _parameters(response.parameters) if response.parameters else b""
            lead = b"".join((head.model, request_id, parameters, further_parameter, head.outputs))
        contents, prefixes = [*response.data], head.prefixes
        if [*map(len, contents)] != head.sizes:
            prefixes = [length_prefix(_RAW, _nbytes(data)) for data in contents]
        # The head is that of just these outputs.
        return [lead, *chain.from_iterable(zip(prefixes, contents))]  # noqa: B905

    def encode_stream_response(self, response: InferResponse, final: bool) -> bytes:
        """A serialised ModelStreamInferResponse, which says whether it is the request's last; raises as
        `parts` does."""
        return b"".join(self.stream_parts(response, final))

    def stream_parts(self, response: InferResponse, final: bool) -> list[Buffer]:
        """The pieces of a serialised ModelStreamInferResponse."""
        parts = self.parts(response, self._finality[final])
        size = sum(map(_nbytes, parts))
        parts.insert(0, length_prefix(ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER, size))
        return parts

    def encode_stream_error(
        self, text: str, request_id: str = "", model_name: str = "", final: bool | None = None
    ) -> bytes:
        """A serialised ModelStreamInferResponse that says why a request failed; its id says which one.

        Args:
            model_name: of the model that answered so; empty where the request did not come to it.
            final: whether this is the request's last answer; None: not said.
        """
        message = ModelStreamInferResponse(error_message=_clean(text))
        message.infer_response.id = _clean(request_id)
        message.infer_response.model_name = model_name
        if final is not None:
            message.infer_response.parameters[_FINAL_RESPONSE].bool_param = final
        return message.SerializeToString()

    def _build_head(self, response_head: ResponseHead) -> _EncodedHead:
        model = ModelInferResponse(model_name=response_head.model_name, model_version=response_head.model_version)
        outputs = ModelInferResponse()
        for output in response_head.outputs:
            outputs.outputs.add(name=output.name, datatype=output.datatype.value, shape=output.shape)
        # Right for all datatypes but BYTES, whose length is checked each time.
        sizes = [math.prod(output.shape) * output.datatype.itemsize for output in response_head.outputs]
        model_fields, output_fields = model.SerializeToString(), outputs.SerializeToString()
        head = _EncodedHead(
            model_fields,
            output_fields,
            model_fields + output_fields,
            sizes,
            [length_prefix(_RAW, size) for size in sizes],
        )
        return self._heads.keep(response_head, head)


def _nbytes(data: Buffer) -> int:
    return data.nbytes if type(data) is memoryview else len(data)


def _parameters(values: Parameters) -> bytes:
    message = ModelInferResponse()
    write_parameters(values, message.parameters)
    return message.SerializeToString()


def _clean(text: str) -> str:
    """The text without lone surrogates (from undecodable file names), which protobuf refuses."""
    return text.encode(errors="replace").decode()


def typed_answer(response: InferResponse) -> ModelInferResponse:
    """Raises: ServeError: UNIMPLEMENTED for a datatype without a field of its own."""
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
