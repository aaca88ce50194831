"""Collects the operations of pipelines, which have rocAL's semantics: one table for the CPU engine and for amd.rocal.

An operation takes UINT8 images and returns one in UINT8 or FP32. Sizes and positions are in pixels unless stated
otherwise. An operation reads the image of the previous step, and the first one the decoder's image. Its key "inputs"
may name other images: the "name" of an earlier step, or "decoded"; an operation with two images requires it. A
measurement measures the sent image.

To add an operation, declare it in OPERATIONS of a module here, by name and keys of amd.rocal's fn. AMD Inference
Server's names, in CamelCase, are aliases.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.backends.rocal.operations import cutting, geometry, levels, resizing
from rocserve.backends.rocal.operations.base import Measurement, Operation

OPERATIONS: Mapping[str, Operation | Measurement] = {
    operation.name: operation for module in (resizing, cutting, geometry, levels) for operation in module.OPERATIONS
}
"""Value of the JSON key "operation" -> operation."""
