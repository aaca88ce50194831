"""Reads the parameters of the Python models of this package."""

from __future__ import annotations

import json
from collections.abc import Mapping


def parameters_of(args: Mapping[str, str]) -> Mapping[str, str]:
    """`args`: as in `initialize`."""
    entries = json.loads(args["model_config"])["parameters"]
    return {key: entry["string_value"] for key, entry in entries.items()}
