"""The inputs of a pipeline's model: raw pixels, further values, what is declared and what is completed."""

from __future__ import annotations

import logging
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support import pictures

from rocserve.backends.base import Batch, LoadedModel
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, InstanceGroup, InstanceKind, OutputConfig
from rocserve.core.requests import TensorSpec
from rocserve.core.tensors import Tensor, encode_bytes_elements, tensor_from_numpy

Served = Callable[..., LoadedModel]

RESIZE = {"operation": "Resize", "dest_width": 16, "dest_height": 8, "is_output": True}
SIZE = {"operation": "ImageSize", "is_output": True}
NOTHING = {"operation": "CropFixed", "crop_width": 4000, "crop_height": 4000, "crop_pos_x": 0, "crop_pos_y": 0}
MIRROR = {
    "operation": "ResizeMirrorNormalize",
    "dest_width": 16,
    "dest_height": 8,
    "mean": [0],
    "std_dev": [1],
    "mirror": {"input": "FLIP"},
    "is_output": True,
}
RAW = {"decoder": {"input": "raw"}, "pipeline": [RESIZE]}
ENCODED = InputConfig("ENCODED", DataType.BYTES, (1,))


def encoded(*images: bytes, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor("ENCODED", DataType.BYTES, shape or (len(images), 1), encode_bytes_elements(images))


def run(model: LoadedModel, tensors: Sequence[Tensor], sizes: Sequence[int] = (1,)) -> list[np.ndarray[Any, Any]]:
    names = tuple(spec.name for spec in model.signature.outputs)
    result = model.execute(Batch({tensor.name: tensor for tensor in tensors}, names, tuple(sizes)))
    for failure in result.failures.values():
        raise failure
    return [np.asarray(result.outputs[name]) for name in names]


@pytest.mark.parametrize(
    ("dims", "color_format", "shape"),
    [
        ((-1, -1, 3), "RGB24", (40, 60, 3)),
        ((40, 60, 3), "BGR24", (40, 60, 3)),
        ((-1, -1, 1), "U8", (40, 60, 1)),
        ((-1, -1), "U8", (40, 60)),
    ],
)
def test_one_raw_image(served: Served, dims: tuple[int, ...], color_format: str, shape: tuple[int, ...]) -> None:
    declared = [InputConfig("PICTURE", DataType.UINT8, dims)]
    document = {"decoder": {"input": "raw"}, "pipeline": [{**NOTHING, "is_output": True}]}
    model = served(document, inputs=declared, parameters={"color_format": color_format})
    assert model.signature.inputs == (TensorSpec("PICTURE", DataType.UINT8, dims),)
    pixels = np.ascontiguousarray(pictures.colours(60, 40)[..., : shape[-1] if len(shape) == 3 else 1].reshape(shape))
    (given,) = run(model, [tensor_from_numpy("PICTURE", pixels)])
    np.testing.assert_array_equal(given.reshape(shape), pixels)
    # The declared size is the output's, if the pipeline keeps the image's size.
    assert model.signature.outputs[0].shape[:2] == ((40, 60) if -1 not in dims else (-1, -1))


def test_raw_images_of_a_declared_batch(served: Served) -> None:
    declared = [InputConfig("PICTURE", DataType.UINT8, (40, 60))]
    model = served(RAW, inputs=declared, max_batch_size=4, parameters={"color_format": "U8"})
    model.warm_up([])
    images = np.stack([pictures.colours(60, 40)[:, :, channel] for channel in range(3)])
    (rows,) = run(model, [tensor_from_numpy("PICTURE", images)], (1, 2))
    assert rows.shape == (3, 8, 16, 1)


@pytest.mark.parametrize(
    ("document", "datatype", "dims", "one"),
    [
        (RAW, DataType.UINT8, (4, 40, 60, 3), [40, 60, 3]),
        (RAW, DataType.UINT8, (4, -1, -1, 3), [-1, -1, 3]),
        ({"pipeline": [RESIZE]}, DataType.UINT8, (4, -1), [-1]),
        ({"pipeline": [RESIZE]}, DataType.BYTES, (4, 1), [1]),
        ({"pipeline": [RESIZE]}, DataType.BYTES, (4,), [1]),
    ],
)
def test_several_images_whose_outputs_hold_one_are_refused_when_the_model_is_loaded(
    served: Served, document: Any, datatype: DataType, dims: tuple[int, ...], one: list[int]
) -> None:
    """Otherwise each request would be refused, because it cannot bring one image."""
    declared = [InputConfig("PICTURE", datatype, dims)]

    def loaded(*lead: int) -> LoadedModel:
        outputs = [OutputConfig("IMAGE", DataType.UINT8, (*lead, 8, 16, 3))]
        return served(document, inputs=declared, outputs=outputs)

    with pytest.raises(ServeError) as fault:
        loaded()
    assert fault.value.code is StatusCode.INVALID_ARGUMENT
    assert fault.value.text.endswith(
        f"dims of input 'PICTURE' must be {one}, one image, since the outputs' have no batch dimension, not"
        f" {list(dims)}, 4 images: give one image, or put 4 in front of the dims of each output"
    )
    assert loaded(4).signature.outputs == (TensorSpec("IMAGE", DataType.UINT8, (-1, 8, 16, 3)),)


@pytest.mark.parametrize("lead", [1, -1])
def test_a_request_that_may_bring_one_image_is_served(served: Served, lead: int) -> None:
    declared = [InputConfig("PICTURE", DataType.UINT8, (lead, 40, 60, 3))]
    outputs = [OutputConfig("IMAGE", DataType.UINT8, (8, 16, 3))]
    model = served(RAW, inputs=declared, outputs=outputs)
    (given,) = run(model, [tensor_from_numpy("PICTURE", pictures.colours(60, 40)[np.newaxis])])
    assert given.shape == (8, 16, 3)


@pytest.mark.parametrize("datatype", [DataType.BOOL, DataType.UINT8, DataType.INT32])
@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_flag_for_each_image(served: Served, datatype: DataType, shape: tuple[int, ...]) -> None:
    flip = InputConfig("FLIP", datatype, (1,), reshape=None if len(shape) == 2 else ())
    model = served({"pipeline": [MIRROR]}, inputs=[flip, ENCODED], max_batch_size=8)
    model.warm_up([])
    images = encoded(*[pictures.jpeg(60, 40 + index) for index in range(3)])
    # Every value but 0 is true.
    flags = np.array([7, 0, 200]).astype(datatype.numpy_dtype).reshape(shape)
    (rows,) = run(model, [tensor_from_numpy("FLIP", flags), images], (1, 2))
    (plain,) = run(model, [tensor_from_numpy("FLIP", np.zeros_like(flags)), images], (1, 2))
    for row, flag in enumerate((True, False, True)):
        np.testing.assert_array_equal(rows[row], plain[row][:, ::-1] if flag else plain[row])


def test_what_is_not_declared_is_completed(served: Served) -> None:
    single = served({"pipeline": [{**MIRROR, "is_output": False}, {**NOTHING, "is_output": True}]})
    assert single.signature.supports_batching
    alone = served({"pipeline": [{**NOTHING, "is_output": True}, MIRROR]})
    assert alone.signature.inputs == (
        TensorSpec("encoded", DataType.BYTES, (1,)),
        TensorSpec("FLIP", DataType.BOOL, (1,)),
    )
    tensors = [
        Tensor("encoded", DataType.BYTES, (1,), encode_bytes_elements([pictures.jpeg(500, 400)])),
        tensor_from_numpy("FLIP", np.array([True])),
    ]
    assert [output.shape for output in run(alone, tensors)] == [(800, 1000, 3), (8, 16, 3)]


def test_the_size_of_the_image_that_was_sent(served: Served) -> None:
    outputs = [OutputConfig("IMAGE", DataType.UINT8, (8, 16, 3)), OutputConfig("SIZE", DataType.INT32, (2,))]
    document = {"decoder": {"exif": True}, "pipeline": [RESIZE, SIZE]}
    model = served(document, inputs=[ENCODED], outputs=outputs, max_batch_size=8)
    images = encoded(
        pictures.jpeg(500, 375), pictures.turned_jpeg(6, 60, 40), pictures.saved(pictures.colours(), "PNG")
    )
    _, sizes = run(model, [images], (3,))
    np.testing.assert_array_equal(sizes, [[375, 500], [60, 40], [40, 60]])
    unbatched = [OutputConfig("IMAGE", DataType.UINT8, (-1, 8, 16, 3)), OutputConfig("SIZE", DataType.INT32, (-1, 2))]
    several = served(document, inputs=[InputConfig("ENCODED", DataType.BYTES, (-1,))], outputs=unbatched)
    _, sizes = run(several, [encoded(pictures.jpeg(10, 20), pictures.jpeg(30, 40), shape=(2,))])
    np.testing.assert_array_equal(sizes, [[20, 10], [40, 30]])


def test_values_and_images_must_be_as_many(served: Served) -> None:
    inputs = [InputConfig("ENCODED", DataType.BYTES, (-1,)), InputConfig("FLIP", DataType.BOOL, (-1,))]
    model = served({"pipeline": [MIRROR]}, inputs=inputs)
    images = encoded(pictures.jpeg(), pictures.jpeg(), shape=(2,))
    with pytest.raises(ServeError, match="input 'FLIP' must have one value for each of the 2 images, got 3") as caught:
        run(model, [images, tensor_from_numpy("FLIP", np.zeros(3, bool))])
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


def test_a_bad_raw_image_fails_alone(served: Served) -> None:
    document = {"decoder": {"input": "raw", "max_pixels": 2400}, "pipeline": [RESIZE]}
    model = served(document)
    run(model, [tensor_from_numpy("pixels", np.zeros((1, 40, 60, 3), np.uint8))])
    with pytest.raises(ServeError, match="the image in input 'pixels' cannot be used: its 61x40 pixels are more"):
        run(model, [tensor_from_numpy("pixels", np.zeros((1, 40, 61, 3), np.uint8))])


def test_the_lower_limit_on_pixels_counts(served: Served) -> None:
    for of_pipeline, of_parameter in ((100, "1000000"), (1_000_000, "100")):
        document = {"decoder": {"max_pixels": of_pipeline}, "pipeline": [RESIZE]}
        model = served(document, inputs=[ENCODED], parameters={"max_pixels": of_parameter})
        with pytest.raises(ServeError, match="60x40 pixels are more than the 100 that 'max_pixels' allows"):
            run(model, [encoded(pictures.jpeg(), shape=(1,))])


@pytest.mark.parametrize(
    ("document", "inputs", "text"),
    [
        (RAW, [InputConfig("P", DataType.BYTES, (1,))], r"input 'P' must be TYPE_UINT8 \(raw pixels\), not BYTES"),
        (RAW, [InputConfig("P", DataType.UINT8, (-1, -1))], r"dims of input 'P' must be \[ height, width, 3 \]"),
        (RAW, [InputConfig("P", DataType.UINT8, (-1, -1, 4))], r"must be \[ height, width, 3 \], not \[-1, -1, 4\]"),
        ({"pipeline": [MIRROR]}, [ENCODED], "takes values from input 'FLIP', which is not among the inputs"),
        (
            {"pipeline": [MIRROR]},
            [ENCODED, InputConfig("FLIP", DataType.FP32, (1,))],
            "input 'FLIP' must be TYPE_BOOL or TYPE_UINT8 or TYPE_INT32, not FP32",
        ),
        (
            {"pipeline": [MIRROR]},
            [ENCODED, InputConfig("FLIP", DataType.BOOL, (2, 3))],
            r"dims of input 'FLIP' must be \[ 1 \], a value for each image, not \[2, 3\]",
        ),
        (
            {"pipeline": [MIRROR]},
            [ENCODED, InputConfig("FLIP", DataType.BOOL, (1,)), InputConfig("MORE", DataType.BYTES, (1,))],
            "a pipeline has one input of images besides FLIP, but 2 are configured",
        ),
        (
            {"pipeline": [{**MIRROR, "mirror": {"input": "encoded"}}]},
            [],
            "the pipeline's input 'encoded' has the name of the image's",
        ),
    ],
)
def test_inputs_that_do_not_fit_the_pipeline(
    served: Served, document: Mapping[str, Any], inputs: Sequence[InputConfig], text: str
) -> None:
    with pytest.raises(ServeError, match=text) as caught:
        served(document, inputs=inputs)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


def test_a_measurement_has_its_own_type_and_dims(served: Served) -> None:
    outputs = [OutputConfig("SIZE", DataType.FP32, (2,))]
    with pytest.raises(ServeError, match=r"'SIZE' is the pipeline's ImageSize: it must be TYPE_INT32 with dims \[2\]"):
        served({"pipeline": [SIZE]}, outputs=outputs)
    outputs = [OutputConfig("SIZE", DataType.INT32, (3,))]
    with pytest.raises(ServeError, match=r"dims \[2\], not INT32 with \[3\]"):
        served({"pipeline": [SIZE]}, outputs=outputs)


def test_an_engine_that_is_not_there(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocserve.backends.rocal.backend.is_installed", lambda module: False)
    for options in ({"parameters": {"engine": "rocal"}}, {"kind": InstanceKind.GPU}):
        with pytest.raises(ServeError, match=r"needs rocAL, because .* amd.rocal is not installed") as caught:
            served({"pipeline": [RESIZE]}, **options)
        assert caught.value.code is StatusCode.UNAVAILABLE


def test_the_choice_of_the_engine_is_said(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocserve.backends.rocal.backend.is_installed", lambda module: False)
    caplog.set_level(logging.DEBUG)
    served({"pipeline": [RESIZE]}, parameters={"engine": "cpu"})
    assert "pipeline.json runs on engine cpu: parameter 'engine' says so" in caplog.text
    served({"pipeline": [RESIZE]})
    assert "engine cpu: the instance is KIND_AUTO" in caplog.text
    caplog.clear()
    # As the server plans a group of KIND_GPU without a GPU: on the CPU, and only with this parameter.
    group = InstanceGroup("", InstanceKind.GPU, 1)
    served({"pipeline": [RESIZE]}, kind=InstanceKind.CPU, parameters={"engine": "auto"}, instance_groups=(group,))
    assert "engine cpu: KIND_GPU is asked for, but amd.rocal is not installed" in caplog.text


def test_rocal_that_cannot_be_loaded_is_replaced_only_where_auto_is_written(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It seems to be installed, but its import fails.
    monkeypatch.setattr("rocserve.backends.rocal.backend.is_installed", lambda module: True)
    monkeypatch.setitem(sys.modules, "amd", None)
    with pytest.raises(ServeError, match=r"amd\.rocal is not installed") as caught:
        served({"pipeline": [RESIZE]}, kind=InstanceKind.GPU)
    assert caught.value.code is StatusCode.UNAVAILABLE
    caplog.set_level(logging.DEBUG)
    served({"pipeline": [RESIZE]}, kind=InstanceKind.GPU, parameters={"engine": "auto"}).warm_up([])
    assert "engine cpu: rocAL cannot run it (amd.rocal is not installed" in caplog.text


@pytest.mark.usefixtures("rocal")
def test_an_amd_rocal_that_fails_in_a_way_of_its_own_is_replaced_too(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import amd.rocal.fn

    # As another version may declare it.
    monkeypatch.setattr(amd.rocal.fn, "external_source", lambda source: None)
    options = {"kind": InstanceKind.GPU}
    with pytest.raises(ServeError, match=r"rocAL fails: .*unexpected keyword argument 'color_format'") as caught:
        served({"pipeline": [RESIZE]}, **options)
    assert caught.value.code is StatusCode.UNAVAILABLE
    caplog.set_level(logging.DEBUG)
    served({"pipeline": [RESIZE]}, **options, parameters={"engine": "auto"}).warm_up([])
    assert "engine cpu: rocAL cannot run it (rocAL fails: " in caplog.text


def test_an_error_names_a_libturbojpeg_that_cannot_be_loaded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: {fault}")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    fault = "invalid ELF header"
    with pytest.raises(ServeError, match=r"^libturbojpeg.so.0: invalid ELF header; libturbojpeg decodes") as caught:
        served({"pipeline": [RESIZE]})
    assert caught.value.code is StatusCode.UNAVAILABLE
    fault = "cannot open shared object file: No such file or directory"
    with pytest.raises(ServeError, match="libturbojpeg was not found; it decodes JPEGs"):
        served({"pipeline": [RESIZE]})


def test_several_images_in_one_tensor_without_batching(served: Served) -> None:
    images = [pictures.colours(60, 40), 255 - pictures.colours(60, 40), pictures.colours(60, 40)[::-1]]
    files = [pictures.saved(image, "PNG") for image in images]
    outputs = [OutputConfig("IMAGE", DataType.UINT8, (-1, 8, 16, 3))]
    by_strings = served({"pipeline": [RESIZE]}, inputs=[InputConfig("ENCODED", DataType.BYTES, (-1,))], outputs=outputs)
    (expected,) = run(by_strings, [encoded(*files, shape=(3,))])
    assert expected.shape == (3, 8, 16, 3)
    padded = np.stack([np.frombuffer(file.ljust(max(map(len, files)) + 7, b"\0"), np.uint8) for file in files])
    by_rows = served({"pipeline": [RESIZE]}, inputs=[InputConfig("ENCODED", DataType.UINT8, (-1, -1))], outputs=outputs)
    np.testing.assert_array_equal(run(by_rows, [tensor_from_numpy("ENCODED", padded)])[0], expected)
    by_pixels = served(RAW, inputs=[InputConfig("PIXELS", DataType.UINT8, (-1, 40, 60, 3))], outputs=outputs)
    (rows,) = run(by_pixels, [tensor_from_numpy("PIXELS", np.stack(images))])
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("threads", ["1", "4"])
def test_a_small_request_of_many_bad_images_takes_little_memory(served: Served, threads: str) -> None:
    inputs = [InputConfig("ENCODED", DataType.BYTES, (-1,))]
    outputs = [OutputConfig("IMAGE", DataType.UINT8, (-1, 8, 16, 3))]
    document, parameters = {"pipeline": [RESIZE]}, {"threads": threads}
    model = served(document, inputs=inputs, outputs=outputs, parameters=parameters)
    request = encoded(*[b""] * 10_000, shape=(10_000,))
    tracemalloc.start()
    try:
        with pytest.raises(ServeError, match=r"^image 0 of input 'ENCODED' cannot be decoded: it is empty"):
            run(model, [request])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The result and the error of each image; the tracebacks differ.
    assert peak < 10_000 * 1500


def test_results_for_which_there_is_no_memory(served: Served) -> None:
    large = {**RESIZE, "dest_width": 30_000, "dest_height": 3000}
    outputs = [OutputConfig("IMAGE", DataType.FP32, (-1, 3000, 30_000, 3))]
    inputs = [InputConfig("ENCODED", DataType.BYTES, (-1,))]
    model = served({"pipeline": [large]}, inputs=inputs, outputs=outputs)
    with pytest.raises(ServeError, match=r"^no memory for the results of 200000 images: Unable to allocate") as caught:
        run(model, [encoded(*[b""] * 200_000, shape=(200_000,))])
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
