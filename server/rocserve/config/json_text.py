"""A ModelConfig as JSON, as Triton's backends print it for their models."""

from __future__ import annotations

import json

from rocserve.protocol.json_form import plain_values
from rocserve.protocol.model_config_pb2 import ModelConfig


def config_json(message: ModelConfig) -> str:
    """All of a configuration."""
    return json.dumps(plain_values(message), separators=(",", ":"))
