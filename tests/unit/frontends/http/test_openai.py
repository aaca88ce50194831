"""OpenAI's form: bodies, signatures, errors, and a call's requests."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.hand_loop import HandLoop

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, internal, unavailable
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.request_memory import MemoryFull, RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.responses import InferResponse
from rocserve.core.steps import result_of
from rocserve.core.tensors import Tensor
from rocserve.frontends.http.infer_bodies import InferRequestReader
from rocserve.frontends.http.openai.answers import embeddings_answer, rerank_answer
from rocserve.frontends.http.openai.bodies import Fault, RerankBody, attempted, read_embeddings, read_rerank
from rocserve.frontends.http.openai.calls import TextOutputs, infer_request, rows_of_ids, rows_of_texts, run_texts
from rocserve.frontends.http.openai.errors import FieldFault, openai_error
from rocserve.frontends.http.openai.models import TextModel, TextOutput, text_model
from rocserve.frontends.http.openai.service import _check_dimensions, _check_most_tokens, _cut
from rocserve.frontends.http.request import Head, HttpError
from rocserve.services.inference import header_forwarding


def fault_of(read: Callable[..., Any], body: Any) -> tuple[str, str]:
    found = attempted(read, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert isinstance(found, Fault), found
    return found.member, found.text


@pytest.mark.parametrize(
    ("given", "member", "text"),
    [
        ({"input": "a"}, "model", "model: expected a text, got nothing"),
        ({"model": 3, "input": "a"}, "model", "model: expected a text, got 3"),
        ({"model": "m"}, "input", "list of token ids, or a list of such lists, got nothing"),
        ({"model": "m", "input": []}, "input", "or a list of such lists, got an empty list"),
        ({"model": "m", "input": ""}, "input", "input: expected a text of at least one character, got an empty text"),
        ({"model": "m", "input": ["a", ""]}, "input", "input[1]: expected a text of at least one character"),
        ({"model": "m", "input": ["a", 1]}, "input", "input[1]: expected a text of at least one character, got 1"),
        ({"model": "m", "input": [True]}, "input", "got a list whose first element is a boolean"),
        ({"model": "m", "input": [{}]}, "input", "got a list whose first element is an object"),
        ({"model": "m", "input": [1, "a"]}, "input", "input[1]: expected a token id, a whole number, got a text"),
        ({"model": "m", "input": [1, -1]}, "input", "input[1]: expected a token id, a whole number, got -1"),
        ({"model": "m", "input": [1, 1 << 63]}, "input", "input[1]: expected a token id"),
        ({"model": "m", "input": [[1], [True]]}, "input", "input[1][0]: expected a token id"),
        ({"model": "m", "input": [[1], []]}, "input", "input[1]: expected a list of token ids, got an empty list"),
        ({"model": "m", "input": ["a"] * 2049}, "input", "input: expected at most 2048 elements, got 2049"),
        ({"model": "m", "input": "a", "encoding_format": "int8"}, "encoding_format", "expected 'float' or 'base64'"),
        ({"model": "m", "input": "a", "encoding_format": []}, "encoding_format", "got an empty list"),
        ({"model": "m", "input": "a", "dimensions": 0}, "dimensions", "expected a whole number from 1 on, got 0"),
        ({"model": "m", "input": "a", "dimensions": True}, "dimensions", "expected a whole number from 1 on, got True"),
        ({"model": "m", "input": "a", "user": 3}, "user", "user: expected a text, got 3"),
        ({"model": "m", "input": "a", "dimension": 3}, "dimension", "did you mean 'dimensions'?"),
        (b'{"model": "m", "input": "\\ud800"}', "input", "Invalid encoding in string"),
        ([], "", "the body: expected a JSON object, got a list"),
        (b"", "", "failed to parse the request JSON buffer"),
    ],
)
def test_faulty_bodies_of_embeddings(given: Any, member: str, text: str) -> None:
    found, fault = fault_of(read_embeddings, given)
    assert found == member
    assert text in fault


@pytest.mark.parametrize(
    ("given", "member", "text"),
    [
        ({"documents": ["a"]}, "query", "query: expected a text, got nothing"),
        ({"query": "q"}, "documents", "documents: expected a list of texts, got nothing"),
        ({"query": "q", "documents": "a"}, "documents", "documents: expected a list of texts, got a text"),
        ({"query": "q", "documents": [1]}, "documents", "documents[0]: expected a text of at least one character"),
        ({"query": "q", "documents": [{"text": ""}]}, "documents", "documents[0]: expected a text of at least one"),
        ({"query": "q", "documents": [{"title": "a", "text": "b"}]}, "documents", "an object with text, title"),
        ({"query": "q", "documents": [{}]}, "documents", "an object with no members; send only the text"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n", "top_n: expected a whole number from 1 on, got 0"),
        (
            {"query": "q", "documents": ["a"], "return_documents": 1},
            "return_documents",
            "expected true or false, got 1",
        ),
        ({"query": "q", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "a whole number from 1 on"),
        ({"query": "q", "documents": ["a"], "priority": 1}, "priority", "unknown member"),
    ],
)
def test_faulty_bodies_of_reranking(given: Any, member: str, text: str) -> None:
    found, fault = fault_of(read_rerank, {"model": "m", **given})
    assert found == member
    assert text in fault


def test_members_that_are_null_are_left_out() -> None:
    body = {"model": "m", "input": ["a"], "dimensions": None, "encoding_format": None, "user": None, "other": None}
    found = attempted(read_embeddings, json.dumps(body).encode())
    assert not isinstance(found, Fault)
    assert (found.texts, found.ids, found.is_base64, found.dimensions) == (["a"], (), False, None)


TEXT = InputConfig("TEXT", DataType.BYTES, (1,))
QUERY = InputConfig("QUERY", DataType.BYTES, (1,))
OPTIONAL_TEXT = InputConfig("TEXT", DataType.BYTES, (1,), optional=True)
IDS = InputConfig("IDS", DataType.INT64, (-1,), optional=True)
EMBEDDING = OutputConfig("EMBEDDING", DataType.FP32, (2,))
SCORE = OutputConfig("SCORE", DataType.FP32, (1,))
COUNT = OutputConfig("TOKEN_COUNT", DataType.INT32, (1,))


def config_of(inputs: list[InputConfig], outputs: list[OutputConfig], rows: int = 2, **more: Any) -> ModelConfig:
    defaults: Any = {"decoupled": False, "parameters": {}, "name": "m", "max_batch_size": rows}
    config: Any = SimpleNamespace(inputs=inputs, outputs=outputs, **{**defaults, **more})
    given: ModelConfig = config
    return given


def model_of(inputs: list[InputConfig], outputs: list[OutputConfig], rows: int = 2) -> TextModel:
    found = text_model(config_of(inputs, outputs, rows))
    assert found is not None
    return found


def test_signatures_of_models_of_text() -> None:
    plain = model_of([TEXT], [EMBEDDING])
    assert (plain.output, plain.width, plain.takes_ids, plain.counts_tokens) == (TextOutput.EMBEDDING, 2, False, False)
    full = model_of([OPTIONAL_TEXT, IDS], [COUNT, EMBEDDING])
    assert (full.takes_ids, full.counts_tokens) == (True, True)
    # Ids beside a text that must be there are something else.
    assert not model_of([TEXT, IDS], [EMBEDDING]).takes_ids
    assert model_of([QUERY, TEXT], [SCORE, COUNT]).output is TextOutput.SCORE


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([TEXT, QUERY], [EMBEDDING]),
        ([TEXT], [SCORE]),
        ([TEXT], [COUNT]),
        ([InputConfig("TEXT", DataType.BYTES, (2,))], [EMBEDDING]),
        ([InputConfig("TEXT", DataType.INT64, (1,))], [EMBEDDING]),
        ([TEXT], [OutputConfig("EMBEDDING", DataType.FP16, (2,))]),
        ([TEXT], [OutputConfig("EMBEDDING", DataType.FP32, (-1, 2))]),
        ([QUERY, TEXT], [OutputConfig("SCORE", DataType.FP32, (2,))]),
        ([TEXT, InputConfig("X", DataType.FP32, (1,))], [EMBEDDING]),
    ],
)
def test_other_signatures(inputs: list[InputConfig], outputs: list[OutputConfig]) -> None:
    assert text_model(config_of(inputs, outputs)) is None
    assert text_model(config_of([TEXT], [EMBEDDING], decoupled=True)) is None


def overload() -> ServeError:
    error = unavailable("Exceeds maximum queue size")
    error.is_overload = True
    return error.with_text("in ensemble 'm', Exceeds maximum queue size")


@pytest.mark.parametrize(
    ("error", "status", "kind", "member", "code"),
    [
        (FieldFault("input", "no"), 400, "invalid_request_error", "input", None),
        (FieldFault("", "no"), 400, "invalid_request_error", None, None),
        (FieldFault("model", "no", StatusCode.NOT_FOUND, "model_not_found"), 404, "invalid_request_error", "model",
         "model_not_found"),
        (HttpError(403, "restricted"), 401, "invalid_request_error", None, "invalid_api_key"),
        (HttpError(405, "no", {"Allow": "POST"}), 405, "invalid_request_error", None, None),
        (overload(), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        (ServeError(StatusCode.RESOURCE_EXHAUSTED, "no"), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        # The server's memory is full, for any client.
        (MemoryFull("no"), 503, "server_error", None, None),
        (unavailable("no"), 503, "server_error", None, None),
        (internal("no"), 500, "server_error", None, None),
        (ServeError(StatusCode.DEADLINE_EXCEEDED, "no"), 504, "server_error", None, None),
    ],
)  # fmt: skip
def test_errors(error: ServeError | HttpError, status: int, kind: str, member: str | None, code: str | None) -> None:
    answer = openai_error(error)
    told = json.loads(answer.body)["error"]
    assert (answer.status, told["type"], told["param"], told["code"]) == (status, kind, member, code)
    assert told["message"].startswith(error.text)
    assert answer.headers.get("Allow") == ("POST" if status == 405 else None)
    assert answer.headers.get("WWW-Authenticate") == ("Bearer" if status == 401 else None)


def test_a_retry_is_advised_as_for_other_requests() -> None:
    error = unavailable("no")
    error.retry_seconds = 0.5
    assert openai_error(error.with_text("in ensemble 'm', no")).headers["Retry-After"] == "1"


def test_texts_of_like_length_share_a_request() -> None:
    model = model_of([TEXT], [EMBEDDING])
    shares = list(rows_of_texts(model, ["ccc", "a", "bb", "dddd", "e"]))
    assert [share.places for share in shares] == [[1, 4], [2, 0], [3]]
    assert shares[2].inputs == [("TEXT", "BYTES", (1,), b"\x04\x00\x00\x00dddd")]
    given = [np.array(ids) for ids in ([1], [2, 3], [4], [5], [6, 7])]
    ids = list(rows_of_ids(model_of([OPTIONAL_TEXT, IDS], [EMBEDDING]), given))
    assert [(share.places, share.inputs[0][2]) for share in ids] == [([0, 2], (1,)), ([3], (1,)), ([1, 4], (2,))]


class Models:
    """A stand-in for the inference service, which holds requests until the test answers them."""

    def __init__(self) -> None:
        self.plane = HandLoop()
        self.paths = PrivatePaths()
        self.held: list[tuple[InferRequest, Any]] = []
        self.cancelled: list[int] = []

    def infer(self, request: InferRequest, responder: Any) -> None:
        number = len(self.held)
        self.held.append((request, responder))
        responder.watch_cancellation(lambda: self.cancelled.append(number))

    def answer(self, number: int, width: int = 2) -> None:
        """Answer with vectors that have the length of the text everywhere, and a token for each text."""
        request, responder = self.held[number]
        rows = request.head.inputs[0].shape[0]
        data, lengths = bytes(request.data[0]), []
        while data:
            lengths.append(int.from_bytes(data[:4], "little"))
            data = data[4 + lengths[-1] :]
        values = np.repeat(np.array(lengths, np.float32), width).tobytes()
        outputs = [
            Tensor("TOKEN_COUNT", DataType.INT32, (rows, 1), np.ones(rows, np.int32).tobytes()),
            Tensor("EMBEDDING", DataType.FP32, (rows, width), values),
        ]
        responder.send(InferResponse.of("m", "1", "", outputs))


MODEL = model_of([TEXT], [EMBEDDING, COUNT])


def call_of(
    models: Models, memory: RequestMemory, timeout: float | None = None
) -> Callable[[Sequence[str]], Coroutine[Any, Any, TextOutputs]]:
    """Return a call with two requests at once, which began at 0."""
    parts: Any = SimpleNamespace(inference=models, memory=memory, reader=InferRequestReader(), forwarding=None)
    request: Any = SimpleNamespace(began_at=0.0, head=Head())
    return lambda texts: run_texts(parts, request, timeout, 2, MODEL, rows_of_texts(MODEL, texts))


def test_headers_become_parameters_as_of_other_requests() -> None:
    parts: Any = SimpleNamespace(reader=InferRequestReader(), forwarding=header_forwarding("^x-"))
    request: Any = SimpleNamespace(head=Head(pairs=[(b"x-tenant", b"seven"), (b"other", b"no")]))
    made = infer_request(parts, request, MODEL, next(rows_of_texts(MODEL, ["a"])))
    assert dict(made.head.parameters) == {"x-tenant": "seven"}


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_call_has_only_so_many_requests_at_once() -> None:
    models, memory = Models(), RequestMemory()
    call = call_of(models, memory)
    texts = ["eeeee", "a", "dddd", "bb", "ccc"]
    running = asyncio.create_task(call(texts))
    await turn()
    assert len(models.held) == 2
    # Equal heads are one object, so a version plans them once.
    assert models.held[0][0].head is models.held[1][0].head
    assert memory.used_bytes == sum(len(request.data[0]) for request, _ in models.held)
    models.answer(1)
    await turn()
    assert len(models.held) == 2, "answers are taken in order"
    models.answer(0)
    await turn()
    models.answer(2)
    outputs: TextOutputs = await running
    assert outputs.values.tolist() == [[5, 5], [1, 1], [4, 4], [2, 2], [3, 3]]
    assert outputs.token_count == 5
    assert memory.used_bytes == 0
    models.plane.turn()
    assert models.cancelled == []


async def test_the_first_failure_ends_a_call() -> None:
    models, memory = Models(), RequestMemory()
    call = call_of(models, memory)
    running = asyncio.create_task(call(list("abcde")))
    await turn()
    models.held[0][1].send(internal("no"))
    with pytest.raises(ServeError, match="no"):
        await running
    models.plane.turn()
    assert models.cancelled == [1]
    models.answer(1)
    assert memory.used_bytes == 0


async def test_vectors_of_unlike_lengths_are_refused() -> None:
    models = Models()
    call = call_of(models, RequestMemory())
    running = asyncio.create_task(call(list("abcd")))
    await turn()
    models.answer(0)
    models.answer(1, width=3)
    with pytest.raises(ServeError, match="model 'm' gave vectors of different lengths for the texts of one call"):
        await running


async def test_a_client_that_leaves_cancels_all_requests_of_its_call() -> None:
    models = Models()
    call = call_of(models, RequestMemory())
    running = asyncio.create_task(call(list("abcde")))
    await turn()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    models.plane.turn()
    assert models.cancelled == [0, 1]


async def test_a_deadline_that_passes_ends_a_call() -> None:
    models = Models()
    call = call_of(models, RequestMemory(), timeout=0.001)
    with pytest.raises(ServeError) as raised:
        await call(list("abcde"))
    assert raised.value.code is StatusCode.DEADLINE_EXCEEDED
    models.plane.turn()
    assert models.cancelled == list(range(len(models.held)))


@pytest.mark.parametrize("is_base64", [False, True])
def test_the_numbers_of_a_vector_are_read_back_to_the_bit(is_base64: bool) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, (200, 50), dtype=np.uint32)
    found = bits.view(np.float32)
    found = found[np.isfinite(found).all(axis=1)]
    whole = np.array([0, -0.0, 1, -1, 0.1, 1e-45, 99_999_992, -1e8, 123_456_789, 3.4e38], np.float32).repeat(5)
    small = found / np.float32(2.0**100)
    for vectors in (found, whole[np.newaxis], whole[np.newaxis, :30], small):
        outputs = TextOutputs(vectors, 0)
        answer = json.loads(b"".join(result_of(embeddings_answer("m", outputs, is_base64))))
        assert [entry["index"] for entry in answer["data"]] == [*range(len(vectors))]
        read = [
            np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
            if is_base64
            else np.array(entry["embedding"], np.float32)
            for entry in answer["data"]
        ]
        np.testing.assert_array_equal(np.stack(read).view(np.uint32), vectors.view(np.uint32))
        if not is_base64:
            # Also whole numbers have a point.
            assert {type(number) for entry in answer["data"] for number in entry["embedding"]} == {float}


def test_long_documents_are_written_in_steps() -> None:
    texts = ['"\\\n' * 30_000, "é" * 100_000, ""]
    outputs = TextOutputs(np.array([[0.5], [2], [0.25]], np.float32), 7)
    steps = rerank_answer("m", outputs, RerankBody("m", "q", texts, None, True))
    assert next(steps) is None
    answer = json.loads(b"".join(result_of(rerank_answer("m", outputs, RerankBody("m", "q", texts, None, True)))))
    assert answer == {
        "model": "m",
        "results": [
            {"index": 1, "relevance_score": 2.0, "document": {"text": texts[1]}},
            {"index": 0, "relevance_score": 0.5, "document": {"text": texts[0]}},
            {"index": 2, "relevance_score": 0.25, "document": {"text": ""}},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
        "meta": {"tokens": {"input_tokens": 7}},
    }


def test_of_equal_scores_the_first_document_comes_first() -> None:
    outputs = TextOutputs(np.array([[1.0], [2.0]] * 50, np.float32), 0)
    body = RerankBody("m", "q", ["a"] * 100, None, False)
    answer = json.loads(b"".join(result_of(rerank_answer("m", outputs, body))))
    assert [entry["index"] for entry in answer["results"]] == [*range(1, 100, 2), *range(0, 100, 2)]


def test_documents_are_cut_only_where_the_model_cuts_them() -> None:
    limited, other = (
        text_model(config_of([QUERY, TEXT], [SCORE], parameters=parameters)) for parameters in ({"max_tokens": "8"}, {})
    )
    assert limited is not None and other is not None
    _check_most_tokens(limited, None)
    _check_most_tokens(limited, 8)
    _check_most_tokens(other, None)
    for model, wanted, expected in ((limited, 7, "expected at least 8, where"), (other, 4096, "expected nothing, as")):
        with pytest.raises(FieldFault, match=f"max_tokens_per_doc: {expected}.* got {wanted}; leave it out"):
            _check_most_tokens(model, wanted)


def test_a_faulty_list_of_lengths_is_named() -> None:
    model = text_model(config_of([TEXT], [EMBEDDING], parameters={"matryoshka": "1;2"}))
    assert model is not None
    with pytest.raises(ServeError, match="parameter 'matryoshka': expected comma-separated numbers or 'any'"):
        _check_dimensions(model, 2, 1)
    anything = text_model(config_of([TEXT], [EMBEDDING], parameters={"matryoshka": "any"}))
    assert anything is not None
    _check_dimensions(anything, 2, 1)
    with pytest.raises(FieldFault, match="dimensions: expected at most 2, the length of the vectors"):
        _check_dimensions(anything, 2, 3)


def test_a_vector_of_zeros_is_cut_to_zeros() -> None:
    outputs = _cut(TextOutputs(np.array([[0, 0, 3], [3, 4, 5]], np.float32), 1), 2)
    np.testing.assert_allclose(outputs.values, [[0, 0], [0.6, 0.8]], rtol=1e-6)
    assert outputs.values.dtype == np.float32
