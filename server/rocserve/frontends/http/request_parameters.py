"""The `parameters` of a request's JSON."""

from __future__ import annotations

from typing import Any

from rocserve.core.errors import invalid_argument
from rocserve.core.requests import ParameterValue
from rocserve.core.sequences import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START, SequenceId, SequenceTag
from rocserve.frontends.http.json_values import UNSIGNED_LIMIT, boolean, checked_text, members, text, unsigned

_RESERVED_PREFIX = "triton_"
_UNSIGNED = frozenset({"priority", "timeout"})


def plain_parameter(name: str, value: Any) -> ParameterValue:
    """A parameter that is only handed on.

    Raises:
        ServeError: INVALID_ARGUMENT when it is neither a number nor a text nor a boolean.
    """
    kind = type(value)
    if kind is int:
        fits: bool = -(1 << 63) <= value < 1 << 63
        return int(value) if fits else float(value)
    if kind is str:
        return checked_text(value)
    if kind is bool or kind is float:
        plain: ParameterValue = value
        return plain
    raise invalid_argument(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


class RequestParameters:
    """What the parameters of an inference request say."""

    __slots__ = ("binary_output", "others", "sequence")

    def __init__(self, value: Any) -> None:
        """`value`: the JSON of `parameters`.

        Raises:
            ServeError: INTERNAL for one of the wrong type, INVALID_ARGUMENT for a reserved name.
        """
        self.binary_output = False
        """Whether outputs that the request does not name come in binary form."""
        self.sequence: SequenceTag | None = None
        self.others: dict[str, ParameterValue] = {}
        identity: SequenceId = 0
        flags = {SEQUENCE_START: False, SEQUENCE_END: False}
        tells_of_a_sequence = False
        for name, entry in members(value, "failed to get request params.").items():
            if name == SEQUENCE_ID:
                identity, tells_of_a_sequence = _sequence_id(entry), True
            elif name in flags:
                flags[name], tells_of_a_sequence = boolean(entry, f"Unable to parse '{name}'"), True
            elif name in _UNSIGNED:
                self.others[name] = unsigned(entry, f"Unable to parse '{name}'")
            elif name == "binary_data_output":
                self.binary_output = boolean(entry, f"Unable to parse '{name}'")
            elif name.startswith(_RESERVED_PREFIX):
                raise invalid_argument(
                    "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
                )
            else:
                self.others[name] = plain_parameter(name, entry)
        if tells_of_a_sequence:
            self.sequence = SequenceTag(identity, flags[SEQUENCE_START], flags[SEQUENCE_END])


def _sequence_id(value: Any) -> SequenceId:
    if type(value) is int and 0 <= value < UNSIGNED_LIMIT:
        return value
    return text(value, f"Unable to parse '{SEQUENCE_ID}'")
