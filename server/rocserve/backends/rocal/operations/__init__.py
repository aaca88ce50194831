"""The operations of a pipeline, with rocAL's semantics.

An operation takes an image of UINT8 pixels and gives one of UINT8 or FP32. Sizes and positions are pixels unless said
otherwise. To add an operation, write its class in the module of its kind and name it in OPERATIONS.
"""

from __future__ import annotations

from typing import Any

from rocserve.backends.rocal.operations.base import Operation
from rocserve.backends.rocal.operations.crop import CropFixed, CropMirrorNormalize
from rocserve.backends.rocal.operations.resize import (
    CropResizeFixed,
    Resize,
    ResizeCropMirrorFixed,
    ResizeMirrorNormalize,
)

OPERATIONS: dict[str, type[Operation]] = {
    operation.__name__: operation
    for operation in (
        Resize,
        ResizeMirrorNormalize,
        CropMirrorNormalize,
        CropFixed,
        CropResizeFixed,
        ResizeCropMirrorFixed,
    )
}
"""By the name in the JSON key `operation`."""


def make_operation(name: str, values: dict[str, Any]) -> Operation:
    return OPERATIONS[name](**values)
