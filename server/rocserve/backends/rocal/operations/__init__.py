"""The operations of a pipeline, with rocAL's semantics: one table for the CPU engine and for amd.rocal.

An operation takes images of UINT8 pixels and gives one of UINT8 or FP32. Sizes and positions are pixels unless said
otherwise. In a pipeline file each reads the image of the step before it (the first one: what the decoder gives), unless
its "inputs" name others: names that earlier steps were given by "name", or "decoded". What reads two always says. A
measurement measures the image that was sent.

To add an operation, declare it in OPERATIONS of the module of its kind. Names in CamelCase are those of AMD Inference
Server's JSON, names in snake_case those of amd.rocal's fn.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.backends.rocal.operations import cutting, geometry, levels, resizing
from rocserve.backends.rocal.operations.base import Measurement, Operation

OPERATIONS: Mapping[str, Operation | Measurement] = {
    operation.name: operation for module in (resizing, cutting, geometry, levels) for operation in module.OPERATIONS
}
"""By the name in the JSON key "operation"."""
