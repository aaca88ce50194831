"""Parameters between inference.InferParameter and plain values."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from rocserve.core.errors import internal, invalid_argument
from rocserve.core.request_parameters import EXPECTED_TYPES
from rocserve.core.requests import NO_PARAMETERS, Parameters, ParameterValue
from rocserve.protocol.grpc_service_pb2 import InferParameter


def read_parameters(parameters: Mapping[str, InferParameter]) -> Parameters:
    """The values of a parameter map. Raises: ServeError: INVALID_ARGUMENT when a parameter has no value."""
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
    """Fill a parameter map of a message. Raises: ServeError: INTERNAL for an integer that neither int64 nor uint64
    holds, or a type that has no field."""
    for name, value in values.items():
        # Reading a missing key of a map of messages makes the entry.
        parameter = parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            parameter.int64_param = value
        elif isinstance(value, int) and 0 <= value < 1 << 64:
            parameter.uint64_param = value
        elif isinstance(value, int):
            raise internal(f"parameter '{name}' is {value}, which 64 bits do not hold")
        elif isinstance(value, float):
            parameter.double_param = value
        elif isinstance(value, str):
            parameter.string_param = value
        else:
            raise internal(f"parameter '{name}' is of type {type(value).__name__}; expected bool, int, float or str")
