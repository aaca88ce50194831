"""The load check's own reader of ONNX files, compared with package onnx."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.load_check import model, normal

from rocserve.core.wire_format import length_prefix, varint
from rocserve.load_check.onnx_facts import onnx_facts
from rocserve.load_check.onnx_message import Node, Tensor, graph_of

_TYPES = [
    TensorProto.FLOAT,
    TensorProto.UINT8,
    TensorProto.INT8,
    TensorProto.UINT16,
    TensorProto.INT16,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.BOOL,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.UINT32,
    TensorProto.UINT64,
]


def node(**attributes: Any) -> Node:
    return Node(helper.make_node("Op", ["x", ""], ["y"], domain="own", **attributes).SerializeToString())


@pytest.mark.parametrize("raw", [False, True], ids=["values", "bytes"])
@pytest.mark.parametrize("kind", _TYPES, ids=[TensorProto.DataType.Name(kind) for kind in _TYPES])
def test_tensors_have_the_values_that_package_onnx_reads(kind: int, raw: bool) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    least = np.iinfo(dtype).min if dtype.kind == "i" else 0
    most = np.iinfo(dtype).max if dtype.kind in "iu" else 1 if dtype.kind == "b" else 1.5
    values = np.array([[least, 1, most]], dtype)
    message = helper.make_tensor("t", kind, values.shape, values.tobytes() if raw else values.ravel(), raw)
    tensor = Tensor(message.SerializeToString())
    read = tensor.values(3)
    assert (tensor.name, tensor.element_type, tensor.dims) == ("t", kind, [1, 3])
    assert read is not None and read.dtype == dtype
    assert read.tolist() == numpy_helper.to_array(message).tolist() == values.tolist()
    assert tensor.values(2) is None


def test_tensors_without_values_to_read_have_none() -> None:
    texts = helper.make_tensor("t", TensorProto.STRING, [2], [b"a", b"b"])
    elsewhere = numpy_helper.from_array(np.zeros(2, np.float32), "t")
    elsewhere.data_location = TensorProto.EXTERNAL
    brain = helper.make_tensor("t", TensorProto.BFLOAT16, [1], [1.0])
    assert [Tensor(one.SerializeToString()).values(9) for one in (texts, elsewhere, brain)] == [None] * 3
    cut = numpy_helper.from_array(np.zeros(2, np.float32), "t")
    cut.raw_data = cut.raw_data[:4]
    with pytest.raises(ValueError, match="reshape"):
        Tensor(cut.SerializeToString()).values(9)


def test_nodes_have_the_attributes_that_package_onnx_reads() -> None:
    given = {"f": 1.5, "i": -3, "s": b"text", "none": 0, "fs": [0.5, 2.0], "is": [-1, 1 << 40, 0], "ss": [b"", b"b"]}
    read = node(**given, t=numpy_helper.from_array(np.arange(3), "inner"))
    assert (read.op_type, read.domain, read.input, read.output) == ("Op", "own", ["x", ""], ["y"])
    assert {name: read.attribute(name) for name in given if name != "fs"} == {
        name: value for name, value in given.items() if name != "fs"
    }
    assert read.attribute("fs").tolist() == [0.5, 2.0]
    inner = read.attribute("t")
    assert isinstance(inner, Tensor) and (inner.name, inner.dims) == ("inner", [3])
    assert (read.attribute("absent"), read.attribute("absent", 7)) == (None, 7)


def test_writers_may_leave_out_zeros_and_pack_lists() -> None:
    """As protobuf's newer syntax, proto3, does."""
    zero = length_prefix(1, 4) + b"axis" + varint(20 << 3) + varint(2)
    packed = length_prefix(1, 4) + b"perm" + length_prefix(8, 12) + varint(1) + varint((1 << 64) - 1) + varint(0)
    packed += varint(20 << 3) + varint(7)
    read = Node(b"".join(length_prefix(5, len(one)) + one for one in (zero, packed)))
    assert read.attribute("axis", 5) == 0
    assert read.attribute("perm") == [1, -1, 0]


def test_names_need_not_be_utf_8() -> None:
    read = Node(length_prefix(1, 2) + b"\xff\xfe" + length_prefix(2, 2) + b"\xff\xfe")
    assert read.input == read.output != ["\ufffd\ufffd"]


def test_shapes_and_types_of_inputs_and_outputs() -> None:
    values = [
        helper.make_tensor_value_info("a", TensorProto.FLOAT16, ["n", 3, None, 0]),
        helper.make_tensor_value_info("b", TensorProto.INT64, None),
        helper.make_tensor_sequence_value_info("c", TensorProto.FLOAT, [2]),
    ]
    graph = helper.make_graph([], "g", values, values[:1], value_info=values[1:2])
    read = graph_of(helper.make_model(graph).SerializeToString())
    assert [(one.name, one.element_type, one.shape) for one in read.inputs] == [
        ("a", TensorProto.FLOAT16, [None, 3, None, None]),
        ("b", TensorProto.INT64, []),
        ("c", 0, []),
    ]
    assert [one.name for one in (*read.outputs, *read.values)] == ["a", "b"]


def test_a_graph_in_two_parts_is_one() -> None:
    """Joined messages are one message, by protobuf's definition."""
    whole = model("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    more = onnx.ModelProto()
    more.graph.node.add(op_type="Abs")
    read = graph_of(whole.SerializeToString() + more.SerializeToString())
    assert [one.op_type for one in read.nodes] == ["Neg", "Abs"]
    assert [one.name for one in read.inputs] == ["x"]


def test_damaged_files_raise_nothing(tmp_path: Path) -> None:
    whole = model(
        """g (int64[N, T] x, bool b) => (float[N, 4] y) {
            i = Gather<axis = 1>(x, p) o = Constant<value_ints = [1, 2]>()
            y = If(b)<then_branch = p () => (float[N, 4] u) { u = Gather(t, i) },
                      else_branch = q () => (float[N, 4] v) { v = Gather(t, i) }> }""",
        t=normal(40, 4),
        p=np.array(-1),
    ).SerializeToString()
    chance = random.Random(3)
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 5)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        (tmp_path / "model.onnx").write_bytes(damaged)
        onnx_facts(tmp_path / "model.onnx")


def test_package_onnx_is_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model("g (int64[N] x) => (float[N, 4] y) { y = Gather(t, x) }", t=normal(40, 4)), path)
    program = (
        "import sys; from pathlib import Path; from rocserve.load_check.onnx_facts import onnx_facts;"
        f" print(dict(onnx_facts(Path({str(path)!r})).ends), 'onnx' in sys.modules, 'google.protobuf' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "{'x': 40} False False\n"
