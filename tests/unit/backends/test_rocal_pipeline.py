"""The contents of a pipeline file, and the errors for others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rocserve.backends.rocal.decoding.options import DecoderOptions
from rocserve.backends.rocal.operations import OPERATIONS
from rocserve.backends.rocal.operations.base import Operation
from rocserve.backends.rocal.pipeline import DECODED, Layout, Pipeline, Step, parse_pipeline
from rocserve.backends.rocal.schema import REQUIRED, PipelineError
from rocserve.core.datatypes import DataType

RESIZE = {"operation": "Resize", "dest_width": 8, "dest_height": 6, "is_output": True}
NORMALIZE = {
    "operation": "CropMirrorNormalize",
    "crop_width": 4,
    "crop_height": 4,
    "mean": [100, 110, 120],
    "std_dev": [50, 51, 52],
    "is_output": True,
}


def parse(*operations: Any, channels: int = 3, **top_level: Any) -> Pipeline:
    return parse_pipeline(json.dumps({"pipeline": list(operations), **top_level}), channels)


def values(step: Step) -> Any:
    return step.call.values


def test_operations_become_typed_steps() -> None:
    pipeline = parse({**RESIZE, "is_output": False}, NORMALIZE)
    assert [step.name for step in pipeline.images] == ["Resize", "CropMirrorNormalize"]
    assert values(pipeline.images[0]) == {"dest_width": 8, "dest_height": 6}
    assert values(pipeline.images[1]) == {
        "crop_width": 4,
        "crop_height": 4,
        "start_x": 0.5,
        "start_y": 0.5,
        "mean": (100.0, 110.0, 120.0),
        "std_dev": (50.0, 51.0, 52.0),
        "mirror": False,
    }
    assert [step.is_output for step in pipeline.images] == [False, True]
    assert pipeline.decoder == DecoderOptions(1000, 1000)
    assert pipeline.notes == ()


def test_decoder_limits_are_read() -> None:
    assert parse(RESIZE, decoder={"max_width": 0, "max_height": 640}).decoder == DecoderOptions(0, 640)


def test_output_datatype_and_layout_are_read() -> None:
    (step,) = parse({**RESIZE, "dtype": "FLOAT", "layout": "NCHW"}).images
    assert (step.datatype, step.layout) == (DataType.FP32, Layout.NCHW)


def test_keys_for_volumes_are_taken_and_ignored() -> None:
    volume = {**NORMALIZE, "crop_depth": 224, "start_z": 0}
    assert parse(volume).steps == parse(NORMALIZE).steps


@pytest.mark.parametrize(
    ("mean", "deviation", "given", "expected_mean", "noted"),
    [
        ([0.5, 0.4, 0.3], [0.2, 0.2, 0.2], "auto", 127.5, True),
        ([0.5, 0.4, 0.3], [0.2, 0.2, 0.2], "unit", 127.5, False),
        ([0.5, 0.4, 0.3], [0.2, 0.2, 0.2], "pixel", 0.5, False),
        ([0, 0, 0], [1, 1, 1], "auto", 0, False),
        ([0, 0.5, 0.5], [0.5, 0.5, 0.5], "auto", 0, False),
        ([100, 0.5, 0.5], [0.5, 0.5, 0.5], "auto", 100, False),
        ([0.5, 0.5, 0.5], [0.5, 0.5, 1], "auto", 0.5, False),
        ([0, 0, 0], [1, 1, 1], "unit", 0, False),
    ],
)
def test_range_of_mean_and_deviation(
    mean: list[float], deviation: list[float], given: str, expected_mean: float, noted: bool
) -> None:
    operation = {**NORMALIZE, "mean": mean, "std_dev": deviation, "mean_std_range": given}
    pipeline = parse(operation)
    step = pipeline.images[0]
    assert values(step)["mean"][0] == pytest.approx(expected_mean)
    scaled = given == "unit" or noted
    assert values(step)["std_dev"][0] == pytest.approx(deviation[0] * (255 if scaled else 1))
    assert step.default_datatype is (DataType.FP32 if scaled else DataType.UINT8)
    assert bool(pipeline.notes) is noted


def test_range_for_the_whole_file_is_overridden_by_an_operations_own() -> None:
    unit = {**NORMALIZE, "mean": [0.5] * 3, "std_dev": [0.5] * 3}
    pipeline = parse(unit, {**unit, "mean_std_range": "unit"}, mean_std_range="pixel")
    assert [values(step)["mean"][0] for step in pipeline.images] == [0.5, 127.5]


def test_one_mean_stands_for_all_channels() -> None:
    (step,) = parse({**NORMALIZE, "mean": [7], "std_dev": [9]}).images
    assert (values(step)["mean"], values(step)["std_dev"]) == ((7.0,) * 3, (9.0,) * 3)


def test_three_means_do_not_fit_grey_images() -> None:
    with pytest.raises(PipelineError, match=r"pipeline\[0\] \(CropMirrorNormalize\).*'mean' has 3 values.*1 channel"):
        parse(NORMALIZE, channels=1)


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        ({}, r"pipeline\[1\]: key 'operation' is missing"),
        ({"operation": "Rotate"}, r"pipeline\[1\]: key 'operation' must be one of .*\"CropFixed\".*, not \"Rotate\""),
        ([], r"pipeline\[1\] must be an object, not \[\]"),
        ({**RESIZE, "width": 3}, r"pipeline\[1\] \(Resize\): unknown key 'width'; allowed are dest_height, dest_width"),
        ({**RESIZE, "mean": [1]}, "unknown key 'mean'"),
        ({**RESIZE, "mean_std_range": "unit"}, "unknown key 'mean_std_range'"),
        ({"operation": "Resize", "dest_width": 8}, r"pipeline\[1\] \(Resize\): key 'dest_height' is missing"),
        ({**RESIZE, "dest_width": -1}, "'dest_width' must be a size in pixels, a whole number from 0 to 65535, not -1"),
        ({**RESIZE, "dest_width": 1.5}, "'dest_width' must be a size"),
        ({**RESIZE, "dest_width": True}, "'dest_width' must be a size"),
        ({**RESIZE, "dest_width": "8"}, "'dest_width' must be a size in pixels.*, not \"8\""),
        ({**RESIZE, "is_output": 1}, "'is_output' must be true or false, not 1"),
        ({**RESIZE, "dtype": "INT8"}, '\'dtype\' must be one of "UINT8", "FP32".*, not "INT8"'),
        ({**RESIZE, "is_output": False, "layout": "NCHW"}, "'dtype' and 'layout' belong to an output"),
        ({**NORMALIZE, "std_dev": [1, 0, 1]}, "'std_dev' must be a list of 1 or 3 numbers, none of them 0"),
        ({**NORMALIZE, "mean": [1, 2]}, "'mean' must be a list of 1 or 3 numbers"),
        ({**NORMALIZE, "mean": 1}, "'mean' must be a list of 1 or 3 numbers, not 1"),
        ({**NORMALIZE, "mean": [1, 2, None]}, "'mean' must be a list of 1 or 3 numbers"),
        ({**NORMALIZE, "crop_width": 0}, "'crop_width' must be a size in pixels, a whole number from 1 to 65535"),
        ({**NORMALIZE, "start_x": 30}, "'start_x' must be a fraction from 0 to 1, not 30"),
        (
            {
                "operation": "CropFixed",
                "crop_width": 2,
                "crop_height": 2,
                "crop_pos_x": 0,
                "crop_pos_y": 0,
                "crop_depth": 0,
            },
            "'crop_depth' must be a size in pixels, a whole number from 1 to 65535, not 0",
        ),
    ],
)
def test_the_error_of_a_wrong_operation_has_its_place_and_reason(operation: Any, text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        parse(RESIZE, operation)


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        ({**RESIZE, "dest_width": None}, "whole number from 0 to 65535, not null"),
        ({**RESIZE, "dest_width": 70000}, "whole number from 0 to 65535, not 70000"),
        ({**RESIZE, "dest_width": [False, "a"]}, r'not \[false, "a"\]'),
        ({**RESIZE, "dest_width": list(range(1000))}, r"not \[0, 1, 2.*\.\.\.$"),
        ({**NORMALIZE, "mean": [10**400]}, "'mean' must be a list of 1 or 3 numbers, which 32 bits hold"),
        ({**NORMALIZE, "mean": [1e300]}, "'mean' must be a list of 1 or 3 numbers, which 32 bits hold"),
        ({**NORMALIZE, "mean": [float("nan")]}, "'mean' must be a list of 1 or 3 numbers.*NaN"),
        ({**NORMALIZE, "mean": [float("-inf")]}, "'mean' must be a list of 1 or 3 numbers.*Infinity"),
        # Too small for 32 bits: one divided by it would be infinite.
        ({**NORMALIZE, "std_dev": [1e-39]}, "'std_dev' must be a list of 1 or 3 numbers, none of them 0, not"),
        ({"operation": "resise"}, r'not "resise"; did you mean "resize"\?$'),
        ({"operation": "CROPMIRRORNORMALIZE"}, r'did you mean "CropMirrorNormalize"\?$'),
        ({"operation": "resnet"}, r'not "resnet"(; did you mean "\w+"\?)?$'),
        ({"operation": "yolo"}, 'not "yolo"$'),
        ({"operation": ["Resize"]}, r'not \["Resize"\]$'),
        ({**RESIZE, "dest_widht": 3}, r'unknown key \'dest_widht\'; allowed are .*; did you mean "dest_width"\?$'),
        ({**RESIZE, "dtype": "fp32"}, r'not "fp32"; did you mean "FP32"\?$'),
    ],
)
def test_errors_show_json_and_guess_what_was_meant(operation: Any, text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        parse(operation)


BLEND = {"operation": "blend", "ratio": 0.5, "is_output": True}


@pytest.mark.parametrize(
    ("operations", "text"),
    [
        (
            [{**RESIZE, "inputs": ["decoded", "decoded"]}],
            r"pipeline\[0\] \(Resize\): key 'inputs' must name 1 image, not 2",
        ),
        ([{**RESIZE, "inputs": ["a"]}], r"no earlier operation has the \"name\" 'a'; known are 'decoded'"),
        ([{**RESIZE, "inputs": "decoded"}], "key 'inputs' must be a list of names, not \"decoded\""),
        ([{**RESIZE, "name": "decoded"}], r"the \"name\" 'decoded' is taken"),
        ([{**RESIZE, "name": "a"}, {**RESIZE, "name": "a"}], r"pipeline\[1\] \(Resize\): the \"name\" 'a' is taken"),
        ([{**RESIZE, "name": 3}], "key 'name' must be a name, not 3"),
        ([BLEND], r"pipeline\[0\] \(blend\): key 'inputs' is missing; it names the 2 images to read, of 'decoded'"),
        ([{**BLEND, "inputs": ["decoded"]}], "key 'inputs' must name 2 images, not 1"),
        ([{**RESIZE, "dest_width": {"input": "W"}}], "key 'dest_width' cannot be an object or come from an input"),
        ([{**NORMALIZE, "mirror": {"inputs": "M"}}], "key 'mirror' must be a value or .*input.*, not"),
        ([{**NORMALIZE, "mirror": {"input": ""}}], "key 'mirror' must be a value or"),
        ([{"operation": "ImageSize"}], r"pipeline\[0\] \(ImageSize\) has a result only as an output"),
        ([{"operation": "ImageSize", "is_output": True, "layout": "NHWC"}], "unknown key 'layout'"),
    ],
)
def test_an_error_names_wrong_names_and_inputs(operations: list[Any], text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        parse(*operations)


def test_operations_read_the_one_before_or_those_that_they_name() -> None:
    pipeline = parse(
        {**RESIZE, "is_output": False, "name": "a"},
        {"operation": "ImageSize", "is_output": True},
        {**RESIZE, "is_output": False, "name": "b"},
        {**RESIZE, "is_output": False, "inputs": ["decoded"]},
        {**BLEND, "inputs": ["b", "a"]},
    )
    assert [step.sources for step in pipeline.images] == [(DECODED,), (0,), (DECODED,), (2, 0)]


def test_inputs_are_listed_once_in_their_order() -> None:
    flipped, turned = {**NORMALIZE, "mirror": {"input": "F"}}, {**NORMALIZE, "mirror": {"input": "T"}}
    pipeline = parse(flipped, turned, flipped)
    assert pipeline.inputs == ("F", "T")
    assert [[binding.key for binding in step.bindings] for step in pipeline.images] == [["mirror"]] * 3


OF_IMAGES = {name: operation for name, operation in OPERATIONS.items() if isinstance(operation, Operation)}


@pytest.mark.parametrize("name", sorted(OF_IMAGES))
def test_what_an_input_gives_has_a_default_until_it_comes(name: str) -> None:
    for key in OF_IMAGES[name].keys.values():
        if key.is_bindable:
            assert key.default is not REQUIRED
            assert key.read(key.default) == key.default


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "not valid JSON: .*line 1"),
        ("\xff", "not valid JSON"),
        ("[]", r'expected an object {"pipeline": \[...\]}, not \[\]'),
        (" \n", "the file is empty; expected an object"),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"pipeline": [{"operation": "copy", "is_output": true, "is_output": false}]}',
            "key 'is_output' occurs twice",
        ),
        ('{"pipeline": [], "pipeline": []}', "key 'pipeline' occurs twice in one object"),
        # The search took minutes: each key was compared with all others.
        ("{" + "".join(f'"{number}": 0, ' for number in range(100_000)) + '"z": 1, "z": 2}', "key 'z' occurs twice"),
        (f'{{"{"k" * 100_000}": 0}}', r"pipeline file: unknown key 'k{77}\.\.\.'; allowed"),
        ("{}", "pipeline file: key 'pipeline' is missing"),
        ('{"pipeline": []}', "key 'pipeline' must be a list of operations"),
        ('{"pipeline": [], "batch": 3}', "pipeline file: unknown key 'batch'; allowed are decoder"),
        (json.dumps({"pipeline": [RESIZE], "decoder": {"width": 3}}), "decoder: unknown key 'width'"),
        (json.dumps({"pipeline": [RESIZE], "decoder": {"max_width": -3}}), "decoder: key 'max_width' must be"),
        (json.dumps({"pipeline": [RESIZE], "mean_std_range": "byte"}), "'mean_std_range' must be one of"),
        (json.dumps({"pipeline": [{**RESIZE, "is_output": False}]}), "no operation is an output"),
    ],
)
def test_the_error_of_a_wrong_file_has_its_reason(document: str, text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        parse_pipeline(document.encode("latin-1"), channels=3)


def test_no_key_is_both_taken_and_ignored() -> None:
    for name, operation in OF_IMAGES.items():
        assert set(operation.keys).isdisjoint(operation.ignored_keys), name
