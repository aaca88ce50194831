"""`preprocess: text` in a configuration: texts to vectors, labels or scores, on encoders with seeded weights."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from support.http_requests import ask
from support.models import add_constant, drop
from support.server import RocserveProcess, Start
from support.text_encoders import (
    SENTENCE_FILES,
    SENTENCES,
    VOCABULARY,
    WIDTH,
    BareEncoder,
    encoder,
    lookup_encoder,
    write_encoder,
    write_json,
    write_tokenizer,
)
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve_client import AsyncClient, Client, InvalidArgument

pytest.importorskip("tokenizers", reason="needs the package tokenizers")

SWAPS = 2
LABELS = ("calm", "loud", "odd")
KINDS = {"O": 0, "PLACE": 1}
SHORTENED_FILES = {
    **SENTENCE_FILES,
    "config.json": {**SENTENCE_FILES["config.json"], "matryoshka_dimensions": [4]},
}
LONG = " ".join(SENTENCES * 3)
TEXTS = (*SENTENCES[:3], "Cat", "unknown words: zebra!", LONG)


def rows(*texts: str) -> np.ndarray:
    return np.array([[text.encode()] for text in texts], object)


def logistic(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values.astype(np.float64)))


def softmax(values: np.ndarray) -> np.ndarray:
    parts = np.exp(values.astype(np.float64))
    return parts / parts.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("texts")
    for name, model, files, parameters in (
        ("sentences", encoder(), SENTENCE_FILES, {}),
        ("narrow", encoder(datatype=TensorProto.INT32, inputs=("input_ids",)), {}, {"pooling": "cls"}),
        ("fixed", encoder(shape=("batch", 12)), {}, {"pooling": "last", "normalise": "true"}),
        ("whole", encoder("sentence_embedding"), SHORTENED_FILES, {}),
        (
            "moods",
            encoder("logits", 3),
            {
                "config.json": {
                    "architectures": ["BertForSequenceClassification"],
                    "id2label": {str(number): label for number, label in enumerate(LABELS)},
                    "max_position_embeddings": 64,
                }
            },
            {},
        ),
        (
            "places",
            encoder("token_logits", 2),
            {
                "config.json": {
                    "architectures": ["BertForTokenClassification"],
                    "id2label": {str(number): label for label, number in KINDS.items()},
                }
            },
            {},
        ),
        (
            "judge",
            encoder("logits", 1),
            {"config.json": {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}},
            {},
        ),
    ):
        folder = write_encoder(repository, name, model, files, parameters)
        write_tokenizer(folder)
    return repository


@pytest.fixture(scope="module")
def server(start: Start, models: Path) -> RocserveProcess:
    return start(models)


@pytest.fixture(scope="module")
def client(server: RocserveProcess) -> Client:
    return Client(f"127.0.0.1:{server.port}")


@pytest.fixture
def bare(models: Path, tmp_path: Path):
    tokenizer = write_tokenizer(tmp_path)

    def make(name: str, most: int) -> BareEncoder:
        return BareEncoder(tokenizer, (models / name / "1" / "model.onnx").read_bytes(), most)

    return make


def test_a_vector_is_what_the_files_say_alone_and_in_company(client: Client, bare) -> None:
    encode = bare("sentences", 32)
    together = client.infer("sentences_text", {"TEXT": rows(*TEXTS)})
    for row, text in enumerate(TEXTS):
        mean = encode(text).mean(axis=0)
        expected = mean / np.linalg.norm(mean)
        alone = client.infer("sentences_text", {"TEXT": rows(text)})
        np.testing.assert_allclose(alone["EMBEDDING"][0], expected, atol=1e-5)
        np.testing.assert_allclose(together["EMBEDDING"][row], expected, atol=1e-5)
        assert together["TOKEN_COUNT"][row] == alone["TOKEN_COUNT"][0] == len(encode(text))
    assert together["TOKEN_COUNT"][-1] == 32


async def test_texts_that_come_together_get_the_bits_of_each_alone(server: RocserveProcess, client: Client) -> None:
    alone = [client.infer("sentences_text", {"TEXT": rows(text)})["EMBEDDING"] for text in TEXTS]
    before = client.statistics("sentences_postprocess")[0]
    async with AsyncClient(f"127.0.0.1:{server.port}") as many:
        for _ in range(20):
            answers = await asyncio.gather(*[many.infer("sentences_text", {"TEXT": rows(text)}) for text in TEXTS * 4])
            for answer, expected in zip(answers, alone * 4, strict=True):
                np.testing.assert_array_equal(answer["EMBEDDING"], expected)
    after = client.statistics("sentences_postprocess")[0]
    runs, texts = after.execution_count - before.execution_count, after.inference_count - before.inference_count
    assert texts == 80 * len(TEXTS) > runs, "their lengths differ, and some share a batch"


WIDE = 384
WIDE_TEXTS = [text for text in TEXTS for _ in range(8)]
OWN_STEP = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        hidden = [pb_utils.get_input_tensor_by_name(request, "HIDDEN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("FIRST", one[:, 0])]) for one in hidden]
"""
OWN_STEP_CONFIG = """
max_batch_size: 64
input [{ name: "HIDDEN" data_type: TYPE_FP32 dims: [-1, 384] }, { name: "COUNT" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "FIRST" data_type: TYPE_FP32 dims: [384] }]
"""
OWN_CHAIN_CONFIG = """
platform: "ensemble" max_batch_size: 64
input [{ name: "TEXT" data_type: TYPE_STRING dims: [1] }]
output [{ name: "FIRST" data_type: TYPE_FP32 dims: [384] }]
ensemble_scheduling { step [
    { model_name: "wide_tokenize" model_version: -1 input_map { key: "TEXT" value: "TEXT" }
      output_map [{ key: "input_ids" value: "i" }, { key: "attention_mask" value: "m" },
                  { key: "TOKEN_COUNT" value: "c" }] },
    { model_name: "wide" model_version: -1
      input_map [{ key: "input_ids" value: "i" }, { key: "attention_mask" value: "m" }]
      output_map { key: "last_hidden_state" value: "h" } },
    { model_name: "first" model_version: -1 input_map [{ key: "HIDDEN" value: "h" }, { key: "COUNT" value: "c" }]
      output_map { key: "FIRST" value: "FIRST" } }] }
"""


def maps_outputs_of(model: str, reader: RocserveProcess, process: str) -> bool:
    """Whether the worker of `process` can read all outputs of the worker of `model`."""
    (worker,) = reader.workers(process)
    return f"memfd:rocserve:{model} " in Path(f"/proc/{worker.pid}/maps").read_text()


def test_many_texts_are_pooled_where_the_encoder_has_left_them(start: Start, tmp_path: Path) -> None:
    """Their vectors are numpy's to the bit. A Python model of the user's sees nothing but its inputs."""
    table = np.random.default_rng(3).standard_normal((VOCABULARY, WIDE), np.float32)
    folder = write_encoder(
        tmp_path, "wide", lookup_encoder(table), {}, {"pooling": "mean", "normalise": "true", "max_tokens": "32"}
    )
    tokenizer = write_tokenizer(folder)
    tokenizer.enable_truncation(32)
    drop(tmp_path, "first", OWN_STEP, OWN_STEP_CONFIG, filename="model.py")
    drop(tmp_path, "chain", None, OWN_CHAIN_CONFIG)
    server = start(tmp_path)
    client = Client(f"127.0.0.1:{server.port}")
    means = np.stack([table[tokenizer.encode(text).ids].mean(axis=0) for text in WIDE_TEXTS])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    for _ in range(2):
        result = client.infer("wide_text", {"TEXT": rows(*WIDE_TEXTS)})
        np.testing.assert_array_equal(result["EMBEDDING"], expected)
        result = client.infer("chain", {"TEXT": rows(*WIDE_TEXTS)})
        np.testing.assert_array_equal(result["FIRST"], [table[tokenizer.encode("").ids[0]]] * len(WIDE_TEXTS))
    assert maps_outputs_of("wide", server, "wide_postprocess")
    assert not maps_outputs_of("wide", server, "first")


def test_a_client_may_send_the_ids_of_its_tokens(client: Client, bare, tmp_path: Path) -> None:
    ids = write_tokenizer(tmp_path).encode(SENTENCES[0]).ids
    by_text = client.infer("sentences_text", {"TEXT": rows(SENTENCES[0])})
    by_ids = client.infer("sentences_text", {"IDS": np.array([ids])})
    np.testing.assert_array_equal(by_ids["EMBEDDING"], by_text["EMBEDDING"])
    assert by_ids["TOKEN_COUNT"].tolist() == [[len(ids)]]


def test_metadata_say_how_texts_are_cut_and_vectors_made(client: Client) -> None:
    assert client.model_metadata("sentences_text").properties == {
        "output": "embedding",
        "pooling": "mean",
        "normalise": "true",
        "max_tokens": "32",
    }
    assert client.model_metadata("whole_text").properties["pooling"] == "by the encoder"
    assert client.model_metadata("judge_text").properties == {
        "output": "score",
        "activation": "sigmoid",
        "max_tokens": "as tokenizer.json says",
    }


def test_an_encoder_without_a_mask_gets_one_text_a_request(client: Client, bare) -> None:
    result = client.infer("narrow_text", {"TEXT": rows(SENTENCES[0])[0]})
    np.testing.assert_allclose(result["EMBEDDING"], bare("narrow", 6)(SENTENCES[0])[0], atol=1e-5)
    with pytest.raises(InvalidArgument, match="unexpected shape for input 'TEXT'"):
        client.infer("narrow_text", {"TEXT": rows(*SENTENCES[:2])})


@pytest.mark.parametrize("name", ["sentences", "sentences_text", "narrow"])
def test_the_client_embeds_texts(server: RocserveProcess, client: Client, name: str) -> None:
    """`sentences` takes several texts in a request, `narrow` one."""
    ensemble = f"{name.removesuffix('_text')}_text"
    single = [rows(text) if name != "narrow" else rows(text)[0] for text in TEXTS]
    expected = np.vstack([client.infer(ensemble, {"TEXT": text})["EMBEDDING"].reshape(1, -1) for text in single])
    # The rows go in other company, and so are rounded otherwise.
    np.testing.assert_allclose(client.embed(name, TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(client.embed(name, TEXTS[0]), expected[0], atol=1e-5)

    async def ask() -> np.ndarray:
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            return await client.embed(name, TEXTS)

    np.testing.assert_allclose(asyncio.run(ask()), expected, atol=1e-5)


def test_the_client_says_that_a_model_makes_no_vectors(client: Client) -> None:
    for name in ("moods", "moods_text"):
        with pytest.raises(InvalidArgument, match="model 'moods_text' does not turn texts into vectors: expected"):
            client.embed(name, "a")


def test_an_encoder_of_one_length_gets_its_length(client: Client) -> None:
    result = client.infer("fixed_text", {"TEXT": rows("cat", LONG)})
    assert result["EMBEDDING"].shape == (2, WIDTH)
    np.testing.assert_allclose(np.linalg.norm(result["EMBEDDING"], axis=1), 1, atol=1e-5)
    assert result["TOKEN_COUNT"].ravel().tolist() == [3, 12]


def test_a_vector_of_the_encoder_itself_is_taken(client: Client, bare) -> None:
    result = client.infer("whole_text", {"TEXT": rows(SENTENCES[1])})
    expected = bare("whole", 32)(SENTENCES[1])
    np.testing.assert_allclose(result["EMBEDDING"][0], expected / np.linalg.norm(expected), atol=1e-5)


def test_a_text_gets_its_label(client: Client, bare) -> None:
    encode = bare("moods", 64)
    result = client.infer("moods_text", {"TEXT": rows(*TEXTS)})
    for row, text in enumerate(TEXTS):
        expected = softmax(encode(text))
        np.testing.assert_allclose(result["PROBABILITIES"][row], expected, atol=1e-5)
        assert result["LABEL"][row].tolist() == [LABELS[expected.argmax()].encode()]
        np.testing.assert_allclose(result["PROBABILITY"][row], [expected.max()], atol=1e-5)


def test_each_token_of_a_text_gets_its_label_and_its_place(client: Client, bare) -> None:
    text = "Zürich: rain"
    result = client.infer("places_text", {"TEXT": rows(text)[0]})
    expected = softmax(bare("places", 6)(text))[1:-1]
    assert len(result["TOKENS"]) == len(expected) == result["TOKEN_COUNT"][0] - 2
    np.testing.assert_allclose(result["PROBABILITIES"], expected.max(axis=1), atol=1e-5)
    assert result["LABELS"].tolist() == [list(KINDS)[number].encode() for number in expected.argmax(axis=1)]
    # The places count characters, not bytes.
    pieces = [text[begin:end] for begin, end in result["OFFSETS"].tolist()]
    assert pieces[1] == ":"
    assert result["TOKENS"][-1].decode().removeprefix("##") == pieces[-1]


def test_a_pair_of_texts_gets_its_score(client: Client, bare) -> None:
    encode = bare("judge", 6)
    pairs = ((SENTENCES[0], "cat"), (SENTENCES[1], "the dog"))
    columns = [rows(*texts) for texts in zip(*pairs, strict=True)]
    result = client.infer("judge_text", {"QUERY": columns[0], "TEXT": columns[1]})
    expected = [logistic(encode(*pair)) for pair in pairs]
    np.testing.assert_allclose(result["SCORE"], expected, atol=1e-5)


def test_a_folder_as_exports_leave_it_is_served_and_its_files_followed(tmp_path: Path, bare) -> None:
    folder = tmp_path / "sentences"
    (folder / "onnx").mkdir(parents=True)
    (folder / "onnx" / "model.onnx").write_bytes(encoder())
    write_json(folder, SENTENCE_FILES)
    write_tokenizer(folder)
    words = (folder / "tokenizer.json").read_text()
    tokens = bare("sentences", 32)(SENTENCES[0])
    with RocserveProcess([], str(folder), log=tmp_path / "server.log") as server:
        server.wait_until_ready()
        client = Client(f"127.0.0.1:{server.port}")

        def gives(vector: np.ndarray) -> bool:
            found = client.infer("sentences_text", {"TEXT": rows(SENTENCES[0])})["EMBEDDING"][0]
            return bool(np.allclose(found, vector / np.linalg.norm(vector), atol=1e-5))

        assert gives(tokens.mean(axis=0))
        write_json(folder, {"1_Pooling/config.json": {"pooling_mode_cls_token": True}})
        wait_until(lambda: gives(tokens[0]), "the new pooling")
        (folder / "tokenizer.json").write_text(words[: len(words) // 2])
        wait_until(lambda: "tokenizer.json cannot be read by tokenizers" in server.log_text, "the damage to be seen")
        assert gives(tokens[0]), "what was served before goes on"


def test_each_request_gets_the_old_or_the_new_encoders_vector_while_encoders_with_other_inputs_are_swapped(
    server: RocserveProcess, models: Path, tmp_path: Path
) -> None:
    """The tokenizer, the encoder and the ensemble are replaced together, also for requests between two steps."""
    encoders = (encoder(), encoder(inputs=("input_ids", "attention_mask")))
    folder = write_encoder(tmp_path, "swapped", encoders[0], SENTENCE_FILES, {})
    tokenizer = write_tokenizer(folder)
    folder = folder.rename(models / "swapped")
    means = [BareEncoder(tokenizer, model, 32)(SENTENCES[0]).mean(axis=0) for model in encoders]
    vectors = [mean / np.linalg.norm(mean) for mean in means]
    assert not np.allclose(*vectors, atol=1e-2)
    answers: list[int | str] = []
    has_ended = threading.Event()

    def ask_on(address: str) -> None:
        client = Client(address)
        # Without a pause, clients take the processors that the swaps need.
        while not has_ended.wait(0.005):
            try:
                vector = client.infer("swapped_text", {"TEXT": rows(SENTENCES[0])})["EMBEDDING"][0]
                answers.append([np.allclose(vector, one, atol=1e-5) for one in vectors].index(True))
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")

    Client(server.address).wait_until_ready(PATIENCE_SECONDS, model="swapped_text")
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(ask_on, server.address) for _ in range(2)]
        try:
            wait_until(lambda: answers, "an answer before the first swap")
            for swap in range(1, SWAPS + 1):
                (tmp_path / "new.onnx").write_bytes(encoders[swap % 2])
                (tmp_path / "new.onnx").rename(folder / "1" / "model.onnx")
                wait_until(lambda wanted=swap % 2: answers[-1:] == [wanted], f"the answer after swap {swap}")
        finally:
            has_ended.set()
    for one in asked:
        one.result()
    assert Counter(answer for answer in answers if isinstance(answer, str)) == {}, server.log_text
    changes = sum(one != other for one, other in itertools.pairwise(answers))
    assert changes >= SWAPS


def test_a_folder_whose_model_takes_no_tokens_serves_it_alone(tmp_path: Path) -> None:
    folder = tmp_path / "adder"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(add_constant(1.0))
    write_tokenizer(folder)
    with RocserveProcess([], str(folder), log=tmp_path / "server.log") as server:
        server.wait_until_ready()
        assert [entry.name for entry in Client(f"127.0.0.1:{server.port}").repository_index()] == ["adder"]
        assert "adder_text is not served: model 'adder': preprocess 'text' is for a model with" in server.log_text


@pytest.mark.parametrize(
    ("inputs", "wording"),
    [
        ({}, r"expected TEXT, or IDS \(the ids of its tokens\) in its place; got neither"),
        ({"TEXT": rows("a"), "IDS": np.array([[5]])}, "in its place; got both"),
        ({"TEXT": np.array([[b"a"], [b"\xff"]], object)}, "row 1 of TEXT is not UTF-8 text: invalid start byte"),
        ({"IDS": np.array([[5, 4000]])}, "IDS has the token id 4000, but the encoder knows 0 to"),
        ({"IDS": np.array([[-1]])}, "IDS has the token id -1, but the encoder knows 0 to"),
        ({"IDS": np.ones((1, 33), np.int64)}, "IDS has 33 tokens for each text; expected 1 to 32"),
        ({"IDS": np.ones((1, 0), np.int64)}, "IDS has 0 tokens for each text; expected 1 to 32"),
        # The ids of another model's tokenizer, which this encoder knows all the same.
        (
            {"IDS": np.array([[5, 6, 3]])},
            r"IDS: expected ids that begin with \[2\] and end with \[3\], the tokens that",
        ),
        ({"IDS": np.array([[2, 5, 6]])}, r"tokenizer adds to a text, got \[2, 5, 6\]"),
        ({"IDS": np.array([[5] * 20])}, r"got \[5, 5, \.\.\., 5\]; ids of another tokenizer"),
    ],
)
def test_what_is_not_a_text_is_refused(client: Client, inputs, wording: str) -> None:
    with pytest.raises(InvalidArgument, match=wording):
        client.infer("sentences_text", inputs)


def test_the_same_models_answer_in_openais_form(server: RocserveProcess, client: Client, tmp_path: Path) -> None:
    def embed(model: str, given: object, **more: object) -> tuple[int, Any]:
        body = {"model": model, "input": given, **more}
        return ask(server, "POST", "/v1/embeddings", body, timeout=PATIENCE_SECONDS)

    expected = client.infer("sentences_text", {"TEXT": rows(*TEXTS)})
    status, answer = embed("sentences", TEXTS)
    assert (status, answer["model"]) == (200, "sentences_text")
    vectors = [entry["embedding"] for entry in answer["data"]]
    # The rows go in other company, and so are rounded otherwise.
    np.testing.assert_allclose(vectors, expected["EMBEDDING"], atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == expected["TOKEN_COUNT"].sum()
    tokenizer = write_tokenizer(tmp_path)
    ids = [tokenizer.encode(text).ids for text in TEXTS[:5]]
    status, answer = embed("sentences", ids)
    assert status == 200
    np.testing.assert_allclose([entry["embedding"] for entry in answer["data"]], vectors[:5], atol=1e-5)
    status, answer = embed("sentences", [[5, 6, 7]])
    assert status == 400
    assert "LangChain's OpenAIEmbeddings does with check_embedding_ctx_length=False" in answer["error"]["message"]
    # What config.json says about shorter vectors.
    whole = client.infer("whole_text", {"TEXT": rows(TEXTS[0])})["EMBEDDING"][0]
    status, answer = embed("whole", TEXTS[0], dimensions=4)
    np.testing.assert_allclose(answer["data"][0]["embedding"], whole[:4] / np.linalg.norm(whole[:4]), atol=1e-5)
    assert embed("sentences", TEXTS[0], dimensions=4)[0] == 400
    body = {"model": "judge", "query": SENTENCES[0], "documents": TEXTS}
    status, answer = ask(server, "POST", "/v1/rerank", body, timeout=PATIENCE_SECONDS)
    assert status == 200
    scores = client.infer("judge_text", {"QUERY": rows(*[SENTENCES[0]] * len(TEXTS)), "TEXT": rows(*TEXTS)})["SCORE"]
    found = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    np.testing.assert_allclose([found[place] for place in range(len(TEXTS))], scores[:, 0], atol=1e-5)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    listed = ask(server, "GET", "/v1/models")[1]["data"]
    assert {"sentences_text", "judge_text"} <= {entry["id"] for entry in listed}
    assert not {"sentences", "sentences_tokenize", "moods_text", "places_text"} & {entry["id"] for entry in listed}
