"""OpenAI's form of embeddings, reranking and the list of models, by plain HTTP and by the clients of that form."""

from __future__ import annotations

import asyncio
import base64
import gzip
import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.http_requests import ask
from support.models import add_constant, drop
from support.server import RocserveProcess, Start
from support.text_models import cut, drop_text_model, vector_of
from support.waiting import PATIENCE_SECONDS, wait_until

EXAMPLE = Path(__file__).parents[2] / "clients/examples/openai_nearest.py"
TEXTS = ["banana", "a", "alpaca and llama", "zebra", "the panda eats bamboo", "aa", "cat"]


@dataclass
class Served:
    server: RocserveProcess
    repository: Path
    notes: Path
    """The folder in which `letters_text` notes its requests."""
    gate: Path
    """The folder in which `slow` does, which opens its gate."""

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        return ask(self.server, "POST", path, body, headers, timeout=PATIENCE_SECONDS)

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return ask(self.server, "GET", path, b"", headers, timeout=PATIENCE_SECONDS)

    def embed(self, model: str, given: Any, **more: Any) -> tuple[int, Any]:
        return self.post("/v1/embeddings", {"model": model, "input": given, **more})

    def inferences(self, model: str) -> int:
        (statistics,) = self.get(f"/v2/models/{model}/stats")[1]["model_stats"]
        count: int = statistics["inference_count"]
        return count

    def fault(self, path: str, body: Any) -> tuple[int, str, str | None, str | None]:
        """The status of a refusal, its message, param and code."""
        status, answer = self.post(path, body)
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error["message"], error["param"], error["code"]


@pytest.fixture(scope="module", params=[0, 2], ids=["one-process", "front-ends"])
def served(request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Served:
    repository = tmp_path_factory.mktemp("openai") / "repository"
    repository.mkdir()
    matryoshka = 'parameters { key: "matryoshka" value { string_value: "2,3" } }'
    notes = drop_text_model(repository, "letters_text", "TEXT or IDS", rows=3, more=matryoshka)
    drop_text_model(repository, "plain", counts=False)
    drop_text_model(repository, "judge_text", "QUERY", rows=2)
    bounded = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    gate = drop_text_model(repository, "slow", rows=1, more=bounded)
    drop(repository, "a", add_constant(1.0))
    return Served(start(repository, f"--front-ends={request.param}"), repository, notes, gate)


by_front_ends = pytest.mark.parametrize("served", [2], indirect=True, ids=["front-ends"])
"""For client packages: plain requests of the same form go to both kinds of server."""


@by_front_ends
def test_the_example_sorts_texts(served: Served) -> None:
    command = [sys.executable, EXAMPLE, f"--url=http://{served.server.http_address}/v1", "--model=letters_text"]
    ran = subprocess.run([*command, "aa", "zebra", "aa"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "1.000  aa"
    assert len(ran.stdout.splitlines()) == 2


def test_vectors_come_in_the_order_of_the_texts(served: Served) -> None:
    (served.notes / "rows").unlink(missing_ok=True)
    counted = served.inferences("letters_text")
    status, answer = served.embed("letters", TEXTS, user="someone", encoding_format=None)
    assert status == 200
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": place, "embedding": vector_of(text)} for place, text in enumerate(TEXTS)
        ],
        "model": "letters_text",
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
    }
    # As many rows in each request as the model takes.
    assert sorted((served.notes / "rows").read_text().split()) == ["1", "3", "3"]
    # They count as other requests do; the answer may come before they are counted.
    wait_until(lambda: served.inferences("letters_text") == counted + len(TEXTS), "the statistics")


@pytest.mark.parametrize("model", ["letters", "letters_text", "plain"])
def test_one_text(served: Served, model: str) -> None:
    status, answer = served.embed(model, "banana and ananas")
    assert status == 200
    assert [entry["embedding"] for entry in answer["data"]] == [vector_of("banana and ananas")]
    # This model does not count tokens.
    assert answer["usage"]["total_tokens"] == (0 if model == "plain" else 3)


def test_vectors_in_base64(served: Served) -> None:
    status, answer = served.embed("letters", TEXTS, encoding_format="base64")
    assert status == 200
    vectors = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist() for entry in answer["data"]]
    assert vectors == list(map(vector_of, TEXTS))


def test_token_ids(served: Served) -> None:
    status, answer = served.embed("letters", [7, 8, 9])
    assert (status, answer["data"][0]["embedding"]) == (200, [3.0, 7.0, 9.0, 0.0])
    status, answer = served.embed("letters", [[5, 6], [9], [7, 8]])
    assert [entry["embedding"] for entry in answer["data"]] == [[2, 5, 6, 0], [1, 9, 9, 0], [2, 7, 8, 0]]
    assert answer["usage"]["prompt_tokens"] == 5
    status, message, param, _ = served.fault("/v1/embeddings", {"model": "plain", "input": [7, 8]})
    assert (status, param) == (400, "input")
    assert "model 'plain': expected texts as input, got token ids" in message
    assert "check_embedding_ctx_length=False" in message


def test_shorter_vectors(served: Served) -> None:
    status, answer = served.embed("letters", "banana", dimensions=4)
    assert (status, answer["data"][0]["embedding"]) == (200, vector_of("banana"))
    status, answer = served.embed("letters", "banana", dimensions=2)
    # The text of a number has the digits of FP32.
    assert (status, np.float32(answer["data"][0]["embedding"]).tolist()) == (200, cut(vector_of("banana"), 2))
    status, message, param, _ = served.fault("/v1/embeddings", {"model": "letters", "input": "a", "dimensions": 1})
    assert (status, param) == (400, "dimensions")
    assert message == "dimensions: expected 2 or 3 or 4, the length of the vectors of model 'letters_text', got 1"
    _, message, _, _ = served.fault("/v1/embeddings", {"model": "plain", "input": "a", "dimensions": 2})
    assert "expected 4, the length of the vectors of model 'plain', got 2; its files do not say" in message


def test_large_bodies_and_answers(served: Served) -> None:
    texts = [f"{place} {'a' * (place % 300)}" for place in range(2048)]
    status, answer = served.embed("letters", texts)
    assert status == 200
    assert [entry["embedding"] for entry in answer["data"]] == list(map(vector_of, texts))
    assert [entry["index"] for entry in answer["data"]] == list(range(2048))
    # Another process parses such a body; its fault comes back with the member's name.
    status, message, param, _ = served.fault("/v1/embeddings", {"model": "letters", "input": [*texts, "one more"]})
    assert (status, param) == (400, "input")
    assert "expected at most 2048 elements, got 2049" in message


def test_a_compressed_body(served: Served) -> None:
    body = gzip.compress(json.dumps({"model": "letters", "input": "banana"}).encode())
    status, answer = served.post("/v1/embeddings", body, **{"Content-Encoding": "gzip"})
    assert (status, answer["data"][0]["embedding"]) == (200, vector_of("banana"))
    status, answer = served.post("/v1/embeddings", body, **{"Content-Encoding": "br"})
    assert (status, answer["error"]["message"]) == (501, "Unsupported compression type")


def test_reranking(served: Served) -> None:
    documents: list[Any] = ["llama", {"text": "the llama of Peru"}, "a cat", "animals of Peru near a llama"]
    body = {"model": "judge", "query": "animals near Peru", "documents": documents}
    status, answer = served.post("/v1/rerank", body)
    assert status == 200
    assert answer["model"] == "judge_text"
    assert answer["usage"] == {"prompt_tokens": 13, "total_tokens": 13}
    # Of equal scores the first document comes first.
    found = [(entry["index"], entry["relevance_score"]) for entry in answer["results"]]
    assert found == [(3, 3.0), (1, 1.0), (0, 0.0), (2, 0.0)]
    assert "document" not in answer["results"][0]
    status, answer = served.post("/v1/rerank", {**body, "top_n": 2, "return_documents": True})
    assert [(entry["index"], entry["document"]) for entry in answer["results"]] == [
        (3, {"text": "animals of Peru near a llama"}),
        (1, {"text": "the llama of Peru"}),
    ]
    assert len(served.post("/v1/rerank", {**body, "top_n": 9})[1]["results"]) == 4
    # The model would read the query with each document: a thousand times the bytes that were sent.
    long = {"model": "judge", "query": "a" * 100_000, "documents": ["a"] * 1000}
    status, message, param, _ = served.fault("/v1/rerank", long)
    assert (status, param) == (400, "query")
    assert "query: expected at most 67108 bytes with 1000 documents" in message


def test_version_2_of_coheres_reranking(served: Served) -> None:
    body = {"model": "judge", "query": "animals near Peru", "documents": ["llama", "the llama of Peru"], "top_n": 1}
    assert served.post("/v2/rerank", body) == served.post("/v1/rerank", body)
    status, message, param, _ = served.fault("/v2/rerank", {**body, "max_tokens_per_doc": 4096})
    assert (status, param) == (400, "max_tokens_per_doc")
    assert "leave it out" in message
    status, answer = served.get("/v2/rerank")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")


def test_the_list_of_models(served: Served) -> None:
    status, answer = served.get("/v1/models")
    assert (status, answer["object"]) == (200, "list")
    assert [entry["id"] for entry in answer["data"]] == ["judge_text", "letters_text", "plain", "slow"]
    entry = answer["data"][1]
    assert (entry["object"], entry["owned_by"], type(entry["created"])) == ("model", "rocserve", int)
    assert served.get("/v1/models/letters_text")[1]["id"] == "letters_text"
    assert served.get("/v1/models/letters")[1]["id"] == "letters_text"
    status, answer = served.get("/v1/models/nowhere")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")


def test_models_that_do_not_fit(served: Served) -> None:
    status, message, param, code = served.fault("/v1/embeddings", {"model": "nowhere", "input": "a"})
    assert (status, param, code) == (404, "model", "model_not_found")
    assert message.startswith("Request for unknown model: 'nowhere' is not found")
    status, message, param, code = served.fault("/v1/embeddings", {"model": "a", "input": "a"})
    assert (status, param, code) == (400, "model", None)
    assert "model 'a': expected a model of text (input TEXT BYTES [1], output EMBEDDING FP32 [width]), got" in message
    status, message, _, _ = served.fault("/v1/embeddings", {"model": "judge", "input": "a"})
    assert (status, "send it to /v1/rerank" in message) == (400, True)
    status, message, _, _ = served.fault("/v1/rerank", {"model": "letters", "query": "a", "documents": ["a"]})
    assert (status, "model 'letters_text' gives EMBEDDING" in message) == (400, True)


def test_other_refusals_have_the_form_too(served: Served) -> None:
    assert served.fault("/v1/embeddings", b"{") == (
        400, "failed to parse the request JSON buffer: Missing a name for object member. at 1", None, None,
    )  # fmt: skip
    status, message, _, _ = served.fault("/v1/chat/completions", {"model": "letters"})
    assert (status, "not models that generate it" in message) == (404, True)
    status, answer = served.get("/v1/embeddings")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")
    status, message, _, _ = served.fault("/v1/embeddings", {"model": "plain", "input": ["a", "fail"]})
    # The model's own error, without the server's paths.
    assert (status, message) == (500, "no tokens in .../fail")
    status, message, _, _ = served.fault("/v1/embeddings", {"model": "plain", "input": ["a", "nan"]})
    assert (status, "gave NaN or infinity" in message) == (500, True)
    status, answer = served.post("/v1/embeddings", {"model": "plain", "input": "a"}, **{"X-Request-Timeout-Ms": "0"})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_client_that_leaves_takes_its_request_along(served: Served) -> None:
    for name in ("begun", "cancelled", "open"):
        (served.gate / name).unlink(missing_ok=True)
    connection = http.client.HTTPConnection("127.0.0.1", served.server.http_port, timeout=PATIENCE_SECONDS)
    connection.request("POST", "/v1/embeddings", json.dumps({"model": "slow", "input": ["wait", "a"]}))
    wait_until((served.gate / "begun").exists, "the request's beginning")
    connection.close()
    wait_until((served.gate / "cancelled").exists, "the request's end")


def test_a_deadline_and_a_full_queue(served: Served) -> None:
    for name in ("begun", "cancelled", "open"):
        (served.gate / name).unlink(missing_ok=True)
    refused = threading.Event()

    def embed() -> int:
        status, answer = served.embed("slow", "wait")
        if status != 200:
            assert "Exceeds maximum queue size" in answer["error"]["message"]
            assert (answer["error"]["type"], answer["error"]["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            refused.set()
        return status

    with ThreadPoolExecutor(9) as threads:
        calls = [threads.submit(embed)]
        wait_until((served.gate / "begun").exists, "the first request's beginning")
        late = {"X-Request-Timeout-Ms": "50"}
        status, answer = served.post("/v1/embeddings", {"model": "slow", "input": "a"}, **late)
        assert (status, answer["error"]["type"]) == (504, "server_error")
        # More than the instance and the queue hold: they stay until the gate opens, so one finds no room.
        calls += [threads.submit(embed) for _ in range(8)]
        assert refused.wait(PATIENCE_SECONDS)
        (served.gate / "open").touch()
        statuses = [call.result() for call in calls]
    assert set(statuses) == {200, 429}


def test_a_model_that_is_being_loaded(served: Served) -> None:
    assert served.fault("/v1/embeddings", {"model": "late", "input": "a"})[0] == 404
    gate = served.repository.parent / "late-gate"
    waits = f"import time\nfrom pathlib import Path\nwhile not Path({str(gate)!r}).exists():\n    time.sleep(0.01)\n"
    drop_text_model(served.repository, "late_text", before=waits)
    wait_until(lambda: served.fault("/v1/embeddings", {"model": "late", "input": "a"})[0] != 404, "its loading")
    status, message, _, _ = served.fault("/v1/embeddings", {"model": "late", "input": "a"})
    assert (status, message) == (503, "model 'late_text' is being loaded; ask again in a second")
    gate.touch()
    wait_until(lambda: served.embed("late", "a")[0] == 200, "its readiness")


@pytest.fixture
def openai(monkeypatch: pytest.MonkeyPatch) -> Any:
    """OpenAI's package; no request goes through a proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return pytest.importorskip("openai", reason="the package openai is not installed")


def client_flags(server: RocserveProcess, key: str = "any") -> dict[str, Any]:
    address = f"http://{server.http_address}/v1"
    return {"base_url": address, "api_key": key, "max_retries": 0, "timeout": PATIENCE_SECONDS}


@by_front_ends
def test_openais_client(served: Served, openai: Any) -> None:
    with openai.OpenAI(**client_flags(served.server)) as client:
        # Without a format the client asks for base64.
        for more in ({}, {"encoding_format": "float"}, {"user": "someone", "dimensions": 4}):
            answer = client.embeddings.create(model="letters", input=TEXTS, **more)
            assert [entry.embedding for entry in answer.data] == list(map(vector_of, TEXTS))
            assert (answer.model, answer.usage.total_tokens) == ("letters_text", 12)
        answer = client.embeddings.create(model="letters", input=[[5, 6], [9]])
        assert [entry.embedding for entry in answer.data] == [[2, 5, 6, 0], [1, 9, 9, 0]]
        assert {"letters_text", "judge_text"} <= {model.id for model in client.models.list()}
        assert client.models.retrieve("letters").id == "letters_text"
        with pytest.raises(openai.NotFoundError) as missing:
            client.embeddings.create(model="nowhere", input="a")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="expected a text of at least one character") as faulty:
            client.embeddings.create(model="letters", input=["a", ""])
        assert (faulty.value.type, faulty.value.param) == ("invalid_request_error", "input")
        with pytest.raises(openai.NotFoundError, match="not models that generate it"):
            client.chat.completions.create(model="letters", messages=[{"role": "user", "content": "Hello"}])


@by_front_ends
async def test_openais_asynchronous_client(served: Served, openai: Any) -> None:
    async with openai.AsyncOpenAI(**client_flags(served.server)) as client:
        calls = [client.embeddings.create(model="letters", input=text) for text in TEXTS]
        answers = await asyncio.gather(*calls)
    assert [answer.data[0].embedding for answer in answers] == list(map(vector_of, TEXTS))


@by_front_ends
async def test_langchain(served: Served, openai: Any) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="the package langchain-openai is not installed")
    flags = {"model": "letters", "check_embedding_ctx_length": False, "chunk_size": 3}
    embeddings = langchain.OpenAIEmbeddings(**flags, **client_flags(served.server))
    assert embeddings.embed_documents(TEXTS) == list(map(vector_of, TEXTS))
    assert embeddings.embed_query("banana") == vector_of("banana")
    assert await embeddings.aembed_documents(TEXTS) == list(map(vector_of, TEXTS))


@by_front_ends
def test_coheres_clients(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cohere = pytest.importorskip("cohere", reason="the package cohere is not installed")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    flags = {"api_key": "any", "base_url": f"http://{served.server.http_address}", "timeout": PATIENCE_SECONDS}
    asked = {"model": "judge", "query": "animals near Peru", "documents": ["llama", "animals of Peru near a llama"]}
    first, second = cohere.Client(**flags), cohere.ClientV2(**flags)
    for client in (first, second):
        answer = client.rerank(**asked, top_n=1)
        assert [(one.index, one.relevance_score) for one in answer.results] == [(1, 3.0)]
        assert answer.meta.tokens.input_tokens == 7
    answer = first.rerank(**asked, return_documents=True)
    assert [one.document.text for one in answer.results] == [*reversed(asked["documents"])]
    with pytest.raises(cohere.BadRequestError, match="unknown member 'priority'"):
        second.rerank(**asked, priority=1, request_options={"max_retries": 0})
    with pytest.raises(cohere.NotFoundError, match="model_not_found"):
        second.rerank(**{**asked, "model": "nowhere"}, request_options={"max_retries": 0})


SECRET = "--http-restricted-api=inference:infer-key=secret"


@pytest.fixture(scope="module")
def restricted(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    repository = tmp_path_factory.mktemp("restricted") / "repository"
    repository.mkdir()
    drop_text_model(repository, "letters_text", rows=3)
    drop(repository, "a", add_constant(1.0))
    flags = ("--http-restricted-api=metadata:meta-key=other", "--max-requests-per-client=2")
    yield start(repository, SECRET, *flags)


def test_the_secret_of_inference_is_the_key(restricted: RocserveProcess) -> None:
    body = {"model": "letters", "input": "banana"}

    def embed(**headers: str) -> int:
        return ask(restricted, "POST", "/v1/embeddings", body, headers)[0]

    assert embed() == 401
    assert embed(Authorization="Bearer wrong") == embed(Authorization="secret") == 401
    assert embed(Authorization="Basic secret") == embed(Authorization="Bearer other") == 401
    assert embed(Authorization="Bearer secret") == embed(authorization="bearer  secret") == 200
    assert embed(**{"Infer-Key": "secret"}) == 200
    _, answer = ask(restricted, "POST", "/v1/embeddings", body)
    assert answer["error"] == {
        "message": "This API is restricted, expecting header 'infer-key' or its value in 'Authorization: Bearer VALUE'",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


def test_the_secret_is_asked_for_in_tensorflows_form_too(restricted: RocserveProcess) -> None:
    path, body = "/v1/models/a:predict", {"instances": [[1, 2]]}
    assert ask(restricted, "POST", path, body) == (
        403,
        {"error": "This API is restricted, expecting header 'infer-key'"},
    )
    for key in ({"infer-key": "secret"}, {"Authorization": "Bearer secret"}):
        assert ask(restricted, "POST", path, body, key) == (200, {"predictions": [[2, 3]]})


def test_openais_client_sends_the_secret(restricted: RocserveProcess, openai: Any) -> None:
    with openai.OpenAI(**client_flags(restricted, "secret")) as client:
        answer = client.embeddings.create(model="letters", input="banana")
        assert answer.data[0].embedding == vector_of("banana")
    with openai.OpenAI(**client_flags(restricted, "wrong")) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.embeddings.create(model="letters", input="banana")
        assert refused.value.code == "invalid_api_key"


def test_a_call_of_many_texts_keeps_to_the_limit_of_its_client(restricted: RocserveProcess) -> None:
    body = {"model": "letters", "input": [f"text {number}" for number in range(60)]}
    key = {"Authorization": "Bearer secret"}
    status, answer = ask(restricted, "POST", "/v1/embeddings", body, key, timeout=PATIENCE_SECONDS)
    assert (status, len(answer["data"])) == (200, 60)


def test_the_list_of_models_shows_what_metadata_show(restricted: RocserveProcess) -> None:
    key = {"Authorization": "Bearer secret"}
    assert ask(restricted, "GET", "/v1/models", headers=key)[0] == 401
    assert ask(restricted, "GET", "/v1/models", headers={**key, "meta-key": "other"})[0] == 200
    assert ask(restricted, "GET", "/v1/models/letters", headers={"meta-key": "other"})[0] == 401


def test_the_key_opens_inference_and_nothing_else(restricted: RocserveProcess) -> None:
    key = {"Authorization": "Bearer secret"}
    generate = "/v2/models/letters_text/generate"
    assert ask(restricted, "POST", generate, {"TEXT": "a"})[0] == 403
    assert ask(restricted, "POST", generate, {"TEXT": "a"}, key)[0] == 200
    other = {"Authorization": "Bearer other"}
    assert ask(restricted, "GET", "/v2/models/a", headers=other)[0] == 403
    assert ask(restricted, "GET", "/v2/models/a", headers={"meta-key": "other"})[0] == 200
