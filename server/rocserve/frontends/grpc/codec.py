"""Decodes serialised ModelInferRequests without copying tensors, and encodes responses, copying tensors once.

A message is a head (names, datatypes, shapes, parameters), an id and the tensors' bytes. The head nearly always equals
an earlier request's, so it is looked up by its bytes; protobuf parses only new heads. Messages in an unusual form
(field order, groups) are parsed by protobuf and serialised again in the usual one. For responses, the encoder
remembers all bytes before the tensors, and inserts the id and the parameters.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from google.protobuf.message import DecodeError

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.memo import Memo
from rocserve.core.parameters import NO_PARAMETERS, Parameters
from rocserve.core.requests import (
    SHARED_REGION,
    InferRequest,
    InputHead,
    RequestedOutput,
    RequestHead,
    check_entries,
    check_id,
)
from rocserve.core.responses import InferResponse, ResponseHead
from rocserve.core.sequences import SEQUENCE_PARAMETERS, SequenceTag
from rocserve.core.steps import Steps
from rocserve.core.tensors import COPIED_SOONER, Buffer
from rocserve.core.wire_format import LENGTH_DELIMITED, WireError, length_prefix, read_varint
from rocserve.frontends.grpc.typed_contents import (
    FIELDS,
    FIELDS_BY_NUMBER,
    ID_TAG,
    RAW_TAG,
    Cut,
    Unusual,
    cut_contents,
    second_contents,
)
from rocserve.plane.heap import copy_in_steps, no_memory
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.faults import invalid_field, parse_message
from rocserve.protocol.parameters import cut_sequence, read_parameters, read_sequence, write_parameters

LONGEST_REMEMBERED_HEAD = 4096
"""Bytes; bounds the memory that clients can fill with heads."""


@dataclass(frozen=True, slots=True, eq=False)
class _ParsedHead:
    """What many requests with equal heads share."""

    head: RequestHead
    sources: tuple[bytes | None, ...] | None
    """The data of each input: b"" for typed contents and shared memory, None if the input takes the next raw entry.
    None as a whole if all inputs are raw."""
    sequence: SequenceTag | None = None
    """The sequence of this request alone; a head with one is not remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where id and tensors lie in messages of one length whose other bytes are equal."""

    head: RequestHead
    frames: list[tuple[int, bytes]]
    """(Begin, bytes) of each part that is outside of the id and the tensors."""
    id_start: int
    id_end: int
    """0 = the messages have no id."""
    raw: list[slice]

    @classmethod
    def of(cls, data: bytes, head: RequestHead, id_start: int, id_end: int, raw: list[tuple[int, int]]) -> _Layout:
        left_out = [(id_start, id_end), *raw]
        begins = [0, *[end for _, end in left_out]]
        ends = [*[begin for begin, _ in left_out], len(data)]
        frames = [(begin, data[begin:end]) for begin, end in zip(begins, ends, strict=True) if begin < end]
        return cls(head, frames, id_start, id_end, [slice(*part) for part in raw])


class RequestDecoder:
    """Decodes requests and remembers their heads. Safe on any thread."""

    def __init__(self) -> None:
        # Two threads may both parse a new head; the operations of Memo are atomic.
        self._heads = Memo[bytes, _ParsedHead]()
        self._typed_heads = Memo[bytes, _ParsedHead]()
        """Heads of requests with typed contents, without the contents."""
        self._layouts = Memo[int, _Layout]()
        """Message length -> layout of the last message of that length whose head was known."""
        self._sequence_heads = Memo[bytes, tuple[_ParsedHead, SequenceTag]]()
        """Heads of running sequences, apart from the other heads because each sequence has a different one."""

    def decode_request(self, data: bytes) -> InferRequest | TypedRequest:
        """Decode one request. Its inputs' data are views on `data`, unless `data` is small.

        Raises ServeError (INVALID_ARGUMENT) if the bytes are not a ModelInferRequest, or an input's data is missing,
        given twice or in the wrong field.
        """
        try:
            layout = self._layouts.get(len(data))
            if layout is None:
                return self._decode_by_fields(data)
            for begin, frame in layout.frames:
                if not data.startswith(frame, begin):
                    return self._decode_by_fields(data)
            request_id = data[layout.id_start : layout.id_end].decode() if layout.id_end else ""
        except (IndexError, ValueError):
            return self.decode_by_protobuf(data)
        source = data if len(data) <= COPIED_SOONER else memoryview(data)
        cut: Callable[[slice], Buffer] = source.__getitem__
        return InferRequest(layout.head, request_id, [*map(cut, layout.raw)])

    def _decode_by_fields(self, data: bytes) -> InferRequest | TypedRequest:
        """Raises IndexError or ValueError if the fields are faulty or in an unusual order, and ServeError as
        `decode_request` does."""
        position = id_field = id_start = id_end = 0
        end = head_end = len(data)
        raw: list[tuple[int, int]] = []
        for _ in FIELDS:
            if position >= end:
                break
            tag = data[position]
            start = position + 2
            length = data[position + 1]
            if length > 0x7F:
                length, start = read_varint(data, position + 1)
            if tag == RAW_TAG:
                if not raw:
                    head_end = position
                raw.append((start, start + length))
            elif raw or tag & 0x87 != LENGTH_DELIMITED:
                raise Unusual
            elif tag == ID_TAG:
                # The last id counts. Earlier ones stay in the head, where they do no harm.
                id_field, id_start, id_end = position, start, start + length
            position = start + length
        else:
            check_entries(len(FIELDS))
        if position != end:
            raise Unusual
        check_id(id_end - id_start)
        request_id = data[id_start:id_end].decode()

        view = memoryview(data)
        contents: list[Buffer] = [view[begin:end] for begin, end in raw]
        parsed = head_bytes = None
        if head_end - (id_end - id_field) <= LONGEST_REMEMBERED_HEAD:
            head_bytes = data[:id_field] + data[id_end:head_end] if id_end else data[:head_end]
            parsed = self._heads.get(head_bytes)
        if parsed is None:
            skeleton, cuts = cut_contents(data)
            if cuts:
                return self._without_contents(data, skeleton, cuts, request_id, contents)
            if head_bytes is None:
                head_bytes = data[:id_field] + data[id_end:head_end]
            # Without these bytes, a head has no sequence parameters.
            if b"sequence_" in head_bytes:
                return self._decode_with_sequence(head_bytes, request_id, contents)
            parsed = self._parse_head(head_bytes, self._heads)
        elif parsed.sources is None and len(raw) == len(parsed.head.inputs):
            self._layouts.keep(len(data), _Layout.of(data, parsed.head, id_start, id_end, raw))
        return InferRequest(parsed.head, request_id, _assign(parsed, contents))

    def _without_contents(
        self, data: bytes, skeleton: bytes, cuts: Sequence[Cut], request_id: str, raw: list[Buffer]
    ) -> TypedRequest:
        parsed = self._typed_heads.get(skeleton) or self._parse_head(skeleton, self._typed_heads)
        head, assigned = parsed.head, _assign(parsed, raw)
        for one in cuts:
            entry = head.inputs[one.index]
            one.field.refuse_other(entry.datatype, entry.name, head.model_name)
        request = InferRequest(head, request_id, assigned, sequence=parsed.sequence)
        return TypedRequest(request, data, cuts, self)

    def _decode_with_sequence(self, head_bytes: bytes, request_id: str, raw: list[Buffer]) -> InferRequest:
        """Decode a request, and separate its sequence parameters, so that all sequences share one head."""
        known = self._sequence_heads.get(head_bytes)
        if known is not None:
            return InferRequest(known[0].head, request_id, _assign(known[0], raw), sequence=known[1])
        stem, sequence = cut_sequence(head_bytes) or (head_bytes, None)
        parsed = self._heads.get(stem) or self._parse_head(stem, self._heads)
        if (
            sequence is not None
            and not sequence.flags
            and parsed.sequence is None
            and len(head_bytes) <= LONGEST_REMEMBERED_HEAD
        ):
            self._sequence_heads.keep(head_bytes, (parsed, sequence))
        return InferRequest(parsed.head, request_id, _assign(parsed, raw), sequence=sequence or parsed.sequence)

    def _parse_head(self, head_bytes: bytes, heads: Memo[bytes, _ParsedHead]) -> _ParsedHead:
        """Raises ValueError if the bytes are not a head."""
        try:
            message = pb.ModelInferRequest.FromString(head_bytes)
        except DecodeError:
            # protobuf's error would count the bytes of the head only.
            raise ValueError from None
        parsed = _read_head(message)
        if parsed.sequence is None and len(head_bytes) <= LONGEST_REMEMBERED_HEAD:
            heads.keep(head_bytes, parsed)
        return parsed

    def decode_by_protobuf(self, data: bytes) -> InferRequest | TypedRequest:
        """Decode a message in an unusual form: protobuf serialises it again in the usual form."""
        message = parse_message(data, pb.ModelInferRequest)
        check_id(len(message.id))
        _check_entries(message)
        for tensor in message.inputs:
            fields = [field for field, _ in tensor.contents.ListFields()]
            if len(fields) > 1:
                FIELDS_BY_NUMBER[fields[0].number].refuse_other(tensor.datatype, tensor.name, message.model_name)
                raise second_contents(tensor.name, message.model_name)
        message.DiscardUnknownFields()
        return self._decode_by_fields(message.SerializeToString())


@dataclass(frozen=True, slots=True, eq=False)
class TypedRequest:
    """A request whose typed contents are not decoded yet."""

    request: InferRequest
    """Without the contents."""
    _message: bytes
    _cuts: Sequence[Cut]
    _decoder: RequestDecoder

    def decode(self, admit: Callable[[int], object]) -> Steps[InferRequest]:
        """Return the whole request, decoding some elements per step. `admit` takes the number of bytes to be allocated
        next. Raises ServeError (INVALID_ARGUMENT) if contents are faulty, and what `admit` raises."""
        request = self.request
        data = [*request.data]
        for cut in self._cuts:
            try:
                datatype = DataType(request.head.inputs[cut.index].datatype)
                data[cut.index] = yield from cut.decode(datatype, admit)
            except WireError:
                raise invalid_field(pb.ModelInferRequest, "inputs", cut.start) from None
            except Unusual:
                again = self._decoder.decode_by_protobuf(self._message)
                return (yield from again.decode(admit)) if isinstance(again, TypedRequest) else again
        request.data = data
        return request


def refused_request_id(data: bytes) -> str:
    """Return the id of a message that could not be decoded as a request; "" if it cannot be read."""
    try:
        return parse_message(data, pb.ModelInferRequest).id
    except ServeError:
        return ""


def _check_entries(message: pb.ModelInferRequest) -> None:
    count = len(message.inputs) + len(message.outputs) + len(message.parameters)
    check_entries(count)
    count += sum(len(tensor.shape) + len(tensor.parameters) for tensor in message.inputs)
    check_entries(count + sum(len(output.parameters) for output in message.outputs))


def _read_head(message: pb.ModelInferRequest) -> _ParsedHead:
    """`message`: a request without its contents. Raises ServeError (INVALID_ARGUMENT)."""
    model_name = message.model_name
    _check_entries(message)
    inputs: list[InputHead] = []
    sources: list[bytes | None] = []
    typed = False
    for tensor in message.inputs:
        entry = InputHead(tensor.name, tensor.datatype, tuple(tensor.shape), read_parameters(tensor.parameters))
        inputs.append(entry)
        shared = SHARED_REGION in entry.parameters
        has_contents = tensor.HasField("contents")
        if has_contents:
            typed = True
            if shared:
                raise invalid_argument(
                    f"unexpected 'content' provided when using shared memory for input tensor '{entry.name}' for model"
                    f" '{model_name}'"
                )
        sources.append(b"" if shared or has_contents else None)
    parameters = read_parameters(message.parameters)
    if not SEQUENCE_PARAMETERS.isdisjoint(parameters):
        parameters = {
            name: value for name, value in parameters.items() if name not in SEQUENCE_PARAMETERS
        } or NO_PARAMETERS
    head = RequestHead(
        model_name,
        message.model_version,
        tuple(inputs),
        tuple(RequestedOutput(output.name, read_parameters(output.parameters)) for output in message.outputs),
        parameters,
        is_typed=typed,
    )
    all_raw = all(source is None for source in sources)
    return _ParsedHead(head, None if all_raw else tuple(sources), read_sequence(message.parameters))


def _assign(parsed: _ParsedHead, raw: Sequence[Buffer]) -> list[Buffer]:
    """Return the data of each input. Raw entries go to the inputs without other data; surplus entries are ignored.
    Raises ServeError (INVALID_ARGUMENT). A remembered head does not cover raw entries, so they are checked here."""
    inputs = parsed.head.inputs
    sources = parsed.sources or (None,) * len(inputs)
    if raw and parsed.head.is_typed:
        typed = zip(inputs, sources, strict=True)
        name = next(one.name for one, source in typed if source is not None and SHARED_REGION not in one.parameters)
        raise invalid_argument(
            f"contents field must not be specified when using raw_input_contents for '{name}' for model"
            f" '{parsed.head.model_name}'"
        )
    entries = iter(raw)
    data: list[Buffer] = []
    for entry, source in zip(inputs, sources, strict=True):
        found = source if source is not None else next(entries, None)
        if found is None:
            raise invalid_argument(
                f"unable to find data for input tensor '{entry.name}' for model '{parsed.head.model_name}' in request."
            )
        data.append(found)
    return data


_FINAL_RESPONSE = "triton_final_response"
_ID = pb.ModelInferResponse.ID_FIELD_NUMBER
_RAW = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_ID_PREFIXES = tuple(length_prefix(_ID, length) for length in range(128))


@dataclass(frozen=True, slots=True, eq=False)
class _EncodedHead:
    """The bytes that many responses share."""

    model: bytes
    """The fields before the id: name and version."""
    outputs: bytes
    """The fields after the parameters: names, datatypes and shapes of the outputs."""
    alone: bytes
    """`model` and `outputs`, for responses without id and parameters."""
    sizes: list[int]
    """The bytes of each output by its shape; wrong for BYTES."""
    prefixes: list[bytes]
    """The tag and the length before each output, if the output has as many bytes as `sizes` says."""


def join_large(parts: Sequence[Buffer]) -> Steps[bytes]:
    """Join the parts step by step. Raises ServeError (RESOURCE_EXHAUSTED) if there is no memory."""
    nbytes = sum(map(_nbytes, parts))
    try:
        # The stream's buffer becomes the message without a copy.
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
    """Encodes responses and remembers their heads. Safe on any thread."""

    def __init__(self) -> None:
        # Two threads may both build a new head; the operations of Memo are atomic.
        self._heads = Memo[ResponseHead, _EncodedHead]()
        self._last_parameters: tuple[Parameters, bytes] = ({}, b"")
        self._finality = {final: _parameters({_FINAL_RESPONSE: final}) for final in (False, True)}

    def parts(self, response: InferResponse, further_parameter: bytes = b"") -> list[Buffer]:
        """Return the pieces of a ModelInferResponse. Raises ServeError (INTERNAL) if a parameter cannot be encoded."""
        head = self._heads.get(response.head) or self._build_head(response.head)
        lead = head.alone
        if response.id or response.parameters or further_parameter:
            request_id = b""
            if response.id:
                request_id = response.id.encode(errors="replace")
                length = len(request_id)
                request_id = (_ID_PREFIXES[length] if length < 128 else length_prefix(_ID, length)) + request_id
            parameters = self._parameters(response.parameters) if response.parameters else b""
            lead = b"".join((head.model, request_id, parameters, further_parameter, head.outputs))
        contents, prefixes = [*response.data], head.prefixes
        if [*map(len, contents)] != head.sizes:
            prefixes = [length_prefix(_RAW, _nbytes(data)) for data in contents]
        # The head describes exactly these outputs.
        return [lead, *chain.from_iterable(zip(prefixes, contents))]  # noqa: B905

    def encode_stream_response(self, response: InferResponse, final: bool) -> bytes:
        """Return a ModelStreamInferResponse. `final`: it is the request's last. Raises ServeError as `parts` does."""
        return b"".join(self.stream_parts(response, final))

    def stream_parts(self, response: InferResponse, final: bool) -> list[Buffer]:
        parts = self.parts(response, self._finality[final])
        size = sum(map(_nbytes, parts))
        parts.insert(0, length_prefix(pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER, size))
        return parts

    def encode_stream_error(
        self, text: str, request_id: str = "", model_name: str = "", final: bool | None = None
    ) -> bytes:
        """Return a serialised ModelStreamInferResponse with the reason why a request failed, and the request's id.

        `model_name`: the model that answered with the error; "" if the request reached no model. `final`: whether this
        is the request's last answer; None = unspecified.
        """
        message = pb.ModelStreamInferResponse(error_message=_without_surrogates(text))
        message.infer_response.id = _without_surrogates(request_id)
        message.infer_response.model_name = model_name
        if final is not None:
            message.infer_response.parameters[_FINAL_RESPONSE].bool_param = final
        return message.SerializeToString()

    def _parameters(self, values: Parameters) -> bytes:
        # Many responses may share one object, as those of an ensemble do.
        last = self._last_parameters
        if last[0] is not values:
            last = self._last_parameters = (values, _parameters(values))
        return last[1]

    def _build_head(self, response_head: ResponseHead) -> _EncodedHead:
        model = pb.ModelInferResponse(model_name=response_head.model_name, model_version=response_head.model_version)
        outputs = pb.ModelInferResponse()
        for output in response_head.outputs:
            outputs.outputs.add(name=output.name, datatype=output.datatype.value, shape=output.shape)
        # Wrong for BYTES, so `parts` compares the sizes for each response.
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
    message = pb.ModelInferResponse()
    write_parameters(values, message.parameters)
    return message.SerializeToString()


def _without_surrogates(text: str) -> str:
    """Return the text without lone surrogates (from undecodable file names), which protobuf refuses."""
    return text.encode(errors="replace").decode()
