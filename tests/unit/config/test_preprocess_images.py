"""The models that `preprocess` stands for, by the configuration of their network; tests/e2e has the networks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from rocserve.config.class_names import ClassNames
from rocserve.config.preprocess.generated import GeneratedModel
from rocserve.config.preprocess.images import _PRESETS, image_models
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.presets import NAMES, TEXT

Dims = Sequence[int]


def config(
    preset: str, inputs: Sequence[Dims], outputs: Sequence[Dims], datatype: DataType = DataType.FP32
) -> ModelConfig:
    return ModelConfig(
        "net",
        max_batch_size=8,
        inputs=tuple(InputConfig(f"in{place}", datatype, tuple(dims)) for place, dims in enumerate(inputs)),
        outputs=tuple(OutputConfig(f"out{place}", DataType.FP32, tuple(dims)) for place, dims in enumerate(outputs)),
        parameters={"preprocess": preset},
    )


def names(*lines: str) -> ClassNames:
    return ClassNames("/models/net/labels.txt", "labels.txt", lines)


def text(made: GeneratedModel, path: str) -> str:
    return made.files[PurePosixPath(path)].decode()


@pytest.mark.parametrize(
    ("preset", "outputs", "side"),
    [
        ("imagenet", [[3]], 224),
        ("inception", [[3, 1, 1]], 299),
        ("yolov4", [[-1, -1, 3, 8]] * 3, 416),
        ("yolov8", [[7, -1]], 640),
    ],
)
def test_an_open_size_is_the_preset_s(preset: str, outputs: Sequence[Dims], side: int) -> None:
    pipeline, post, ensemble = image_models(config(preset, [[3, -1, -1]], outputs), names("a", "b", "c"))
    assert [made.name for made in (pipeline, post, ensemble)] == ["net_preprocess", "net_postprocess", "net_image"]
    normalise = json.loads(text(pipeline, "1/pipeline.json"))["pipeline"][-1 if len(outputs[0]) in (1, 3) else -2]
    assert (normalise["crop_width"], normalise["crop_height"]) == (side, side)
    assert text(post, "labels.txt") == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("preset", "outputs", "first", "last"),
    [
        ("imagenet", [[1000]], "tench, Tinca tinca", "toilet tissue, toilet paper, bathroom tissue"),
        ("inception", [[1001]], "background", "toilet tissue, toilet paper, bathroom tissue"),
        ("yolov8", [[84, 8400]], "person", "toothbrush"),
        ("yolov8", [[9, 8400]], "0", "4"),
    ],
)
def test_names_of_public_classes_are_known_by_their_number(preset, outputs, first, last) -> None:
    _, post, _ = image_models(config(preset, [[3, 640, 640]], outputs), None)
    names = text(post, "labels.txt").splitlines()
    assert (names[0], names[-1]) == (first, last)


@pytest.mark.parametrize(
    ("preset", "inputs", "outputs", "expected"),
    [
        ("imagenet", [[3, 8, 8], [3, 8, 8]], [[9]], "one input of colour images"),
        ("imagenet", [[1, 8, 8]], [[9]], "one input of colour images"),
        ("imagenet", [[3, 8, 8]], [[9], [9]], "one output of scores"),
        ("imagenet", [[3, 8, 8]], [[9, 9]], "one output of scores"),
        ("imagenet", [[3, 8, 8]], [], "one output of scores"),
        ("yolov4", [[3, 64, 64]], [[8, 8, 3, 8], [4, 4, 3, 8]], "three outputs of cells"),
        ("yolov4", [[3, 64, 64]], [[2, 2, 3, 8], [4, 4, 3, 8], [8, 8, 3, 8]], "three outputs of cells"),
        ("yolov4", [[3, 64, 64]], [[8, 8, 3, 8], [4, 4, 3, 8], [2, 2, 3, 9]], "three outputs of cells"),
        ("yolov8", [[3, 64, 64]], [[84]], "one output of boxes"),
        ("yolov8", [[3, 64, 64]], [[-1, 84]], "one output of boxes"),
        ("yolov8", [], [[10, 84]], "one input of colour images"),
    ],
)
def test_a_model_that_it_is_not_for_is_refused(preset, inputs, outputs, expected) -> None:
    with pytest.raises(ServeError, match=f"preprocess '{preset}' is for a model with {expected}"):
        image_models(config(preset, inputs, outputs), None)


def test_an_output_of_one_number_is_refused_like_others() -> None:
    unbatched = replace(config("yolov4", [[3, 64, 64]], [[300, 4], [300], [1]]), max_batch_size=0)
    with pytest.raises(ServeError, match="preprocess 'yolov4' is for a model with three outputs of cells"):
        image_models(unbatched, None)


@pytest.mark.parametrize(
    ("preset", "outputs", "expected"),
    [
        ("imagenet", [[9]], "one output of scores, one for each class"),
        ("inception", [[9]], "one output of scores, one for each class"),
        ("yolov4", [[8, 8, 3, 8], [4, 4, 3, 8], [2, 2, 3, 8]], "three outputs of cells"),
        ("yolov8", [[10, 84]], "one output of boxes"),
        ("yolov5", [[252, 8]], "one output of boxes"),
        ("yolo_end2end", [[300, 6]], "one output of boxes"),
    ],
)
def test_outputs_that_are_no_numbers_are_refused(preset, outputs, expected) -> None:
    fit = config(preset, [[3, 64, 64]], outputs)
    assert image_models(fit, None)
    # With BF16 each request would fail.
    for datatype in (DataType.BYTES, DataType.BF16):
        others = replace(fit, outputs=tuple(replace(output, datatype=datatype) for output in fit.outputs))
        with pytest.raises(ServeError, match=f"is for a model with {expected}.* and gives out0 {datatype.value}"):
            image_models(others, None)


@pytest.mark.parametrize(("preset", "outputs"), [("imagenet", [[10**12]]), ("yolov8", [[10**12 + 4, 84]])])
def test_more_classes_than_a_label_file_may_have_are_refused(preset, outputs) -> None:
    with pytest.raises(ServeError, match="model 'net' has 1000000000000 classes, at most 1000000 can have labels"):
        image_models(config(preset, [[3, 64, 64]], outputs), None)


@pytest.mark.parametrize(
    ("preset", "outputs", "classes"),
    [
        ("imagenet", [[4]], "output 'out0' of model 'net' has 4"),
        ("yolov4", [[8, 8, 3, 9], [4, 4, 3, 9], [2, 2, 3, 9]], "output 'out0', 'out1', 'out2' of model 'net' has 4"),
        ("yolov8", [[8, 84]], "output 'out0' of model 'net' has 4"),
    ],
)
def test_class_names_that_do_not_fit_are_refused_by_their_file(preset, outputs, classes) -> None:
    with pytest.raises(ServeError) as caught:
        image_models(config(preset, [[3, 64, 64]], outputs), names("a", "b", "c"))
    assert caught.value.text == (
        f"/models/net/labels.txt has 3 labels, but {classes} classes; expected a file with a line for each class:"
        " correct the file, or move it away"
    )


def test_labels_of_the_configuration_are_taken_before_a_file_beside_the_model() -> None:
    one = config("imagenet", [[3, 64, 64]], [[3]])
    labelled = replace(one.outputs[0], label_filename="mine.txt", labels=("x", "y", "z"))
    _, post, _ = image_models(replace(one, outputs=(labelled,)), names("a", "b", "c"))
    assert text(post, "labels.txt") == "x\ny\nz\n"
    short = replace(labelled, labels=("x",))
    with pytest.raises(ServeError, match=r"^label_filename 'mine\.txt' has 1 label, but output 'out0'"):
        image_models(replace(one, outputs=(short,)), None)


def test_each_name_of_a_preset_has_one() -> None:
    assert (*_PRESETS, TEXT) == NAMES


def test_numbers_that_are_no_pixels_are_refused() -> None:
    with pytest.raises(ServeError, match="FP32, FP16 or UINT8; this one takes in0 INT64"):
        image_models(config("imagenet", [[3, 8, 8]], [[9]], DataType.INT64), None)
