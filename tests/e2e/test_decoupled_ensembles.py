"""Ensembles with decoupled members, and with optional tensors."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import drop
from support.repository_index import models_of
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            (count,) = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().ravel()
            for number in range(count):
                tensor = pb_utils.Tensor("NUMBER", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_CONFIG = """
backend: "python"
input { name: "COUNT" data_type: TYPE_INT32 dims: 1 }
output { name: "NUMBER" data_type: TYPE_INT32 dims: 1 }
model_transaction_policy { decoupled: true }
"""
SQUARE = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "NUMBER").as_numpy()
            if number[0] == 13:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("thirteen")))
                continue
            extra = pb_utils.get_input_tensor_by_name(request, "EXTRA")
            time.sleep(0.02 if number[0] % 2 == 0 else 0)
            outputs = [pb_utils.Tensor("SQUARE", number * number + (0 if extra is None else extra.as_numpy()))]
            if number[0] % 2:
                outputs.append(pb_utils.Tensor("ODD", number))
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""
SQUARE_CONFIG = """
backend: "python"
input { name: "NUMBER" data_type: TYPE_INT32 dims: 1 }
input { name: "EXTRA" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "SQUARE" data_type: TYPE_INT32 dims: 1 }
output { name: "ODD" data_type: TYPE_INT32 dims: 1 }
instance_group { count: 2 kind: KIND_CPU }
"""
STEP_COUNT = 'step { model_name: "count" model_version: -1 input_map { key: "COUNT" value: "COUNT" }'
STEP_SQUARE = 'step { model_name: "square" model_version: -1 input_map { key: "NUMBER" value: "number" }'
SQUARES = f"""
platform: "ensemble"
input {{ name: "COUNT" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "SQUARE" data_type: TYPE_INT32 dims: 1 }}
ensemble_scheduling {{
  {STEP_COUNT} output_map {{ key: "NUMBER" value: "number" }} }}
  {STEP_SQUARE} output_map {{ key: "SQUARE" value: "SQUARE" }} }}
  max_inflight_requests: LIMIT
}}
"""
COUNT_SQUARES = f"""
platform: "ensemble"
input {{ name: "COUNT" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "NUMBER" data_type: TYPE_INT32 dims: 1 }}
ensemble_scheduling {{
  {STEP_COUNT} output_map {{ key: "NUMBER" value: "number" }} }}
  {STEP_SQUARE} output_map {{ key: "SQUARE" value: "square" }} }}
  step {{ model_name: "count" model_version: -1 input_map {{ key: "COUNT" value: "square" }}
    output_map {{ key: "NUMBER" value: "NUMBER" }} }}
}}
"""
OPTIONAL = """
platform: "ensemble"
input { name: "NUMBER" data_type: TYPE_INT32 dims: 1 }
input { name: "MORE" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "SQUARE" data_type: TYPE_INT32 dims: 1 }
output { name: "ODD" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling {
  step { model_name: "square" model_version: -1
    input_map { key: "NUMBER" value: "NUMBER" } input_map { key: "EXTRA" value: "MORE" }
    output_map { key: "SQUARE" value: "SQUARE" } output_map { key: "ODD" value: "ODD" } }
}
"""
MIXED = f"""
platform: "ensemble"
input {{ name: "COUNT" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "SQUARE" data_type: TYPE_INT32 dims: 1 }}
ensemble_scheduling {{
  {STEP_COUNT} output_map {{ key: "NUMBER" value: "number" }} }}
  {STEP_SQUARE} input_map {{ key: "EXTRA" value: "COUNT" }} output_map {{ key: "SQUARE" value: "SQUARE" }} }}
}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("decoupled-ensembles")
    repository = folder / "repository"
    drop(repository, "count", COUNT, COUNT_CONFIG)
    drop(repository, "square", SQUARE, SQUARE_CONFIG)
    ensembles = {
        "squares": SQUARES.replace("LIMIT", "0"),
        "squares_one_by_one": SQUARES.replace("LIMIT", "1"),
        "count_squares": COUNT_SQUARES,
        "optional": OPTIONAL,
        "mixed": MIXED,
    }
    for name, config in ensembles.items():
        drop(repository, name, None, config)
    with RocserveProcess([repository], "--exit-on-error=false", log=folder / "server.log") as running:
        with running.client() as client:
            ready = ("squares", "squares_one_by_one", "count_squares", "optional")
            wait_until(lambda: all(client.is_model_ready(name) for name in ready), "the ensembles")
        wait_until(lambda: models_of(running).get("mixed", ("", ""))[0] == "UNAVAILABLE", "the refusal of the last one")
        yield running


def number(name: str, value: int) -> triton.InferInput:
    return infer_input(name, np.array([value], np.int32))


def streamed(server: RocserveProcess, model: str, output: str, *counts: int) -> list[list[int] | str]:
    """For each request the values that arrived, up to its final response; or its error."""
    answers: queue.Queue = queue.Queue()
    with server.client() as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        gathered: list[list[int] | str] = []
        for place, count in enumerate(counts):
            client.async_stream_infer(
                model, [number("COUNT", count)], request_id=str(place), enable_empty_final_response=True
            )
            values: list[int] = []
            while True:
                result, error = answers.get(timeout=PATIENCE_SECONDS)
                if error is not None:
                    gathered.append(str(error))
                    break
                response = result.get_response()
                assert response.id == str(place)
                if response.outputs:
                    values.append(int(result.as_numpy(output)[0]))
                if response.parameters["triton_final_response"].bool_param:
                    gathered.append(values)
                    break
        client.stop_stream()
    return gathered


@pytest.mark.parametrize("model", ["squares", "squares_one_by_one"])
def test_what_is_behind_a_decoupled_member_runs_for_each_answer(server: RocserveProcess, model: str) -> None:
    assert streamed(server, model, "SQUARE", 5, 0, 1, 12) == [
        [0, 1, 4, 9, 16],
        [],
        [0],
        [value * value for value in range(12)],
    ]


def test_streams_within_streams(server: RocserveProcess) -> None:
    (values,) = streamed(server, "count_squares", "NUMBER", 4)
    # 0, 1, 4 and 9 numbers, in any order.
    assert sorted(values) == sorted([0, *range(4), *range(9)])


def test_an_error_ends_the_request(server: RocserveProcess) -> None:
    assert streamed(server, "squares", "SQUARE", 15, 2) == ["in ensemble 'squares', thirteen", [0, 1]]


def test_the_configuration_tells(server: RocserveProcess) -> None:
    client = server.client()
    assert client.get_model_config("squares").config.model_transaction_policy.decoupled
    assert not client.get_model_config("optional").config.model_transaction_policy.decoupled
    with pytest.raises(InferenceServerException, match="ModelInfer RPC doesn't support models with decoupled"):
        client.infer("squares", [number("COUNT", 1)])


def test_statistics(server: RocserveProcess) -> None:
    client = server.client()

    def successes() -> int:
        return client.get_inference_statistics("squares").model_stats[0].inference_stats.success.count

    before = successes()
    streamed(server, "squares", "SQUARE", 3, 0)
    assert successes() == before + 2


def test_elements_of_two_streams_do_not_meet(server: RocserveProcess) -> None:
    assert (
        "in ensemble mixed, step of model 'mixed' receives inputs originated from different decoupled models; it is the"
        " step of 'square'"
    ) in models_of(server)["mixed"][1]


def test_inputs_and_outputs_that_are_left_out(server: RocserveProcess) -> None:
    client = server.client()
    answer = client.infer("optional", [number("NUMBER", 3)])
    assert answer.as_numpy("SQUARE")[0] == 9
    assert answer.as_numpy("ODD")[0] == 3
    answer = client.infer("optional", [number("NUMBER", 4), number("MORE", 100)])
    assert answer.as_numpy("SQUARE")[0] == 116
    assert answer.as_numpy("ODD") is None
