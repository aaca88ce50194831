"""ONNX models with external weights, dropped into a running server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from support.infer_inputs import infer_input
from support.server import RocserveProcess
from support.waiting import wait_until

FLAGS = ("--repository-poll-secs=1", "--repository-settle-secs=0.1")


def write_model(folder: Path, value: float) -> None:
    """Y = X + value, FP32 [batch, 2], the value in weights.bin. Written like exporters do: first the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = helper.make_tensor("weights", TensorProto.FLOAT, [2], np.full(2, value, "<f4").tobytes(), raw=True)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("X", "Y")]
    add = helper.make_node("Add", ["X", "weights"], ["Y"])
    graph = helper.make_graph([add], "graph", values[:1], values[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)


def ask(client: triton.InferenceServerClient, model: str) -> list[float]:
    return client.infer(model, [infer_input("X", np.array([[1, 2]], np.float32))]).as_numpy("Y")[0].tolist()


def reason(client: triton.InferenceServerClient, model: str) -> str:
    return {row.name: row.reason for row in client.get_model_repository_index().models}.get(model, "")


def test_weights_that_change_alone_come_late_or_go_are_noticed(serve, repository: Path) -> None:
    changed = repository / "changed" / "1"
    write_model(changed, 1.0)
    folder = repository / "late" / "1"
    write_model(folder, 1.0)
    weights = (folder / "weights.bin").read_bytes()
    (folder / "weights.bin").unlink()
    server: RocserveProcess = serve(repository, flags=FLAGS)
    client = server.client()
    wait_until(lambda: client.is_model_ready("changed"), "the model with its weights")
    assert ask(client, "changed") == [2.0, 3.0]
    (changed / "weights.bin").write_bytes(np.full(2, 5.0, "<f4").tobytes())
    wait_until(lambda: ask(client, "changed") == [6.0, 7.0], "the answer of the new weights")

    missing = "needs external data file 'weights.bin', which is missing; copy it into the same folder"
    wait_until(lambda: missing in reason(client, "late"), "the reason")
    (folder / "weights.bin").write_bytes(weights)
    wait_until(lambda: client.is_model_ready("late"), "the model")
    assert ask(client, "late") == [2.0, 3.0]
    (folder / "weights.bin").write_bytes(weights[:4])
    wait_until(lambda: "copy that file again" in reason(client, "late"), "the reason")
    assert ask(client, "late") == [2.0, 3.0]
