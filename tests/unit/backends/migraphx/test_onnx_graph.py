"""What is read from an ONNX file, and what is refused before MIGraphX sees it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import migraphx_models

from rocserve.backends.migraphx.compiling.graph import GraphTensor
from rocserve.backends.migraphx.compiling.onnx_graph import read_onnx_graph
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode


def _write(folder: Path, model: onnx.ModelProto | bytes) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def _refusal(path: Path) -> str:
    with pytest.raises(ServeError) as error:
        read_onnx_graph(path)
    assert error.value.code is StatusCode.INVALID_ARGUMENT
    return error.value.text


def _model(
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto] | None = None,
    nodes: list[onnx.NodeProto] | None = None,
    **graph: object,
) -> onnx.ModelProto:
    outputs = outputs or [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
    nodes = nodes or [helper.make_node("Identity", ["x"], ["y"])]
    return helper.make_model(helper.make_graph(nodes, "graph", inputs, outputs, **graph))


def _float(name: str, dims: list[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def test_a_network(tmp_path: Path) -> None:
    graph = read_onnx_graph(_write(tmp_path, migraphx_models.mini_resnet()))
    assert graph.inputs == (GraphTensor("image", DataType.FP32, ("batch", 3, 8, 8)),)
    assert graph.outputs == (GraphTensor("logits", DataType.FP32, ("batch", 10)),)
    assert graph.external_files == () and not graph.is_quantised
    floats = sum(np.prod(tensor.dims) for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer)
    assert graph.weight_bytes == 4 * floats


def test_inputs_and_outputs_keep_their_order(tmp_path: Path) -> None:
    graph = read_onnx_graph(_write(tmp_path, migraphx_models.two_in_two_out()))
    assert [tensor.name for tensor in graph.inputs] == ["left", "right"]
    assert [tensor.name for tensor in graph.outputs] == ["difference", "product"]


def test_dimensions_that_are_left_open(tmp_path: Path) -> None:
    graph = read_onnx_graph(_write(tmp_path, _model([_float("x", ["n", 3, None, -1, 0]), _float("z", None)])))
    assert [tensor.dims for tensor in graph.inputs] == [("n", 3, "", "", ""), None]
    assert read_onnx_graph(_write(tmp_path, _model([_float("x", [])]))).inputs[0].dims == ()


def test_an_input_with_a_default_is_none(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones(3, np.float32), "w")
    model = _model(
        [_float("x", [3]), _float("w", [3])], nodes=[helper.make_node("Add", ["x", "w"], ["y"])], initializer=[weight]
    )
    assert [tensor.name for tensor in read_onnx_graph(_write(tmp_path, model)).inputs] == ["x"]


def test_datatypes(tmp_path: Path) -> None:
    types = {TensorProto.BOOL: "BOOL", TensorProto.FLOAT16: "FP16", TensorProto.BFLOAT16: "BF16"}
    inputs = [helper.make_tensor_value_info(str(number), number, [1]) for number in types]
    graph = read_onnx_graph(_write(tmp_path, _model(inputs)))
    assert [tensor.datatype for tensor in graph.inputs] == [DataType(name) for name in types.values()]


def test_a_quantised_model(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["y"]),
    ]
    scale = numpy_helper.from_array(np.array(0.5, np.float32), "scale")
    assert read_onnx_graph(_write(tmp_path, _model([_float("x", [2])], nodes=nodes, initializer=[scale]))).is_quantised


def test_what_subgraphs_and_constants_hold_counts(tmp_path: Path) -> None:
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(5, np.float64), "c"))
    branch = helper.make_graph([constant, helper.make_node("Identity", ["c"], ["b"])], "branch", [], [_float("b", [5])])
    nodes = [
        helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch),
        helper.make_node("Gelu", ["y"], ["z"], domain="com.microsoft"),
    ]
    flag = helper.make_tensor_value_info("x", TensorProto.BOOL, [])
    graph = read_onnx_graph(_write(tmp_path, _model([flag], nodes=nodes)))
    assert graph.weight_bytes == 2 * 5 * 8


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "ONNX file model.onnx is empty; copy it again"),
        (b"\x00" * 100, "is damaged or not an ONNX file (100 bytes: "),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a git-LFS pointer"),
        (b"not a model at all", "is damaged or not an ONNX file (18 bytes: "),
        (b"\x08\x08", "is not an ONNX model, or is damaged: it has no nodes"),
        (b"\x2a\x03abc", "is not an ONNX model, or is damaged: it has no ir_version"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, content: bytes, text: str) -> None:
    assert text in _refusal(_write(tmp_path, content))


def test_a_truncated_file(tmp_path: Path) -> None:
    whole = migraphx_models.mini_resnet()
    refused = _refusal(_write(tmp_path, whole[: len(whole) // 2]))
    assert "ONNX file model.onnx is damaged or not an ONNX file" in refused
    assert f"; it looks cut short, at {len(whole) // 2} bytes; copy it again" in refused


def test_a_file_without_outputs(tmp_path: Path) -> None:
    model = _model([_float("x", [1])])
    del model.graph.output[:]
    refused = _refusal(_write(tmp_path, model))
    assert "ONNX file model.onnx is not an ONNX model, or is damaged: it has no outputs; copy or export it" in refused


def test_weights_that_are_too_short(tmp_path: Path) -> None:
    model = onnx.load_from_string(migraphx_models.mlp())
    weights = model.graph.initializer[0]
    whole, weights.raw_data = len(weights.raw_data), weights.raw_data[:-1]
    refused = _refusal(_write(tmp_path, model.SerializeToString()))
    assert f"is damaged: tensor '{weights.name}' has {whole - 1} bytes, expected {whole}; copy" in refused


@pytest.mark.parametrize(
    ("datatype", "field", "dims", "expected"),
    [
        ("FLOAT", "float_data", [512], 512),
        ("DOUBLE", "double_data", [4, 4], 16),
        ("INT64", "int64_data", [], 1),
        ("UINT32", "uint64_data", [3], 3),
        ("FLOAT16", "int32_data", [5], 5),
        ("BOOL", "int32_data", [5], 5),
        ("UINT4", "int32_data", [5], 3),
        ("COMPLEX64", "float_data", [5], 10),
    ],
)
def test_values_that_are_too_few_or_too_many(
    tmp_path: Path, datatype: str, field: str, dims: list[int], expected: int
) -> None:
    """MIGraphX would leave the rest of the memory unchanged, or write past the tensor's end."""
    weight = TensorProto(name="w", data_type=TensorProto.DataType.Value(datatype), dims=dims)
    for count in (0, expected - 1, expected + 1):
        del getattr(weight, field)[:]
        getattr(weight, field).extend([1] * count)
        model = _model([_float("x", [1])], initializer=[weight])
        refused = _refusal(_write(tmp_path, model))
        assert f"is damaged: tensor 'w' has {count} values, expected {expected}; copy" in refused
    del getattr(weight, field)[:]
    getattr(weight, field).extend([1] * expected)
    assert read_onnx_graph(_write(tmp_path, _model([_float("x", [1])], initializer=[weight]))).weight_bytes > 0


@pytest.mark.skipif(not hasattr(TensorProto, "FLOAT8E8M0"), reason="onnx 1.19")
@pytest.mark.parametrize(("datatype", "expected"), [("FLOAT4E2M1", 4), ("FLOAT8E8M0", 8), ("INT4", 4)])
def test_weights_of_the_newest_datatypes_that_are_too_short(tmp_path: Path, datatype: str, expected: int) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.DataType.Value(datatype), dims=[8], raw_data=b"x")
    refused = _refusal(_write(tmp_path, _model([_float("x", [1])], initializer=[weight])))
    assert f"is damaged: tensor 'w' has 1 bytes, expected {expected}; copy" in refused


@pytest.mark.parametrize("dims", [[-1], [-2, -3]])
def test_weights_of_less_than_nothing(tmp_path: Path, dims: list[int]) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=bytes(64))
    refused = _refusal(_write(tmp_path, _model([_float("x", [1])], initializer=[weight])))
    assert "is damaged: the shape of tensor 'w' exceeds any memory; copy or export it again" in refused


def test_a_tensor_that_is_made_twice(tmp_path: Path) -> None:
    twice = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])]
    refused = _refusal(_write(tmp_path, _model([_float("x", [1])], nodes=twice)))
    assert refused.endswith("is not a valid ONNX model: tensor 'y' is made twice; export it again")
    again = [helper.make_node("Relu", ["x"], ["x"]), helper.make_node("Neg", ["x"], ["y"])]
    assert "tensor 'x' is made twice" in _refusal(_write(tmp_path, _model([_float("x", [1])], nodes=again)))
    # Omitted outputs have no name.
    without = [helper.make_node("Dropout", ["x"], ["y", ""]), helper.make_node("Dropout", ["x"], ["z", ""])]
    assert read_onnx_graph(_write(tmp_path, _model([_float("x", [1])], nodes=without)))


def test_sparse_weights(tmp_path: Path) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.zeros(1, np.int64), "w_places"), [2])
    model = _model([_float("x", [1])], sparse_initializer=[sparse])
    assert _refusal(_write(tmp_path, model)).endswith(
        "has sparse initializers, which MIGraphX does not support; let ONNX Runtime run the model: parameter 'engine'"
        ' "onnxruntime"'
    )


@pytest.mark.parametrize("count", [20, 100_000], ids=["sizes", "number of sizes"])
@pytest.mark.parametrize("fields", [{}, {"raw_data": b"x"}, {"data_location": TensorProto.EXTERNAL}])
def test_weights_of_a_shape_that_no_memory_holds(tmp_path: Path, count: int, fields: dict[str, Any]) -> None:
    weight = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 62] * count, **fields)
    weight.external_data.add(key="location", value="model.onnx")
    refused = _refusal(_write(tmp_path, _model([_float("x", [1])], initializer=[weight])))
    assert "is damaged: the shape of tensor 'w' exceeds any memory; copy or export it again" in refused


def test_a_file_above_what_the_format_can_have(tmp_path: Path) -> None:
    path = _write(tmp_path, b"")
    os.truncate(path, (1 << 31) + 5)
    assert "has 2147483653 bytes, more than the format's 2 GB" in _refusal(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "model.onnx cannot be read: No such file or directory" in _refusal(tmp_path / "model.onnx")
    assert "cannot be read: Is a directory" in _refusal(tmp_path)


def _sequence() -> onnx.ValueInfoProto:
    return helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [1])


def _sparse() -> onnx.ValueInfoProto:
    return helper.make_sparse_tensor_value_info("x", TensorProto.FLOAT, [1])


def _map() -> onnx.ValueInfoProto:
    of = helper.make_tensor_type_proto(TensorProto.FLOAT, [1])
    return helper.make_value_info("x", helper.make_map_type_proto(TensorProto.INT64, of))


def _optional() -> onnx.ValueInfoProto:
    of = helper.make_tensor_type_proto(TensorProto.FLOAT, [1])
    return helper.make_value_info("x", helper.make_optional_type_proto(of))


def _untyped() -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name="x")


def _elements(number: int) -> Callable[[], onnx.ValueInfoProto]:
    return lambda: helper.make_tensor_value_info("x", number, [1])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_sequence, "has input 'x' of type sequence, but only dense tensors can be served"),
        (_sparse, "has input 'x' of type sparse tensor, but only"),
        (_map, "has input 'x' of type map, but only"),
        (_optional, "has input 'x' of type optional, but only"),
        (_untyped, "has input 'x' of a type that is not given"),
        (
            _elements(TensorProto.STRING),
            "with elements of type STRING, which MIGraphX does not support; let ONNX Runtime",
        ),
        (_elements(TensorProto.COMPLEX64), "with elements of type COMPLEX64, which the KServe protocol does not have"),
        (
            _elements(TensorProto.FLOAT8E4M3FN),
            "with elements of type FLOAT8E4M3FN, which the KServe protocol does not have",
        ),
        (_elements(0), "with elements of type UNDEFINED, which the KServe protocol does not have"),
    ],
)
def test_types_that_are_refused(tmp_path: Path, make: Callable[[], onnx.ValueInfoProto], text: str) -> None:
    assert text in _refusal(_write(tmp_path, _model([make()])))
    output = make()
    output.name = "y"
    as_output = _refusal(_write(tmp_path, _model([_float("x", [1])], outputs=[output])))
    assert text.replace("input 'x'", "output 'y'") in as_output


def test_names_that_are_there_twice_or_missing(tmp_path: Path) -> None:
    assert "has two inputs with the name 'x'" in _refusal(
        _write(tmp_path, _model([_float("x", [1]), _float("x", [2])]))
    )
    assert "has an input without a name" in _refusal(_write(tmp_path, _model([_float("", [1])])))


class TestExternalData:
    def _external(self, **entries: str) -> onnx.ModelProto:
        """A weight of 16 bytes in another file."""
        weight = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
        for key, value in entries.items():
            weight.external_data.add(key=key, value=value)
        return _model([_float("x", [4])], nodes=[helper.make_node("Add", ["x", "w"], ["y"])], initializer=[weight])

    def test_files_are_found_and_counted(self, tmp_path: Path) -> None:
        model = onnx.load_from_string(migraphx_models.mini_resnet())
        onnx.save_model(model, tmp_path / "model.onnx", save_as_external_data=True, size_threshold=0, location="w.bin")
        graph = read_onnx_graph(tmp_path / "model.onnx")
        assert graph.external_files == (tmp_path / "w.bin",)
        assert graph.weight_bytes == read_onnx_graph(_write(tmp_path, migraphx_models.mini_resnet())).weight_bytes

    def test_without_a_length_it_is_by_the_shape(self, tmp_path: Path) -> None:
        (tmp_path / "w").write_bytes(bytes(16))
        assert read_onnx_graph(_write(tmp_path, self._external(location="w"))).weight_bytes == 16

    @pytest.mark.parametrize(
        ("entries", "text"),
        [
            ({"location": "gone"}, "needs external data file 'gone', which is missing; copy it into the same folder"),
            ({"location": "../w"}, "external data of model.onnx: '../w' must be a path within its folder"),
            ({"location": "/etc/passwd"}, "'/etc/passwd' must be a path within its folder"),
            ({"location": "out"}, "'out' is a link that leads out of the model's folder, to /etc"),
            ({"location": "loop"}, "'loop' is a link that leads nowhere"),
            ({"location": "folder"}, "needs external data file 'folder', which is missing"),
            ({"location": "pipe"}, "needs external data file 'pipe', which is missing"),
            ({"location": "w" * 256}, "wwww' cannot be read: File name too long"),
            ({}, "tensor 'w' is external, but names no file"),
            ({"location": "w", "offset": "8"}, "needs bytes 8 to 24 of external data file 'w', which has 16"),
            ({"location": "w", "offset": "0", "length": "17"}, "needs bytes 0 to 17 of external data file 'w', which"),
            ({"location": "w", "offset": "0", "length": "12"}, "has 16 bytes by its type and shape, but 12 in 'w'"),
            ({"location": "w", "offset": "-1"}, "has external data with offset '-1', which is not a number of bytes"),
            ({"location": "w", "offset": "9" * 9999}, "which is not a number of bytes"),
            (
                {"location": "w", "length": "16"},
                "location, length, in this order, but MIGraphX reads them as location,",
            ),
            ({"offset": "0", "location": "w"}, "offset, location, in this order, but MIGraphX reads them as location"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, entries: dict[str, str], text: str) -> None:
        folder = tmp_path / "1"
        (folder / "folder").mkdir(parents=True)
        (folder / "w").write_bytes(bytes(16))
        (tmp_path / "w").write_bytes(bytes(16))
        os.mkfifo(folder / "pipe")
        (folder / "out").symlink_to("/etc")
        (folder / "loop").symlink_to("loop")
        assert text in _refusal(_write(folder, self._external(**entries)))

    def test_what_migraphx_reads_is_checked_whatever_the_tensor_says(self, tmp_path: Path) -> None:
        model = self._external(location="../secret")
        model.graph.initializer[0].data_location = TensorProto.DEFAULT
        assert "'../secret' must be a path within its folder" in _refusal(_write(tmp_path, model))
        model = self._external(location="w", offset="0", length="16")
        model.graph.initializer[0].external_data.add(key="location", value="../secret")
        assert "tensor 'w' has an entry of its external data twice" in _refusal(_write(tmp_path, model))

    def test_links_within_the_models_folder(self, tmp_path: Path) -> None:
        (tmp_path / "1").mkdir()
        (tmp_path / "blob").write_bytes(bytes(16))
        (tmp_path / "1/w").symlink_to("../blob")
        path = _write(tmp_path / "1", self._external(location="w"))
        assert "leads out of the model's folder" in _refusal(path)
        assert read_onnx_graph(path, (tmp_path,)).external_files == (tmp_path / "1/w",)


def test_damaged_files_give_nothing_but_our_error(tmp_path: Path) -> None:
    chance = random.Random(4)
    whole = migraphx_models.two_in_two_out()
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 8)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            read_onnx_graph(_write(tmp_path, bytes(damaged)))
        except ServeError as error:
            assert error.code is StatusCode.INVALID_ARGUMENT and "model.onnx" in error.text
            refused += 1
    assert refused > 100
