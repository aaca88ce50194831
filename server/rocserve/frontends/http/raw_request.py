"""A request whose body is nothing but the one input of its model, or a form of files: what it leaves out is deduced."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InputConfig, ModelConfig
from rocserve.core.request_parameters import check_entries
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import NO_PARAMETERS, InferRequest, InputHead
from rocserve.core.tensors import Buffer, encode_bytes_elements
from rocserve.frontends.http.infer_request import RequestHeads
from rocserve.frontends.http.protocol import LARGEST_HEAD_LINE

_KIND = "multipart/form-data"
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
"""RFC 2046 has no longer ones."""
_HEAD_END = re.compile(rb"\r\n\r\n")
_NAME = re.compile(rb';\s*name=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE)


def form_boundary(content_type: str) -> bytes | None:
    """The delimiter between the parts of a form; None = the body is no form.

    Raises:
        ServeError: INVALID_ARGUMENT, the header has none.
    """
    if not content_type.lower().startswith(_KIND):
        return None
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise invalid_argument(f"the Content-Type {_KIND} has no boundary of at most 70 characters")
    return (found[1] or found[2]).encode("utf-8", "surrogateescape")


def form_parts(body: Buffer, boundary: bytes) -> list[tuple[str, Buffer]]:
    """The parts' names, and views of what they hold.

    Raises:
        ServeError: INVALID_ARGUMENT, the body is no form with this boundary, or has too many parts.
    """
    view = memoryview(body)
    # Searched for by `re`: over bytes that are nearly delimiters `find` takes three times as long, and it has no views.
    delimiter = re.compile(b"\r\n--" + re.escape(boundary))
    parts: list[tuple[str, Buffer]] = []
    first = b"--" + boundary
    # The first one is at the beginning, without the line's end.
    position = len(first) if view[: len(first)] == first else _next(delimiter, view, 0).end()
    while bytes(view[position : position + 2]) != b"--":
        head_end = _HEAD_END.search(view, position, position + LARGEST_HEAD_LINE)
        if head_end is None:
            raise _broken(f"part {len(parts) + 1} has no head of at most {LARGEST_HEAD_LINE} bytes")
        name = _NAME.search(view, position, head_end.start())
        if name is None:
            raise _broken(f"part {len(parts) + 1} has no name")
        found = _next(delimiter, view, head_end.end())
        text = str(name[1] or name[2] or b"", "utf-8", "replace")
        parts.append((text, view[head_end.end() : found.start()]))
        check_entries(len(parts))
        position = found.end()
    return parts


def _next(delimiter: re.Pattern[bytes], view: memoryview, start: int) -> re.Match[bytes]:
    found = delimiter.search(view, start)
    if found is None:
        raise _broken("it ends within a part")
    return found


def _broken(why: str) -> ServeError:
    return invalid_argument(f"the request's body is no {_KIND} with the boundary that its Content-Type tells: {why}")


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
    shape = _shape(entry, config, 1, len(body))
    data = body
    if entry.datatype is DataType.BYTES:
        if -1 in entry.dims or math.prod(shape) != 1:
            raise invalid_argument(
                f"{_UNKNOWN_ID}For BYTE datatype raw input '{entry.name}', the model must have input shape [1]"
            )
        data = encode_bytes_elements([memoryview(body)])
    inputs = [InputHead(entry.name, entry.datatype.value, shape, NO_PARAMETERS)]
    return InferRequest(heads.head(config.name, model_version, inputs, (), NO_PARAMETERS), "", [data])


def form_request(
    parts: Sequence[tuple[str, Buffer]], config: ModelConfig, model_version: str, heads: RequestHeads
) -> InferRequest:
    """The request that the parts of a form mean, in order: a part is an element of the BYTES input of its name, or a
    row of another one. Where the model has one input, and the parts one name, that may be any.

    Raises:
        ServeError: INVALID_ARGUMENT when there is no such input, or its shape cannot be deduced.
    """
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
                f"unexpected inference input '{name}' for model '{config.name}': the parts of a form are named as its"
                f" inputs, {', '.join(entries)}"
            )
        is_bytes = entry.datatype is DataType.BYTES
        shape = _shape(entry, config, len(contents), len(contents) if is_bytes else sum(map(len, contents)))
        data.append(encode_bytes_elements(map(memoryview, contents)) if is_bytes else b"".join(contents))
        inputs.append(InputHead(name, entry.datatype.value, shape, NO_PARAMETERS))
    return InferRequest(heads.head(config.name, model_version, inputs, (), NO_PARAMETERS), "", data)


def _shape(entry: InputConfig, config: ModelConfig, rows: int, size: int) -> tuple[int, ...]:
    """`size`: elements of BYTES, else bytes."""
    shape = [rows, *entry.dims] if config.max_batch_size > 0 else list(entry.dims)
    variable = [axis for axis, length in enumerate(shape) if length == -1]
    if len(variable) > 1:
        raise invalid_argument(
            f"{_UNKNOWN_ID}The shape of the raw input '{entry.name}' can not be deduced because there are more than one"
            " variable-sized dimension"
        )
    if variable:
        itemsize = 1 if entry.datatype is DataType.BYTES else entry.datatype.itemsize
        fixed = math.prod(length for length in shape if length != -1) * itemsize
        shape[variable[0]] = size // fixed if fixed else 0
    return tuple(shape)
