"""The response cache: answers that may be given again, within a bound of bytes, those used least lately going first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from rocserve.core.requests import InferResponse, Parameters, ResponseHead

_ENTRY_BYTES = 256
_TENSOR_BYTES = 256
"""About what an entry, and each of its tensors, takes beside the data."""


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """A response on memory of its own."""

    head: ResponseHead
    data: tuple[bytes, ...]
    parameters: Parameters
    nbytes: int


def copied_response(response: InferResponse) -> CachedResponse:
    """What is kept of a response."""
    data = tuple(map(bytes, response.data))
    nbytes = _ENTRY_BYTES + sum(_TENSOR_BYTES + len(each) for each in data)
    return CachedResponse(response.head, data, dict(response.parameters), nbytes)


class ResponseCache:
    """Shared by all models, on the data plane's thread; `nbytes` may be read from any."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._nbytes = 0
        self._entries: OrderedDict[tuple[Hashable, bytes], CachedResponse] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """How much it holds."""
        return self._nbytes

    def get(self, owner: Hashable, key: bytes) -> CachedResponse | None:
        """The answer that `owner` has kept under `key`."""
        entry = self._entries.get((owner, key))
        if entry is not None:
            self._entries.move_to_end((owner, key))
        return entry

    def put(self, owner: Hashable, key: bytes, response: CachedResponse) -> bool:
        """Keep an answer; False: it is larger than the whole cache."""
        if response.nbytes > self._size_bytes:
            return False
        replaced = self._entries.pop((owner, key), None)
        if replaced is not None:
            self._nbytes -= replaced.nbytes
        self._entries[owner, key] = response
        self._nbytes += response.nbytes
        while self._nbytes > self._size_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._nbytes -= dropped.nbytes
        return True

    def forget(self, owner: Hashable) -> None:
        """Let go of all that `owner` has kept."""
        for key in [key for key in self._entries if key[0] == owner]:
            self._nbytes -= self._entries.pop(key).nbytes
