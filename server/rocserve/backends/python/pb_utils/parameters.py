"""Parameters of requests and responses as models give and read them."""

from __future__ import annotations

import json
from typing import Any

from rocserve.backends.python.pb_utils.errors import TritonModelException
from rocserve.core.requests import Parameters, ParameterValue


def checked_parameters(parameters: dict[str, Any]) -> dict[str, ParameterValue]:
    """
    Raises:
        TritonModelException: a key is no str, or a value no bool, int or str.
    """
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


def parameters_text(parameters: Parameters) -> str:
    """As Triton writes them: without spaces, and text as it is."""
    return json.dumps(dict(parameters), separators=(",", ":"), ensure_ascii=False)
