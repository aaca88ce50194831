"""Tensors that come element by element in InferTensorContents, turned to the form of raw contents."""

from __future__ import annotations

import numpy as np

from rocserve.core.errors import invalid_argument
from rocserve.core.tensors import encode_bytes_elements
from rocserve.core.wire_format import length_prefix
from rocserve.protocol.grpc_service_pb2 import InferTensorContents

_DATATYPES: dict[str, tuple[str, ...]] = {
    "bool_contents": ("BOOL",),
    "int_contents": ("INT32", "INT16", "INT8"),
    "int64_contents": ("INT64",),
    "uint_contents": ("UINT32", "UINT16", "UINT8"),
    "uint64_contents": ("UINT64",),
    "fp32_contents": ("FP32",),
    "fp64_contents": ("FP64",),
    "bytes_contents": ("BYTES",),
}
"""What each field may hold; the first is the one that error texts name."""

_AS_RAW = frozenset({"bool_contents", "fp32_contents", "fp64_contents"})

_ARRAY_TYPES = {
    "BOOL": "?",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP32": "<f4",
    "FP64": "<f8",
}


def raw_contents(contents: InferTensorContents, datatype: str, input_name: str, model_name: str) -> bytes:
    """The elements as raw bytes; integers wider than the datatype keep their low bytes, as in Triton.

    Raises:
        ServeError: INVALID_ARGUMENT when the elements are in a field of another datatype, or in two fields.
    """
    raw = b""
    supplied = False
    where = f"unexpected explicit tensor data for input tensor '{input_name}' for model '{model_name}'"
    for field, elements in contents.ListFields():
        if supplied:
            raise invalid_argument(f"{where}, binary data was already supplied.")
        supplied = True
        held = _DATATYPES[field.name]
        if datatype not in held:
            raise invalid_argument(f"{where} of type '{held[0]}', expected datatype '{datatype}'")
        if datatype == "BYTES":
            raw = encode_bytes_elements(elements)
        elif field.name in _AS_RAW:
            # On the wire they stand as raw contents have them; what nobody knows stands behind them.
            nbytes = len(elements) * np.dtype(_ARRAY_TYPES[datatype]).itemsize
            start = len(length_prefix(field.number, nbytes))
            raw = contents.SerializeToString()[start : start + nbytes]
        else:
            wide = np.fromiter(elements, dtype=_ARRAY_TYPES[held[0]], count=len(elements))
            raw = wide.astype(_ARRAY_TYPES[datatype], copy=False).tobytes()
    return raw
