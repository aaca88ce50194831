"""TensorFlow Serving's form of prediction, which is KServe's v1 too, by plain HTTP, KServe's and OpenAI's clients."""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.http_requests import ask
from support.models import add_constant, add_sub, answering, drop, map_classifier
from support.server import RocserveProcess, Start
from support.stores import tool
from support.text_models import drop_text_model, vector_of
from support.waiting import PATIENCE_SECONDS, wait_until

from benchmarks.environments import CACHE, PYTHON_VERSION, Environment, PeerUnavailable

BATCH = "max_batch_size: %d\n"
BYTES_CONFIG = """
max_batch_size: 4
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "size" data_type: TYPE_INT32 dims: [ 1 ] }
"""

_OCR = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.read(request) for request in requests]

    def read(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "image").as_numpy().reshape(-1)
        words = np.array([[text, text[::-1]] for text in texts], dtype=object)
        scores = np.array([[-0.25, -1.5]] * len(texts), np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("preds", words), pb_utils.Tensor("logprobs", scores)])
"""
_OCR_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "preds" data_type: TYPE_STRING dims: [ 2 ] }
output { name: "logprobs" data_type: TYPE_FP32 dims: [ 2 ] }
"""


@dataclass
class Served:
    server: RocserveProcess
    repository: Path

    def predict(self, model: str, body: Any, **headers: str) -> tuple[int, Any]:
        return ask(self.server, "POST", f"/v1/models/{model}:predict", body, headers, timeout=PATIENCE_SECONDS)

    def get(self, path: str) -> tuple[int, Any]:
        return ask(self.server, "GET", f"/v1/models{path}", timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module", params=[0, 2], ids=["one-process", "front-ends"])
def served(request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Served:
    repository = tmp_path_factory.mktemp("rest") / "repository"
    repository.mkdir()
    drop(repository, "add_one", add_constant(1.0), BATCH % 3 + "version_policy: { all { } }")
    drop(repository, "add_one", add_constant(2.0), version=2)
    drop(repository, "add_sub", add_sub(2), BATCH % 8)
    drop(repository, "iris", map_classifier(["setosa", "other", "both"]))
    sizes = "np.array([[len(v)] for v in x.reshape(-1)], np.int32)"
    drop(repository, "bytes", answering("image", "size", sizes), BYTES_CONFIG)
    drop_text_model(repository, "letters_text", rows=3)
    drop(repository, "ocr", _OCR, _OCR_CONFIG)
    given = Served(start(repository, f"--front-ends={request.param}"), repository)
    # Dropped later, because a server is not ready before all of its first models are.
    drop(repository, "broken", b"no model")
    wait_until(lambda: "END" in str(given.get("/broken")[1]), "its failure")
    return given


def test_rows_and_columns(served: Served) -> None:
    # More rows than the model takes at once.
    rows = [[place, place + 0.5] for place in range(10)]
    expected = [[place + 2, place + 2.5] for place in range(10)]
    assert served.predict("add_one", {"instances": rows}) == (200, {"predictions": expected})
    assert served.predict("add_one", {"inputs": {"X": rows}}) == (200, {"outputs": expected})
    assert served.predict("add_one/versions/1", {"instances": [[1, 2]]}) == (200, {"predictions": [[2, 3]]})


def test_several_inputs_and_outputs(served: Served) -> None:
    rows = [{"INPUT0": [1, 2], "INPUT1": [3, 5]}, {"INPUT0": [0, 0], "INPUT1": [1, 1]}]
    assert served.predict("add_sub", {"signature_name": "serving_default", "instances": rows}) == (
        200,
        {"predictions": [{"OUTPUT0": [4, 7], "OUTPUT1": [-2, -3]}, {"OUTPUT0": [1, 1], "OUTPUT1": [-1, -1]}]},
    )
    columns = {"INPUT0": [[1, 2]], "INPUT1": [[3, 5]]}
    assert served.predict("add_sub", {"inputs": columns}) == (
        200, {"outputs": {"OUTPUT0": [[4, 7]], "OUTPUT1": [[-2, -3]]}},
    )  # fmt: skip


def test_bytes_and_large_bodies(served: Served) -> None:
    images = [base64.b64encode(b"\xff" * size).decode() for size in (3, 100_000, 300_000)]
    assert served.predict("bytes", {"instances": [{"b64": image} for image in images]}) == (
        200, {"predictions": [[3], [100_000], [300_000]]},
    )  # fmt: skip
    assert served.predict("bytes", {"instances": [{"image": {"b64": images[0]}}]}) == (200, {"predictions": [[3]]})
    # Answers in several pieces.
    rows = [[place, place] for place in range(12_000)]
    status, answer = served.predict("add_one", {"instances": rows})
    assert (status, answer["predictions"]) == (200, [[place + 2, place + 2] for place in range(12_000)])


def test_a_compressed_body(served: Served) -> None:
    body = gzip.compress(json.dumps({"instances": [[1, 2]]}).encode())
    assert served.predict("add_one", body, **{"Content-Encoding": "gzip"}) == (200, {"predictions": [[3, 4]]})


def test_errors_are_a_text(served: Served) -> None:
    for model, body, status, text in (
        ("nowhere", {"instances": [1]}, 404, "Request for unknown model: 'nowhere' is not found"),
        ("add_one/versions/7", {"instances": [1]}, 404, "version 7"),
        ("broken", {"instances": [1]}, 404, "'broken' has no available versions"),
        ("add_one", {"instances": [["a", 1]]}, 400, "input 'X': expected numbers (FP32), got a text"),
        ("add_one", {"instances": [[1, 2, 3]]}, 400, "unexpected shape for input 'X'"),
        ("add_one", b"{", 400, "failed to parse the request JSON buffer"),
        ("letters_text", {"instances": ["fail"]}, 500, "no tokens in .../fail"),
    ):
        found, answer = served.predict(model, body)
        assert (found, text in answer["error"]) == (status, True), (model, found, answer)
    status, answer = ask(served.server, "GET", "/v1/models/add_one:predict")
    assert (status, answer) == (405, {"error": "Method Not Allowed"})
    status, answer = ask(served.server, "POST", "/v1/models/add_one:classify", {"examples": []})
    assert (status, "has POST /v1/models/NAME" in answer["error"]) == (404, True)
    status, answer = served.predict("add_one", {"instances": [[1, 2]]}, **{"X-Request-Timeout-Ms": "0"})
    assert (status, "whole number of milliseconds" in answer["error"]) == (400, True)


AVAILABLE = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}


def test_the_states_of_a_model(served: Served) -> None:
    status, answer = served.get("/add_one")
    assert (status, answer["name"], answer["ready"], answer["id"], answer["object"]) == (
        200, "add_one", True, "add_one", "model",
    )  # fmt: skip
    assert answer["model_version_status"] == [{"version": "1", **AVAILABLE}, {"version": "2", **AVAILABLE}]
    assert served.get("/add_one/versions/2") == (200, {"model_version_status": [{"version": "2", **AVAILABLE}]})
    assert served.get("/add_one/versions/7") == (404, {"error": "model 'add_one' has no version 7; it has 1, 2"})
    assert served.get("/nowhere/versions/7") == (404, {"error": "no model 'nowhere'"})
    status, answer = served.get("/broken")
    assert (status, answer["ready"], answer["model_version_status"][0]["state"]) == (503, False, "END")
    assert answer["error"]["message"] == "model 'broken' is not ready; POST /v2/repository/index says why"
    # An encoder's name stands for the model that is made of it.
    status, answer = served.get("/letters")
    assert (status, answer["id"], answer["name"], answer["ready"]) == (200, "letters_text", "letters_text", True)


def test_the_list_is_openais_and_kserves(served: Served) -> None:
    status, answer = served.get("")
    assert (status, answer["object"]) == (200, "list")
    assert [entry["id"] for entry in answer["data"]] == ["letters_text"]
    assert answer["models"] == ["add_one", "add_sub", "bytes", "iris", "letters_text", "ocr"]


def test_a_model_that_is_being_loaded(served: Served) -> None:
    gate = served.repository.parent / "gate"
    waits = f"import time\nfrom pathlib import Path\nwhile not Path({str(gate)!r}).exists():\n    time.sleep(0.01)\n"
    drop(served.repository, "late", waits + answering("image", "size"), BYTES_CONFIG)
    wait_until(lambda: "LOADING" in str(served.get("/late")[1]), "its loading")
    status, answer = served.get("/late")
    assert (status, answer["ready"], answer["model_version_status"][0]["state"]) == (503, False, "LOADING")
    assert answer["error"]["message"] == "model 'late' is being loaded; ask again in a second"
    gate.touch()
    wait_until(lambda: served.get("/late")[0] == 200, "its readiness")


by_front_ends = pytest.mark.parametrize("served", [2], indirect=True, ids=["front-ends"])
"""For client packages: plain requests of the same form go to both kinds of server."""

_KSERVE = """
import asyncio, json, sys
from kserve import InferenceRESTClient, RESTConfig

async def main(url):
    client = InferenceRESTClient(RESTConfig(protocol="v1", retries=0))
    async def failure(call):
        try:
            await call
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    found = {
        "iris": await client.infer(url, {"instances": [[6.5, 2.5], [1.0, 5.0]]}, model_name="iris"),
        "images": await client.infer(url, {"instances": [{"image": {"b64": "/wA="}}]}, model_name="bytes"),
        "ready": [await client.is_model_ready(url, name) for name in ("iris", "broken")],
        "faulty": await failure(client.infer(url, {"instances": [["a", 1.0]]}, model_name="add_one")),
    }
    print(json.dumps(found))

asyncio.run(main(sys.argv[1]))
"""


@by_front_ends
def test_kserves_client(served: Served) -> None:
    python = tool("kserve/bin/python")
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    command = [python, "-c", _KSERVE, f"http://{served.server.http_address}"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert [row["label"] for row in found["iris"]["predictions"]] == ["both", "both"]
    assert found["images"] == {"predictions": [[2]]}
    assert found["ready"] == [True, False]
    assert "400" in found["faulty"]
    assert "input 'X': expected numbers (FP32), got a text" in found["faulty"]


_TF_SERVING = """
import asyncio, sys
import tf.serving as serving

async def main(host, port):
    async def show(images, **more):
        found = await serving.predict(images, host=host, port=int(port), **more)
        print(found.value)
    await show(["bmlnaHQ=", "YXQ="])
    await show(["x"], endpoint="/v1/models/nowhere:predict")

asyncio.run(main(*sys.argv[1:]))
"""


@by_front_ends
def test_a_client_of_tensorflow_serving(served: Served) -> None:
    """PyPI's tf-serving, which knows only a model `ocr` of pictures in base64."""
    environment = Environment(CACHE / "tf-serving-peer" / f"python{PYTHON_VERSION}")
    try:
        environment.provision(["tf-serving==0.1.6"])
    except PeerUnavailable as error:
        pytest.skip(f"no tf-serving here: {error}")
    command = [environment.programs / "python", "-c", _TF_SERVING, "http://127.0.0.1", str(served.server.http_port)]
    clean = {**os.environ, "NO_PROXY": "127.0.0.1"}
    ran = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    words, refused = ran.stdout.splitlines()
    images = [f"ImagePreds(preds={[text, text[::-1]]}, logprobs=[-0.25, -1.5])" for text in ("bmlnaHQ=", "YXQ=")]
    assert words == f"[{', '.join(images)}]"
    assert refused.startswith("TFServingError(error=")
    assert "nowhere" in refused


@by_front_ends
def test_openais_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    address = f"http://{served.server.http_address}/v1"
    with openai.OpenAI(base_url=address, api_key="any", max_retries=0, timeout=PATIENCE_SECONDS) as client:
        assert [model.id for model in client.models.list()] == ["letters_text"]
        assert client.models.retrieve("letters").id == "letters_text"
        assert client.models.retrieve("add_one").id == "add_one"
        with pytest.raises(openai.NotFoundError) as missing:
            client.models.retrieve("nowhere")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.InternalServerError, match="is not ready"):
            client.models.retrieve("broken")
        answer = client.embeddings.create(model="letters", input="banana", encoding_format="float")
        assert answer.data[0].embedding == vector_of("banana")
