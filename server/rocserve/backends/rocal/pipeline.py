"""Reads a rocAL pipeline: {"pipeline": [operation, ...], "decoder": {...}, "mean_std_range": ...}.

An operation has the keys that `operations` declares, and in addition:
- `is_output`, and `dtype` and `layout` of this output;
- `name`, by which later operations refer to its image, and `inputs`, the names of the images that it reads;
- if it has a mean, `mean_std_range`, the range of levels that the mean and the standard deviation are for: "pixel" =
  0..255 (as in rocAL), "unit" = 0..1 (they are scaled by 255), "auto" = unit if all of them are between 0 and 1.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.decoding.options import DecoderOptions
from rocserve.backends.rocal.image import UNKNOWN, Extent, Image, ResultExtent
from rocserve.backends.rocal.operations import OPERATIONS
from rocserve.backends.rocal.operations.base import Call, Measurement, Operation
from rocserve.backends.rocal.schema import Binding, Key, PipelineError, cut, shown
from rocserve.core.datatypes import DataType
from rocserve.core.printable import listed

RANDOM_OPERATIONS = (
    "random_crop",
    "ssd_random_crop",
    "random_bbox_crop",
    "jitter",
    "snp_noise",
    "rain",
    "snow",
    "fog",
)
"""Operations that use random numbers for each image, whatever their keys are."""


@Key
def _operation_name(value: Any) -> Any:
    if isinstance(value, str) and value in RANDOM_OPERATIONS:
        raise ValueError("an operation without random numbers")
    return schema.choice(*OPERATIONS).read(value)


def _read_document(text: str | bytes) -> dict[str, Any]:
    """Parse the file's object. A duplicate key is an error, because one of its values would be lost."""
    expected = 'expected an object {"pipeline": [...]}'
    if not text.strip():
        raise PipelineError(f"the file is empty; {expected}")
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except ValueError as error:
        if isinstance(error, PipelineError):
            raise
        raise PipelineError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise PipelineError("not a pipeline: its lists and objects are nested too deeply to be read") from None
    if not isinstance(document, dict):
        raise PipelineError(f"{expected}, not {shown(document)}")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise PipelineError(f"key '{cut(twice)}' occurs twice in one object ({shown(table)}); remove one")
    return table


DECODED = -1
"""Index of the decoder's image among the sources of a step."""


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
"""KServe's and rocAL's name -> datatype."""

_RANGES = schema.choice("auto", "pixel", "unit")


_MEASUREMENT_KEYS = {"operation": _operation_name, "is_output": schema.flag(False)}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a pipeline."""

    index: int
    call: Call
    """Flags that come from inputs have their defaults."""
    sources: tuple[int, ...]
    """Indices of the steps whose images this step reads; DECODED = the decoder's image."""
    bindings: tuple[Binding, ...]
    is_read: bool
    """Whether a later step reads the image for an output."""
    read_last: frozenset[int]
    """Sources that no later step reads; empty if nothing needs this step's image."""
    is_output: bool
    datatype: DataType | None
    """The output's datatype; None = the model configuration decides, or else `default_datatype`."""
    layout: Layout | None
    default_datatype: DataType

    @property
    def name(self) -> str:
        return self.call.operation.name

    @property
    def where(self) -> str:
        return f"pipeline[{self.index}] ({self.name})"

    def call_with(self, flags: Mapping[str, bool]) -> Call:
        if not self.bindings:
            return self.call
        return self.call.operation(**{**self.call.values, **{one.key: flags[one.input] for one in self.bindings}})

    def extent(self, extents: Mapping[int, ResultExtent]) -> ResultExtent:
        return self.call.extent(*(extents[source] for source in self.sources))

    def run(self, images: Mapping[int, Image], flags: Mapping[str, bool], as_float: bool) -> Image:
        """Return the step's image. `images`: the earlier images by step index. See Call.run."""
        return self.call_with(flags).run(*(images[source] for source in self.sources), as_float=as_float)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A checked pipeline."""

    steps: tuple[Step | Measurement, ...]
    decoder: DecoderOptions
    inputs: tuple[str, ...]
    """Request inputs that give one flag per image, in the order in which the steps name them."""
    notes: tuple[str, ...]
    """Warnings for the log about values that may be meant otherwise."""

    @property
    def images(self) -> list[Step]:
        return [step for step in self.steps if isinstance(step, Step)]

    @property
    def outputs(self) -> list[Step | Measurement]:
        return [step for step in self.steps if isinstance(step, Measurement) or step.is_output]


def parse_pipeline(text: str | bytes, channels: int) -> Pipeline:
    """Parse a pipeline for images with this number of channels. Raises PipelineError if the text is not JSON, has
    unknown, missing or wrong keys or no output, or has means for another number of channels."""
    keys = {
        "pipeline": schema.key_if("a list of operations", lambda value: isinstance(value, list) and bool(value)),
        "decoder": schema.key_if("an object", lambda value: isinstance(value, dict))({}),
        "mean_std_range": _RANGES("auto"),
    }
    top_level = schema.read_keys("pipeline file", _read_document(text), keys)
    reader = _StepReader(top_level["mean_std_range"], channels)
    steps = [reader.read(index, entry) for index, entry in enumerate(top_level["pipeline"])]
    read: set[int] = set()
    for index, step in reversed(list(enumerate(steps))):
        if isinstance(step, Step):
            used = step.sources if step.is_output or index in read else ()
            steps[index] = replace(step, is_read=index in read, read_last=frozenset(used) - read)
            read.update(used)
    inputs = dict.fromkeys(binding.input for step in steps if isinstance(step, Step) for binding in step.bindings)
    pipeline = Pipeline(tuple(steps), DecoderOptions.read(top_level["decoder"]), tuple(inputs), tuple(reader.notes))
    if not pipeline.outputs:
        raise PipelineError('no operation is an output; set "is_output": true on the last one')
    return pipeline


class _StepReader:
    """Reads step after step, and keeps the names that later steps may refer to."""

    def __init__(self, default_range: str, channels: int) -> None:
        self.notes: list[str] = []
        self._default_range = default_range
        self._channels = channels
        self._names = {"decoded": DECODED}
        self._previous = DECODED

    def read(self, index: int, entry: Any) -> Step | Measurement:
        where = f"pipeline[{index}]"
        if not isinstance(entry, dict):
            raise PipelineError(f"{where} must be an object, not {shown(entry)}")
        name = schema.read_keys(
            where, {key: entry[key] for key in entry if key == "operation"}, {"operation": _operation_name}
        )
        operation = OPERATIONS[name["operation"]]
        where = f"{where} ({operation.name})"
        if isinstance(operation, Measurement):
            values, _ = schema.read_bound_keys(where, entry, _MEASUREMENT_KEYS)
            if not values["is_output"]:
                raise PipelineError(f'{where} has a result only as an output; set "is_output": true')
            return operation
        if operation.colour_only and self._channels != 3:
            raise PipelineError(f"{where} needs colour; the images have 1 channel (parameter 'color_format')")
        keys = {
            **_MEASUREMENT_KEYS,
            "dtype": schema.choice(*_DATATYPES)(None),
            "layout": schema.choice(*(layout.value for layout in Layout))(None),
            "name": schema.name(None),
            "inputs": schema.names(None),
            **operation.keys,
            **operation.ignored_keys,
        }
        if operation.normalises:
            keys["mean_std_range"] = _RANGES(self._default_range)
        values, bindings = schema.read_bound_keys(where, entry, keys)
        if not values["is_output"] and (values["dtype"] or values["layout"]):
            raise PipelineError(
                f"{where}: 'dtype' and 'layout' belong to an output; set \"is_output\": true or leave them out"
            )
        for key in operation.channel_keys:
            if len(values[key]) not in (0, 1, self._channels):
                raise PipelineError(
                    f"{where}: key '{key}' has {len(values[key])} values, but the images have {self._channels} channel"
                    " (parameter 'color_format')"
                )
        unit_range = operation.normalises and self._has_unit_range(where, operation.channel_keys, values)
        if operation.normalises:
            # Convert mean and deviation to levels of 0..255, with one value per channel.
            for key in operation.channel_keys:
                numbers = values[key] * self._channels if len(values[key]) == 1 else values[key]
                values[key] = tuple(number * 255 for number in numbers) if unit_range else numbers
        try:
            call = operation(**{key: values[key] for key in operation.keys})
        except ValueError as error:
            raise PipelineError(f"{where}: {error}") from None
        step = Step(
            index=index,
            call=call,
            sources=self._sources(where, operation, values["inputs"]),
            bindings=bindings,
            is_read=False,
            read_last=frozenset(),
            is_output=values["is_output"],
            datatype=_DATATYPES[values["dtype"]] if values["dtype"] else None,
            layout=Layout(values["layout"]) if values["layout"] else None,
            # Levels normalised for 0..1 are near 0. As UINT8 almost nothing would be left of them.
            default_datatype=DataType.FP32 if unit_range else operation.default_datatype,
        )
        if values["name"] in self._names:
            raise PipelineError(f"{where}: the \"name\" '{cut(values['name'])}' is taken; choose another")
        if values["name"] is not None:
            self._names[values["name"]] = index
        self._previous = index
        return step

    def _sources(self, where: str, operation: Operation, names: tuple[str, ...] | None) -> tuple[int, ...]:
        count = operation.sources
        if names is None and count == 1:
            return (self._previous,)
        known = listed([f"'{cut(name)}'" for name in self._names])
        if names is None:
            raise PipelineError(f"{where}: key 'inputs' is missing; it names the {count} images to read, of {known}")
        if len(names) != count:
            raise PipelineError(f"{where}: key 'inputs' must name {count} image{'s'[: count - 1]}, not {len(names)}")
        for name in names:
            if name not in self._names:
                raise PipelineError(f"{where}: no earlier operation has the \"name\" '{cut(name)}'; known are {known}")
        return tuple(self._names[name] for name in names)

    def _has_unit_range(self, where: str, keys: tuple[str, ...], values: dict[str, Any]) -> bool:
        if values["mean_std_range"] != "auto":
            return bool(values["mean_std_range"] == "unit")
        if not all(0 < number < 1 for key in keys for number in values[key]):
            return False
        self.notes.append(
            f"{where}: {' and '.join(keys)} all lie between 0 and 1, so they are taken as meant for levels of 0..1 and"
            ' scaled by 255; write "mean_std_range": "unit" to confirm or "pixel" to use them unchanged'
        )
        return True


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Datatype and layout of a pipeline's output."""

    datatype: DataType
    """UINT8, FP32 or FP16; a measurement has its own."""
    layout: Layout

    def shape(self, extent: Extent, channels: int) -> tuple[int, int, int]:
        """Return one image's shape; -1 = unknown side."""
        height = -1 if extent.height is None else extent.height
        width = -1 if extent.width is None else extent.width
        return (height, width, channels) if self.layout is Layout.NHWC else (channels, height, width)


def output_extents(pipeline: Pipeline, decoded: Extent) -> list[Extent | None]:
    """Return each output's size, as far as it is the same for every image of the `decoded` size; None for a
    measurement. Raises PipelineError if two images that are read together can never fit, or if a result would be too
    large."""
    results = known_extents(pipeline, ResultExtent.whole(decoded))
    return [None if isinstance(step, Measurement) else results[step.index].size for step in pipeline.outputs]


def known_extents(pipeline: Pipeline, decoded: ResultExtent = UNKNOWN) -> Mapping[int, ResultExtent]:
    """Return the extents of the decoder's image and each step's, by index, as far as they are the same for all images.
    Raises PipelineError as `output_extents` does."""
    results = {DECODED: decoded}
    for step in pipeline.images:
        try:
            results[step.index] = step.extent(results)
            results[step.index].check()
        except ValueError as error:
            raise PipelineError(f"{step.where}: {error}") from None
    return results
