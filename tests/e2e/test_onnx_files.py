"""ONNX files as exporters write them, served without a configuration, and asked by clients of both protocols."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper, numpy_helper
from support.http_requests import ask
from support.infer_inputs import infer_input
from support.models import drop, map_classifier
from support.server import RocserveProcess
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

from rocserve_client import Client, Output

FLOAT = TensorProto.FLOAT


def file(nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], **defaults: Any) -> bytes:
    """Inputs and outputs are name -> shape, of FP32; None = the file does not say."""
    infos = [
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in tensors.items()]
        for tensors in (inputs, outputs)
    ]
    tensors = [
        numpy_helper.from_array(np.array(value, np.int64 if name == "axis" else np.float32).reshape(-1), name)
        for name, value in defaults.items()
    ]
    made = helper.make_graph(nodes, "graph", *infos, tensors)
    content: bytes = helper.make_model(
        made, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8
    ).SerializeToString()
    return content


ANY_RANK = file([helper.make_node("Neg", ["x"], ["y"])], {"x": None}, {"y": None})
DEFAULT = file([helper.make_node("Mul", ["x", "k"], ["y"])], {"x": ["n", 2], "k": [1]}, {"y": ["n", 2]}, k=[2])
NOTHING_PAST = file(
    [helper.make_node("Concat", ["past", "x"], ["present"], axis=1)],
    {"past": [1, 0, 2], "x": [1, 1, 2]},
    {"present": [1, 1, 2]},
)
SQUEEZED = file(
    [helper.make_node("Unsqueeze", ["x", "axis"], ["wide"]), helper.make_node("Squeeze", ["wide"], ["y"])],
    {"x": ["n", 2]},
    {"y": ["n", 2]},
    axis=2,
)
# As CatBoost exports a regressor: the file declares one value for each row, and the operator gives a column.
COLUMN = file(
    [helper.make_node("LinearRegressor", ["x"], ["y"], domain="ai.onnx.ml", coefficients=[2.0, 1.0])],
    {"x": ["n", 2]},
    {"y": ["n"]},
)
BATCHED = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [2] }
output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    repository = tmp_path_factory.mktemp("repository")
    drop(repository, "classifier", map_classifier(["cat", "dog", "yak"]))
    drop(repository, "numbered", map_classifier([7, -1, 12], label_shape=[1]))
    for name, content in {
        "any_rank": ANY_RANK,
        "default": DEFAULT,
        "nothing_past": NOTHING_PAST,
        "squeezed": SQUEEZED,
        "column": COLUMN,
    }.items():
        drop(repository, name, content)
    drop(repository, "any_rank_batched", ANY_RANK, BATCHED)
    drop(repository, "squeezed_whole", SQUEEZED, BATCHED.replace("4", "0").replace("[2]", "[-1, 2]"))
    drop(repository, "default_batched", DEFAULT, "max_batch_size: 4")
    with RocserveProcess([repository], log=tmp_path_factory.mktemp("log") / "server.log") as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(params=[tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


def asked(
    server: RocserveProcess, protocol: ModuleType, model: str, output: str, classes: int = 0, **inputs: Any
) -> list[Any]:
    address = server.address if protocol is tritonclient.grpc else server.http_address
    with protocol.InferenceServerClient(address) as client:
        given = [infer_input(name, np.array(value, np.float32), protocol) for name, value in inputs.items()]
        wanted = [protocol.InferRequestedOutput(output, class_count=classes)]
        answer: list[Any] = client.infer(model, given, outputs=wanted).as_numpy(output).tolist()
        return answer


@pytest.mark.parametrize(
    ("model", "best"),
    [("classifier", [b"4.000000:2:yak", b"3.000000:0:cat"]), ("numbered", [b"4.000000:2:12", b"3.000000:0:7"])],
)
def test_a_classifier_of_maps_gives_its_values_and_its_classes(
    server: RocserveProcess, protocol: ModuleType, model: str, best: list[bytes]
) -> None:
    rows = [[3, 1], [2, 5]]
    assert asked(server, protocol, model, "maps", X=rows) == [[3, 1, 4], [2, 5, 7]]
    assert asked(server, protocol, model, "maps", 2, X=rows[:1]) == [best]
    text = f"{model}:1: output 'maps' is served as the tensor"
    wait_until(lambda: text in server.log_text, "the worker's line in the log")


def test_the_client_has_the_classes_names(server: RocserveProcess) -> None:
    with Client(server.address) as client:
        asked_for = [Output("maps", classification=1)]
        result = client.infer("classifier", {"X": np.array([[3, 1]], np.float32)}, asked_for)
        ((best,),) = result.classes("maps")
        assert (best.score, best.label) == (4.0, "yak")


@pytest.mark.parametrize("value", [7, [1, 2], [[1, 2], [3, 4]], [[[5]]]])
def test_a_tensor_of_unknown_rank_has_any(server: RocserveProcess, protocol: ModuleType, value: Any) -> None:
    assert asked(server, protocol, "any_rank", "y", x=value) == (-np.array(value)).tolist()


def test_a_scalar_in_json(server: RocserveProcess) -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [], "data": [7]}
    status, answer = ask(server, "POST", "/v2/models/any_rank/infer", {"inputs": [given]})
    assert (status, answer["outputs"][0]["shape"], answer["outputs"][0]["data"]) == (200, [], [-7.0])


def test_a_configuration_may_give_the_rank_and_batch(server: RocserveProcess, protocol: ModuleType) -> None:
    assert asked(server, protocol, "any_rank_batched", "y", x=[[1, 2], [3, 4]]) == [[-1, -2], [-3, -4]]
    with pytest.raises(InferenceServerException, match=r"Expected \[-1,2\], got \[1,1,2\]"):
        asked(server, protocol, "any_rank_batched", "y", x=[[[1, 2]]])


def test_an_input_with_a_default_is_sent_or_left_out(server: RocserveProcess, protocol: ModuleType) -> None:
    assert asked(server, protocol, "default", "y", x=[[1, 2]]) == [[2, 4]]
    assert asked(server, protocol, "default", "y", x=[[1, 2]], k=[5]) == [[5, 10]]
    assert asked(server, protocol, "default_batched", "y", x=[[1, 2], [3, 4]]) == [[2, 4], [6, 8]]
    with pytest.raises(InferenceServerException, match="got 2 inputs"):
        asked(server, protocol, "default_batched", "y", x=[[1, 2]], k=[5])


def test_a_tensor_without_elements(server: RocserveProcess, protocol: ModuleType) -> None:
    past = np.zeros((1, 0, 2), np.float32)
    assert asked(server, protocol, "nothing_past", "present", past=past, x=[[[1, 2]]]) == [[[1, 2]]]
    with pytest.raises(InferenceServerException, match=r"Expected \[1,0,2\], got \[1,1,2\]"):
        asked(server, protocol, "nothing_past", "present", past=[[[3, 4]]], x=[[[1, 2]]])


@pytest.mark.parametrize("model", ["squeezed", "squeezed_whole"])
def test_an_answer_for_one_row_keeps_its_row(server: RocserveProcess, protocol: ModuleType, model: str) -> None:
    """PyTorch's squeeze() drops every size of 1, the batch of one too: ONNX Runtime gives [2] for [1, 2]."""
    for rows in (1, 1, 3, 1):
        values = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        assert asked(server, protocol, model, "y", x=values) == values.tolist()


def test_a_column_that_the_file_calls_one_value_for_each_row(server: RocserveProcess, protocol: ModuleType) -> None:
    """The client gets the shape that the metadata has."""
    with Client(server.address) as client:
        assert client.model_metadata("column").outputs[0].shape == (-1, 1)
    assert asked(server, protocol, "column", "y", x=[[1, 2]]) == [[4]]
    assert asked(server, protocol, "column", "y", x=[[1, 2], [3, 4], [5, 6]]) == [[4], [10], [16]]
