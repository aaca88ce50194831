"""The rocal backend as a worker drives it: forms of the input, batches with bad images, declared outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.pictures import jpeg

from rocserve.backends.base import Batch, LoadedModel
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, InstanceKind, OutputConfig
from rocserve.core.requests import TensorSpec
from rocserve.core.tensors import Tensor, encode_bytes_elements

Served = Callable[..., LoadedModel]

RESIZE = {"pipeline": [{"operation": "Resize", "dest_width": 16, "dest_height": 8, "is_output": True}]}
CROP = {
    "decoder": {"max_width": 0, "max_height": 0},
    "pipeline": [
        {
            "operation": "CropFixed",
            "crop_width": 30,
            "crop_height": 30,
            "crop_pos_x": 0,
            "crop_pos_y": 0,
            "is_output": True,
        }
    ],
}
ENCODED = InputConfig("ENCODED", DataType.BYTES, (1,))
IMAGE = OutputConfig("IMAGE", DataType.UINT8, (8, 16, 3))


def bytes_batch(images: Sequence[bytes], sizes: Sequence[int], shape: tuple[int, ...] | None = None) -> Batch:
    shape = shape or (len(images), 1)
    return Batch(
        {"ENCODED": Tensor("ENCODED", DataType.BYTES, shape, encode_bytes_elements(images))}, ("IMAGE",), tuple(sizes)
    )


def batching_model(served: Served, **options: Any) -> LoadedModel:
    return served(RESIZE, inputs=[ENCODED], outputs=[IMAGE], max_batch_size=8, **options)


def output(model: LoadedModel, batch: Batch, name: str = "IMAGE") -> np.ndarray[Any, Any]:
    result = model.execute(batch)
    assert not result.failures
    array = result.outputs[name]
    assert isinstance(array, np.ndarray)
    return array


def test_images_of_their_own_size_are_not_batched(served: Served) -> None:
    model = served(CROP)
    assert model.signature.inputs == (TensorSpec("encoded", DataType.BYTES, (1,)),)
    assert model.signature.outputs == (TensorSpec("image", DataType.UINT8, (-1, -1, 3)),)
    assert not model.signature.supports_batching
    for width, expected in ((20, (30, 20, 3)), (50, (30, 30, 3))):
        tensor = Tensor("encoded", DataType.BYTES, (1,), encode_bytes_elements([jpeg(width, 40)]))
        assert output(model, Batch({"encoded": tensor}, ("image",), (1,)), "image").shape == expected


def test_mean_and_deviation_for_unit_range_give_floats_by_default(served: Served) -> None:
    pipeline = {
        "pipeline": [
            RESIZE["pipeline"][0] | {"is_output": False},
            {
                "operation": "CropMirrorNormalize",
                "crop_width": 8,
                "crop_height": 8,
                "mean": [0.485, 0.456, 0.406],
                "std_dev": [0.229, 0.224, 0.225],
                "is_output": True,
            },
        ]
    }
    (spec,) = served(pipeline).signature.outputs
    assert (spec.datatype, spec.shape) == (DataType.FP32, (-1, 8, 8, 3))


@pytest.mark.parametrize(
    ("datatype", "dims", "layout", "tolerance"),
    [
        (DataType.FP32, (8, 16, 3), "NHWC", 0.51),
        (DataType.FP16, (8, 16, 3), "NHWC", 0.6),
        (DataType.FP32, (3, 8, 16), "NCHW", 0.51),
        (DataType.UINT8, (3, 8, 16), "NCHW", 0),
        (DataType.UINT8, (-1, -1, -1), "NHWC", 0),
    ],
)
def test_the_output_follows_the_declared_one(
    served: Served, datatype: DataType, dims: tuple[int, ...], layout: str, tolerance: float
) -> None:
    encoded = bytes_batch([jpeg(300, 200)], [1])
    plain = output(batching_model(served), encoded).astype(float)
    declared = OutputConfig("IMAGE", datatype, dims)
    model = served(RESIZE, inputs=[ENCODED], outputs=[declared], max_batch_size=8)
    array = output(model, encoded)
    assert array.dtype == datatype.numpy_dtype
    assert model.signature.outputs[0].shape == (-1, *array.shape[1:])
    if layout == "NCHW":
        array = array.transpose(0, 2, 3, 1)
    # The UINT8 kernel does not read the last row and column.
    np.testing.assert_allclose(array[:, :-1, :-1], plain[:, :-1, :-1], atol=tolerance)


def test_a_layout_that_the_dims_leave_open_is_nhwc_unless_the_pipeline_says_otherwise(served: Served) -> None:
    encoded = bytes_batch([jpeg(300, 200)], [1])
    declared = {"inputs": [ENCODED], "outputs": [OutputConfig("IMAGE", DataType.UINT8, (3, 5, 3))], "max_batch_size": 8}
    low = {**RESIZE["pipeline"][0], "dest_width": 5, "dest_height": 3}
    narrow = {**RESIZE["pipeline"][0], "dest_width": 3, "dest_height": 5}
    plain = output(served({"pipeline": [low]}), encoded_as(encoded, "encoded"), "image")
    given = output(served({"pipeline": [low]}, **declared), encoded)
    np.testing.assert_array_equal(given, plain)
    plain = output(served({"pipeline": [narrow]}), encoded_as(encoded, "encoded"), "image")
    given = output(served({"pipeline": [{**narrow, "layout": "NCHW"}]}, **declared), encoded)
    np.testing.assert_array_equal(given, plain.transpose(0, 3, 1, 2))


def encoded_as(batch: Batch, name: str) -> Batch:
    """The same images under the names of a model without a configuration."""
    (tensor,) = batch.inputs.values()
    return Batch({name: Tensor(name, tensor.datatype, tensor.shape, tensor.data)}, ("image",), batch.request_sizes)


@pytest.mark.parametrize(
    ("pipeline", "options", "text"),
    [
        ({"pipeline": []}, {}, r"pipeline.json: pipeline file: key 'pipeline' must be a list of operations"),
        (RESIZE, {"parameters": {"threads": "0"}}, "parameter 'threads' .* must be a whole number from 1 to 1024"),
        (RESIZE, {"parameters": {"color_format": "RGB"}}, "'color_format' .* one of RGB24, BGR24, U8, not \"RGB\""),
        (RESIZE, {"parameters": {"engine": "gpu"}}, "'engine' .* must be one of auto, cpu, rocal, not \"gpu\""),
        (RESIZE, {"kind": InstanceKind.GPU, "parameters": {"engine": "cpu"}}, "asks for KIND_GPU, but its parameter"),
        (RESIZE, {"inputs": [ENCODED, ENCODED]}, "a pipeline has one input of images, but 2 are configured"),
        (RESIZE, {"inputs": [InputConfig("X", DataType.FP32, (1,))]}, "input 'X' must be TYPE_STRING or TYPE_UINT8"),
        (
            RESIZE,
            {"inputs": [InputConfig("X", DataType.UINT8, (8, 16, 3))]},
            r'must be \[ -1 \], not \[8, 16, 3\]; for pixels instead of files give the pipeline "decoder"',
        ),
        (RESIZE, {"inputs": [InputConfig("X", DataType.BYTES, (1, 2, 3))]}, r"dims of input 'X' must be \[ 1 \]"),
        (RESIZE, {"outputs": [IMAGE, IMAGE]}, "2 outputs are configured, but the pipeline has 1"),
        (
            RESIZE,
            {"outputs": [OutputConfig("IMAGE", DataType.UINT8, (16, 8, 3))]},
            r"output 'IMAGE' is configured with dims \[16, 8, 3\], but the pipeline gives \[8, 16, 3\]",
        ),
        (
            {"pipeline": [{**RESIZE["pipeline"][0], "layout": "NCHW"}]},
            {"outputs": [IMAGE]},
            r"configured with dims \[8, 16, 3\], but the pipeline gives \[3, 8, 16\]",
        ),
        (RESIZE, {"outputs": [OutputConfig("IMAGE", DataType.INT32, (8, 16, 3))]}, "must be TYPE_UINT8, TYPE_FP32"),
        (RESIZE, {"outputs": [OutputConfig("IMAGE", DataType.UINT8, (16, 8))]}, "must have the three dims of an image"),
        (
            {"pipeline": [{**RESIZE["pipeline"][0], "dtype": "FP16"}]},
            {"outputs": [IMAGE]},
            'configured as UINT8, but the pipeline\'s "dtype" says FP16',
        ),
        (CROP, {"max_batch_size": 4}, "the size of output 'image' differs from image to image"),
    ],
)
def test_the_error_of_a_failed_load_has_its_reason(
    served: Served, pipeline: Mapping[str, Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ServeError, match=text) as caught:
        served(pipeline, **options)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


def test_warm_up(served: Served) -> None:
    model = batching_model(served)
    model.warm_up([])
    model.warm_up([bytes_batch([jpeg()], [1])])
    with pytest.raises(ServeError, match="cannot be decoded"):
        model.warm_up([bytes_batch([b"no image"], [1])])


def test_an_image_that_misses_the_declared_size_is_refused(served: Served) -> None:
    declared = OutputConfig("IMAGE", DataType.UINT8, (30, 30, 3))
    model = served(CROP, inputs=[ENCODED], outputs=[declared])
    assert output(model, bytes_batch([jpeg(50, 50)], [1], shape=(1,))).shape == (30, 30, 3)
    with pytest.raises(ServeError, match=r"must have shape \[30, 30, 3\], but this image gives \[30, 20, 3\]"):
        model.execute(bytes_batch([jpeg(20, 50)], [1], shape=(1,)))


@pytest.mark.usefixtures("rocal")
@pytest.mark.parametrize("engine", ["cpu", "rocal"])
def test_an_image_that_misses_the_declared_size_is_refused_alone(served: Served, engine: str) -> None:
    declared = OutputConfig("IMAGE", DataType.UINT8, (30, 30, 3))
    options = {"inputs": [ENCODED], "outputs": [declared], "max_batch_size": 8, "parameters": {"engine": engine}}
    model = served(CROP, **options)
    # numpy would repeat a single pixel.
    images = [jpeg(50, 50), jpeg(20, 50), jpeg(1, 1), jpeg(30, 30)]
    result = model.execute(bytes_batch(images, [1, 2, 1]))
    (text,) = [failure.text for failure in result.failures.values()]
    assert list(result.failures) == [1]
    assert text == (
        "image 0 of input 'ENCODED' cannot be processed: output 'IMAGE' must have shape [30, 30, 3], but this image"
        " gives [30, 20, 3]; resize images to a fixed size in the pipeline"
    )
    assert result.failures[1].code is StatusCode.INVALID_ARGUMENT
    alone = model.execute(bytes_batch(images[2:3], [1]))
    assert "but this image gives [1, 1, 3]" in alone.failures[0].text
    for row in (0, 3):
        np.testing.assert_array_equal(
            result.outputs["IMAGE"][row], output(model, bytes_batch(images[row : row + 1], [1]))[0]
        )


@pytest.mark.usefixtures("rocal")
@pytest.mark.parametrize("engine", ["cpu", "rocal"])
def test_outputs_that_nobody_wants_are_left_out(served: Served, engine: str) -> None:
    small = {"operation": "Resize", "dest_width": 4, "dest_height": 4, "is_output": True}
    document = {"pipeline": [*RESIZE["pipeline"], small]}
    model = served(document, parameters={"engine": engine})
    tensor = Tensor("encoded", DataType.BYTES, (1, 1), encode_bytes_elements([jpeg(40, 30)]))
    both = model.execute(Batch({"encoded": tensor}, ("image", "image_1"), (1,))).outputs
    one = model.execute(Batch({"encoded": tensor}, ("image_1",), (1,))).outputs
    assert list(one) == ["image_1"]
    np.testing.assert_array_equal(one["image_1"], both["image_1"])


@pytest.mark.parametrize(
    ("document", "side"),
    [
        ({**RESIZE, "decoder": {"max_width": 5, "max_height": 5}}, 30),
        ({**RESIZE, "decoder": {"max_pixels": 1000}}, 30),
        ({"pipeline": [{"operation": "slice", "anchor": [0, 0], "shape": [200, 200], "is_output": True}]}, 400),
    ],
)
def test_a_model_is_warmed_up_though_not_every_image_suits_it(
    served: Served, document: Mapping[str, Any], side: int
) -> None:
    model = served(document)
    model.warm_up([])
    for size, suits in ((side, True), (64, False)):
        tensor = Tensor("encoded", DataType.BYTES, (1, 1), encode_bytes_elements([jpeg(size, size)]))
        failures = model.execute(Batch({"encoded": tensor}, ("image",), (1,))).failures
        assert bool(failures) is not suits
