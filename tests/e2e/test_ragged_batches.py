"""Requests of different shapes in one batch: their tensors, the generated batch inputs, and their parts of the
outputs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from support.infer_inputs import infer_input
from support.models import drop, graph, identity
from support.repository_index import reason_of
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

RAGGED_CONFIG = """
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 90000000 }
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
    """The tensors of RAGGED_CONFIG; each request gets the longest length of the batch."""
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


TEXTS_CONFIG = """
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 90000000 }
input { name: "X" data_type: TYPE_STRING dims: [ -1 ] allow_ragged_batch: true }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_INT32 source_input: "X" }
output { name: "COUNTS" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } }
"""

PYTHON_CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 90000000 }
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "TOGETHER" data_type: TYPE_INT32 dims: [ 1 ] }
"""

PYTHON_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        count = np.array([[len(requests)]], np.int32)
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("Y", 3 * pb_utils.get_input_tensor_by_name(request, "X").as_numpy()),
                pb_utils.Tensor("TOGETHER", count),
            ])
            for request in requests
        ]
"""


SEQUENCE_CONFIG = """
max_batch_size: 8
sequence_batching {
  oldest { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
}
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_FP32 source_input: "X" }
output { name: "COUNTS" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
output { name: "STARTS" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "DOUBLED" data_type: TYPE_FP32 dims: [ -1 ] }
batch_output { target_name: "DOUBLED" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }
"""


def sequence_model() -> bytes:
    floats, integers = TensorProto.FLOAT, TensorProto.INT32
    return graph(
        [
            helper.make_node("Identity", ["COUNT"], ["COUNTS"]),
            helper.make_node("Identity", ["START"], ["STARTS"]),
            helper.make_node("Add", ["X", "X"], ["DOUBLED"]),
        ],
        {"X": (floats, ["n"]), "COUNT": (floats, ["r"]), "START": (integers, ["b", 1])},
        {"COUNTS": (floats, ["r"]), "STARTS": (integers, ["b", 1]), "DOUBLED": (floats, ["n"])},
    )


def counted_texts() -> bytes:
    return graph(
        [helper.make_node("Identity", ["COUNT"], ["COUNTS"]), helper.make_node("Identity", ["X"], ["unused"])],
        {"X": (TensorProto.STRING, ["n"]), "COUNT": (TensorProto.INT32, ["r"])},
        {"COUNTS": (TensorProto.INT32, ["r"]), "unused": (TensorProto.STRING, ["n"])},
    )


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory) -> RocserveProcess:
    repository = tmp_path_factory.mktemp("ragged")
    drop(repository, "ragged", ragged_model(), RAGGED_CONFIG)
    warm_up = (
        'model_warmup { name: "w" batch_size: 2'
        ' inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true } } }'
    )
    drop(repository, "warmed", ragged_model(), RAGGED_CONFIG + warm_up)
    drop(repository, "sequence", sequence_model(), SEQUENCE_CONFIG)
    drop(repository, "texts", counted_texts(), TEXTS_CONFIG)
    drop(
        repository,
        "whole",
        identity(TensorProto.FLOAT, ["n"]),
        """input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, -1 ] allow_ragged_batch: true }
        output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, -1 ] }
        batch_output { target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0" }""",
    )
    drop(repository, "python", PYTHON_MODEL, PYTHON_CONFIG)
    return start(repository)


def ask_all(server: RocserveProcess, model: str, arrays: list[np.ndarray], datatype: str, name: str = "X") -> list:
    """The answers to concurrent requests, each on a separate connection."""

    def ask(array: np.ndarray) -> triton.InferResult:
        return server.client().infer(model, [infer_input(name, array)], client_timeout=PATIENCE_SECONDS)

    with ThreadPoolExecutor(len(arrays)) as pool:
        return list(pool.map(ask, arrays))


@pytest.mark.parametrize("model", ["ragged", "warmed"])
def test_each_request_gets_its_part_and_the_model_what_tells_them_apart(server: RocserveProcess, model: str) -> None:
    arrays = [
        np.random.default_rng(seed).random((1, *shape), np.float32)
        for seed, shape in enumerate([(2, 3), (1, 1), (5, 2)])
    ]
    answers = ask_all(server, model, arrays, "FP32")
    bounds = []
    for array, answer in zip(arrays, answers, strict=True):
        np.testing.assert_array_equal(answer.as_numpy("DOUBLED"), array * 2)
        assert answer.as_numpy("COUNTS").tolist() == [[array.size]]
        assert answer.as_numpy("LONGESTS").tolist() == [[10]]
        assert answer.as_numpy("ITEM_SHAPES").tolist() == [list(array.shape[1:])]
        assert answer.as_numpy("ITEM_SIZES").tolist() == [list(array.shape[1:])]
        bounds.append((int(answer.as_numpy("STARTS")[0, 0]), int(answer.as_numpy("ENDS")[0, 0])))
    # In whatever order they arrived, each begins where another ends.
    assert sorted(end - start for start, end in bounds) == [1, 6, 10]
    ordered = sorted(bounds)
    assert ordered[0][0] == 0
    assert [end for _, end in ordered[:-1]] == [start for start, _ in ordered[1:]]
    (statistics,) = server.client().get_inference_statistics(model).model_stats
    assert [batch.batch_size for batch in statistics.batch_stats] == [3]


def test_texts_too(server: RocserveProcess) -> None:
    arrays = [np.array([[b"a", b"", b"ccc"]], np.object_), np.array([[b"dd"]], np.object_)]
    answers = ask_all(server, "texts", arrays, "BYTES")
    assert [answer.as_numpy("COUNTS").tolist() for answer in answers] == [[[3]], [[1]]]


def test_a_model_without_a_batch_dimension_gets_one_line_of_elements(server: RocserveProcess) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    (answer,) = ask_all(server, "whole", [array], "FP32", "INPUT0")
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array)


def test_requests_of_a_sequence_too(server: RocserveProcess) -> None:
    client = server.client()
    for length, starts in ((3, True), (5, False)):
        array = np.ones((1, length), np.float32)
        entry = infer_input("X", array)
        answer = client.infer(
            "sequence", [entry], sequence_id=7, sequence_start=starts, client_timeout=PATIENCE_SECONDS
        )
        np.testing.assert_array_equal(answer.as_numpy("DOUBLED"), 2 * array)
        assert answer.as_numpy("COUNTS").tolist() == [[length]]
        assert answer.as_numpy("STARTS").tolist() == [[int(starts)]]


def test_a_python_model_sees_each_request_with_its_own_shape(server: RocserveProcess) -> None:
    arrays = [np.ones((1, 3), np.float32), np.ones((1, 5), np.float32)]
    for array, answer in zip(arrays, ask_all(server, "python", arrays, "FP32"), strict=True):
        np.testing.assert_array_equal(answer.as_numpy("Y"), 3 * array)
        assert answer.as_numpy("TOGETHER").tolist() == [[2]]


def test_a_configuration_that_is_not_the_models_is_refused(server: RocserveProcess) -> None:
    (repository,) = server.repositories
    drop(
        repository,
        "square",
        identity(TensorProto.FLOAT, ["n", 4]),
        """max_batch_size: 4
        input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] allow_ragged_batch: true }
        output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }""",
    )
    drop(
        repository,
        "other",
        ragged_model(),
        RAGGED_CONFIG.replace(
            'target_name: "COUNT" data_type: TYPE_FP32', 'target_name: "COUNT" data_type: TYPE_INT32'
        ),
    )
    for name, text in {
        "square": "configuration expects model provides input with shape [-1]  for ragged input 'INPUT0', model"
        " provides [-1,4]",
        "other": "batch input 'COUNT' is TYPE_INT32 in the configuration, TYPE_FP32 in the model",
    }.items():
        refusal = f"unable to load model '{name}', {text}"
        wait_until(lambda name=name, refusal=refusal: refusal in reason_of(server, name), f"'{refusal}'")
        assert not server.client().is_model_ready(name)
