"""Parameters of requests, tensors and responses, and checks of those that the protocol defines. Texts are Triton's."""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.core.errors import ServeError, invalid_argument

ParameterValue = bool | int | float | str
Parameters = Mapping[str, ParameterValue]

NO_PARAMETERS: Parameters = {}

EXPECTED_TYPES: Mapping[str, str] = {
    "priority": "int64_param or uint64_param.",
    "timeout": "int64_param.",
    "classification": "int64_param",
    "timing": "bool_param.",
    "triton_enable_empty_final_response": "bool_param.",
}
"""Parameter -> its types, in the words of Triton's error text."""

QUEUE_PARAMETERS = frozenset({"priority", "timeout"})
"""Parameters that decide about a request's position in the queue."""
TIMING = "timing"
"""The parameter with which a client asks for the times of its request. Models see it too."""
RESERVED_PREFIX = "triton_"
"""The protocol reserves names with this prefix."""


def parameters_key(parameters: Parameters) -> str:
    """Return a key that is equal only for equal parameters of equal types; 1, 1.0 and True themselves are equal."""
    return str(parameters) if parameters else ""


def check_request_parameters(parameters: Parameters) -> None:
    """Check types and values of a request's parameters. Raises ServeError (INVALID_ARGUMENT)."""
    for name, value in parameters.items():
        if name in QUEUE_PARAMETERS:
            if isinstance(value, bool) or not isinstance(value, int):
                raise _wrong_type(name)
            if value < 0:
                raise invalid_argument(f"invalid value for '{name}', expected value >= 0.")
        elif name in ("triton_enable_empty_final_response", TIMING):
            if not isinstance(value, bool):
                raise _wrong_type(name)
        elif name.startswith(RESERVED_PREFIX):
            raise invalid_argument(
                f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage. Only the following"
                f" keys starting with '{RESERVED_PREFIX}' are allowed: triton_enable_empty_final_response"
            )


def class_count(parameters: Parameters) -> int:
    """Return the number of classes to return; 0 = the tensor itself. Raises ServeError (INVALID_ARGUMENT)."""
    value = parameters.get("classification")
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type("classification")
    if value <= 0:
        raise invalid_argument("invalid value for 'classification' parameter, expected >= 0")
    return value


def _wrong_type(name: str) -> ServeError:
    return invalid_argument(f"invalid value type for '{name}' parameter, expected {EXPECTED_TYPES[name]}")
