"""Post-processes the outputs of YOLO detectors as a Python model: heads -> boxes, scores, classes and their names.
config.pbtxt describes the detector by its parameters and the label file of output CLASSES. With `input_size` the only
head has boxes, in the form that `head` names (see `yolo.HeadForm`), else the heads have cells and anchors."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils

from rocserve.presets.class_names import class_names_of
from rocserve.presets.parameters import parameters_of
from rocserve.presets.yolo import (
    FINISHED_COLUMNS,
    HeadForm,
    HeadGeometry,
    Resize,
    Thresholds,
    detect,
    detect_boxes,
)

_Choice = TypeVar("_Choice", bound=enum.Enum)


class TritonPythonModel:
    READS_INPUTS_IN_PLACE = True

    def initialize(self, args: dict[str, str]) -> None:
        """Raises ValueError if a parameter is missing or wrong."""
        parameters = Parameters(parameters_of(args))
        self._input_size: tuple[int, int] | None = None
        if "input_size" in parameters.texts:
            sides = parameters.counts("input_size")
            if len(sides) != 2:
                text = parameters.text("input_size")
                raise ValueError(f"parameter 'input_size' must be a height and a width, not '{text}'")
            self._input_size = sides[0], sides[1]
        self._geometries = () if self._input_size else parameters.geometries()
        self._form = parameters.choice("head", HeadForm) if "head" in parameters.texts else HeadForm.CLASSES
        self._resize = parameters.choice("resize", Resize)
        self._thresholds = Thresholds(
            score=parameters.numbers("score_threshold", only=True)[0],
            iou=parameters.numbers("iou_threshold", only=True)[0],
            max_boxes=parameters.counts("max_boxes", only=True)[0],
        )
        self._labels = class_names_of(args, "CLASSES")

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        heads = [_input(request, f"HEAD_{index}") for index in range(len(self._geometries) or 1)]
        height, width = _input(request, "SIZE").ravel().tolist()
        try:
            # A network may have a batch dimension of one.
            heads = [head.reshape(head.shape[-2 if self._input_size else -4 :]) for head in heads]
            self._check_classes(heads[0].shape)
            image_size = (height, width)
            if self._input_size is None:
                found = detect(heads, self._geometries, self._resize, image_size, self._thresholds)
            else:
                found = detect_boxes(heads[0], self._form, self._input_size, self._resize, image_size, self._thresholds)
            labels = self._labels_of(found.classes)
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        outputs = {
            "BOXES": found.boxes,
            "SCORES": found.scores,
            "CLASSES": found.classes,
            "LABELS": labels,
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

    def _check_classes(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the head has another number of classes than there are labels, or no classes at all."""
        if self._input_size is None:
            classes = shape[-1] - 5
        elif self._form is HeadForm.FINISHED:
            if shape[-1] != FINISHED_COLUMNS:
                raise ValueError(f"HEAD_0 has shape {list(shape)}, expected [boxes, {FINISHED_COLUMNS}]")
            return
        else:
            columns = shape[-2] if self._form is HeadForm.CLASSES else shape[-1]
            classes = columns - (5 if self._form is HeadForm.OBJECT_ROWS else 4)
        if len(self._labels) != classes:
            raise ValueError(f"there are {len(self._labels)} labels, but HEAD_0 has shape {list(shape)}")

    def _labels_of(self, classes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the names of classes; without any names, the classes' numbers. Raises ValueError if a name is
        missing."""
        if not any(self._labels):
            return np.array([str(number).encode() for number in classes.tolist()], dtype=object)
        if len(classes) and not 0 <= classes.min() <= classes.max() < len(self._labels):
            raise ValueError(f"there are {len(self._labels)} labels, but a box has the class {classes.max()}")
        named: np.ndarray[Any, Any] = self._labels[classes]
        return named


class Parameters:
    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def geometries(self) -> tuple[HeadGeometry, ...]:
        """Read `strides`, one for each head; `anchors`, equally many for each head; `xy_scale`, one for each head."""
        strides, scales, sides = self.counts("strides"), self.numbers("xy_scale"), self.numbers("anchors")
        if len(scales) != len(strides) or not strides or not sides or len(sides) % (2 * len(strides)):
            raise ValueError(
                "expected an xy_scale and equally many anchors (width, height) for each of the strides, got"
                f" {len(strides)} strides, {len(scales)} scales and {len(sides)} numbers in anchors"
            )
        anchors = np.reshape(sides, (len(strides), -1, 2)).tolist()
        return tuple(
            HeadGeometry(stride, tuple((width, height) for width, height in of_head), scale)
            for stride, of_head, scale in zip(strides, anchors, scales, strict=True)
        )

    def numbers(self, key: str, only: bool = False) -> list[float]:
        """`only`: exactly one number is allowed."""
        text = self.text(key)
        try:
            numbers = [float(number) for number in text.split(",")]
        except ValueError:
            numbers = []
        if not numbers or not all(map(math.isfinite, numbers)):
            raise ValueError(f"parameter '{key}' must be numbers with commas between them, not '{text}'")
        if only and len(numbers) != 1:
            raise ValueError(f"parameter '{key}' must be one number, not '{text}'")
        return numbers

    def counts(self, key: str, only: bool = False) -> list[int]:
        numbers = self.numbers(key, only)
        if not all(number >= 1 and number.is_integer() for number in numbers):
            raise ValueError(f"parameter '{key}' must be whole numbers of at least 1, not '{self.text(key)}'")
        return [int(number) for number in numbers]

    def choice(self, key: str, choices: type[_Choice]) -> _Choice:
        text, allowed = self.text(key), [choice.value for choice in choices]
        if text not in allowed:
            raise ValueError(f"parameter '{key}' must be one of {', '.join(allowed)}, not '{text}'")
        return choices(text)

    def text(self, key: str) -> str:
        if key not in self.texts:
            raise ValueError(f"parameter '{key}' is missing in config.pbtxt")
        return self.texts[key]


def _input(request: Any, name: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    return array if array.dtype.kind == "i" else array.astype(np.float32, copy=False)
