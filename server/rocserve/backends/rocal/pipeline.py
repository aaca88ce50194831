"""Reads a rocAL pipeline: {"pipeline": [operation, ...], "decoder": {...}, "mean_std_range": ...}.

Each operation has the keys of its class in `operations` and, beside them: `is_output`; `dtype` and `layout` of that
output; and, where it has a mean, `mean_std_range`, which says what the mean and the standard deviation are meant for:
"pixel" = levels of 0..255 (as rocAL takes them), "unit" = levels of 0..1 (they are scaled by 255), "auto" = unit where
all of them lie between 0 and 1.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.decoder import DecoderLimits
from rocserve.backends.rocal.operations import OPERATIONS, make_operation
from rocserve.backends.rocal.operations.base import Operation
from rocserve.backends.rocal.schema import Key, PipelineError
from rocserve.core.datatypes import DataType


class Layout(enum.Enum):
    NHWC = "NHWC"
    NCHW = "NCHW"


_DATATYPES = {
    "UINT8": DataType.UINT8,
    "FP32": DataType.FP32,
    "FLOAT": DataType.FP32,
    "FP16": DataType.FP16,
    "FLOAT16": DataType.FP16,
}
"""KServe's names and rocAL's."""

_RANGES = schema.read_choice("auto", "pixel", "unit")


def _read_table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an object")
    return value


def _read_operations(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of operations")
    return value


_TOP_LEVEL_KEYS = {
    "pipeline": Key(_read_operations),
    "decoder": Key(_read_table, default={}),
    "mean_std_range": Key(_RANGES, default="auto"),
}
_DECODER_KEYS = {"max_width": Key(schema.read_size, default=1000), "max_height": Key(schema.read_size, default=1000)}
_STEP_KEYS = {
    "operation": Key(schema.read_choice(*OPERATIONS)),
    "is_output": Key(schema.read_flag, default=False),
    "dtype": Key(schema.read_choice(*_DATATYPES), default=None),
    "layout": Key(schema.read_choice(*(layout.value for layout in Layout)), default=None),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation and what is to become of its result."""

    operation: Operation
    is_output: bool
    datatype: DataType | None
    """The output's; None = the model configuration decides, else `default_datatype`."""
    layout: Layout | None
    default_datatype: DataType


@dataclass(frozen=True, slots=True)
class Pipeline:
    steps: tuple[Step, ...]
    limits: DecoderLimits
    notes: tuple[str, ...]
    """What was understood in a way that the writer may want to know of."""


def parse_pipeline(text: str | bytes, channels: int) -> Pipeline:
    """The pipeline for images of so many channels.

    Raises:
        PipelineError: it is not JSON, has unknown, missing or wrong keys, no output, or means for other channels.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise PipelineError(f"not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise PipelineError(f'expected an object {{"pipeline": [...]}}, not {document!r:.60}')
    top_level = schema.read_keys("pipeline file", document, _TOP_LEVEL_KEYS)
    limits = DecoderLimits(**schema.read_keys("decoder", top_level["decoder"], _DECODER_KEYS))
    notes: list[str] = []
    steps = tuple(
        _read_step(index, entry, top_level["mean_std_range"], channels, notes)
        for index, entry in enumerate(top_level["pipeline"])
    )
    if not any(step.is_output for step in steps):
        raise PipelineError('no operation is an output; set "is_output": true on the last one')
    return Pipeline(steps, limits, tuple(notes))


def _read_step(index: int, entry: Any, default_range: str, channels: int, notes: list[str]) -> Step:
    where = f"pipeline[{index}]"
    if not isinstance(entry, dict):
        raise PipelineError(f"{where} must be an object, not {entry!r:.60}")
    name = schema.read_keys(where, {key: entry[key] for key in entry if key == "operation"}, _STEP_KEYS)["operation"]
    where = f"{where} ({name})"
    operation_class = OPERATIONS[name]
    normalises = "mean" in operation_class.keys
    keys = {**_STEP_KEYS, **operation_class.keys, **operation_class.ignored_keys}
    if normalises:
        keys["mean_std_range"] = Key(_RANGES, default=default_range)
    values = schema.read_keys(where, entry, keys)
    if not values["is_output"] and (values["dtype"] or values["layout"]):
        raise PipelineError(
            f"{where}: 'dtype' and 'layout' belong to an output; set \"is_output\": true or leave them out"
        )
    unit_range = normalises and _normalise_for_pixels(where, values, channels, notes)
    return Step(
        operation=make_operation(name, {key: values[key] for key in operation_class.keys}),
        is_output=values["is_output"],
        datatype=_DATATYPES[values["dtype"]] if values["dtype"] else None,
        layout=Layout(values["layout"]) if values["layout"] else None,
        # What was normalised for levels of 0..1 lies around 0: as UINT8 next to nothing would be left of it.
        default_datatype=DataType.FP32 if unit_range else DataType.UINT8,
    )


def _normalise_for_pixels(where: str, values: dict[str, Any], channels: int, notes: list[str]) -> bool:
    """Bring mean and deviation to levels of 0..255 and one value a channel; returns whether they were for 0..1."""
    for key in ("mean", "std_dev"):
        if len(values[key]) == 1:
            values[key] *= channels
        elif len(values[key]) != channels:
            raise PipelineError(
                f"{where}: key '{key}' has {len(values[key])} values, but the images have {channels} channel"
                f" (parameter 'color_format')"
            )
    numbers = (*values["mean"], *values["std_dev"])
    looks_like_unit = all(0 < number < 1 for number in numbers)
    if values["mean_std_range"] == "pixel" or (values["mean_std_range"] == "auto" and not looks_like_unit):
        return False
    if values["mean_std_range"] == "auto":
        notes.append(
            f"{where}: mean and std_dev all lie between 0 and 1, so they are taken as meant for levels of 0..1 and"
            ' scaled by 255; write "mean_std_range": "unit" to confirm or "pixel" to have them taken as they are'
        )
    for key in ("mean", "std_dev"):
        values[key] = tuple(number * 255 for number in values[key])
    return True
