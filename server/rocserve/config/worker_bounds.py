"""The bounds of a model's processes that its parameters set instead of the server's flags."""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.core.errors import invalid_argument

_FIELDS = {
    "worker_memory_bytes": "memory_bytes",
    "worker_tasks": "tasks",
    "worker_file_bytes": "file_bytes",
}
"""Of WorkerSettings, by parameter."""


def worker_bounds(parameters: Mapping[str, str]) -> Mapping[str, int]:
    """Those of a model, by the fields of WorkerSettings. Raises: ServeError: INVALID_ARGUMENT, one is no number."""
    return {field: _count(name, parameters[name]) for name, field in _FIELDS.items() if name in parameters}


def _count(name: str, text: str) -> int:
    # Longer numbers are none that a kernel takes.
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise invalid_argument(f"parameter '{name}': expected a whole number, 0 for no bound, got '{text}'")
    return int(text)
