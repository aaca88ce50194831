"""Arrays to and from DLPack (https://dmlc.github.io/dlpack), on numpy's own export and import.

numpy has no BF16: such tensors travel through it as their 16 bits, and the datatype in the capsule is rewritten. Who
made a capsule frees it by its own means, for which the datatype does not matter.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from rocserve.backends.python.pb_utils.errors import TritonModelException

NOT_CONTIGUOUS = (
    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
)
CPU_DEVICE = (1, 0)
"""kDLCPU and the device's number."""

_UINT, _BFLOAT = 1, 4
"""kDLUInt and kDLBfloat."""
_HOST_DEVICES = (1, 3, 11)
"""kDLCPU, kDLCUDAHost and kDLROCMHost: memory that the CPU reads."""


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _TensorHead(ctypes.Structure):
    """The first fields of DLTensor, with which a capsule's DLManagedTensor begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
    )


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def export_array(array: np.ndarray[Any, Any], bfloat16: bool) -> Any:
    """A capsule on the array's memory, which it keeps alive; `bfloat16`: its uint16 are the bits of BF16."""
    # A capsule cannot say that its memory must not be written.
    writable = array if array.flags.writeable else array.copy()
    capsule = writable.__dlpack__()
    if bfloat16:
        _head(capsule).dtype.code = _BFLOAT
    return capsule


def import_array(tensor: Any) -> tuple[np.ndarray[Any, Any], bool]:
    """The array on the memory of a capsule, or of an object with `__dlpack__`, and whether it is the bits of BF16.
    Raises: TritonModelException: it is no such object, is out of the CPU's reach, not contiguous or of another
    datatype."""
    capsule = tensor
    if type(tensor).__name__ != "PyCapsule":
        if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and"
                " `__dlpack_device__` attributes"
            )
        if tensor.__dlpack_device__()[0] not in _HOST_DEVICES and callable(getattr(tensor, "cpu", None)):
            tensor = tensor.cpu()
        _require_host(tensor.__dlpack_device__()[0])
        try:
            capsule = tensor.__dlpack__(stream=None)
        except BufferError as error:
            raise TritonModelException(f"DLPack tensor cannot be read: {error}") from None
    if not _is_valid(capsule, b"dltensor"):
        raise TritonModelException("Provided capsule is no DLPack tensor, or was used before.")
    head = _head(capsule)
    _require_host(head.device.device_type)
    bfloat16 = head.dtype.code == _BFLOAT
    if bfloat16:
        if head.dtype.bits != 16:
            raise TritonModelException(f"Expected BF16 tensor to have 16 bits, but had: {head.dtype.bits}")
        head.dtype.code = _UINT
    try:
        array = np.from_dlpack(_Offer(capsule))
    except (BufferError, RuntimeError) as error:
        raise TritonModelException(f"DLPack tensor cannot be read: {error}") from None
    if not array.flags.c_contiguous:
        raise TritonModelException(NOT_CONTIGUOUS)
    return array, bfloat16


def device_tensor(tensor: Any) -> Any:
    """PyTorch's tensor on the memory of a capsule, or of an object with `__dlpack__`, that is on a GPU; None where it
    is on the CPU, or the model has imported no PyTorch that has a GPU."""
    torch = sys.modules.get("torch")
    if type(tensor).__name__ == "PyCapsule":
        is_there = _is_valid(tensor, b"dltensor") and _head(tensor).device.device_type not in _HOST_DEVICES
    else:
        is_there = hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] not in _HOST_DEVICES
    if torch is None or not is_there or not torch.cuda.is_available():
        return None
    found = tensor if isinstance(tensor, torch.Tensor) else torch.from_dlpack(tensor)
    return found.detach()


class _Offer:
    """A capsule as the object that numpy asks for."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE


def _require_host(device_type: int) -> None:
    if device_type not in _HOST_DEVICES:
        raise TritonModelException(
            f"DLDevice type {int(device_type)} is not supported: outputs are taken from the CPU's memory; pass"
            " the tensor itself rather than its capsule, or copy it to the CPU first"
        )


def _head(capsule: Any) -> _TensorHead:
    return _TensorHead.from_address(_get_pointer(capsule, b"dltensor"))
