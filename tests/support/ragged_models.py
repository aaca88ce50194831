"""An ONNX model that tells what it is given with a batch of requests of different shapes."""

from __future__ import annotations

from onnx import TensorProto, helper

from support.models import graph

RAGGED_CONFIG = """
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 5000000 }
input { name: "X" data_type: TYPE_FP32 dims: [ -1, -1 ] allow_ragged_batch: true }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_FP32 source_input: "X" }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "END" data_type: TYPE_INT32 source_input: "X" }
batch_input {
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "BOUNDS" data_type: TYPE_INT32 source_input: "X"
}
batch_input { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: "LONGEST" data_type: TYPE_FP32 source_input: "X" }
batch_input { kind: BATCH_ITEM_SHAPE target_name: "SHAPES" data_type: TYPE_INT32 source_input: "X" }
batch_input { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "SIZES" data_type: TYPE_FP32 source_input: "X" }
output { name: "DOUBLED" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "COUNTS" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "ENDS" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "STARTS" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "LONGESTS" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "ITEM_SHAPES" data_type: TYPE_INT32 dims: [ 2 ] }
output { name: "ITEM_SIZES" data_type: TYPE_FP32 dims: [ 2 ] }
batch_output { target_name: "DOUBLED" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }
"""


def ragged_model() -> bytes:
    """All that RAGGED_CONFIG names; the longest of the batch stands at each request."""
    numbers = {
        "first": [0],
        "last": [-1],
        "pair": [-1, 2],
    }
    nodes = [
        *(
            helper.make_node("Constant", [], [name], value=helper.make_tensor(name, TensorProto.INT64, [len(v)], v))
            for name, v in numbers.items()
        ),
        helper.make_node("Add", ["X", "X"], ["DOUBLED"]),
        helper.make_node("Identity", ["COUNT"], ["COUNTS"]),
        helper.make_node("Identity", ["END"], ["ENDS"]),
        helper.make_node("Slice", ["BOUNDS", "first", "last"], ["STARTS"]),
        helper.make_node("Shape", ["LONGEST"], ["longest"]),
        helper.make_node("Shape", ["COUNT"], ["requests"]),
        helper.make_node("Expand", ["longest", "requests"], ["LONGESTS"]),
        helper.make_node("Identity", ["SHAPES"], ["ITEM_SHAPES"]),
        helper.make_node("Reshape", ["SIZES", "pair"], ["ITEM_SIZES"]),
    ]
    floats, integers = TensorProto.FLOAT, TensorProto.INT32
    return graph(
        nodes,
        {
            "X": (floats, ["elements"]),
            "COUNT": (floats, ["requests"]),
            "END": (integers, ["requests"]),
            "BOUNDS": (integers, ["bounds"]),
            "LONGEST": (floats, ["longest"]),
            "SHAPES": (integers, ["rows", "rank"]),
            "SIZES": (floats, ["sizes"]),
        },
        {
            "DOUBLED": (floats, ["elements"]),
            "COUNTS": (floats, ["requests"]),
            "ENDS": (integers, ["requests"]),
            "STARTS": (integers, ["starts"]),
            "LONGESTS": (TensorProto.INT64, ["all"]),
            "ITEM_SHAPES": (integers, ["rows", 2]),
            "ITEM_SIZES": (floats, ["rows", 2]),
        },
    )
