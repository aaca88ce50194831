"""Loading and unloading other models from a model, which this server leaves to its operators and clients."""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.backends.python.pb_utils.errors import TritonModelException

_ADVICE = "models cannot control the server's models in this version; use the server's repository API instead"


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Raises: TritonModelException, always."""
    raise TritonModelException(f"Failed to load model: {model_name}: {_ADVICE}")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Raises: TritonModelException, always."""
    raise TritonModelException(f"Failed to unload model: {model_name}: {_ADVICE}")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Raises: TritonModelException, always."""
    raise TritonModelException(f"Failed to check model readiness: {model_name}: {_ADVICE}")
