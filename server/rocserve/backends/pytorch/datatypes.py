"""Converts datatypes and tensors between PyTorch and the protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rocserve.backends.onnx.strings import bytes_of_text, text_of_bytes
from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal, invalid_argument
from rocserve.core.tensors import Tensor, octets

_TORCH: dict[DataType, torch.dtype] = {
    datatype: torch.bfloat16 if datatype is DataType.BF16 else getattr(torch, datatype.numpy_dtype.name)
    for datatype in DataType
    if datatype is not DataType.BYTES
}
"""PyTorch has numpy's names."""
OURS = {theirs: ours for ours, theirs in _TORCH.items()}


def torch_dtype(datatype: DataType) -> torch.dtype:
    return _TORCH[datatype]


def datatype_of(dtype: torch.dtype, what: str) -> DataType:
    """Return the protocol's datatype. Raises ServeError (INVALID_ARGUMENT) if the protocol has none."""
    if dtype not in OURS:
        raise invalid_argument(f"{what} has dtype {dtype}, which the KServe protocol does not have")
    return OURS[dtype]


def is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(element, str) for element in value)


def to_torch(tensor: Tensor, copies: bool) -> Any:
    """Return a tensor on the input's memory, or a copy of it; for BYTES a list of str."""
    array = tensor.numpy()
    if tensor.datatype is DataType.BYTES:
        return [text_of_bytes(element) for element in array.flat]
    made = torch.from_numpy(array.copy() if copies else array)
    return made.view(torch.bfloat16) if tensor.datatype is DataType.BF16 else made


def from_torch(name: str, value: Any) -> np.ndarray[Any, Any] | Tensor:
    """Return an output for the protocol, without a copy if it is on the CPU. Raises ServeError (INTERNAL) if the output
    is neither a dense tensor nor a list of strings."""
    if is_strings(value):
        return np.array([bytes_of_text(text) for text in value], np.object_)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.dtype not in OURS:
        what = f"a {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            kind = "tensor" if value.layout is torch.strided else f"tensor in {value.layout}"
            what = f"a {kind} of {value.dtype}"
        raise internal(f"output '{name}' is {what}, which the protocol cannot represent")
    value = value.detach().cpu().resolve_conj().resolve_neg()
    if value.dtype is not torch.bfloat16:
        return np.asarray(value.numpy())
    bits = value.contiguous().view(torch.uint16).numpy()
    return Tensor(name, DataType.BF16, bits.shape, octets(bits))
