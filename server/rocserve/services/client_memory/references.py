"""What a tensor of a request says of the region that it lies in; texts are Triton's."""

from __future__ import annotations

from dataclasses import dataclass

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.requests import SHARED_BYTE_SIZE, SHARED_OFFSET, SHARED_REGION, Parameters

_UNSIGNED = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RegionReference:
    """A part of a region."""

    region: str
    offset: int
    """Bytes from the region's beginning. Triton reads both numbers as unsigned ones, so a negative one is huge."""
    nbytes: int


def read_reference(tensor: str, parameters: Parameters) -> RegionReference | None:
    """Where the tensor lies; None = in the request itself.

    Raises:
        ServeError: INVALID_ARGUMENT, a parameter is of the wrong type, or lacks its fellow.
    """
    region = parameters.get(SHARED_REGION)
    if region is None:
        for name in (SHARED_OFFSET, SHARED_BYTE_SIZE):
            if name in parameters:
                raise invalid_argument(
                    f"'{name}' can not be specified without '{SHARED_REGION}' parameter for tensor '{tensor}'"
                )
        return None
    if not isinstance(region, str):
        raise _wrong_type(SHARED_REGION, tensor, "string_param")
    offset = _number(SHARED_OFFSET, tensor, parameters) if SHARED_OFFSET in parameters else 0
    if SHARED_BYTE_SIZE not in parameters:
        raise invalid_argument(
            f"'{SHARED_BYTE_SIZE}' must be specified along with '{SHARED_REGION}' parameter for tensor '{tensor}'"
        )
    return RegionReference(region, offset, _number(SHARED_BYTE_SIZE, tensor, parameters))


def _number(name: str, tensor: str, parameters: Parameters) -> int:
    value = parameters[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(name, tensor, "int64_param")
    return value & _UNSIGNED


def _wrong_type(name: str, tensor: str, expected: str) -> ServeError:
    return invalid_argument(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {expected}.")
