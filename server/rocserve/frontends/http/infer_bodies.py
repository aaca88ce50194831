"""Turns the bodies of infer requests into requests. Binary tensors are views on the body. A body may also consist of
its model's only input, or be a form of files; names and shapes are then deduced."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.memo import Memo
from rocserve.core.model_config import InputConfig, ModelConfig
from rocserve.core.parameters import (
    NO_PARAMETERS,
    QUEUE_PARAMETERS,
    RESERVED_PREFIX,
    Parameters,
    ParameterValue,
    parameters_key,
)
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import (
    SHARED_BYTE_SIZE,
    SHARED_OFFSET,
    SHARED_REGION,
    InferRequest,
    InputHead,
    RequestedOutput,
    RequestHead,
    check_entries,
    check_id,
)
from rocserve.core.sequences import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START, SequenceId, SequenceTag
from rocserve.core.steps import Steps
from rocserve.core.tensors import ELEMENT_LENGTH, Buffer, encode_bytes_elements
from rocserve.frontends.http.answer_bodies import AnswerForm
from rocserve.frontends.http.json_text import (
    MISSING,
    UNSIGNED_LIMIT,
    array,
    boolean,
    checked_text,
    find,
    member,
    members,
    number_too_big,
    parse_json,
    raw_contents,
    text,
    unsigned,
)
from rocserve.frontends.http.request import LARGEST_HEAD_LINE
from rocserve.plane.heap import COPIED_AT_ONCE, copy_in_steps, fill, new_memory

_Kind = TypeVar("_Kind")


def plain_parameter(name: str, value: Any) -> ParameterValue:
    """Return the value of a parameter that the server only passes on. Raises ServeError: INVALID_ARGUMENT if it is not
    a number, text or boolean, INTERNAL if it has no form in UTF-8 or in 64 bits."""
    checked_text(name)
    kind = type(value)
    if kind is int:
        try:
            return value if -(1 << 63) <= value < 1 << 63 else float(value)
        except OverflowError:
            raise number_too_big() from None
    if kind is str:
        return checked_text(value)
    if kind is bool or kind is float:
        plain: ParameterValue = value
        return plain
    raise invalid_argument(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _read_parameters(value: Any) -> tuple[dict[str, ParameterValue], SequenceTag | None, bool]:
    """Read the parameters of an inference request. Returns the parameters to pass on, the sequence, and whether outputs
    that the request does not name are binary.

    Raises ServeError: INTERNAL if a parameter has the wrong type, INVALID_ARGUMENT if its name is reserved.
    """
    binary_output = has_sequence = False
    others: dict[str, ParameterValue] = {}
    identity: SequenceId = 0
    flags = {SEQUENCE_START: False, SEQUENCE_END: False}
    for name, entry in members(value, "failed to get request params.").items():
        if name == SEQUENCE_ID:
            has_sequence = True
            if type(entry) is int and 0 <= entry < UNSIGNED_LIMIT:
                identity = entry
            else:
                identity = text(entry, f"Unable to parse '{SEQUENCE_ID}'")
        elif name in flags:
            flags[name], has_sequence = boolean(entry, f"Unable to parse '{name}'"), True
        elif name in QUEUE_PARAMETERS:
            others[name] = unsigned(entry, f"Unable to parse '{name}'")
        elif name == "binary_data_output":
            binary_output = boolean(entry, f"Unable to parse '{name}'")
        elif name.startswith(RESERVED_PREFIX):
            raise invalid_argument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        else:
            others[name] = plain_parameter(name, entry)
    sequence = SequenceTag(identity, flags[SEQUENCE_START], flags[SEQUENCE_END]) if has_sequence else None
    return others, sequence, binary_output


_Key = tuple[object, ...]


LONGEST_REMEMBERED_TEXT = 4096
"""Bytes of JSON, and of the key of a head; bounds the memory that clients can fill."""


@dataclass(slots=True, eq=False)
class InferText:
    """The JSON of an inference request."""

    id: str
    inputs: list[InputHead]
    outputs: list[RequestedOutput]
    parameters: Parameters
    sequence: SequenceTag | None
    form: AnswerForm
    data: list[Buffer | slice]
    """For each input: its bytes from the JSON, or where it lies after the JSON."""


_PREFIX = request_prefix([""])
_IN_JSON: Any = object()
"""Stands for an input whose elements are in the JSON."""
_ELEMENTS = re.compile(rb'"data"\s*:\s*(\[[][\w\s,.+-]*\])')
"""The elements of a tensor without strings."""


@dataclass(frozen=True, slots=True, eq=False)
class _RememberedText:
    """The common JSON of many requests: without an id, and with the elements of tensors cut out."""

    head: RequestHead
    form: AnswerForm
    parts: list[slice]
    """For each input: where it lies after the JSON, or _IN_JSON."""
    binary_length: int


class InferRequestReader:
    """Reads JSON and the tensors after it. JSON repeats, so all but the elements is parsed once. On the event loop."""

    def __init__(self) -> None:
        self._heads = Memo[_Key, RequestHead]()
        self._texts = Memo[tuple[str | bytes, ...], _RememberedText]()

    def read(
        self, body: Buffer, header_length: int, model_name: str, model_version: str
    ) -> tuple[InferRequest, AnswerForm]:
        """Return the request, and the form of its response. `header_length` is the number of bytes of JSON in the body.
        Raises ServeError with Triton's codes and words."""
        binary = memoryview(body)[header_length:]
        if header_length > LONGEST_REMEMBERED_TEXT:
            text = parse_infer_text(model_name, len(binary), memoryview(body)[:header_length])
            return self.make_request(text, binary, model_name, model_version), text.form
        json = bytes(body[:header_length])
        texts = _ELEMENTS.split(json)
        elements = texts[1::2]
        key = (model_name, model_version, *texts[::2])
        known = self._texts.get(key)
        # Tensors of another length do not fit the JSON, which is refused below.
        if known is not None and known.binary_length == len(binary):
            values = iter(elements)
            try:
                data: list[Buffer] = [
                    _json_data(parse_json(next(values)), entry) if part is _IN_JSON else binary[part]
                    for part, entry in zip(known.parts, known.head.inputs, strict=True)
                ]
                return InferRequest(known.head, "", data), known.form
            except ServeError:
                pass  # Parsing the whole body below finds the fault, and reports its place in the whole.
        text = parse_infer_text(model_name, len(binary), json)
        request = self.make_request(text, binary, model_name, model_version)
        parts = [part if isinstance(part, slice) else _IN_JSON for part in text.data]
        if not text.id and text.sequence is None and _are_exactly_elements(len(elements), json, parts):
            self._texts.keep(key, _RememberedText(request.head, text.form, parts, len(binary)))
        return request, text.form

    def make_request(self, text: InferText, binary: memoryview, model_name: str, model_version: str) -> InferRequest:
        head = self.head(model_name, model_version, text.inputs, text.outputs, text.parameters)
        data = [binary[part] if isinstance(part, slice) else part for part in text.data]
        return InferRequest(head, text.id, data, sequence=text.sequence)

    def read_raw(self, body: Buffer, config: ModelConfig, model_version: str) -> Steps[InferRequest]:
        """Return the request of a body that is the model's only input. Raises ServeError: INVALID_ARGUMENT if the model
        has several inputs, or the shape cannot be deduced; RESOURCE_EXHAUSTED if there is no memory."""
        if len(config.inputs) != 1:
            raise invalid_argument(
                f"{_PREFIX}Raw request must only have 1 input (found 1) to be deduced but got {len(config.inputs)}"
                f" inputs in '{config.name}' model configuration"
            )
        entry = config.inputs[0]
        shape = _shape(entry, config, 1, len(body))
        data = body
        if entry.datatype is DataType.BYTES:
            if -1 in entry.dims or math.prod(shape) != 1:
                raise invalid_argument(
                    f"{_PREFIX}For BYTE datatype raw input '{entry.name}', the model must have input shape [1]"
                )
            data = yield from _joined([body], True)
        inputs = [InputHead(entry.name, entry.datatype.value, shape, NO_PARAMETERS)]
        return InferRequest(self.head(config.name, model_version, inputs), "", [data])

    def read_form(self, body: Buffer, boundary: bytes, config: ModelConfig, model_version: str) -> Steps[InferRequest]:
        """Return the request of a form. In order, each part is an element of the BYTES input with the part's name, or a
        row of an input of another datatype. If the model has one input and all parts have one name, any name is
        accepted.

        Raises ServeError: INVALID_ARGUMENT if no input has the name, its shape cannot be deduced, or `form_parts`
        raises it; RESOURCE_EXHAUSTED if there is no memory.
        """
        parts = yield from form_parts(body, boundary)
        by_name: dict[str, list[Buffer]] = {}
        for name, content in parts:
            by_name.setdefault(name, []).append(content)
        if len(by_name) == len(config.inputs) == 1:
            by_name = {config.inputs[0].name: next(iter(by_name.values()))}
        entries = {entry.name: entry for entry in config.inputs}
        inputs: list[InputHead] = []
        data: list[Buffer] = []
        for name, contents in by_name.items():
            entry = entries.get(name)
            if entry is None:
                raise invalid_argument(
                    f"unexpected inference input '{name}' for model '{config.name}': name each part of the form after"
                    f" an input: {', '.join(entries)}"
                )
            is_bytes = entry.datatype is DataType.BYTES
            shape = _shape(entry, config, len(contents), len(contents) if is_bytes else sum(map(len, contents)))
            data.append((yield from _joined(contents, is_bytes)))
            inputs.append(InputHead(name, entry.datatype.value, shape, NO_PARAMETERS))
        return InferRequest(self.head(config.name, model_version, inputs), "", data)

    def head(
        self,
        model_name: str,
        model_version: str,
        inputs: Sequence[InputHead],
        outputs: Sequence[RequestedOutput] = (),
        parameters: Parameters = NO_PARAMETERS,
    ) -> RequestHead:
        """Return the head of these parts: the same object for equal parts, because plans are remembered by it."""
        key: _Key = (
            model_name,
            model_version,
            tuple((entry.name, entry.datatype, entry.shape, parameters_key(entry.parameters)) for entry in inputs),
            tuple((entry.name, parameters_key(entry.parameters)) for entry in outputs),
            parameters_key(parameters),
        )
        head = self._heads.get(key)
        if head is None:
            head = RequestHead(model_name, model_version, tuple(inputs), tuple(outputs), parameters)
            if len(repr(key)) <= LONGEST_REMEMBERED_TEXT:
                self._heads.keep(key, head)
        return head


def parse_infer_text(model_name: str, binary_length: int, json: Buffer) -> InferText:
    """Parse a request's JSON, which `binary_length` bytes follow. Raises ServeError with Triton's codes and words."""
    head = parse_json(json)
    request_id = read_id(head)
    entry = find(head, "parameters")
    others, sequence, otherwise_binary = ({}, None, False) if entry is MISSING else _read_parameters(entry)
    inputs, data = _read_inputs(head, binary_length, model_name)
    outputs, form = _read_outputs(head, otherwise_binary)
    check_entries(len(inputs) + len(outputs) + len(others) + sum(len(given.shape) for given in inputs))
    return InferText(request_id, inputs, outputs, others or NO_PARAMETERS, sequence, form, data)


def _are_exactly_elements(count: int, json: bytes, parts: list[slice]) -> bool:
    """Return whether the `count` matches of `_ELEMENTS` are exactly the elements of the inputs, in order."""
    if count != parts.count(_IN_JSON):
        return False
    numbers = itertools.count()
    numbered = parse_json(_ELEMENTS.sub(lambda found: b'"data":%d' % next(numbers), json))
    found = (find(entry, "data") for entry in numbered["inputs"])
    return [number for number in found if number is not MISSING] == list(range(count))


def refused_request_id(json: Buffer) -> str:
    """Return the id in a body that could not be read as a request; "" if it cannot be found."""
    try:
        return read_id(parse_json(json))
    except ServeError:
        return ""


def read_id(head: Any) -> str:
    value = find(head, "id")
    if value is MISSING:
        return ""
    request_id = text(value, "Unable to parse 'id'")
    # JSON may contain lone surrogates; each takes a byte wherever the id is written.
    check_id(len(request_id.encode(errors="replace")))
    return request_id


def _read_inputs(head: Any, binary_length: int, model_name: str) -> tuple[list[InputHead], list[Buffer | slice]]:
    inputs: list[InputHead] = []
    data: list[Buffer | slice] = []
    position = 0
    for entry in _field(head, "inputs", array):
        parameters = find(entry, "parameters")
        size, region = find(parameters, "binary_data_size"), find(parameters, SHARED_REGION)
        sources = {"'data'": find(entry, "data"), "'binary_data_size'": size, "'shared_memory_region'": region}
        given_fields = [name for name, value in sources.items() if value is not MISSING]
        if len(given_fields) != 1:
            raise invalid_argument(
                "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
                " 'shared_memory_region' in 'parameters'. But "
                + (" ".join(["set", *given_fields]) if given_fields else "no field is set")
            )
        name, datatype = _field(entry, "name", text), _field(entry, "datatype", text)
        shape = tuple(unsigned(size, "Unable to parse 'shape'") for size in _field(entry, "shape", array))
        given = InputHead(name, datatype, shape, NO_PARAMETERS if region is MISSING else _shared_memory(parameters))
        if size is not MISSING:
            end = position + unsigned(size, "Unable to parse 'binary_data_size'")
            if end > binary_length:
                raise invalid_argument(
                    f"unexpected size for input '{name}', expecting {end - binary_length} additional bytes for model"
                    f" '{model_name}'"
                )
            data.append(slice(position, end))
            position = end
        elif region is not MISSING:
            data.append(b"")
        else:
            data.append(_json_data(entry["data"], given, is_base64=find(parameters, "content_type") == "base64"))
        inputs.append(given)
    if position != binary_length:
        raise invalid_argument(f"unexpected additional input data for model '{model_name}'")
    return inputs, data


def _field(value: Any, name: str, read: Callable[[Any, str], _Kind]) -> _Kind:
    where = f"Unable to parse '{name}'"
    return read(member(value, name, where), where)


def _json_data(data: Any, head: InputHead, is_base64: bool = False) -> bytes:
    count = math.prod(head.shape)
    if count == 0:
        return b""
    return raw_contents(array(data, "Unable to parse 'data'"), head.datatype, count, head.name, is_base64)


def _shared_memory(parameters: Any) -> dict[str, ParameterValue]:
    """Return a tensor's place in a client's shared memory, as gRPC's parameters."""
    found: dict[str, ParameterValue] = {SHARED_REGION: _field(parameters, SHARED_REGION, text)}
    for name in (SHARED_OFFSET, SHARED_BYTE_SIZE):
        value = find(parameters, name)
        found[name] = 0 if value is MISSING else unsigned(value, f"Unable to parse '{name}'")
    return found


def _read_outputs(head: Any, otherwise_binary: bool) -> tuple[list[RequestedOutput], AnswerForm]:
    entries = find(head, "outputs")
    outputs: list[RequestedOutput] = []
    binary: dict[str, bool] = {}
    shared: set[str] = set()
    for entry in () if entries is MISSING else array(entries, "Unable to parse 'outputs'"):
        parameters = find(entry, "parameters")
        names = (SHARED_REGION, "classification", "binary_data")
        region, classes, as_binary = (find(parameters, name) for name in names)
        if region is not MISSING:
            if classes is not MISSING:
                raise invalid_argument("Output can't set both 'shared_memory_region' and 'classification'")
            if as_binary is not MISSING and boolean(as_binary, "Unable to set 'binary_data'"):
                raise invalid_argument("Output can't set both 'shared_memory_region' and 'binary_data'")
        name = _field(entry, "name", text)
        kept: dict[str, ParameterValue] = {}
        if classes is not MISSING and unsigned(classes, "Unable to set 'classification'"):
            kept["classification"] = classes
        if region is not MISSING:
            kept.update(_shared_memory(parameters))
            shared.add(name)
        is_binary = as_binary is not MISSING and boolean(as_binary, "Unable to parse 'binary_data'")
        binary.setdefault(name, is_binary)
        outputs.append(RequestedOutput(name, kept or NO_PARAMETERS))
    return outputs, AnswerForm(tuple(binary.items()), otherwise_binary, frozenset(shared))


_KIND = "multipart/form-data"
_HEAD_END = re.compile(rb"\r\n\r\n")
_NAME = re.compile(
    rb'^content-disposition:(?:[^\r\n"]|"[^\r\n"]*")*?;\s*name=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE | re.MULTILINE
)


def form_boundary(content_type: str) -> bytes | None:
    """Return the boundary between the parts of a form; None if the body is not a form. Raises ServeError
    (INVALID_ARGUMENT) if the header has no boundary."""
    if not content_type.lower().startswith(_KIND):
        return None
    # RFC 2046 allows no longer boundaries.
    found = re.search(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', content_type, flags=re.IGNORECASE)
    if found is None:
        raise invalid_argument(f"Content-Type {_KIND}: expected a boundary of at most 70 characters, got none")
    return (found[1] or found[2]).encode("utf-8", "surrogateescape")


def _joined(contents: Sequence[Buffer], have_lengths: bool) -> Steps[Buffer]:
    """Join contents, plainly or as elements of BYTES. Raises ServeError (RESOURCE_EXHAUSTED) if there is no memory."""
    nbytes = sum(map(len, contents)) + (ELEMENT_LENGTH.size * len(contents) if have_lengths else 0)
    if nbytes <= COPIED_AT_ONCE:
        return encode_bytes_elements(map(memoryview, contents)) if have_lengths else b"".join(contents)
    pieces = chain.from_iterable((ELEMENT_LENGTH.pack(len(one)), one) for one in contents) if have_lengths else contents
    view = new_memory(nbytes, "a request")
    for begin, part in fill(view, pieces, COPIED_AT_ONCE):
        yield from copy_in_steps(view, begin, part)
    return view


def form_parts(body: Buffer, boundary: bytes) -> Steps[list[tuple[str, Buffer]]]:
    """Return the names of the parts, and views of their contents. Raises ServeError (INVALID_ARGUMENT) if the body is
    not a form with this boundary, or has too many parts."""
    view = memoryview(body)
    # `re`, because on bytes that resemble delimiters `find` takes three times as long, and it does not search views.
    delimiter = re.compile(b"\r\n--" + re.escape(boundary))
    parts: list[tuple[str, Buffer]] = []
    first = b"--" + boundary
    # The first delimiter has no line's end before it, if it begins the body.
    position = len(first) if view[: len(first)] == first else (yield from _next(delimiter, view, 0)).end()
    while bytes(view[position : position + 2]) != b"--":
        head_end = _HEAD_END.search(view, position, position + LARGEST_HEAD_LINE)
        if head_end is None:
            raise _broken(f"part {len(parts) + 1} has no head of at most {LARGEST_HEAD_LINE} bytes")
        name = _NAME.search(view, position, head_end.start())
        if name is None:
            raise _broken(f"part {len(parts) + 1} has no name")
        found = yield from _next(delimiter, view, head_end.end())
        text = str(name[1] or name[2] or b"", "utf-8", "replace")
        parts.append((text, view[head_end.end() : found.start()]))
        check_entries(len(parts))
        position = found.end()
    return parts


def _next(delimiter: re.Pattern[bytes], view: memoryview, start: int) -> Steps[re.Match[bytes]]:
    while True:
        # The delimiter is shorter than its pattern if some of its bytes are escaped.
        # A step of 1 MiB takes at most a millisecond.
        end = start + (1 << 20)
        found = delimiter.search(view, start, end + len(delimiter.pattern))
        if found is not None:
            return found
        if end >= len(view):
            raise _broken("it ends within a part")
        start = end
        yield


def _broken(why: str) -> ServeError:
    return invalid_argument(f"the body is not valid {_KIND} for the boundary in Content-Type: {why}")


def _shape(entry: InputConfig, config: ModelConfig, rows: int, size: int) -> tuple[int, ...]:
    """Deduce an input's shape. `size`: the number of elements for BYTES, otherwise of bytes."""
    shape = [rows, *entry.dims] if config.max_batch_size > 0 else list(entry.dims)
    variable = [axis for axis, length in enumerate(shape) if length == -1]
    if len(variable) > 1:
        raise invalid_argument(
            f"{_PREFIX}The shape of the raw input '{entry.name}' can not be deduced because there are more than one"
            " variable-sized dimension"
        )
    if variable:
        itemsize = 1 if entry.datatype is DataType.BYTES else entry.datatype.itemsize
        fixed = math.prod(length for length in shape if length != -1) * itemsize
        shape[variable[0]] = size // fixed if fixed else 0
    return tuple(shape)
