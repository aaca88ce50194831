"""An input or output as a model file tells of it, whatever the file's format."""

from __future__ import annotations

from dataclasses import dataclass

from rocserve.core.datatypes import DataType

Dims = tuple[int | str, ...]
"""Each a number, or the name of a dimension that is left open ("" where it has none)."""


@dataclass(frozen=True, slots=True)
class GraphTensor:
    name: str
    datatype: DataType | None
    """None where the file does not tell (TensorFlow's outputs)."""
    dims: Dims | None
    """None where the file does not even tell how many."""
