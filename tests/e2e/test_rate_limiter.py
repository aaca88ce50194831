"""Models that share a resource of the rate limiter."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.infer_inputs import infer_input
from support.models import drop
from support.paced_models import TENSORS, drop_paced
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

LIMITED = """
instance_group {
  kind: KIND_CPU count: 1 rate_limiter { resources { name: "R" count: 2 global: true } }
}
"""


def spans(server: RocserveProcess, models: Sequence[str]) -> list[tuple[int, int]]:
    """The run of each of several concurrent requests: its begin and end."""
    answers: queue.Queue = queue.Queue()
    client = server.client()
    for model in models:
        client.async_infer(
            model, [infer_input("MS", np.array([30], np.int32))], lambda result, error: answers.put((result, error))
        )
    found = []
    for _ in models:
        result, error = answers.get(timeout=PATIENCE_SECONDS)
        assert error is None, error
        began, ended = result.as_numpy("SPAN")
        found.append((int(began), int(ended)))
    return sorted(found)


def test_models_that_share_a_resource_run_one_at_a_time(serve, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    limited = TENSORS[: TENSORS.index("instance_group")] + LIMITED
    for name in ("one", "other"):
        drop_paced(repository, name, tensors=limited)
    drop_paced(repository, "greedy", tensors=limited.replace("count: 2", "count: 4"))
    server = serve(repository, flags=("--rate-limit=execution_count", "--rate-limit-resource=r:3"))
    client = server.client()
    wait_until(lambda: client.is_model_ready("one") and client.is_model_ready("other"), "two models")
    found = spans(server, ["one", "other"] * 6)
    for (_, ended), (began, _) in itertools.pairwise(found):
        assert ended <= began
    refusals: list = []

    def is_refused() -> bool:
        refusals[:] = [entry for entry in client.get_model_repository_index().models if entry.state == "UNAVAILABLE"]
        return bool(refusals)

    wait_until(is_refused, "a refusal")
    (refused,) = refusals
    assert refused.name == "greedy"
    assert (
        'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the'
        " minimum required count is 4" in refused.reason
    )


ADDER = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    \"\"\"Adds 1, then sends the sum to the models CALLED, one after the other, and returns what they make of it.\"\"\"

    def execute(self, requests):
        time.sleep(0.02)  # So that clients' requests wait when the calls begin.
        return [self.answer(request) for request in requests]

    def answer(self, request):
        y = pb_utils.get_input_tensor_by_name(request, "X").as_numpy() + 1
        for name in CALLED:
            call = pb_utils.InferenceRequest(
                model_name=name, requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", y)]
            )
            answer = call.exec()
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            y = pb_utils.get_output_tensor_by_name(answer, "Y").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
"""
ADDS = """
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
LIMITED_ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling {
  max_inflight_requests: 1
  step { model_name: "needs-r" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } }
}
"""


def drop_adder(repository: Path, name: str, called: Sequence[str] = (), resource: str = "", instances: int = 1) -> None:
    limits = f'rate_limiter {{ resources {{ name: "{resource}" count: 1 }} }}' if resource else ""
    group = f"instance_group {{ kind: KIND_CPU count: {instances} {limits} }}"
    drop(repository, name, ADDER.replace("CALLED", repr(list(called))), f'backend: "python" {ADDS} {group}')


def test_models_that_hold_resources_call_models(serve, tmp_path: Path) -> None:
    """Also models that need what their callers hold, and models whose callers hold what the others need."""
    repository = tmp_path / "repository"
    for name, called, resource in (
        ("free", (), ""),
        ("needs-r", (), "R"),
        ("needs-s", (), "S"),
        ("holds-r", ("free", "needs-r", "needs-s"), "R"),
        ("holds-s", ("needs-r", "holds-nothing"), "S"),
        ("holds-nothing", ("needs-s", "limited"), ""),
        ("calls-ensemble", ("limited", "free"), "R"),
    ):
        drop_adder(repository, name, called, resource, instances=2 if called else 1)
    drop(repository, "limited", None, ADDS + LIMITED_ENSEMBLE)
    flags = ("--rate-limit=execution_count", "--rate-limit-resource=R:1", "--rate-limit-resource=S:1")
    client = serve(repository, flags=flags).client()
    sums = {"limited": 1, "holds-r": 4, "holds-s": 5, "holds-nothing": 3, "calls-ensemble": 3, "free": 1}
    models = (*sums, "needs-r", "needs-s")
    wait_until(lambda: all(client.is_model_ready(name) for name in models), "all models")
    answers: queue.Queue = queue.Queue()
    requests = list(enumerate([*sums] * 5))
    for number, model in requests:
        x = infer_input("X", np.array([100 * number], np.int32))
        client.async_infer(
            model,
            [x],
            lambda result, error, key=(number, model): answers.put((key, result, error)),
            client_timeout=PATIENCE_SECONDS,
        )
    for _ in requests:
        (number, model), result, error = answers.get(timeout=PATIENCE_SECONDS)
        assert error is None, (model, error)
        assert result.as_numpy("Y").tolist() == [100 * number + sums[model]], model
