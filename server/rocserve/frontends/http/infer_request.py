"""The body of an infer request -> InferRequest. Tensors that come in binary form are views on the body."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.requests import (
    NO_PARAMETERS,
    InferRequest,
    InputHead,
    ParameterValue,
    RequestedOutput,
    RequestHead,
)
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.answer_form import AnswerForm
from rocserve.frontends.http.json_text import parse_json
from rocserve.frontends.http.json_values import MISSING, array, boolean, find, member, text, unsigned
from rocserve.frontends.http.request_heads import RequestHeads
from rocserve.frontends.http.request_parameters import RequestParameters
from rocserve.frontends.http.tensor_json import raw_contents

REMEMBERED_TEXTS = 1024
LONGEST_REMEMBERED_TEXT = 4096
"""Bytes. Both bound the memory that clients can make the reader take."""

_SHARED_MEMORY_NUMBERS = ("shared_memory_offset", "shared_memory_byte_size")


@dataclass(frozen=True, slots=True, eq=False)
class _RememberedText:
    """JSON that holds nothing of one request alone: its tensors stand behind it, and it has no id."""

    head: RequestHead
    form: AnswerForm
    parts: tuple[slice, ...]
    """Where the inputs lie in the body."""
    body_length: int


class InferRequestReader:
    """Reads the JSON and what stands behind it. Clients send the same JSON again and again, with other tensors: it is
    parsed once. Called on the event loop."""

    def __init__(self, heads: RequestHeads) -> None:
        self._heads = heads
        self._texts: dict[tuple[str, str, bytes], _RememberedText] = {}

    def read(
        self, body: Buffer, header_length: int, model_name: str, model_version: str
    ) -> tuple[InferRequest, AnswerForm]:
        """The request, and how its answer is to be told.

        Args:
            header_length: how many bytes of the body are its JSON.

        Raises:
            ServeError: with Triton's codes and words.
        """
        view = memoryview(body)
        if header_length > LONGEST_REMEMBERED_TEXT:
            return self._parse(view, header_length, model_name, model_version)
        key = (model_name, model_version, bytes(view[:header_length]))
        known = self._texts.get(key)
        # A body of another length does not fit its JSON, and is refused.
        if known is not None and known.body_length == len(view):
            return InferRequest(known.head, "", [view[part] for part in known.parts]), known.form
        request, form = self._parse(view, header_length, model_name, model_version)
        if not request.id and request.sequence is None and all(isinstance(data, memoryview) for data in request.data):
            self._remember(key, request, form, header_length)
        return request, form

    def _remember(self, key: tuple[str, str, bytes], request: InferRequest, form: AnswerForm, start: int) -> None:
        parts: list[slice] = []
        for data in request.data:
            parts.append(slice(start, start + len(data)))
            start += len(data)
        if len(self._texts) >= REMEMBERED_TEXTS:
            self._texts.clear()
        self._texts[key] = _RememberedText(request.head, form, tuple(parts), start)

    def _parse(
        self, view: memoryview, header_length: int, model_name: str, model_version: str
    ) -> tuple[InferRequest, AnswerForm]:
        head = parse_json(view[:header_length])
        request_id = read_id(head)
        entry = find(head, "parameters")
        parameters = None if entry is MISSING else RequestParameters(entry)
        inputs, data = _read_inputs(head, view[header_length:], model_name)
        outputs, form = _read_outputs(head, parameters is not None and parameters.binary_output)
        others = parameters.others if parameters is not None else NO_PARAMETERS
        request = InferRequest(
            self._heads.head(model_name, model_version, inputs, outputs, others or NO_PARAMETERS), request_id, data
        )
        if parameters is not None:
            request.sequence = parameters.sequence
        return request, form


def id_of_refused(json: Buffer) -> str:
    """The id in a body that could not be made a request of; empty where it cannot be read either."""
    try:
        return read_id(parse_json(json))
    except ServeError:
        return ""


def read_id(head: Any) -> str:
    value = find(head, "id")
    return "" if value is MISSING else text(value, "Unable to parse 'id'")


def _read_inputs(head: Any, binary: memoryview, model_name: str) -> tuple[list[InputHead], list[Buffer]]:
    inputs: list[InputHead] = []
    data: list[Buffer] = []
    position = 0
    for entry in array(member(head, "inputs", "Unable to parse 'inputs'"), "Unable to parse 'inputs'"):
        parameters = find(entry, "parameters")
        size, region = find(parameters, "binary_data_size"), find(parameters, "shared_memory_region")
        _check_one_source(find(entry, "data") is not MISSING, size is not MISSING, region is not MISSING)
        name, datatype, shape = _input_head(entry)
        told: dict[str, ParameterValue] = {}
        if size is not MISSING:
            end = position + unsigned(size, "Unable to parse 'binary_data_size'")
            if end > len(binary):
                raise invalid_argument(
                    f"unexpected size for input '{name}', expecting {end - len(binary)} additional bytes for model"
                    f" '{model_name}'"
                )
            data.append(binary[position:end])
            position = end
        elif region is not MISSING:
            told = _shared_memory(parameters)
            data.append(b"")
        else:
            data.append(_json_data(entry, datatype, shape, name))
        inputs.append(InputHead(name, datatype, shape, told or NO_PARAMETERS))
    if position != len(binary):
        raise invalid_argument(f"unexpected additional input data for model '{model_name}'")
    return inputs, data


def _input_head(entry: Any) -> tuple[str, str, tuple[int, ...]]:
    name = text(member(entry, "name", "Unable to parse 'name'"), "Unable to parse 'name'")
    datatype = text(member(entry, "datatype", "Unable to parse 'datatype'"), "Unable to parse 'datatype'")
    where = "Unable to parse 'shape'"
    shape = tuple(unsigned(size, where) for size in array(member(entry, "shape", where), where))
    return name, datatype, shape


def _json_data(entry: Any, datatype: str, shape: tuple[int, ...], name: str) -> bytes:
    count = math.prod(shape) if shape else 0
    if count == 0:
        return b""
    return raw_contents(array(entry["data"], "Unable to parse 'data'"), datatype, count, name)


def _check_one_source(has_data: bool, has_binary: bool, has_shared_memory: bool) -> None:
    if has_data + has_binary + has_shared_memory == 1:
        return
    found = "'data'" * has_data, "'binary_data_size'" * has_binary, "'shared_memory_region'" * has_shared_memory
    given = " ".join(name for name in found if name)
    raise invalid_argument(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
        f" 'shared_memory_region' in 'parameters'. But {f'set {given}' if given else 'no field is set'}"
    )


def _shared_memory(parameters: Any) -> dict[str, ParameterValue]:
    """Where a tensor lies in a client's shared memory, as gRPC's parameters tell it."""
    told: dict[str, ParameterValue] = {
        "shared_memory_region": text(parameters["shared_memory_region"], "Unable to parse 'shared_memory_region'")
    }
    for name in _SHARED_MEMORY_NUMBERS:
        value = find(parameters, name)
        told[name] = 0 if value is MISSING else unsigned(value, f"Unable to parse '{name}'")
    return told


def _read_outputs(head: Any, otherwise_binary: bool) -> tuple[list[RequestedOutput], AnswerForm]:
    entries = find(head, "outputs")
    outputs: list[RequestedOutput] = []
    binary: dict[str, bool] = {}
    shared: set[str] = set()
    for entry in () if entries is MISSING else array(entries, "Unable to parse 'outputs'"):
        parameters = find(entry, "parameters")
        _check_output(parameters)
        name = text(member(entry, "name", "Unable to parse 'name'"), "Unable to parse 'name'")
        told: dict[str, ParameterValue] = {}
        classes = find(parameters, "classification")
        if classes is not MISSING and unsigned(classes, "Unable to set 'classification'"):
            told["classification"] = classes
        if find(parameters, "shared_memory_region") is not MISSING:
            told.update(_shared_memory(parameters))
            shared.add(name)
        as_binary = find(parameters, "binary_data")
        is_binary = as_binary is not MISSING and boolean(as_binary, "Unable to parse 'binary_data'")
        binary.setdefault(name, is_binary)
        outputs.append(RequestedOutput(name, told or NO_PARAMETERS))
    return outputs, AnswerForm(binary, otherwise_binary, shared)


def _check_output(parameters: Any) -> None:
    if find(parameters, "shared_memory_region") is MISSING:
        return
    if find(parameters, "classification") is not MISSING:
        raise invalid_argument("Output can't set both 'shared_memory_region' and 'classification'")
    as_binary = find(parameters, "binary_data")
    if as_binary is not MISSING and boolean(as_binary, "Unable to set 'binary_data'"):
        raise invalid_argument("Output can't set both 'shared_memory_region' and 'binary_data'")
