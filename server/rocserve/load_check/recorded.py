"""Recorded answers: check.npz holds the answers that a model must give. It has an array `input.NAME` for each input of
one request, an array `output.NAME` for each output that is compared, and may have a number `tolerance`."""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from rocserve.core.datatypes import DataType, datatype_of
from rocserve.core.errors import ServeError
from rocserve.core.load_check import RECORDED_ANSWERS, RECORDED_FILE, LoadCheckFailed
from rocserve.core.model_config import ModelConfig, OutputConfig, TensorConfig, control_inputs, state_inputs
from rocserve.core.requests import MOST_ENTRIES, InferRequest, InputHead, RequestedOutput, RequestHead
from rocserve.core.tensors import Tensor, bfloat16_values, tensor_from_numpy
from rocserve.core.validation import RequestValidator, admits, reshape_dims
from rocserve.load_check.difference import difference, furthest
from rocserve.load_check.tensors import Array

_INPUT, _OUTPUT, _TOLERANCE = "input.", "output.", "tolerance"
_MOST_BYTES = 1 << 30
"""Of all arrays: a small file may unpack to any size."""


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """Inputs, and the outputs that a model must compute from them."""

    inputs: Mapping[str, Array]
    """With the batch dimension if the model batches. Texts are arrays of str or bytes, or object arrays of these."""
    outputs: Mapping[str, Array]
    tolerance: float | None = None
    """Largest difference of an output's element, in parts of the output's largest value; None = by datatypes."""


def read_recorded(path: Path) -> RecordedAnswers:
    """Raises ServeError (INVALID_ARGUMENT) if the file cannot be read or has other arrays than a check.npz."""
    arrays = _arrays(path)
    inputs = {name.removeprefix(_INPUT): array for name, array in arrays.items() if name.startswith(_INPUT)}
    outputs = {name.removeprefix(_OUTPUT): array for name, array in arrays.items() if name.startswith(_OUTPUT)}
    unknown = [name for name in arrays if not name.startswith((_INPUT, _OUTPUT)) and name != _TOLERANCE]
    if unknown:
        raise _wrong(f"array '{unknown[0]}' is unknown; expected input.NAME, output.NAME and tolerance")
    if not outputs:
        raise _wrong("it has no output; expected at least one array output.NAME with the recorded answer")
    tolerance: float | None = None
    if _TOLERANCE in arrays:
        number = arrays[_TOLERANCE]
        if number.size != 1 or number.dtype.kind not in "fiu" or not 0 <= number.item() < math.inf:
            raise _wrong("'tolerance' must be one number, 0 or more")
        tolerance = float(number.item())
    return RecordedAnswers(inputs, outputs, tolerance)


def write_recorded(path: Path, answers: RecordedAnswers) -> None:
    """Write a check.npz; a server sees it only when it is complete. Raises ValueError for texts that end with a zero
    character, which numpy's arrays of texts drop; OSError."""
    arrays = {f"{_INPUT}{name}": _storable(name, array) for name, array in answers.inputs.items()}
    arrays |= {f"{_OUTPUT}{name}": _storable(name, array) for name, array in answers.outputs.items()}
    if answers.tolerance is not None:
        arrays[_TOLERANCE] = np.array(answers.tolerance)
    # Scans skip files with this ending.
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            np.savez_compressed(file, **cast(dict[str, Any], arrays))
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def recorded_request(answers: RecordedAnswers, config: ModelConfig) -> InferRequest:
    """Return the recorded request, validated as a client's, with its plan. Controls and states of sequences that are
    not recorded are zeros. Raises ServeError (INVALID_ARGUMENT) if the arrays do not fit the configuration."""
    tensors = [_input(name, array, config) for name, array in answers.inputs.items()]
    tensors += _sequence_zeros(answers, config)
    head = RequestHead(
        config.name,
        "",
        tuple(InputHead(tensor.name, tensor.datatype.value, tensor.shape) for tensor in tensors),
        tuple(RequestedOutput(name) for name in answers.outputs),
    )
    request = InferRequest(head, "", [tensor.data for tensor in tensors])
    declared = {output.name: output for output in config.outputs}
    try:
        RequestValidator(config).validate(request)
    except ServeError as error:
        raise _wrong(error.text) from None
    for name, array in answers.outputs.items():
        _check_dtype("output", name, array, declared[name].datatype)
    return request


def compare_recorded(answers: RecordedAnswers, given: Mapping[str, Array | Tensor], config: ModelConfig) -> str:
    """Compare a model's answer with the recorded one; return the finding, as a part of a LoadCheckReport. `given`: the
    model's outputs. Raises LoadCheckFailed with the first output that differs too much."""
    declared = {output.name: output for output in config.outputs}
    largest = 0.0
    for name, recorded in answers.outputs.items():
        if name not in given:
            raise _differs(f"the model gives no output '{name}', which {RECORDED_FILE} has recorded")
        largest = max(largest, _compare(recorded, given[name], declared[name], answers.tolerance, config))
    return f"recorded answers agree, largest difference {largest:.2g}" if largest else "recorded answers are equal"


def joined(responses: Sequence[Sequence[Tensor]]) -> dict[str, Array]:
    """Return the outputs of a request's responses: those of a decoupled model are joined along their first dimension.
    Raises LoadCheckFailed if their shapes do not allow that."""
    parts: dict[str, list[Array]] = {}
    for response in responses:
        for tensor in response:
            parts.setdefault(tensor.name, []).append(tensor.numpy())
    outputs: dict[str, Array] = {}
    for name, arrays in parts.items():
        try:
            outputs[name] = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        except ValueError:
            shapes = ", ".join(str([*array.shape]) for array in arrays)
            raise _differs(f"the responses' parts of output '{name}' cannot be joined: {shapes}") from None
    return outputs


def _compare(
    recorded: Array, given: Array | Tensor, output: OutputConfig, tolerance: float | None, config: ModelConfig
) -> float:
    """Return the difference. Raises LoadCheckFailed if it is too large."""
    actual = given.numpy() if isinstance(given, Tensor) else given
    actual = actual.reshape(_declared_shape(actual.shape, output, config, recorded.shape))
    name = output.name
    if actual.shape != recorded.shape:
        raise _differs(f"output '{name}' has the shape {[*actual.shape]}, recorded is {[*recorded.shape]}")
    if output.datatype is DataType.BYTES:
        one, other = _texts(actual), _texts(recorded)
        unlike = [index for index in np.ndindex(recorded.shape) if one[index] != other[index]]
        if unlike:
            raise _differs(f"output '{name}' differs: {_both(unlike[0], one, other)}")
        return 0.0
    if output.datatype is DataType.BF16:
        actual, recorded = _floats(actual), _floats(recorded)
    elif actual.dtype != recorded.dtype:
        raise _differs(f"output '{name}' has the dtype {actual.dtype}, recorded is {recorded.dtype}")
    found = difference(actual, recorded)
    # Datatype of an output -> tolerance if the file has none: the largest difference of two engines that compute the
    # same model in this precision. Other datatypes must be equal.
    tolerances = {DataType.FP64: 1e-3, DataType.FP32: 1e-3, DataType.FP16: 2e-2, DataType.BF16: 1e-1}
    allowed = tolerances.get(output.datatype, 0.0) if tolerance is None else tolerance
    if found <= allowed:
        return found
    place = furthest(actual, recorded)
    raise _differs(
        f"output '{name}' differs by {found:.2g} of its largest value, the tolerance is {allowed:g}:"
        f" {_both(place, actual, recorded)}"
    )


def _clients_shape(shape: tuple[int, ...], tensor: TensorConfig, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape that clients see, for a tensor of the shape that the model sees (`reshape`)."""
    lead = int(config.max_batch_size > 0)
    if tensor.reshape is None or not admits(tensor.reshape, shape[lead:]):
        return shape
    return (*shape[:lead], *reshape_dims(shape[lead:], tensor.reshape, tensor.dims))


def _declared_shape(
    shape: tuple[int, ...], output: OutputConfig, config: ModelConfig, recorded: tuple[int, ...]
) -> tuple[int, ...]:
    """Return an output's shape for clients: the configured one, with sizes of 1 that the model has dropped."""
    shape = _clients_shape(shape, output, config)
    alike = [size for size in shape if size != 1] == [size for size in recorded if size != 1]
    return recorded if alike else shape


def _both(place: Sequence[int], actual: Array, recorded: Array) -> str:
    where = f"at {[*place]} " if place else ""
    return f"{where}the model gives {_shown(actual[tuple(place)])}, recorded is {_shown(recorded[tuple(place)])}"


def _shown(value: Any) -> str:
    text = repr(value.decode(errors="backslashreplace")) if isinstance(value, bytes) else f"{value:.7g}"
    return text if len(text) <= 60 else text[:57] + "..."


def _input(name: str, array: Array, config: ModelConfig) -> Tensor:
    """Return an input in the form of a client's. The validation refuses unknown names."""
    entry = next((entry for entry in config.inputs if entry.name == name), None)
    expected = None
    if entry is None:
        with contextlib.suppress(ValueError):
            return tensor_from_numpy(name, array)
    else:
        expected = entry.datatype
        _check_dtype("input", name, array, expected)
        if not admits(entry.dims, array.shape[int(config.max_batch_size > 0) :]):
            # Recorded by a tool that runs the model itself.
            array = array.reshape(_clients_shape(array.shape, entry, config))
    if expected is DataType.BF16 and array.dtype == np.float32:
        bits = np.ascontiguousarray(array).view(np.uint32).astype(np.uint64)
        array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return tensor_from_numpy(name, array, expected)


def _check_dtype(what: str, name: str, array: Array, expected: DataType) -> None:
    takes = [expected.numpy_dtype] if expected is not DataType.BF16 else [np.dtype(np.uint16), np.dtype(np.float32)]
    if array.dtype.kind in "SU" if expected is DataType.BYTES else array.dtype in takes:
        return
    wanted = "str or bytes" if expected is DataType.BYTES else " or ".join(map(str, takes))
    raise _wrong(f"array '{what}.{name}' has the dtype {array.dtype}, expected {wanted} for {expected.value}")


def _sequence_zeros(answers: RecordedAnswers, config: ModelConfig) -> list[Tensor]:
    batching, known = config.sequence_batching, {entry.name for entry in config.inputs}
    if batching is None:
        return []
    rows = [array.shape[:1] for array in answers.inputs.values()][:1] if config.max_batch_size > 0 else []
    tensors = []
    for entry in (*control_inputs(batching), *state_inputs(batching)):
        if entry.name in known and entry.name not in answers.inputs:
            shape = (*(rows[0] if rows else ()), *(1 if size == -1 else size for size in entry.dims))
            tensors.append(Tensor(entry.name, entry.datatype, shape, bytes(math.prod(shape) * entry.datatype.itemsize)))
    return tensors


def _texts(array: Array) -> Array:
    """Return texts as bytes, without the zeros at the end that numpy's arrays of texts do not keep."""
    made = [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel().tolist()]
    texts = np.empty(len(made), np.object_)
    texts[:] = [one.rstrip(b"\0") for one in made]
    return texts.reshape(array.shape)


def _floats(array: Array) -> Array:
    """Return BF16 values, given by their bits or as float32."""
    return bfloat16_values(array) if array.dtype == np.uint16 else array


def _storable(name: str, array: Array) -> Array:
    if datatype_of(array) is not DataType.BYTES:
        return np.ascontiguousarray(array)
    texts = [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel().tolist()]
    if any(text.endswith(b"\0") for text in texts):
        raise ValueError(f"a text of '{name}' ends with a zero character, which {RECORDED_FILE} cannot hold")
    return np.array(texts, np.bytes_).reshape(array.shape)


def _arrays(path: Path) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            unpacked = sum(member.file_size for member in members)
        if unpacked > _MOST_BYTES or len(members) > MOST_ENTRIES:
            raise _wrong(
                f"it has {len(members)} arrays of {unpacked} bytes, at most {MOST_ENTRIES} of {_MOST_BYTES} are"
                " possible"
            )
        with np.load(path, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    except LoadCheckFailed:
        raise
    except OSError as error:
        raise _wrong(f"it cannot be read: {error.strerror or error}") from None
    except Exception as error:
        # numpy and zipfile raise many types for a damaged file.
        fault = "it holds Python objects; write texts as arrays of str or bytes" if "pickle" in str(error) else error
        raise _wrong(f"it is not an archive of numpy's arrays (numpy.savez): {fault}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise _wrong(f"'{name}' in it is not a numpy array")
    return arrays


def _wrong(text: str) -> LoadCheckFailed:
    return LoadCheckFailed(RECORDED_ANSWERS, f"{RECORDED_FILE}: {text}")


def _differs(text: str) -> LoadCheckFailed:
    return LoadCheckFailed(RECORDED_ANSWERS, f"it does not answer as {RECORDED_FILE} says: {text}")
