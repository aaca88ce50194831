"""Weights in the format that PyTorch wrote up to version 1.5, written here by hand."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rocserve.tools.get.download import GetError
from rocserve.tools.networks.efficientnet_lite0 import read_torch_weights


class _Saved:
    """A tensor in column-major order, like one that was transposed before it was saved."""

    def __init__(self, key: str, values: np.ndarray) -> None:
        self.key, self.values = key, values

    def __reduce__(self) -> tuple[Any, ...]:
        steps = tuple(step // self.values.itemsize for step in np.asfortranarray(self.values).strides)
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (self, 1, self.values.shape, steps, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 2)
        self._inside: set[str] = set()

    def persistent_id(self, value: object) -> object:
        # The tensor is pickled first; what it reduces to refers to its storage.
        if isinstance(value, _Saved) and value.key in self._inside:
            return ("storage", sys.modules["torch"].FloatStorage, value.key, "cpu", value.values.size + 1, None)
        if isinstance(value, _Saved):
            self._inside.add(value.key)
        return None


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that the pickles name."""

    def _rebuild_tensor_v2() -> None: ...

    utilities, torch = ModuleType("torch._utils"), ModuleType("torch")
    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utilities._rebuild_tensor_v2 = _rebuild_tensor_v2
    torch.FloatStorage = type("FloatStorage", (), {"__module__": "torch"})
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utilities)


def saved(tensors: Mapping[str, np.ndarray], *, little_endian: bool = True) -> bytes:
    file = io.BytesIO()
    for head in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": little_endian}):
        pickle.dump(head, file, 2)
    _Pickler(file).dump(OrderedDict((name, _Saved(name, values)) for name, values in tensors.items()))
    pickle.dump(list(tensors), file, 2)
    for values in tensors.values():
        file.write((values.size + 1).to_bytes(8, "little"))
        file.write(np.float32(7).tobytes() + values.ravel(order="F").astype("<f4").tobytes())
    return file.getvalue()


TENSORS = {"scale": np.arange(5, dtype=np.float32), "matrix": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}


def test_tensors_come_as_they_were(torch: None) -> None:
    read = read_torch_weights(io.BytesIO(saved(TENSORS)))
    assert list(read) == list(TENSORS)
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(read[name], values)


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("false",)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda whole: pickle.dumps(_Hostile(), 2), "it names posix.system, which is no part of weights"),
        (lambda whole: whole[: len(whole) // 2], "cannot be read"),
        (lambda whole: whole[:-3], "cannot be read"),
        (lambda whole: b"PK\x03\x04" + whole, "cannot be read"),
        (lambda whole: pickle.dumps(1, 2) + whole, "not in PyTorch's format up to version 1.5"),
        (lambda whole: saved(TENSORS, little_endian=False), "not little-endian"),
    ],
    ids=["hostile", "cut", "cut-tensor", "zip", "other", "big-endian"],
)
def test_what_is_no_weights_is_refused(torch: None, spoil: Any, said: str) -> None:
    with pytest.raises(GetError, match=said):
        read_torch_weights(io.BytesIO(spoil(saved(TENSORS))))
