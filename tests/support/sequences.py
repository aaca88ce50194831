"""Sequence models for tests: an accumulator in ONNX with its control inputs, and one whose state the server keeps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from onnx import TensorProto, helper

from support.infer_inputs import infer_input
from support.models import answering, drop, graph

CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
STATE = """
  state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [2] }
"""


def accumulator_config(batching: str, max_batch_size: int = 4, more: str = "") -> str:
    return f"""
    backend: "onnxruntime"
    max_batch_size: {max_batch_size}
    input {{ name: "INPUT" data_type: TYPE_INT32 dims: [2] }}
    output {{ name: "SUM" data_type: TYPE_INT32 dims: [2] }}
    output {{ name: "SEEN" data_type: TYPE_INT64 dims: [4] }}
    sequence_batching {{ {CONTROLS} {STATE} {batching} }}
    {more}
    """


def accumulator(batches: bool = True) -> bytes:
    """SUM = STATE_OUT = INPUT + STATE_IN, and SEEN = [START, END, READY, CORRID]."""
    lead = ["batch"] if batches else []
    one, two, four = [*lead, 1], [*lead, 2], [*lead, 4]
    nodes = [
        helper.make_node("Add", ["INPUT", "STATE_IN"], ["SUM"]),
        helper.make_node("Identity", ["SUM"], ["STATE_OUT"]),
        *(
            helper.make_node("Cast", [name], [f"{name}_64"], to=TensorProto.INT64)
            for name in ("START", "END", "READY", "CORRID")
        ),
        helper.make_node("Concat", ["START_64", "END_64", "READY_64", "CORRID_64"], ["SEEN"], axis=len(lead)),
    ]
    return graph(
        nodes,
        {
            "INPUT": (TensorProto.INT32, two),
            "STATE_IN": (TensorProto.INT32, two),
            "START": (TensorProto.INT32, one),
            "END": (TensorProto.FLOAT, one),
            "READY": (TensorProto.BOOL, one),
            "CORRID": (TensorProto.UINT64, one),
        },
        {"SUM": (TensorProto.INT32, two), "STATE_OUT": (TensorProto.INT32, two), "SEEN": (TensorProto.INT64, four)},
    )


def growing() -> bytes:
    """WORDS = STATE_OUT = STATE_IN followed by INPUT: the state grows with each request."""
    text = TensorProto.STRING
    nodes = [
        helper.make_node("Concat", ["STATE_IN", "INPUT"], ["WORDS"], axis=1),
        helper.make_node("Identity", ["WORDS"], ["STATE_OUT"]),
    ]
    return graph(
        nodes,
        {"STATE_IN": (text, ["batch", "words"]), "INPUT": (text, ["batch", 1])},
        {"WORDS": (text, ["batch", "more"]), "STATE_OUT": (text, ["batch", "more"])},
    )


def drop_accumulator(
    repository: Path, name: str, batching: str, max_batch_size: int = 4, more: str = "", version: int = 1
) -> Path:
    config = accumulator_config(batching, max_batch_size, more)
    return drop(repository, name, accumulator(max_batch_size > 0), config, version)


PYTHON_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        rows = len(requests)
        for request in requests:
            value = {t.name(): t.as_numpy() for t in request.inputs()}
            total = value["INPUT"] + value.get("STATE_IN", 0)
            seen = [int(value[name].reshape(-1)[0]) for name in ("START", "END", "READY")] + [rows]
            name = value["CORRID"].reshape(-1)[0] + b"/" + str(request.correlation_id()).encode()
            name += b"/" + str(request.flags()).encode()
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("SUM", total),
                pb_utils.Tensor("STATE_OUT", total),
                pb_utils.Tensor("SEEN", np.array([seen], np.int64)),
                pb_utils.Tensor("NAME", np.array([[name]], np.object_)),
            ]))
        return responses
"""
PYTHON_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_INT32 dims: [2] }
output { name: "SUM" data_type: TYPE_INT32 dims: [2] }
output { name: "SEEN" data_type: TYPE_INT64 dims: [4] }
output { name: "NAME" data_type: TYPE_STRING dims: [1] }
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [-3, 5] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  state {
    input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [2]
    initial_state { name: "begin" data_type: TYPE_INT32 dims: [2] data_file: "begin" }
  }
  max_sequence_idle_microseconds: 90000000
}
"""
GROWING_CONFIG = """
backend: "onnxruntime"
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_STRING dims: [1] }
output { name: "WORDS" data_type: TYPE_STRING dims: [-1] }
sequence_batching {
  state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_STRING dims: [-1] }
  oldest { max_candidate_sequences: 16 }
  max_sequence_idle_microseconds: 90000000
}
"""
TEXTS_CONFIG = """
backend: "onnxruntime"
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_STRING dims: [2] }
output { name: "OUTPUT0" data_type: TYPE_STRING dims: [2] }
sequence_batching { max_sequence_idle_microseconds: 90000000 }
"""
CRASHING_MODEL = answering(
    "INPUT",
    "SUM",
    first='if min(pb_utils.get_input_tensor_by_name(each, "INPUT").as_numpy()[0, 0] for each in requests) < 0:\n'
    "    os._exit(3)",
)
CRASHING_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_INT32 dims: [2] }
output { name: "SUM" data_type: TYPE_INT32 dims: [2] }
sequence_batching { oldest { max_candidate_sequences: 4 } max_sequence_idle_microseconds: 90000000 }
"""
ENSEMBLE_CONFIG = """
platform: "ensemble"
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_INT32 dims: [2] }
output { name: "SUM" data_type: TYPE_INT32 dims: [2] }
output { name: "SEEN" data_type: TYPE_INT64 dims: [4] }
ensemble_scheduling {
  step {
    model_name: "oldest" model_version: -1
    input_map { key: "INPUT" value: "INPUT" }
    output_map { key: "SUM" value: "SUM" }
    output_map { key: "SEEN" value: "SEEN" }
  }
}
"""
ITERATIVE_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}
        self.decoupled = "decoupled" in args["model_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            wanted = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().reshape(-1)[0])
            key = request.correlation_id()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.left[key] = wanted
            if key not in self.left:
                # A row of nobody.
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros((1, 1), np.int32))]))
                continue
            self.left[key] -= 1
            done = self.left[key] <= 0
            out = pb_utils.Tensor("OUT", np.array([[self.left[key]]], np.int32))
            response = pb_utils.InferenceResponse([out])
            if not done:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if self.decoupled:
                flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if done else 0
                request.get_response_sender().send(response, flags)
            else:
                responses.append(response if done else None)
        return None if self.decoupled else responses
"""
ITERATIVE_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_INT32 dims: [1] }
output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
"""


def request_input(value: int, batches: bool = True) -> triton.InferInput:
    data = np.array([value, 2 * value], np.int32)
    return infer_input("INPUT", data[None] if batches else data)


def ask(
    client: triton.InferenceServerClient,
    model: str,
    value: int,
    sequence: int | str,
    *,
    start: bool = False,
    end: bool = False,
    batches: bool = True,
    client_timeout: float | None = None,
) -> triton.InferResult:
    return client.infer(
        model,
        [request_input(value, batches)],
        sequence_id=sequence,
        sequence_start=start,
        sequence_end=end,
        client_timeout=client_timeout,
    )


def run_sequence(
    client: triton.InferenceServerClient, model: str, sequence: int | str, values: Sequence[int], batches: bool = True
) -> list[int]:
    """Run one sequence; return its sums. Checks the control inputs."""
    sums: list[int] = []
    last = len(values) - 1
    for place, value in enumerate(values):
        result = ask(client, model, value, sequence, start=place == 0, end=place == last, batches=batches)
        total = result.as_numpy("SUM").reshape(2)
        assert total[1] == 2 * total[0]
        seen = result.as_numpy("SEEN").reshape(4).tolist()
        assert seen == [place == 0, place == last, 1, sequence]
        sums.append(int(total[0]))
    return sums


def run_at_once(count: int, run: object) -> None:
    """Call `run(number)` on `count` threads; raise the first error."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            run(number)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
