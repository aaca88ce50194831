"""How a client wants its outputs told."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Binary data stands behind the JSON, all else in it."""

    binary: Mapping[str, bool] = field(default_factory=dict)
    """By the outputs that the request names."""
    otherwise_binary: bool = False
    """Outputs that it does not name."""
    shared: Set[str] = frozenset()
    """Outputs that lie in the client's shared memory, so that only their heads are told."""

    def is_binary(self, output_name: str) -> bool:
        return self.binary.get(output_name, self.otherwise_binary)


BINARY_ONLY = AnswerForm(otherwise_binary=True)
