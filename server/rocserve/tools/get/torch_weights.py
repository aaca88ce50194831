"""Reads weights that PyTorch has saved, without PyTorch: its format up to version 1.5, pickles and then the bytes of
the tensors. A pickle that names anything but the parts of a tensor is refused."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rocserve.tools.get.errors import GetError

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT_BYTES = 8
"""In front of a storage's bytes, the number of its elements."""
_DATATYPES = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    datatype: np.dtype[Any]
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: Sequence[int]
    steps: Sequence[int]
    """Elements from one to the next along each dimension."""


def read_torch_weights(file: IO[bytes]) -> Mapping[str, NDArray[Any]]:
    """The tensors by their names.

    Raises:
        GetError: it is no such file, or holds something else.
    """
    try:
        if [_Unpickler(file).load() for _ in range(2)] != [_MAGIC, _PROTOCOL]:
            raise GetError("the weights are not in PyTorch's format up to version 1.5")
        if not _Unpickler(file).load()["little_endian"]:
            raise GetError("the weights were written by a machine that is not little-endian")
        tensors: Mapping[str, _Tensor] = _Unpickler(file).load()
        keys: list[str] = _Unpickler(file).load()
        storages = {tensor.storage.key: tensor.storage for tensor in tensors.values()}
        contents = {key: _read_storage(file, storages[key]) for key in keys}
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise GetError(f"the weights cannot be read ({type(error).__name__}: {error})") from None
    return {name: _cut(contents[tensor.storage.key], tensor) for name, tensor in tensors.items()}


def _read_storage(file: IO[bytes], storage: _Storage) -> NDArray[Any]:
    if int.from_bytes(file.read(_COUNT_BYTES), "little") != storage.count:
        raise ValueError("a tensor has another size than is said of it")
    return np.frombuffer(file.read(storage.count * storage.datatype.itemsize), storage.datatype, storage.count)


def _cut(content: NDArray[Any], tensor: _Tensor) -> NDArray[Any]:
    last = tensor.offset + sum((side - 1) * step for side, step in zip(tensor.shape, tensor.steps, strict=True))
    if min((*tensor.steps, tensor.offset, last)) < 0 or last >= content.size:
        raise GetError("the weights cannot be read (a tensor stands out of its bytes)")
    steps = [step * content.itemsize for step in tensor.steps]
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(content[tensor.offset :], tensor.shape, steps))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in _DATATYPES:
            return _DATATYPES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of weights")

    def persistent_load(self, pid: Any) -> _Storage:
        _, datatype, key, _, count, _ = pid
        return _Storage(key, datatype, count)


def _tensor(storage: _Storage, offset: int, shape: Sequence[int], steps: Sequence[int], *rest: object) -> _Tensor:
    return _Tensor(storage, offset, shape, steps)
