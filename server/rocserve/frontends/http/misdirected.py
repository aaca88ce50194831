"""Names the right call for a body that the infer call has refused: a picture, or inputs as members of one object."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig, TensorConfig
from rocserve.core.tensors import Buffer
from rocserve.core.validation import format_shape
from rocserve.frontends.http.body import LARGE_JSON
from rocserve.frontends.http.json_text import parse_json


def advised(error: ServeError, body: Buffer, config: ModelConfig) -> ServeError:
    """Return the error of a body that is not an infer request, with the call that takes the body if one does."""
    view = memoryview(body)
    # The first bytes of picture files, as a regular expression; none of them begins JSON.
    pictures = (
        (b"\xff\xd8\xff", "JPEG"),
        (b"\x89PNG", "PNG"),
        (b"GIF8", "GIF"),
        (b"RIFF....WEBP", "WebP"),
        (b"BM", "BMP"),
    )
    kind = next((kind for begin, kind in pictures if re.match(begin, view, re.DOTALL)), "")
    advice = _for_picture(kind, config) if kind else _for_members(view, config)
    return error.with_text(f"{error.text}; {advice}") if advice else error


def _for_picture(kind: str, config: ModelConfig) -> str:
    entry = config.inputs[0] if len(config.inputs) == 1 else None
    if entry is not None and entry.datatype is DataType.BYTES:
        return f"the body is a {kind} file: send it in a form, curl -F {entry.name}=@FILE"
    refused = f"the body is a {kind} file, and the model takes {tensors_text(config.inputs)}"
    # An image without its batch has rows, columns and channels.
    if entry is None or len(entry.dims) < 3:
        return refused
    return f"{refused}: --preprocess, or the parameter `preprocess`, generates a model that takes pictures"


def tensors_text(entries: Sequence[TensorConfig]) -> str:
    """Return the tensors of a model, for an error: "image FP32 [3,224,224], scale FP32 [1]"."""
    return ", ".join(f"{one.name} {one.datatype.value} {format_shape(one.dims)}" for one in entries)


def _for_members(body: memoryview, config: ModelConfig) -> str:
    if len(body) > LARGE_JSON:
        return ""
    try:
        members = parse_json(body)
    except ServeError:
        return ""
    if not isinstance(members, dict) or "inputs" in members or not any(one.name in members for one in config.inputs):
        return ""
    return (
        "the body has the inputs as its members, the form of the generate call: send it to"
        f" /v2/models/{quote(config.name, safe='')}/generate"
    )
