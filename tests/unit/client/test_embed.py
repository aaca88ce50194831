"""embed(): the requests that the clients send for texts, and the vectors in the order of the texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve_client import Balancing, Cancelled, Client, DeadlineExceeded, Internal, InvalidArgument, NotFound

TEXTS = ("longer than all others", "b", "a cat", "dd", "zwölf", "a", "the dog", "ccc", "eeee")


def expected(*texts: str) -> np.ndarray:
    return np.array([[len(data := text.encode()), data[0], data[-1]] for text in texts], np.float32)


@pytest.mark.parametrize("texts", [TEXTS, list(TEXTS), np.array(TEXTS)], ids=["tuple", "list", "array"])
def test_vectors_come_in_the_order_of_the_texts(call: Any, vectors: Any, texts: Any) -> None:
    found = call(vectors.address, "embed", "rows", texts)
    np.testing.assert_array_equal(found, expected(*TEXTS))
    assert found.dtype == np.float32
    # Texts of like length share a request, of as many as the model takes; requests arrive in any order.
    assert sorted(vectors.texts) == sorted(
        [["b", "a", "dd", "ccc"], ["eeee", "a cat", "zwölf", "the dog"], ["longer than all others"]]
    )


def test_one_text_has_one_vector(call: Any, vectors: Any) -> None:
    for model in ("rows", "single"):
        np.testing.assert_array_equal(call(vectors.address, "embed", model, "a cat"), expected("a cat")[0])
    assert call(vectors.address, "embed", "rows", ["a cat"]).shape == (1, 3)


def test_no_text_has_no_vector_and_sends_no_request(call: Any, vectors: Any) -> None:
    assert call(vectors.address, "embed", "rows", []).shape == (0, 3)
    assert vectors.texts == []


def test_an_encoder_stands_for_the_ensemble_that_is_generated_for_it(call: Any, vectors: Any) -> None:
    np.testing.assert_array_equal(call(vectors.address, "embed", "behind", TEXTS), expected(*TEXTS))
    assert vectors.requests[-1].model_name == "behind_text"


def test_a_model_without_rows_gets_eight_requests_at_once(call: Any, vectors: Any) -> None:
    texts = [f"text {number}" for number in range(40)]
    vectors.gate = 8
    np.testing.assert_array_equal(call(vectors.address, "embed", "single", texts), expected(*texts))
    assert sorted(vectors.texts) == sorted([text] for text in texts)
    assert vectors.most_under_way == 8


def test_an_error_is_raised_and_cancels_the_other_requests(call: Any, vectors: Any) -> None:
    vectors.gate = 3
    with pytest.raises(InvalidArgument, match="asked to fail"):
        call(vectors.address, "embed", "single", ["fail", "wait", "wait"])
    wait_until(lambda: vectors.cancelled == 2)
    assert len(vectors.texts) == 3


def test_the_timeout_is_that_of_the_whole_call(call: Any, vectors: Any) -> None:
    for model in ("single", "rows"):
        with pytest.raises(DeadlineExceeded):
            call(vectors.address, "embed", model, ["wait", "a"], timeout=0.2)
    with pytest.raises(DeadlineExceeded):
        call(vectors.address, "embed", "rows", "a", timeout=0)
    np.testing.assert_array_equal(
        call(vectors.address, "embed", "rows", "a", timeout=PATIENCE_SECONDS), expected("a")[0]
    )


def test_parameters_and_headers_go_with_each_request(call: Any, vectors: Any) -> None:
    call(vectors.address, "embed", "single", ["a", "b"], priority=2, parameters={"timeout": 7}, headers={"Key": "v"})
    sent = [request for request in vectors.requests if hasattr(request, "model_name")]
    assert len(sent) == 2
    for request in sent:
        assert request.parameters["priority"].uint64_param == 2
        assert request.parameters["timeout"].int64_param == 7
    assert [metadata["key"] for metadata in vectors.metadata] == ["v"] * 3


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", b"b"], r"texts\[1\] is a bytes, expected a str"),
        (b"a", r"texts\[0\] is a int, expected a str"),
        ("\ud800", "input 'TEXT': 'utf-8' codec can't encode character"),
    ],
)
def test_what_is_not_a_text_is_refused(call: Any, vectors: Any, texts: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call(vectors.address, "embed", "rows", texts)
    assert vectors.texts == []


def test_a_model_that_makes_no_vectors_is_refused(call: Any, vectors: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(vectors.address, "embed", "shapes", "a")
    assert caught.value.text == (
        "model 'shapes' does not turn texts into vectors: expected input TEXT (BYTES [1]) and output EMBEDDING (FP32"
        " [width]), got inputs input_ids and outputs OUT; beside a tokenizer.json the parameter `preprocess: text`"
        " makes such a model of an encoder"
    )
    with pytest.raises(NotFound, match="'nothing' is not found"):
        call(vectors.address, "embed", "nothing", "a")


def test_an_answer_without_vectors_is_the_servers_fault(call: Any, vectors: Any) -> None:
    with pytest.raises(Internal, match="model 'rows' gave 0 numbers for 2 texts"):
        call(vectors.address, "embed", "rows", ["empty", "a"])


def test_the_rules_of_all_calls_hold(call: Any, vectors: Any) -> None:
    with pytest.raises(InvalidArgument, match="the requests of a sequence belong on one server"):
        call(
            vectors.address,
            "embed",
            "rows",
            "a",
            parameters={"sequence_id": 1},
            connection={"balancing": Balancing(health_check=False)},
        )
    client = Client(vectors.address)
    client.close()
    with pytest.raises(Cancelled):
        client.embed("rows", "a")
