"""Triton's parameter TORCH_COMPILE_OPTIONAL_PARAMETERS: a JSON object of what torch.compile takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import ModelConfig

TORCH_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
_KINDS: Mapping[str, type] = {
    "fullgraph": bool, "dynamic": bool, "backend": str, "mode": str, "options": dict, "disable": bool,
}  # fmt: skip
"""The first two change nothing: an exported program is one graph, and says which of its sizes vary."""


@dataclass(frozen=True, slots=True)
class TorchCompileOptions:
    is_asked_for: bool = False
    """Whether the parameter is there and does not disable it."""
    mode: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def torch_compile_options(config: ModelConfig) -> TorchCompileOptions:
    """
    Raises:
        ServeError: INVALID_ARGUMENT, it is no such object, or asks for another compiler than Inductor.
    """
    text = config.parameters.get(TORCH_COMPILE, "").strip()
    if not text:
        return TorchCompileOptions()
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or any(
        key not in _KINDS or not isinstance(value, _KINDS[key]) for key, value in given.items()
    ):
        known = ", ".join(f"{key} ({kind.__name__})" for key, kind in _KINDS.items())
        raise invalid_argument(
            f"parameter '{TORCH_COMPILE}' of model '{config.name}' must be a JSON object with any of {known},"
            f" not '{text}'"
        )
    if given.get("backend", "inductor") != "inductor":
        raise invalid_argument(
            f"parameter '{TORCH_COMPILE}' of model '{config.name}' asks for the backend '{given['backend']}'; only"
            " inductor can be had so"
        )
    return TorchCompileOptions(not given.get("disable", False), given.get("mode", ""), given.get("options", {}))
