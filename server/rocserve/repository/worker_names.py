"""The names of AMD Inference Server's endpoints: that of the worker first, then with a number behind it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Group:
    """The endpoints of one worker."""

    names: dict[Hashable, str] = field(default_factory=dict)
    """By the parameters that they were asked for with."""
    next_number: int = 0


class WorkerNames:
    """Equal parameters mean the same endpoint, others a new one."""

    def __init__(self, is_taken: Callable[[str], bool]) -> None:
        """`is_taken`: whether a model of a repository has the name."""
        self._is_taken = is_taken
        self._groups: dict[str, _Group] = {}

    def name(self, worker: str, parameters: Hashable) -> str:
        """The endpoint's name, which it keeps until `forget`."""
        group = self._groups.setdefault(worker, _Group())
        name = group.names.get(parameters)
        if name is None:
            name = worker if not group.names else self._numbered(worker, group)
            while self._is_taken(name):
                name = self._numbered(worker, group)
            group.names[parameters] = name
        return name

    def forget(self, worker: str, parameters: Hashable) -> None:
        """The endpoint is no more. When it was the worker's last, its names begin anew."""
        group = self._groups[worker]
        group.names.pop(parameters)
        if not group.names:
            self._groups.pop(worker)

    def _numbered(self, worker: str, group: _Group) -> str:
        number, group.next_number = group.next_number, group.next_number + 1
        return f"{worker}-{number}"
