"""Reads the first entries of a map in MessagePack's format, which is what .mxr files are.

A reader of the whole would hold a file's weights in memory; what is wanted stands in front of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

_DEEPEST = 8
_SIZES = {
    # The types whose size follows them: its format, whether text, bytes, a list or a map comes then.
    0xC4: (">B", "bytes"), 0xC5: (">H", "bytes"), 0xC6: (">I", "bytes"),
    0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text"),
    0xDC: (">H", "list"), 0xDD: (">I", "list"),
    0xDE: (">H", "map"), 0xDF: (">I", "map"),
}  # fmt: skip
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d",
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def read_entries(data: bytes, until: str) -> Mapping[str, Any]:
    """The entries of the map that `data` begins with, up to the key `until`, which has none of its own value read.

    Raises:
        ValueError: there is no such map, or it ends, or holds something else, before that key.
    """
    reader = _Reader(data)
    count = reader.map_size()
    entries: dict[str, Any] = {}
    for _ in range(count):
        key = reader.value()
        if key == until:
            return entries
        if not isinstance(key, str):
            raise ValueError("a key that is no text")
        entries[key] = reader.value()
    raise ValueError(f"no entry '{until}'")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def map_size(self) -> int:
        kind = self._take(1)[0]
        if kind & 0xF0 == 0x80:
            return kind & 0x0F
        if kind in (0xDE, 0xDF):
            return int(self._number(_SIZES[kind][0]))
        raise ValueError(f"it begins with byte 0x{kind:02x}, which begins no map")

    def value(self, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise ValueError("values within values, too deep")
        kind = self._take(1)[0]
        if kind < 0x80 or kind >= 0xE0:
            return kind if kind < 0x80 else kind - 0x100
        if kind in _CONSTANTS:
            return _CONSTANTS[kind]
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind in _SIZES:
            size, what = int(self._number(_SIZES[kind][0])), _SIZES[kind][1]
        elif kind < 0xC0:
            what = "map" if kind < 0x90 else "list" if kind < 0xA0 else "text"
            size = kind & (0x1F if what == "text" else 0x0F)
        else:
            raise ValueError(f"a value of kind 0x{kind:02x}")
        return self._sized(what, size, depth)

    def _sized(self, what: str, size: int, depth: int) -> Any:
        if what == "text":
            return self._take(size).decode()
        if what == "bytes":
            return self._take(size)
        # Each entry takes a byte at least, so the loops end with the data.
        if what == "list":
            return [self.value(depth + 1) for _ in range(size)]
        return {str(self.value(depth + 1)): self.value(depth + 1) for _ in range(size)}

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _take(self, size: int) -> bytes:
        start = self._position
        if size > len(self._data) - start:
            raise ValueError(f"it ends within a value of {size} bytes at byte {start}")
        self._position += size
        return self._data[start : self._position]
