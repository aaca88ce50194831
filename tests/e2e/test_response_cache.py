"""The response cache of a real server, seen by its answers and its statistics."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

CACHE = "--cache-config=local,size=1048576"
CACHED = "response_cache { enable: true }"
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling {
  step { model_name: "m" model_version: -1 input_map { key: "X" value: "IN" } output_map { key: "Y" value: "OUT" } }
}
response_cache { enable: true }
"""


def ask(
    client: triton.InferenceServerClient, values: list[float], model: str = "m", name: str = "X", **options: object
) -> triton.InferResult:
    return client.infer(model, [infer_input(name, np.array([values], np.float32))], **options)


def counts(client: triton.InferenceServerClient, model: str = "m") -> dict[str, int]:
    row = client.get_inference_statistics(model).model_stats[0]
    stats = row.inference_stats
    names = ("success", "queue", "compute_infer", "cache_hit", "cache_miss")
    return {name: getattr(stats, name).count for name in names} | {
        "inferences": row.inference_count,
        "executions": row.execution_count,
    }


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server with a cache; each test has models under its own names."""
    return start(tmp_path_factory.mktemp("cached"), CACHE, "--repository-settle-secs=0.1")


def wait_for(server: RocserveProcess, *models: str) -> triton.InferenceServerClient:
    client = server.client()
    wait_until(lambda: all(map(client.is_model_ready, models)), f"{models}")
    return client


def test_a_new_version_does_not_give_the_old_ones_answers(server: RocserveProcess) -> None:
    (repository,) = server.repositories
    drop(repository, "replaced", add_constant(1.0), CACHED)
    client = wait_for(server, "replaced")
    assert np.array_equal(ask(client, [1, 2], "replaced").as_numpy("Y"), [[2, 3]])
    drop(repository, "replaced", add_constant(10.0), CACHED)
    new = [[11, 12]]
    wait_until(lambda: np.array_equal(ask(client, [1, 2], "replaced").as_numpy("Y"), new), "the new model's answer")


def test_an_ensemble_has_answers_of_its_own_until_a_member_is_replaced(server: RocserveProcess) -> None:
    (repository,) = server.repositories
    drop(repository, "m", add_constant(1.0))
    drop(repository, "e", None, ENSEMBLE)
    outer = ENSEMBLE.replace('"m"', '"e"').replace('"X"', '"IN"').replace('"Y"', '"OUT"')
    drop(repository, "outer", None, outer)
    client = wait_for(server, "outer")
    for model in ("e", "e", "e", "outer"):
        assert np.array_equal(ask(client, [1, 2], model, "IN").as_numpy("OUT"), [[2, 3]])
    assert counts(client)["executions"] == 1
    seen = counts(client, "e")
    assert (seen["success"], seen["cache_hit"], seen["cache_miss"]) == (4, 3, 1), "the last one's was asked by 'outer'"
    drop(repository, "m", add_constant(10.0))
    wait_until(lambda: np.array_equal(ask(client, [1, 2]).as_numpy("Y"), [[11, 12]]), "the new member's answer")
    for model in ("outer", "e", "outer"):
        assert np.array_equal(ask(client, [1, 2], model, "IN").as_numpy("OUT"), [[11, 12]])
    assert counts(client, "outer")["cache_hit"] == 1


TELLING = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seen = [request.request_id(), request.correlation_id(), request.flags(), request.priority(),
                    request.timeout(), json.loads(request.parameters())]
            seen = np.array([[json.dumps(seen).encode()]], dtype=object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", seen)]))
        return responses
"""
CALLING = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceRequest(
            model_name="telling", inputs=request.inputs(), requested_output_names=["SEEN"],
            request_id=request.request_id(), parameters=json.loads(request.parameters()),
        ).exec() for request in requests]
"""
TENSORS = """
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "SEEN" data_type: TYPE_STRING dims: 1 }
"""
LEVELS = "dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
ASKED: list[dict[str, object]] = [
    {},
    {"parameters": {"user": "ann"}},
    {"parameters": {"user": "bob"}},
    {"parameters": {"user": 1}},
    {"parameters": {"user": True}},
    {"parameters": {"user": "1"}},
    {"parameters": {"user": "ann", "more": 1}},
    {"request_id": "ann"},
    {"request_id": "bob"},
]
"""What calls of every kind can say."""
ASKED_OF_MODELS: list[dict[str, object]] = [
    {"priority": 1},
    {"priority": 3},
    {"timeout": 50_000_000},
    {"sequence_id": 7},
    {"sequence_id": 7, "sequence_start": True},
    {"sequence_id": 8, "sequence_end": True},
]


def seen_by_model(
    request_id: str = "",
    sequence_id: int = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
    priority: int = 0,
    timeout: int = 0,
    parameters: object = None,
) -> str:
    flags = sequence_start + 2 * sequence_end
    return json.dumps([request_id, sequence_id, flags, priority, timeout, parameters or {}])


def test_nobody_gets_the_answer_to_another_request_with_the_same_inputs(server: RocserveProcess) -> None:
    (repository,) = server.repositories
    drop(repository, "telling", TELLING, f'backend: "python" {TENSORS} {LEVELS} {CACHED}')
    drop(repository, "uncached", TELLING, f'backend: "python" {TENSORS} {LEVELS}')
    drop(repository, "calling", CALLING, f'backend: "python" {TENSORS}')
    names = 'input_map { key: "IN" value: "IN" } output_map { key: "SEEN" value: "SEEN" }'
    for outer, member in (("ensemble", "uncached"), ("nested", "ensemble"), ("caller", "calling")):
        step = f'ensemble_scheduling {{ step {{ model_name: "{member}" model_version: -1 {names} }} }}'
        drop(repository, outer, None, f'platform: "ensemble" {TENSORS} {CACHED} {step}')
    over_grpc = wait_for(server, "telling", "nested", "caller")
    over_http = triton_http.InferenceServerClient(server.http_address)
    value = np.array([[1]], np.float32)

    def check(ask: Callable[..., str], asked: list[dict[str, object]]) -> None:
        for options in (*asked, *reversed(asked)):
            assert json.loads(ask(**options)) == json.loads(seen_by_model(**options))

    def generate(parameters: dict[str, object] | None = None) -> str:
        body = {"IN": 1, **(parameters or {})}
        url = f"http://{server.http_address}/v2/models/telling/generate"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)["SEEN"]

    for model in ("telling", "ensemble", "nested", "calling", "caller"):
        asked = [*ASKED, *(ASKED_OF_MODELS if model in ("telling", "ensemble", "nested") else [])]
        for client, library in ((over_grpc, triton), (over_http, triton_http)):

            def infer(client=client, library=library, model=model, **options: object) -> str:
                result = client.infer(model, [infer_input("IN", value, library)], **options)
                return result.as_numpy("SEEN").reshape(-1)[0].decode()

            check(infer, asked)
    check(generate, [options for options in ASKED if "request_id" not in options])
    hits, misses = (counts(over_grpc, "telling")[name] for name in ("cache_hit", "cache_miss"))
    # Each of the requests ran once, however it came.
    assert misses == len(ASKED) + len(ASKED_OF_MODELS)
    assert hits > misses


def test_a_server_without_a_cache_says_so(serve, repository: Path) -> None:
    drop(repository, "m", add_constant(1.0), CACHED)
    server: RocserveProcess = serve(repository)
    server.wait_until_ready()
    client = server.client()
    for _ in range(2):
        assert np.array_equal(ask(client, [1, 2]).as_numpy("Y"), [[2, 3]])
    assert counts(client)["executions"] == 2
    assert "asks for the response cache, but the server has none" in server.log_text


@pytest.mark.parametrize("order", ["", "preserve_ordering: true"])
def test_many_clients_at_once(server: RocserveProcess, order: str) -> None:
    name = "ordered" if order else "unordered"
    drop(server.repositories[0], name, add_constant(1.0), f"{CACHED} max_batch_size: 8 dynamic_batching {{ {order} }}")
    client = wait_for(server, name)
    answers: list[tuple[int, triton.InferResult | None]] = []
    for number in range(200):
        entry = infer_input("X", np.full([1, 2], number % 7, np.float32))
        client.async_infer(name, [entry], lambda result, error, sent=number % 7: answers.append((sent, result)))
    wait_until(lambda: len(answers) == 200, "all answers")
    for sent, result in answers:
        assert result is not None
        assert np.array_equal(result.as_numpy("Y"), [[sent + 1, sent + 1]])
    for number in range(7):
        assert np.array_equal(ask(client, [number, number], name).as_numpy("Y"), [[number + 1, number + 1]])
    wait_until(lambda: counts(client, name)["success"] == 207, "all answers")
    seen = counts(client, name)
    assert seen["cache_hit"] + seen["cache_miss"] == 207
    assert seen["cache_hit"] >= 7
