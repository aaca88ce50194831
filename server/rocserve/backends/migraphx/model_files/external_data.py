"""The files beside an ONNX file that hold its larger weights: within its folder, there, and long enough."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from rocserve.backends.contained_paths import path_within
from rocserve.core.errors import ServeError, invalid_argument


def as_text(value: str | bytes) -> str:
    """Text of an ONNX file, which is handed out as bytes where it is none.

    Raises:
        UnicodeDecodeError: it is none.
    """
    return value if isinstance(value, str) else value.decode()


class ExternalFiles:
    """Collects the files that tensors name, and checks each use of one."""

    def __init__(self, model_file: Path, roots: tuple[Path, ...]) -> None:
        """`roots`: where links may lead, beside the folder of the model file."""
        self._model_file = model_file
        self._folder = model_file.parent
        self._roots = (self._folder, *roots)
        self._sizes: dict[str, int] = {}
        self._paths: dict[str, Path] = {}

    @property
    def paths(self) -> tuple[Path, ...]:
        """In the order in which they were first named."""
        return tuple(dict.fromkeys(self._paths.values()))

    def add(self, tensor: onnx.TensorProto, size: int) -> int:
        """Check where a tensor of `size` bytes (0 = not known) lies; returns how many bytes it has.

        Raises:
            ServeError: INVALID_ARGUMENT; the file is outside of the folder, missing or too short.
        """
        entries = {as_text(entry.key): as_text(entry.value) for entry in tensor.external_data}
        if len(entries) != len(tensor.external_data):
            raise self._wrong(tensor, "says something of its external data twice")
        location = entries.get("location", "")
        if not location:
            raise self._wrong(tensor, "is external, but names no file")
        offset = self._number(tensor, entries, "offset", 0)
        length = self._number(tensor, entries, "length", size)
        available = self._size(location)
        if offset + length > available:
            raise self._wrong(
                tensor,
                f"needs bytes {offset} to {offset + length} of external data file '{location}', which has"
                f" {available}; copy that file again",
            )
        if size and "length" in entries and length != size:
            raise self._wrong(tensor, f"has {size} bytes by its type and shape, but {length} in '{location}'")
        return length

    def _size(self, location: str) -> int:
        if location not in self._sizes:
            path = path_within(self._folder, location, self._roots, f"external data of {self._model_file.name}:")
            if not path.is_file():
                raise invalid_argument(
                    f"ONNX file {self._model_file.name} needs external data file '{location}', which is not there; copy"
                    " it into the same folder"
                )
            self._sizes[location] = path.stat().st_size
            self._paths[location] = self._folder / location
        return self._sizes[location]

    def _number(self, tensor: onnx.TensorProto, entries: Mapping[str, str], key: str, default: int) -> int:
        text = entries.get(key, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 19):
            raise self._wrong(tensor, f"has external data with {key} '{text[:40]}', which is no number of bytes")
        return int(text)

    def _wrong(self, tensor: onnx.TensorProto, text: str) -> ServeError:
        return invalid_argument(f"ONNX file {self._model_file.name}: tensor '{tensor.name}' {text}")
