"""Traces in the JSON form of Triton's trace files, which its tools read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.tensors import Tensor
from rocserve.observability.tracing.record import Moment, TraceGroup, TraceRecord


def group_json(group: TraceGroup) -> str:
    """The entries of a request and of those that it led to, with commas between them."""
    entries: list[dict[str, Any]] = []
    for record in group.records:
        entries.append(_head(record))
        moments = record.moments + (group.front_end if not record.parent_id else [])
        entries += [_entry(record.number, moment) for moment in sorted(moments, key=lambda moment: moment.ns)]
    return ",".join(json.dumps(entry, separators=(",", ":"), ensure_ascii=False) for entry in entries)


def _head(record: TraceRecord) -> dict[str, Any]:
    head: dict[str, Any] = {
        "id": record.number,
        "model_name": record.model_name,
        "model_version": int(record.model_version),
    }
    if record.request_id:
        # What is no text in UTF-8 could not be written.
        head["request_id"] = record.request_id.encode(errors="replace").decode()
    if record.parent_id:
        head["parent_id"] = record.parent_id
    return head


def _entry(number: int, moment: Moment) -> dict[str, Any]:
    if moment.tensor is None:
        return {"id": number, "timestamps": [{"name": moment.activity, "ns": moment.ns}]}
    tensor = moment.tensor
    return {
        "id": number,
        "activity": moment.activity,
        "tensor": {
            "name": tensor.name,
            "data": _data(tensor),
            "shape": ",".join(map(str, tensor.shape)),
            "dtype": tensor.datatype.value,
        },
    }


def _data(tensor: Tensor) -> str:
    """The elements with commas between them, texts in quotes (doubled within, as in CSV)."""
    try:
        elements = tensor.numpy().ravel()
    except (ServeError, ValueError):
        # What a client sent may be too short for its shape; the request's answer says so.
        return ""
    if tensor.datatype is DataType.BYTES:
        texts = (element.decode("utf-8", "backslashreplace") for element in elements)
        return ",".join('"' + text.replace('"', '""') + '"' for text in texts)
    if tensor.datatype is DataType.BOOL:
        elements = elements.astype(np.uint8)
    if tensor.datatype is DataType.BF16:
        # The upper half of an FP32.
        elements = (elements.astype(np.uint32) << 16).view(np.float32)
    return ",".join(map(str, elements))
