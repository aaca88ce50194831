"""Writes the bodies of predict's answers: `predictions` (rows) or `outputs` (columns)."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.responses import InferResponse
from rocserve.core.steps import Steps
from rocserve.core.tensors import Tensor, bfloat16_values
from rocserve.frontends.http.json_text import SLICE, json_bytes, wrong_size

Array = np.ndarray[Any, Any]


def output_arrays(
    answers: Sequence[InferResponse], are_single: bool, scalars: Collection[str] = ()
) -> Steps[Mapping[str, Array]]:
    """Return the outputs of a call's requests, by name, joined along the first dimension, or along a new one if the
    requests are single instances. `scalars`: outputs for which the model itself gives a number or a text for each row,
    and the configuration a dimension of 1, which is left out here. Raises ServeError (INTERNAL) if they do not fit
    together."""
    joined: dict[str, Array] = {}
    for place, head in enumerate(answers[0].head.outputs):
        parts: list[Array] = []
        for answer in answers:
            if answer.head.outputs[place].name != head.name:
                raise internal(f"the model gave output '{head.name}' for some of the rows only")
            array = _values(Tensor(*answer.head.outputs[place], answer.data[place]))
            parts.append(array.reshape(array.shape[:-1]) if head.name in scalars else array)
            yield
        try:
            if are_single:
                joined[head.name] = np.stack(parts)
            else:
                joined[head.name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        except ValueError:
            shapes = ", ".join(sorted({str(list(part.shape)) for part in parts}))
            raise internal(f"output '{head.name}' has different shapes for the rows of one call: {shapes}") from None
    return joined


def rows_answer(outputs: Mapping[str, Array], count: int) -> Steps[list[bytes]]:
    """Return the body for `count` instances, in pieces: a value for each, or an object if there are several outputs.
    Raises ServeError (INTERNAL) if an output does not have a row for each instance."""
    for name, array in outputs.items():
        if not array.ndim or len(array) != count:
            raise internal(
                f"output '{name}' has shape {list(array.shape)} for {count} instances; send `inputs` instead of"
                " `instances`, whose outputs may have any shape"
            )
    if len(outputs) == 1:
        ((name, array),) = outputs.items()
        return [b'{"predictions":', *(yield from _pieces(name, array)), b"}"]
    pieces = [b'{"predictions":[']
    for row in range(count):
        begin = b"{" if not row else b",{"
        for name, array in outputs.items():
            pieces += [begin, json_bytes(name), b":", *(yield from _pieces(name, array[row, ...]))]
            begin = b","
        pieces.append(b"}" if outputs else begin + b"}")
        yield
    return [*pieces, b"]}"]


def columns_answer(outputs: Mapping[str, Array]) -> Steps[list[bytes]]:
    """Return the body in pieces: the value of the only output, or an object of several."""
    if len(outputs) == 1:
        ((name, array),) = outputs.items()
        return [b'{"outputs":', *(yield from _pieces(name, array)), b"}"]
    pieces = [b'{"outputs":{']
    for place, (name, array) in enumerate(outputs.items()):
        pieces += [b"," if place else b"", json_bytes(name), b":", *(yield from _pieces(name, array))]
    return [*pieces, b"}}"]


def _values(tensor: Tensor) -> Array:
    """Return the values as an array of numbers, or of objects for BYTES. Raises ServeError if they do not fit."""
    if tensor.datatype is not DataType.BYTES and len(tensor.data) != tensor.element_count * tensor.datatype.itemsize:
        raise wrong_size(tensor.name)
    array = tensor.numpy()
    return bfloat16_values(array) if tensor.datatype is DataType.BF16 else array


def _pieces(name: str, array: Array) -> Steps[list[bytes]]:
    """Return an array as nested lists, in pieces. In steps, because millions of numbers take seconds."""
    if array.size <= SLICE:
        yield
        return [json_bytes(_plain(name, array))]
    inner = array.size // len(array)
    pieces = [b"["]
    if inner > SLICE:
        for place, part in enumerate(array):
            pieces += [b"," if place else b"", *(yield from _pieces(name, part))]
    else:
        count = SLICE // inner
        for begin in range(0, len(array), count):
            text = json_bytes(_plain(name, array[begin : begin + count]))[1:-1]
            pieces.append(b"," + text if begin else text)
            yield
    return [*pieces, b"]"]


def _plain(name: str, array: Array) -> Any:
    """Return values of JSON. Bytes are in base64 if the output's name asks for it, or if they are not UTF-8."""
    values = array.tolist()
    if array.dtype != np.object_:
        return values
    # TensorFlow Serving writes outputs whose names end so in base64.
    return _texts(values, name.endswith("_bytes"))


def _texts(value: Any, as_base64: bool) -> Any:
    if type(value) is list:
        return [_texts(entry, as_base64) for entry in value]
    if not as_base64:
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass
    return {"b64": base64.b64encode(value).decode()}
