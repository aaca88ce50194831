"""What runs each model that `rocserve status` shows, asked for only when it may have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rocserve.tools.status_rows import Key
from rocserve_client import IndexEntry, RocserveError

_WORDS = ("engine", "target", "precision")
"""The properties that together say it: "migraphx gpu fp16", "onnxruntime"."""


class StatusEngines:
    """Remembers the engine of each version for as long as it is READY."""

    def __init__(self, properties: Callable[[str, str], Mapping[str, str]]) -> None:
        """`properties`: of a model's version, as its metadata has them; may raise RocserveError."""
        self._properties = properties
        self._known: dict[Key, str] = {}

    def update(self, index: Iterable[IndexEntry]) -> Mapping[Key, str]:
        """By name and version, in a few words; "" where a server does not say."""
        ready = [(entry.name, entry.version) for entry in index if entry.state == "READY"]
        self._known = {key: self._known[key] for key in ready if key in self._known}
        for key in ready:
            if key in self._known:
                continue
            try:
                properties = self._properties(*key)
            except RocserveError:
                # It has just gone, or the server has: the next poll shows which. Others might wait as long.
                break
            self._known[key] = " ".join(properties[word] for word in _WORDS if word in properties)
        return self._known
