"""Holds the tensors of models, Triton's names and numbers of datatypes, and their numpy types. Arrays are exchanged
with DLPack (https://dmlc.github.io/dlpack) by numpy's own export and import. numpy has no BF16, so such tensors pass
through it as uint16, and the datatype in the capsule is rewritten; a capsule's maker frees it without looking at the
datatype."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rocserve.backends.python.pb_utils.errors import TritonModelException, as_text
from rocserve.core import tensors as core
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import References
from rocserve.core.errors import ServeError
from rocserve.core.tensors import ELEMENT_LENGTH, encode_bytes_elements

if TYPE_CHECKING:
    from rocserve.backends.device_tensors import DeviceTensors

NOT_CONTIGUOUS = (
    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
)
CPU_DEVICE = (1, 0)
"""kDLCPU and the device's number."""

_UINT, _BFLOAT = 1, 4
"""kDLUInt and kDLBfloat."""
_HOST_DEVICES = (1, 3, 11)
"""kDLCPU, kDLCUDAHost and kDLROCMHost: memory that the CPU can read."""


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _TensorHead(ctypes.Structure):
    """The first fields of DLTensor, which is at the start of a capsule's DLManagedTensor."""

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


def import_array(tensor: Any) -> tuple[np.ndarray[Any, Any], bool]:
    """Return an array on the memory of a capsule, or of an object with `__dlpack__`, and whether it holds the bits of
    BF16. Raises TritonModelException if the object, its memory, order or datatype is not supported."""
    capsule = tensor
    if type(tensor).__name__ != "PyCapsule":
        if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and"
                " `__dlpack_device__` attributes"
            )
        if _device_type(tensor) not in _HOST_DEVICES and callable(getattr(tensor, "cpu", None)):
            tensor = tensor.cpu()
        _require_host(tensor)
        try:
            capsule = tensor.__dlpack__(stream=None)
        except BufferError as error:
            raise TritonModelException(f"DLPack tensor cannot be read: {error}") from None
    if not _is_valid(capsule, b"dltensor"):
        raise TritonModelException("Provided capsule is not a DLPack tensor, or was used before.")
    _require_host(capsule)
    head = _head(capsule)
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
    """Return a PyTorch tensor on the GPU memory of a capsule, or of an object with `__dlpack__`; None if it is on the
    CPU, or the model has imported no PyTorch with a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or _device_type(tensor) in _HOST_DEVICES or not torch.cuda.is_available():
        return None
    found = tensor if isinstance(tensor, torch.Tensor) else torch.from_dlpack(tensor)
    return found.detach()


class _Offer:
    """Offers a capsule as the object that numpy expects."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE


def _device_type(tensor: Any) -> int:
    """Return the device type of a capsule, or of an object with `__dlpack__`; the CPU's for other objects."""
    if type(tensor).__name__ == "PyCapsule":
        return int(_head(tensor).device.device_type) if _is_valid(tensor, b"dltensor") else CPU_DEVICE[0]
    return int(tensor.__dlpack_device__()[0]) if hasattr(tensor, "__dlpack_device__") else CPU_DEVICE[0]


def _require_host(tensor: Any) -> None:
    if (device_type := _device_type(tensor)) not in _HOST_DEVICES:
        raise TritonModelException(
            f"DLDevice type {device_type} is not supported: outputs are taken from the CPU's memory; pass"
            " the tensor itself rather than its capsule, or copy it to the CPU first"
        )


def _head(capsule: Any) -> _TensorHead:
    return _TensorHead.from_address(_get_pointer(capsule, b"dltensor"))


_NUMBERS = {
    datatype: number
    for number, datatype in enumerate(
        (DataType.BOOL, DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64, DataType.INT8,
         DataType.INT16, DataType.INT32, DataType.INT64, DataType.FP16, DataType.FP32, DataType.FP64,
         DataType.BYTES, DataType.BF16), 1,
    )
}  # fmt: skip
"""TRITONSERVER_DataType, with the same numbers as config.pbtxt's DataType."""
_BY_NUMBER = {number: datatype for datatype, number in _NUMBERS.items()}
_BY_NUMPY_DTYPE = {datatype.numpy_dtype: datatype for datatype in DataType if datatype is not DataType.BF16}
BY_CONFIG_NAME = {
    "TYPE_STRING" if datatype is DataType.BYTES else f"TYPE_{datatype.value}": datatype for datatype in DataType
}
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    name: datatype.numpy_dtype.type for name, datatype in BY_CONFIG_NAME.items() if datatype is not DataType.BF16
} | {"TYPE_BOOL": bool}


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of a data_type such as "TYPE_FP32". Raises KeyError, also for TYPE_BF16."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of a TRITONSERVER_DataType number; None if there is none."""
    datatype = _BY_NUMBER.get(data_type, DataType.BF16)
    return None if datatype is DataType.BF16 else datatype.numpy_dtype.type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the TRITONSERVER_DataType number of a numpy type; None if there is none."""
    datatype = _datatype_of_numpy(np.dtype(data_type))
    return None if datatype is None else _NUMBERS[datatype]


def _datatype_of_numpy(dtype: np.dtype[Any]) -> DataType | None:
    """Return BYTES for arrays of bytes or objects. Arrays of str (numpy's kind "U") have no datatype, as in Triton."""
    return DataType.BYTES if dtype.kind in "OS" else _BY_NUMPY_DTYPE.get(dtype)


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> bytes | tuple[()] | None:
    """Return an array of objects or bytes, serialised in C order; elements other than bytes are written as their str().
    As in Triton, returns () for an array without elements, and None for an array of another type."""
    if input_tensor.size == 0:
        return ()
    return _encode_array(input_tensor) if input_tensor.dtype.kind in "OS" else None


def deserialize_bytes_tensor(encoded_tensor: bytes) -> np.ndarray[Any, Any]:
    """Return a one-dimensional array of bytes objects. Raises struct.error if the data ends within an element."""
    elements: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        (length,) = ELEMENT_LENGTH.unpack_from(encoded_tensor, position)
        position += ELEMENT_LENGTH.size
        elements.extend(struct.unpack_from(f"<{length}s", encoded_tensor, position))
        position += length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def _encode_array(array: np.ndarray[Any, Any]) -> bytes:
    elements = array.ravel().tolist()
    return encode_bytes_elements(element if isinstance(element, bytes) else str(element) for element in elements)


class Tensor:
    """A named tensor, on the memory of the array or GPU tensor that it was made from."""

    __slots__ = ("__weakref__", "_array", "_on_device", "_tensor")

    def __init__(self, name: str | bytes, numpy_array: np.ndarray[Any, Any]) -> None:
        if type(name) is not str:
            name = as_text(name, "the name of a Tensor")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor '{name}' must be made from a numpy array, got {type(numpy_array).__name__}")
        datatype = _BY_NUMPY_DTYPE.get(numpy_array.dtype) or _datatype_of_numpy(numpy_array.dtype)
        if datatype is None:
            raise TritonModelException(
                f"NumPy dtype is not supported. Tensor '{name}' has dtype {numpy_array.dtype}"
                + ("; use dtype object for text" if numpy_array.dtype.kind == "U" else "")
            )
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        # Subclasses such as masked arrays export their memory differently.
        array = numpy_array if type(numpy_array) is np.ndarray else np.asarray(numpy_array)
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        # Texts are copied now, because a model may reuse the array of objects for the next request.
        if datatype is DataType.BYTES:
            data: core.Buffer = _encode_array(array)
        else:
            data = array.data.cast("B") if array.size else b""
        self._tensor = core.Tensor(name, datatype, numpy_array.shape, data)
        self._array: np.ndarray[Any, Any] | None = array
        self._on_device: Any = None
        """The PyTorch tensor, if on a GPU; `_tensor` has no data then (see `host_tensor`). None = on the CPU."""

    def name(self) -> str:
        return self._tensor.name

    def shape(self) -> list[int]:
        return list(self._tensor.shape)

    def triton_dtype(self) -> int:
        """Return the datatype's number in Triton's TRITONSERVER_DataType."""
        return _NUMBERS[self._tensor.datatype]

    def is_cpu(self) -> bool:
        return self._on_device is None

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """Return an array on the memory, which may be written; for BYTES, an array of bytes objects. Raises
        TritonModelException if the tensor is on a GPU, or is BF16, for which numpy has no type."""
        if self._on_device is not None:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._tensor.datatype is DataType.BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._memory() if self._array is None else self._array

    def to_dlpack(self) -> Any:
        if self._tensor.datatype is DataType.BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        if self._on_device is not None:
            return self._on_device.__dlpack__()
        array = self._memory()
        # A capsule cannot mark its memory as read-only.
        capsule = (array if array.flags.writeable else array.copy()).__dlpack__()
        if self._tensor.datatype is DataType.BF16:
            # The array's uint16 values are the bits of BF16.
            _head(capsule).dtype.code = _BFLOAT
        return capsule

    @staticmethod
    def from_dlpack(name: str | bytes, tensor: Any) -> Tensor:
        """Return a tensor on the memory of a DLPack capsule, or of an object with `__dlpack__`."""
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        on_device = device_tensor(tensor)
        if on_device is not None:
            return wrap_device_tensor(as_text(name, "the name of a Tensor"), on_device)
        array, bfloat16 = import_array(tensor)
        made = Tensor(name, array)
        if bfloat16:
            made._tensor.datatype = DataType.BF16
        return made

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.to_dlpack() if self._on_device is None else self._on_device.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = CPU_DEVICE if self._on_device is None else self._on_device.__dlpack_device__()
        return device

    def _memory(self) -> np.ndarray[Any, Any]:
        if self._array is None:
            tensor = self._tensor
            if tensor.datatype is DataType.BYTES:
                self._array = tensor.numpy()
            else:
                array = np.ndarray(tensor.shape, tensor.datatype.numpy_dtype, tensor.data)
                if not array.flags.writeable:
                    # Models change their inputs in place.
                    array = array.copy()
                    tensor.data = core.octets(array)
                self._array = array
        return self._array


def wrap_tensor(tensor: core.Tensor) -> Tensor:
    """Return a received tensor as a model sees it; its data is decoded only when the model asks for it."""
    wrapped = Tensor.__new__(Tensor)
    wrapped._tensor = tensor
    wrapped._array = wrapped._on_device = None
    return wrapped


def wrap_in_place(tensor: core.Tensor) -> Tensor:
    """Return a received tensor for a model that reads its inputs in place, and so never changes them."""
    wrapped = wrap_tensor(tensor)
    if tensor.datatype is not DataType.BYTES:
        wrapped._array = tensor.numpy()
    return wrapped


def wrap_device_tensor(name: str, value: Any) -> Tensor:
    """Raises TritonModelException if the tensor has no datatype in KServe, or is not contiguous."""
    from rocserve.backends.pytorch.datatypes import datatype_of

    try:
        datatype = datatype_of(value.dtype, f"Tensor '{name}'")
    except ServeError as error:
        raise TritonModelException(error.text) from None
    if not value.is_contiguous():
        raise TritonModelException(NOT_CONTIGUOUS)
    wrapped = wrap_tensor(core.Tensor(name, datatype, tuple(value.shape), b""))
    wrapped._on_device = value
    return wrapped


def wrapper_of(tensors: DeviceTensors | None) -> Callable[[core.Tensor], Tensor]:
    """Return the function that makes tensors for the model, which may keep them, from received tensors. Received
    tensors on the GPU are copied there, on the current stream. `tensors`: access to that GPU; None = there are none."""
    if tensors is None:
        return wrap_tensor

    def wrapped(tensor: core.Tensor) -> Tensor:
        if type(tensor.data) is not References:
            return wrap_tensor(tensor)
        return wrap_device_tensor(tensor.name, tensors.open(tensor).clone())

    return wrapped


def host_tensor(tensor: Tensor) -> core.Tensor:
    """Return a model's tensor as it is sent, in the CPU's memory."""
    if tensor._on_device is None:
        return tensor._tensor
    return Tensor.from_dlpack(tensor._tensor.name, tensor._on_device.cpu())._tensor
