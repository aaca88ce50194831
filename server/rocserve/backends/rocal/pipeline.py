"""Reads a rocAL pipeline: {"pipeline": [operation, ...], "decoder": {...}, "mean_std_range": ...}.

Each operation has the keys of its class in `operations` and, beside them: `is_output`; `dtype` and `layout` of that
output; `name`, by which later operations read its image, and `inputs`, the names of the images that it reads; and,
where it has a mean, `mean_std_range`, which says what the mean and the standard deviation are meant for: "pixel" =
levels of 0..255 (as rocAL takes them), "unit" = levels of 0..1 (they are scaled by 255), "auto" = unit where all of
them lie between 0 and 1.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.decoding.options import DecoderOptions
from rocserve.backends.rocal.operations import OPERATIONS
from rocserve.backends.rocal.operations.base import Measurement, PairOperation, PipelineOperation
from rocserve.backends.rocal.schema import Binding, Key, PipelineError, shown
from rocserve.core.datatypes import DataType

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
"""Those that draw random numbers for each image, whatever their keys are."""


def read_operation_name(names: Iterable[str]) -> Callable[[Any], str]:
    """Reads one of `names`."""
    read_known = schema.read_choice(*names)

    def read(value: Any) -> str:
        if isinstance(value, str) and value in RANDOM_OPERATIONS:
            raise ValueError("one that gives the same result every time, so none of rocAL's random ones")
        return read_known(value)

    return read


def read_document(text: str | bytes) -> dict[str, Any]:
    """The object that the file holds.

    Raises:
        PipelineError: it is not JSON, no object, or has a key twice, of which one would be lost.
    """
    expected = 'expected an object {"pipeline": [...]}'
    if not text.strip():
        raise PipelineError(f"the file is empty; {expected}")
    try:
        document = json.loads(text, object_pairs_hook=_table)
    except ValueError as error:
        if isinstance(error, PipelineError):
            raise
        raise PipelineError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise PipelineError("not a pipeline: its lists and objects are nested too deeply to be read") from None
    if not isinstance(document, dict):
        raise PipelineError(f"{expected}, not {shown(document)}")
    return document


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PipelineError(f"key '{twice}' stands twice in one object ({shown(table)}); leave one out")
    return table


DECODED = -1
"""Stands for the decoder's image among the sources of a step."""

_DECODED_NAME = "decoded"


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
_OPERATION_KEY = {"operation": Key(read_operation_name(OPERATIONS))}
_MEASUREMENT_KEYS = {**_OPERATION_KEY, "is_output": Key(schema.read_flag, default=False)}
_STEP_KEYS = {
    **_MEASUREMENT_KEYS,
    "dtype": Key(schema.read_choice(*_DATATYPES), default=None),
    "layout": Key(schema.read_choice(*(layout.value for layout in Layout)), default=None),
    "name": Key(schema.read_name, default=None),
    "inputs": Key(schema.read_names, default=None),
}


@dataclass(frozen=True, slots=True)
class PipelineInput:
    """An input of the request, beside the image, that gives values to operations: one for each image."""

    name: str
    datatype: DataType
    """BOOL, INT32 or FP32."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation, what it reads, and what is to become of its result."""

    operation: PipelineOperation
    """With the defaults of the keys that inputs give."""
    sources: tuple[int, ...]
    """The steps whose images it reads, by their places; DECODED = the decoder's image. None for a measurement."""
    bindings: tuple[Binding, ...]
    """The keys that inputs give."""
    is_output: bool
    datatype: DataType | None
    """The output's; None = the model configuration decides, else `default_datatype`."""
    layout: Layout | None
    default_datatype: DataType


@dataclass(frozen=True, slots=True)
class Pipeline:
    steps: tuple[Step, ...]
    decoder: DecoderOptions
    inputs: tuple[PipelineInput, ...]
    """In the order in which the steps name them."""
    notes: tuple[str, ...]
    """What was understood in a way that the writer may want to know of."""


def parse_pipeline(text: str | bytes, channels: int) -> Pipeline:
    """The pipeline for images of so many channels.

    Raises:
        PipelineError: it is not JSON, has unknown, missing or wrong keys, no output, or means for other channels.
    """
    top_level = schema.read_keys("pipeline file", read_document(text), _TOP_LEVEL_KEYS)
    reader = _StepReader(top_level["mean_std_range"], channels)
    steps = tuple(reader.read(index, entry) for index, entry in enumerate(top_level["pipeline"]))
    if not any(step.is_output for step in steps):
        raise PipelineError('no operation is an output; set "is_output": true on the last one')
    return Pipeline(
        steps, DecoderOptions.read(top_level["decoder"]), tuple(reader.inputs.values()), tuple(reader.notes)
    )


class _StepReader:
    """Reads one step after the other, and keeps what later ones may refer to."""

    def __init__(self, default_range: str, channels: int) -> None:
        self.inputs: dict[str, PipelineInput] = {}
        self.notes: list[str] = []
        self._default_range = default_range
        self._channels = channels
        self._names = {_DECODED_NAME: DECODED}
        self._previous = DECODED

    def read(self, index: int, entry: Any) -> Step:
        where = f"pipeline[{index}]"
        if not isinstance(entry, dict):
            raise PipelineError(f"{where} must be an object, not {shown(entry)}")
        name = schema.read_keys(where, {key: entry[key] for key in entry if key == "operation"}, _OPERATION_KEY)
        operation_class = OPERATIONS[name["operation"]]
        where = f"{where} ({operation_class.name})"
        if operation_class.colour_only and self._channels != 3:
            raise PipelineError(f"{where} needs colour; the images have 1 channel (parameter 'color_format')")
        values, bindings = schema.read_bound_keys(where, entry, self._keys(operation_class))
        if issubclass(operation_class, Measurement):
            return self._measurement(where, operation_class, values)
        if not values["is_output"] and (values["dtype"] or values["layout"]):
            raise PipelineError(
                f"{where}: 'dtype' and 'layout' belong to an output; set \"is_output\": true or leave them out"
            )
        unit_range = self._normalise_for_pixels(where, operation_class, values)
        step = Step(
            operation=_make(where, operation_class, values, self._channels),
            sources=self._sources(where, operation_class, values["inputs"]),
            bindings=bindings,
            is_output=values["is_output"],
            datatype=_DATATYPES[values["dtype"]] if values["dtype"] else None,
            layout=Layout(values["layout"]) if values["layout"] else None,
            # What was normalised for levels of 0..1 lies around 0: as UINT8 next to nothing would be left of it.
            default_datatype=DataType.FP32 if unit_range else operation_class.default_datatype,
        )
        self._remember_inputs(where, bindings)
        self._remember_name(where, index, values["name"])
        self._previous = index
        return step

    def _keys(self, operation_class: type[PipelineOperation]) -> dict[str, Key]:
        common = _MEASUREMENT_KEYS if issubclass(operation_class, Measurement) else _STEP_KEYS
        keys = {**common, **operation_class.keys, **operation_class.ignored_keys}
        if operation_class.normalisation_keys is not None:
            keys["mean_std_range"] = Key(_RANGES, default=self._default_range)
        return keys

    def _measurement(self, where: str, operation_class: type[Measurement], values: dict[str, Any]) -> Step:
        if not values["is_output"]:
            raise PipelineError(f'{where} is nothing but an output; set "is_output": true')
        operation = _make(where, operation_class, values, self._channels)
        return Step(operation, (), (), True, operation_class.datatype, None, operation_class.datatype)

    def _sources(
        self, where: str, operation_class: type[PipelineOperation], names: tuple[str, ...] | None
    ) -> tuple[int, ...]:
        count = 2 if issubclass(operation_class, PairOperation) else 1
        known = ", ".join(f"'{name}'" for name in self._names)
        if names is None:
            if count == 1:
                return (self._previous,)
            raise PipelineError(f"{where}: key 'inputs' is missing; it names the {count} images to read, of {known}")
        if len(names) != count:
            raise PipelineError(f"{where}: key 'inputs' must name {count} image{'s'[: count - 1]}, not {len(names)}")
        for name in names:
            if name not in self._names:
                raise PipelineError(f"{where}: no earlier operation has the \"name\" '{name}'; known are {known}")
        return tuple(self._names[name] for name in names)

    def _remember_name(self, where: str, index: int, name: str | None) -> None:
        if name in self._names:
            raise PipelineError(f"{where}: the \"name\" '{name}' is taken; each must be another")
        if name is not None:
            self._names[name] = index

    def _remember_inputs(self, where: str, bindings: tuple[Binding, ...]) -> None:
        for binding in bindings:
            known = self.inputs.setdefault(binding.input, PipelineInput(binding.input, binding.datatype))
            if known.datatype is not binding.datatype:
                raise PipelineError(
                    f"{where}: key '{binding.key}' takes {binding.datatype.value}, but input '{binding.input}' holds"
                    f" {known.datatype.value} for an operation before; name another"
                )

    def _normalise_for_pixels(
        self, where: str, operation_class: type[PipelineOperation], values: dict[str, Any]
    ) -> bool:
        """Bring mean and deviation to levels of 0..255 and one value a channel; returns whether they were for 0..1."""
        if operation_class.normalisation_keys is None:
            return False
        mean, deviation = operation_class.normalisation_keys
        for key in (mean, deviation):
            if len(values[key]) == 1:
                values[key] *= self._channels
            elif len(values[key]) != self._channels:
                raise PipelineError(
                    f"{where}: key '{key}' has {len(values[key])} values, but the images have {self._channels} channel"
                    f" (parameter 'color_format')"
                )
        looks_like_unit = all(0 < number < 1 for key in (mean, deviation) for number in values[key])
        if values["mean_std_range"] == "pixel" or (values["mean_std_range"] == "auto" and not looks_like_unit):
            return False
        if values["mean_std_range"] == "auto":
            self.notes.append(
                f"{where}: {mean} and {deviation} all lie between 0 and 1, so they are taken as meant for levels of"
                ' 0..1 and scaled by 255; write "mean_std_range": "unit" to confirm or "pixel" to have them taken as'
                " they are"
            )
        for key in (mean, deviation):
            values[key] = tuple(number * 255 for number in values[key])
        return True


def _make(
    where: str, operation_class: type[PipelineOperation], values: dict[str, Any], channels: int
) -> PipelineOperation:
    try:
        operation = operation_class(**{key: values[key] for key in operation_class.keys})
        operation.check_channels(channels)
        return operation
    except ValueError as error:
        raise PipelineError(f"{where}: {error}") from None
