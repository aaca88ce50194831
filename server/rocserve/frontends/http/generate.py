"""The generate extension: a model's inputs and outputs as the members of plain JSON objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig
from rocserve.core.requests import NO_PARAMETERS, InferRequest, InferResponse, InputHead, ParameterValue, RequestHead
from rocserve.core.tensors import Buffer
from rocserve.frontends.http.infer_request import read_id
from rocserve.frontends.http.json_text import json_bytes, parse_json
from rocserve.frontends.http.json_values import json_object, members
from rocserve.frontends.http.request_parameters import plain_parameter
from rocserve.frontends.http.tensor_json import json_elements, raw_contents

NESTED = "parameters"
"""The member whose members are taken as if they stood beside it."""

NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number"
    " of responses"
)


class GenerateRequest:
    """What one body says: members named as inputs are tensors, all others parameters."""

    def __init__(self, config: ModelConfig, model_version: str) -> None:
        self._config = config
        self._model_version = model_version
        self._entries = {entry.name: entry for entry in config.inputs}
        self._inputs: list[InputHead] = []
        self._data: list[Buffer] = []
        self._parameters: dict[str, ParameterValue] = {}

    def read(self, body: Buffer) -> InferRequest:
        """The request that the body means.

        Raises:
            ServeError: with Triton's codes and words.
        """
        value = parse_json(body)
        request_id = read_id(value)
        for name, entry in members(value).items():
            if name == NESTED:
                self._take_nested(entry)
            else:
                self._take(name, entry)
        parameters = self._parameters or NO_PARAMETERS
        head = RequestHead(self._config.name, self._model_version, tuple(self._inputs), (), parameters)
        return InferRequest(head, request_id, self._data)

    def _take_nested(self, value: Any) -> None:
        if NESTED in self._entries:
            raise invalid_argument(f"Keyword '{NESTED}' for nested schema also given as input tensor name")
        try:
            for name, entry in json_object(value).items():
                self._take(name, entry)
        except ServeError as error:
            where = f"Converting keyword: '{NESTED}'"
            if type(value) is not dict:
                where = f"Expected JSON object for keyword: '{NESTED}'"
            raise ServeError(error.code, f"{where}: {error.text}") from None

    def _take(self, name: str, value: Any) -> None:
        entry = self._entries.get(name)
        if entry is None:
            self._parameters[name] = plain_parameter(name, value)
            return
        count = len(value) if type(value) is list else 1
        shape = self._shape(entry, count)
        self._data.append(raw_contents(value, entry.datatype.value, count, name))
        self._inputs.append(InputHead(name, entry.datatype.value, shape, NO_PARAMETERS))

    def _shape(self, entry: InputConfig, count: int) -> tuple[int, ...]:
        """The elements fill the input's fixed dimensions; the rest of them is its last variable one."""
        shape = [-1, *entry.dims] if self._config.max_batch_size > 0 else list(entry.dims)
        for size in shape:
            if size != -1:
                if size == 0 or count % size:
                    raise _does_not_fit(entry.name)
                count //= size
        for axis in reversed(range(len(shape))):
            if shape[axis] == -1:
                shape[axis], count = count, 1
        if count != 1:
            raise _does_not_fit(entry.name)
        return tuple(shape)


def generate_body(response: InferResponse) -> bytes:
    """A response as one JSON object: what it says of itself, its parameters and its outputs, sorted by their names.

    Raises:
        ServeError: INVALID_ARGUMENT for an output that has no JSON, INTERNAL for one that does not fit its shape.
    """
    told: dict[str, Any] = {"id": response.id} if response.id else {}
    told |= {"model_name": response.model_name, "model_version": response.model_version}
    _add(told, response.parameters)
    _add(told, {tensor.name: _plain(json_elements(tensor)) for tensor in response.outputs})
    return json_bytes({name: told[name] for name in sorted(told)})


def event(body: bytes) -> bytes:
    """One of the events of a stream (text/event-stream)."""
    return b"data: " + body + b"\n\n"


def _add(told: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Names that are taken stay as they are."""
    for name, value in more.items():
        told.setdefault(name, value)


def _plain(elements: list[Any]) -> Any:
    return elements[0] if len(elements) == 1 else elements


def _does_not_fit(input_name: str) -> ServeError:
    return invalid_argument(f"The schema can not convert input '{input_name}' to tensor with proper shape")
