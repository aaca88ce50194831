"""Converts inference.InferParameter to plain values and back, and extracts a request's sequence parameters."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from rocserve.core.errors import internal, invalid_argument
from rocserve.core.parameters import EXPECTED_TYPES, NO_PARAMETERS, Parameters, ParameterValue
from rocserve.core.sequences import (
    SEQUENCE_END,
    SEQUENCE_ID,
    SEQUENCE_PARAMETERS,
    SEQUENCE_START,
    SequenceTag,
    sequence_id,
    wrong_type,
)
from rocserve.core.wire_format import LENGTH_DELIMITED, WireError, field_spans
from rocserve.protocol.faults import parse_message
from rocserve.protocol.grpc_service_pb2 import InferParameter, ModelInferRequest

_PARAMETERS_TAG = ModelInferRequest.PARAMETERS_FIELD_NUMBER << 3 | LENGTH_DELIMITED
_NAMES = frozenset(name.encode() for name in SEQUENCE_PARAMETERS)


def read_parameters(parameters: Mapping[str, InferParameter]) -> Parameters:
    """Return the values of a parameter map. Raises ServeError (INVALID_ARGUMENT) if a parameter has no value."""
    if not parameters:
        return NO_PARAMETERS
    values: dict[str, ParameterValue] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            expected = EXPECTED_TYPES.get(name, "int64_param, bool_param, or string_param.")
            raise invalid_argument(f"invalid value type for '{name}' parameter, expected {expected}")
        values[name] = getattr(parameter, choice)
    return values


def write_parameters(values: Parameters, parameters: MutableMapping[str, InferParameter]) -> None:
    """Fill a message's parameter map. Raises ServeError (INTERNAL) for a value that has no field."""
    for name, value in values.items():
        # In a map of messages, reading a missing key adds it.
        parameter = parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            parameter.int64_param = value
        elif isinstance(value, int) and 0 <= value < 1 << 64:
            parameter.uint64_param = value
        elif isinstance(value, int):
            raise internal(f"parameter '{name}' is {value}, which does not fit into 64 bits")
        elif isinstance(value, float):
            parameter.double_param = value
        elif isinstance(value, str):
            parameter.string_param = value
        else:
            raise internal(f"parameter '{name}' is of type {type(value).__name__}; expected bool, int, float or str")


def read_sequence(parameters: Mapping[str, InferParameter]) -> SequenceTag | None:
    """Return the sequence parameters; None without. Raises ServeError (INVALID_ARGUMENT) for a wrong type."""
    if SEQUENCE_PARAMETERS.isdisjoint(parameters):
        return None
    identity: int | str = 0
    flags = {SEQUENCE_START: False, SEQUENCE_END: False}
    for name, parameter in parameters.items():
        if name not in SEQUENCE_PARAMETERS:
            continue
        choice = parameter.WhichOneof("parameter_choice")
        if name == SEQUENCE_ID:
            if choice not in ("int64_param", "uint64_param", "string_param"):
                raise wrong_type(name)
            identity = sequence_id(getattr(parameter, choice))
        elif choice == "bool_param":
            flags[name] = parameter.bool_param
        else:
            raise wrong_type(name)
    return SequenceTag(identity, flags[SEQUENCE_START], flags[SEQUENCE_END])


def cut_sequence(head: bytes) -> tuple[bytes, SequenceTag] | None:
    """Split a request's serialised head into the head without its sequence parameters, and the sequence. None if there
    are none, or their encoding differs from clients' libraries. Raises ServeError (INVALID_ARGUMENT) if they are
    invalid."""
    kept: list[bytes] = []
    cut: list[bytes] = []
    try:
        for tag, start, content, end, _ in field_spans(head):
            is_sequence = tag == _PARAMETERS_TAG and _key(head[content:end]) in _NAMES
            (cut if is_sequence else kept).append(head[start:end])
    except WireError:
        return None
    if not cut:
        return None
    tag = read_sequence(parse_message(b"".join(cut), ModelInferRequest).parameters)
    return None if tag is None else (b"".join(kept), tag)


def _key(entry: bytes) -> bytes:
    """Return the key of a map entry; b"" if it is not the first field or has more than 127 bytes."""
    if len(entry) < 2 or entry[0] != (1 << 3 | LENGTH_DELIMITED) or entry[1] > 0x7F:
        return b""
    return entry[2 : 2 + entry[1]]
