"""The parameters of requests and outputs that the server acts on. Error texts are Triton's."""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.core.errors import ServeError, invalid_argument

EXPECTED_TYPES: Mapping[str, str] = {
    "priority": "int64_param or uint64_param.",
    "timeout": "int64_param.",
    "classification": "int64_param",
    "triton_enable_empty_final_response": "bool_param.",
}
"""Parameter -> its types, in the words of Triton's error text."""

MOST_ENTRIES = 16384
"""Inputs, outputs, dimensions and parameters of a request: the work for each of them delays other requests."""
LONGEST_ID = 1 << 16
"""Bytes; the id goes into errors, log lines and workers' batches."""
QUEUE_PARAMETERS = frozenset({"priority", "timeout"})
"""Parameters that decide about a request's position in the queue."""
RESERVED_PREFIX = "triton_"
"""The protocol reserves names with this prefix."""
_ALLOWED = "triton_enable_empty_final_response"


def check_entries(count: int) -> None:
    """Raises ServeError (INVALID_ARGUMENT) if there are too many inputs, outputs, dimensions and parameters."""
    if count > MOST_ENTRIES:
        raise invalid_argument(
            f"a request may have {MOST_ENTRIES} inputs, outputs, dimensions and parameters together, got {count}"
        )


def check_id(nbytes: int) -> None:
    """Check the length of a request's id. Raises ServeError (INVALID_ARGUMENT) if it is too long."""
    if nbytes > LONGEST_ID:
        raise invalid_argument(f"a request's id may have {LONGEST_ID} bytes, got {nbytes}")


def check_request_parameters(parameters: Mapping[str, bool | int | float | str]) -> None:
    """Check types and values of a request's parameters. Raises ServeError (INVALID_ARGUMENT)."""
    for name, value in parameters.items():
        if name in QUEUE_PARAMETERS:
            if isinstance(value, bool) or not isinstance(value, int):
                raise _wrong_type(name)
            if value < 0:
                raise invalid_argument(f"invalid value for '{name}', expected value >= 0.")
        elif name == _ALLOWED:
            if not isinstance(value, bool):
                raise _wrong_type(name)
        elif name.startswith(RESERVED_PREFIX):
            raise invalid_argument(
                f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage. Only the following"
                f" keys starting with '{RESERVED_PREFIX}' are allowed: {_ALLOWED}"
            )


def class_count(parameters: Mapping[str, bool | int | float | str]) -> int:
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
