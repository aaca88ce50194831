"""Image models: generates the model folders that the parameter `preprocess` asks for.

A model that takes pixels gets three models: `<name>_preprocess`, a rocAL pipeline from encoded images to its input;
`<name>_postprocess`, from its outputs to labels or boxes; and `<name>_image`, the ensemble of all three.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocserve.config.bounds import MOST_LABELS
from rocserve.config.class_names import ClassNames, dims_of_one_row, wrong_number
from rocserve.config.model_folder import LABELS_FILENAME
from rocserve.config.pbtxt import suggest
from rocserve.config.preprocess.generated import (
    GeneratedModel,
    Postprocess,
    PresetUnfit,
    add_tensor,
    ensemble,
    generated,
    is_number,
    python_model,
    unfit,
)
from rocserve.config.preprocess.yolo_heads import HeadShape, finished_head, yolov5_head, yolov8_head
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.presets import NAMES, PREPROCESS, ensemble_name
from rocserve.presets.yolo import HeadForm
from rocserve.protocol.model_config_pb2 import ModelConfig

_ENCODED, _IMAGE, _SIZE = "ENCODED", "IMAGE", "SIZE"
_YOLOV8 = {"resize": "not_larger", "score_threshold": "0.25", "iou_threshold": "0.7", "max_boxes": "300"}
_YOLOV5 = {"resize": "not_larger", "score_threshold": "0.25", "iou_threshold": "0.45", "max_boxes": "1000"}
"""The defaults of the networks' authors in their programs."""


@dataclass(frozen=True, slots=True)
class _Input:
    """A network's input for one image."""

    name: str
    datatype: DataType
    height: int
    width: int
    is_nchw: bool

    @property
    def dims(self) -> tuple[int, int, int]:
        return (3, self.height, self.width) if self.is_nchw else (self.height, self.width, 3)


@dataclass(frozen=True, slots=True)
class _Preset:
    """How a preset turns images into a model's input, and its output into an answer."""

    side: int
    """Width and height in pixels if the input accepts any size."""
    operations: Callable[[_Input], list[dict[str, Any]]]
    """Pipeline steps from an image to UINT8 pixels of the input's size."""
    mean: tuple[float, ...]
    std_dev: tuple[float, ...]
    """`mean` is subtracted from pixels in 0..1, then `std_dev` divides them. An input of UINT8 gets raw pixels."""
    postprocess: Callable[[PlainConfig, _Input, ClassNames | None], Postprocess]
    """Called with the model, its input and the class names that it brings."""


def image_models(config: PlainConfig, found: ClassNames | None) -> tuple[GeneratedModel, ...]:
    """Generate the image models of a complete configuration that has the parameter `preprocess`. The class names are
    the labels of the model's output, else those that a file brings (`found`), else those in the model's own file, else
    public ones if their number fits (ImageNet's, COCO's), else numbers. Raises ServeError (INVALID_ARGUMENT) if the
    preset is unknown, or if it or the class names do not fit the model."""
    name = config.parameters[PREPROCESS]
    if name not in _PRESETS:
        raise invalid_argument(f"model '{config.name}': unknown {PREPROCESS} '{name}'{suggest(name, NAMES)}")
    preset = _PRESETS[name]
    labelled = next((output for output in config.outputs if output.labels), None)
    if labelled is not None:
        found = ClassNames(f"label_filename '{labelled.label_filename}'", labelled.label_filename, labelled.labels)
    try:
        entry = _read_input(config, preset)
        post = preset.postprocess(config, entry, found)
    except PresetUnfit as error:
        fitting = [f"{PREPROCESS} '{other}'" for other in _PRESETS if other != name and _fits(config, other, found)]
        advice = f"; {' or '.join(fitting)} fits it" if fitting else ""
        raise invalid_argument(f"{error.text}{advice}") from None
    pipeline_message, pipeline = _pipeline(config, preset, entry, with_size=post.is_detector)
    return (
        generated(pipeline_message, {"1/pipeline.json": json.dumps(pipeline, indent=2) + "\n"}),
        post.model(config),
        generated(_ensemble(config, entry, post), {"1/.gitkeep": ""}),
    )


def _fits(config: PlainConfig, name: str, found: ClassNames | None) -> bool:
    try:
        _PRESETS[name].postprocess(config, _read_input(config, _PRESETS[name]), found)
    except ServeError:
        return False
    return True


def _read_input(config: PlainConfig, preset: _Preset) -> _Input:
    """Return the model's image input. Raises ServeError."""
    entry = config.inputs[0] if len(config.inputs) == 1 else None
    dims = () if entry is None else dims_of_one_row(config, entry.dims)
    places = [place for place in (0, 2) if len(dims) == 3 and dims[place] == 3]
    if entry is None or not places or entry.datatype not in (DataType.FP32, DataType.FP16, DataType.UINT8):
        raise unfit(
            config, "one input of colour images, [3, height, width] or [height, width, 3] of FP32, FP16 or UINT8"
        )
    is_nchw = places[0] == 0
    sides = dims[1:] if is_nchw else dims[:2]
    height, width = (preset.side if side < 0 else side for side in sides)
    return _Input(entry.name, entry.datatype, height, width, is_nchw)


def _gives_numbers(config: PlainConfig) -> bool:
    return all(map(is_number, config.outputs))


def _pipeline(
    config: PlainConfig, preset: _Preset, entry: _Input, *, with_size: bool
) -> tuple[ModelConfig, dict[str, Any]]:
    message = ModelConfig(name=f"{config.name}_preprocess", platform="rocal_json")
    message.max_batch_size = max(config.max_batch_size, 1)
    message.dynamic_batching.SetInParent()
    add_tensor(message.input, _ENCODED, DataType.BYTES, [1])
    add_tensor(message.output, _IMAGE, entry.datatype, entry.dims)
    is_raw = entry.datatype is DataType.UINT8
    normalise = {
        "operation": "CropMirrorNormalize",
        "crop_width": entry.width,
        "crop_height": entry.height,
        "mean": [0] if is_raw else list(preset.mean),
        "std_dev": [1] if is_raw else list(preset.std_dev),
        "is_output": True,
    }
    operations = [*preset.operations(entry), normalise]
    if with_size:
        add_tensor(message.output, _SIZE, DataType.INT32, [2])
        operations.append({"operation": "ImageSize", "is_output": True})
    return message, {"mean_std_range": "pixel" if is_raw else "unit", "pipeline": operations}


def _ensemble(config: PlainConfig, entry: _Input, post: Postprocess) -> ModelConfig:
    own = {output.name: output.name for output in post.message.output}
    sizes = {_SIZE: _SIZE} if post.is_detector else {}
    steps = (
        (f"{config.name}_preprocess", {_ENCODED: _ENCODED}, {_IMAGE: _IMAGE, **sizes}),
        (config.name, {entry.name: _IMAGE}, post.inputs),
        (post.message.name, {entry.name: entry.name for entry in post.message.input}, own),
    )
    message = ensemble(ensemble_name(config.name, config.parameters[PREPROCESS]), post.message, steps)
    # Images differ in their number of boxes, so detections do not batch.
    message.max_batch_size = 0 if post.is_detector else config.max_batch_size
    add_tensor(message.input, _ENCODED, DataType.BYTES, [1])
    return message


def _classifier(config: PlainConfig, entry: _Input, found: ClassNames | None) -> Postprocess:
    classes = [side for output in config.outputs for side in dims_of_one_row(config, output.dims) if side != 1]
    if len(config.outputs) != 1 or len(classes) != 1 or classes[0] < 0 or not _gives_numbers(config):
        raise unfit(config, "one output of scores, one for each class")
    _check_task(config, "classify", "one output of scores, one for each class")
    names = _labels(config, found, classes[0])
    message = _postprocess(config, config.max_batch_size, ("SCORES",))
    # The output for people comes first.
    add_tensor(message.output, "LABEL", DataType.BYTES, [1])
    add_tensor(message.output, "PROBABILITY", DataType.FP32, [1])
    add_tensor(message.output, "PROBABILITIES", DataType.FP32, classes).label_filename = LABELS_FILENAME
    if config.max_batch_size > 1:
        message.dynamic_batching.SetInParent()
    inputs = {config.outputs[0].name: "SCORES"}
    return Postprocess(message, "rocserve.presets.classification", inputs, names)


def _yolov4(config: PlainConfig, entry: _Input, found: ClassNames | None) -> Postprocess:
    heads = [dims_of_one_row(config, output.dims) for output in config.outputs]
    values = {dims[-1] for dims in heads}
    strides = (8, 16, 32)
    is_fit = all(
        len(dims) == 4 and dims[2] == 3 and {dims[0], entry.height // stride} <= {-1, entry.height // stride}
        for dims, stride in zip(heads, strides, strict=False)
    )
    is_fit = is_fit and len(heads) == len(strides) and _gives_numbers(config)
    if not is_fit or len(values) != 1 or min(values) <= 5:
        raise unfit(
            config, "three outputs of cells of 8, 16 and 32 pixels, [rows, columns, 3, 5 + classes], in this order"
        )
    # The published parameters of the ONNX Model Zoo's model.
    published = {
        "strides": "8, 16, 32",
        "anchors": "12,16, 19,36, 40,28, 36,75, 76,55, 72,146, 142,110, 192,243, 459,401",
        "xy_scale": "1.2, 1.1, 1.05",
        "resize": "stretch",
        "score_threshold": "0.25",
        "iou_threshold": "0.213",
        "max_boxes": "100",
    }
    return _detector(config, published, _labels(config, found, values.pop() - 5))


def _boxes(
    form: Callable[[HeadShape], tuple[HeadForm, int]], expected: str, parameters: Mapping[str, str]
) -> Callable[[PlainConfig, _Input, ClassNames | None], Postprocess]:
    """Return the function that post-processes a single output of boxes. `form`: recognises the output by its shape, and
    raises ValueError; `expected`: its shape in words."""

    def postprocess(config: PlainConfig, entry: _Input, found: ClassNames | None) -> Postprocess:
        if len(config.outputs) != 1 or not _gives_numbers(config):
            raise unfit(config, f"one output of boxes, {expected}")
        _check_task(config, "detect", f"one output of boxes, {expected}")
        dims = config.outputs[0].dims
        dims = dims if len(dims) == 2 else dims_of_one_row(config, dims)
        own = len(config.purpose.class_names)
        names = len(found.names) if found is not None else own or None
        try:
            head, classes = form(HeadShape(dims, entry.height, entry.width, names))
        except ValueError as reason:
            raise unfit(config, f"one output of boxes, {expected}", str(reason)) from None
        if found is None and own and classes and own != classes:
            others = (
                f"it has columns for {classes} classes, and its file names {own}: the others may be masks or keypoints"
            )
            raise unfit(config, f"one output of boxes, {expected}", others)
        labels = _labels(config, found, classes) if classes else ()
        size = {"input_size": f"{entry.height}, {entry.width}", "head": head.value}
        return _detector(config, {**size, **parameters}, labels)

    return postprocess


def _check_task(config: PlainConfig, task: str, expected: str) -> None:
    """Raise PresetUnfit if the model's file declares another task."""
    if config.purpose.task not in ("", task):
        raise unfit(config, expected, f"its file says that its task is '{config.purpose.task}', not '{task}'")


def _detector(config: PlainConfig, parameters: Mapping[str, str], labels: tuple[str, ...]) -> Postprocess:
    heads = {output.name: f"HEAD_{index}" for index, output in enumerate(config.outputs)}
    message = _postprocess(config, 0, tuple(heads.values()))
    add_tensor(message.input, _SIZE, DataType.INT32, [2])
    add_tensor(message.output, "BOXES", DataType.FP32, [-1, 4])
    add_tensor(message.output, "SCORES", DataType.FP32, [-1])
    add_tensor(message.output, "CLASSES", DataType.INT32, [-1]).label_filename = LABELS_FILENAME
    add_tensor(message.output, "LABELS", DataType.BYTES, [-1])
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    return Postprocess(message, "rocserve.presets.detection", heads, labels, is_detector=True)


def _postprocess(config: PlainConfig, max_batch_size: int, names: Sequence[str]) -> ModelConfig:
    """Make a Python model whose inputs, with these names, are the outputs of the model of `config`."""
    message = python_model(f"{config.name}_postprocess", max_batch_size)
    for name, tensor in zip(names, config.outputs, strict=True):
        add_tensor(message.input, name, tensor.datatype, tensor.dims)
    return message


def _labels(config: PlainConfig, found: ClassNames | None, classes: int) -> tuple[str, ...]:
    if found is not None:
        if len(found.names) != classes:
            raise wrong_number(config, found, "', '".join(output.name for output in config.outputs), classes)
        return found.names
    if len(config.purpose.class_names) == classes:
        return config.purpose.class_names
    # Number of classes -> (labels before those in the file, the file).
    public_labels = {80: ((), "coco.txt"), 1000: ((), "imagenet.txt"), 1001: (("background",), "imagenet.txt")}
    if classes in public_labels:
        before, filename = public_labels[classes]
        text = importlib.resources.files("rocserve.presets").joinpath("labels", filename).read_text("utf-8")
        return (*before, *text.splitlines())
    if classes > MOST_LABELS:
        raise invalid_argument(f"model '{config.name}' has {classes} classes, at most {MOST_LABELS} can have labels")
    return tuple(map(str, range(classes)))


def _shorter_side(entry: _Input) -> list[dict[str, Any]]:
    """Resize the shorter side to 8/7 of the input's longer side. CropMirrorNormalize then crops the centre."""
    # In tests, classifiers see 224 of 256 pixels of an image's shorter side.
    shorter = round(max(entry.height, entry.width) / 0.875)
    return [{"operation": "resize", "resize_shorter": shorter, "interpolation_type": "TRIANGULAR"}]


def _stretched(entry: _Input) -> list[dict[str, Any]]:
    return [{"operation": "Resize", "dest_width": entry.width, "dest_height": entry.height}]


def _fitted(entry: _Input) -> list[dict[str, Any]]:
    """Place the whole image in the top left corner, with grey margins."""
    size = {"resize_width": entry.width, "resize_height": entry.height}
    # The grey of the margins, as in the training of such networks.
    fill = {"out_of_bounds_policy": "PAD", "fill_values": [114]}
    return [
        {"operation": "resize", **size, "scaling_mode": "NOT_LARGER"},
        {"operation": "slice", "anchor": [0, 0], "shape": [entry.height, entry.width], **fill},
    ]


_PRESETS: Mapping[str, _Preset] = {
    "imagenet": _Preset(224, _shorter_side, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), _classifier),
    "inception": _Preset(299, _shorter_side, (0.5,), (0.5,), _classifier),
    "yolov4": _Preset(416, _stretched, (0,), (1,), _yolov4),
    "yolov5": _Preset(640, _fitted, (0,), (1,), _boxes(yolov5_head, "[boxes, 5 + classes]", _YOLOV5)),
    "yolov8": _Preset(640, _fitted, (0,), (1,), _boxes(yolov8_head, "[4 + classes, boxes]", _YOLOV8)),
    # The network has already dropped overlapping boxes.
    "yolo_end2end": _Preset(
        640, _fitted, (0,), (1,), _boxes(finished_head, "[boxes, 6]", {**_YOLOV8, "iou_threshold": "1"})
    ),
}
"""The keys are presets.IMAGES."""
