"""Sequences over gRPC with Triton's clients: their sums must be exact whatever other clients do."""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from onnx import TensorProto
from support.infer_inputs import infer_input
from support.models import drop, identity
from support.sequences import (
    CRASHING_CONFIG,
    CRASHING_MODEL,
    ENSEMBLE_CONFIG,
    GROWING_CONFIG,
    ITERATIVE_CONFIG,
    ITERATIVE_MODEL,
    PYTHON_CONFIG,
    PYTHON_MODEL,
    TEXTS_CONFIG,
    ask,
    drop_accumulator,
    growing,
    request_input,
    run_at_once,
    run_sequence,
)
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

DIRECT = "direct { } max_sequence_idle_microseconds: 90000000"
OLDEST = "oldest { max_candidate_sequences: 8 } max_sequence_idle_microseconds: 90000000"


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    repository = tmp_path_factory.mktemp("sequences")
    two = "instance_group { count: 2 kind: KIND_CPU }"
    drop_accumulator(repository, "direct", DIRECT, more=two)
    drop_accumulator(repository, "oldest", OLDEST, more=two)
    drop_accumulator(repository, "single", DIRECT, max_batch_size=0)
    state = drop(repository, "python", PYTHON_MODEL, PYTHON_CONFIG) / "initial_state"
    state.mkdir()
    (state / "begin").write_bytes(np.array([100, 200], np.int32).tobytes())
    iterative = ITERATIVE_CONFIG + "sequence_batching { iterative_sequence: true }"
    drop(repository, "growing", growing(), GROWING_CONFIG)
    drop(repository, "texts", identity(TensorProto.STRING, ["batch", 2]), TEXTS_CONFIG)
    drop(repository, "chain", None, ENSEMBLE_CONFIG)
    drop(repository, "crashing", CRASHING_MODEL, CRASHING_CONFIG)
    drop(repository, "iterative", ITERATIVE_MODEL, iterative)
    decoupled = iterative + " model_transaction_policy { decoupled: true }"
    drop(repository, "iterative_decoupled", ITERATIVE_MODEL, decoupled)
    return start(repository)


@pytest.fixture
def client(server: RocserveProcess) -> triton.InferenceServerClient:
    return server.client()


@pytest.mark.parametrize("model", ["direct", "oldest", "single"])
def test_hundreds_of_sequences_at_once(server: RocserveProcess, model: str) -> None:
    counters = itertools.count(1000)

    def run(number: int) -> None:
        with server.client() as own:
            for round_number in range(8):
                values = [number + round_number + step for step in range(1 + (number + round_number) % 5)]
                sums = run_sequence(own, model, next(counters), values, batches=model != "single")
                assert sums == list(itertools.accumulate(values))

    run_at_once(25, run)


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_streams_with_many_sequences(server: RocserveProcess, model: str) -> None:
    answers: queue.Queue[tuple[triton.InferResult | None, InferenceServerException | None]] = queue.Queue()
    expected: dict[str, int] = {}
    with server.client() as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for step in range(6):
            for sequence in range(40):
                request_id = f"{sequence}:{step}"
                expected[request_id] = sum(sequence * 10 + past for past in range(step + 1))
                client.async_stream_infer(
                    model,
                    [request_input(sequence * 10 + step)],
                    request_id=request_id,
                    sequence_id=sequence + 1,
                    sequence_start=step == 0,
                    sequence_end=step == 5,
                )
        for _ in range(len(expected)):
            result, error = answers.get(timeout=PATIENCE_SECONDS)
            assert error is None, error
            assert result is not None
            assert int(result.as_numpy("SUM")[0, 0]) == expected.pop(result.get_response().id)
        client.stop_stream()
    assert not expected


@pytest.mark.parametrize("sequence", [2**63 + 5, "a text"])
def test_sequences_over_http(server: RocserveProcess, sequence: int | str) -> None:
    model = "python" if isinstance(sequence, str) else "direct"
    given = triton_http.InferInput("INPUT", [1, 2], "INT32")
    with triton_http.InferenceServerClient(server.http_address) as client:
        totals = []
        for place in range(3):
            given.set_data_from_numpy(np.array([[1, 2]], np.int32))
            result = client.infer(
                model, [given], sequence_id=sequence, sequence_start=place == 0, sequence_end=place == 2
            )
            totals.append(int(result.as_numpy("SUM")[0, 0]) % 100)
        assert totals == [1, 2, 3]
        with pytest.raises(InferenceServerException, match=f"inference request for sequence {sequence} to model"):
            client.infer(model, [given], sequence_id=sequence)


def test_a_python_model_sees_its_controls_and_states(client: triton.InferenceServerClient) -> None:
    for place, (value, total) in enumerate([(1, 1), (2, 3), (3, 6)]):
        result = ask(client, "python", value, "a text", start=place == 0, end=place == 2)
        assert result.as_numpy("SUM").tolist() == [[100 + total, 200 + 2 * total]]
        flags = (place == 0) + 2 * (place == 2)
        assert result.as_numpy("SEEN").tolist() == [[5 if place == 0 else -3, int(place == 2), 1, 1]]
        assert result.as_numpy("NAME").tolist() == [[f"a text/a text/{flags}".encode()]]
        assert [output.name for output in result.get_response().outputs] == ["SUM", "SEEN", "NAME"]


def test_states_of_text_grow_as_the_model_says(server: RocserveProcess) -> None:
    def run(number: int) -> None:
        words = [f"{number}:{place}" for place in range(number % 5 + 1)]
        given = triton.InferInput("INPUT", [1, 1], "BYTES")
        with server.client() as own:
            for place, word in enumerate(words):
                given.set_data_from_numpy(np.array([[word.encode()]], dtype=object))
                last = place == len(words) - 1
                result = own.infer(
                    "growing", [given], sequence_id=f"s{number}", sequence_start=place == 0, sequence_end=last
                )
                seen = [entry.decode() for entry in result.as_numpy("WORDS")[0]]
                # It begins with one empty text: a dimension of any size starts as 1.
                assert seen == ["", *words[: place + 1]]

    run_at_once(20, run)


def test_an_ensemble_passes_sequences_on(client: triton.InferenceServerClient) -> None:
    assert run_sequence(client, "chain", 61, [4, 5, 6]) == [4, 9, 15]
    with pytest.raises(InferenceServerException, match="in ensemble 'chain', inference request for sequence 61"):
        ask(client, "chain", 1, 61)


def test_a_crash_ends_the_sequences_that_were_there(client: triton.InferenceServerClient) -> None:
    ask(client, "crashing", 1, 1, start=True)
    ask(client, "crashing", 1, 2, start=True)
    with pytest.raises(InferenceServerException) as caught:
        ask(client, "crashing", -1, 1)
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    # The other sequence was in the same worker: the model's state of it is lost.
    wait_until(lambda: _starts_again(client), "the model's new worker")
    with pytest.raises(InferenceServerException) as caught:
        ask(client, "crashing", 1, 2)
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert "sequence 2 of model 'crashing' has been lost with the worker that ran it" in caught.value.message()
    assert ask(client, "crashing", 5, 2, start=True, end=True).as_numpy("SUM").tolist() == [[5, 10]]


def _starts_again(client: triton.InferenceServerClient) -> bool:
    try:
        ask(client, "crashing", 1, 3, start=True, end=True)
    except InferenceServerException:
        return False
    return True


def test_rows_of_nobody_have_empty_texts(client: triton.InferenceServerClient) -> None:
    given = triton.InferInput("INPUT0", [1, 2], "BYTES")
    for sequence in (1, 2, 3):
        words = [f"a{sequence}".encode(), b"" if sequence == 2 else b"longer"]
        given.set_data_from_numpy(np.array([words], dtype=object))
        result = client.infer("texts", [given], sequence_id=sequence, sequence_start=True)
        assert result.as_numpy("OUTPUT0").tolist() == [words]


def _iterative_input(value: int) -> triton.InferInput:
    return infer_input("INPUT", np.array([[value]], np.int32))


def test_iterative_requests_come_until_they_are_done(server: RocserveProcess) -> None:
    with server.client() as client:
        before = client.get_inference_statistics("iterative").model_stats[0]

        def run(number: int) -> None:
            with server.client() as own:
                result = own.infer("iterative", [_iterative_input(3 + number % 3)])
                assert result.as_numpy("OUT").tolist() == [[0]]

        run_at_once(12, run)
        after = client.get_inference_statistics("iterative").model_stats[0]
        assert after.inference_stats.success.count - before.inference_stats.success.count >= 12


def test_iterative_responses_come_as_they_are_made(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[triton.InferResult | None, InferenceServerException | None]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("iterative_decoupled", [_iterative_input(5)])
    seen = []
    for _ in range(5):
        result, error = answers.get(timeout=PATIENCE_SECONDS)
        assert error is None, error
        assert result is not None
        seen.append(int(result.as_numpy("OUT")[0, 0]))
    client.stop_stream()
    assert seen == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_a_request_that_is_given_up_ends_only_its_own_sequence(server: RocserveProcess, model: str) -> None:
    """Twelve clients share eight slots. Each starts a sequence again and again under one id, without having ended it,
    while its earlier request waits, runs, is cancelled or late."""

    def run(number: int) -> None:
        chance, sequence = random.Random(number), 7000 + number
        answers: queue.Queue[tuple[triton.InferResult | None, InferenceServerException | None]] = queue.Queue()
        with server.client() as own:
            # Calls keep their order on a channel that is connected.
            assert own.is_server_live()
            for _ in range(12):
                given_up = own.async_infer(
                    model,
                    [request_input(1000)],
                    lambda result, error: None,
                    sequence_id=sequence,
                    sequence_start=True,
                    client_timeout=chance.choice((None, 0.001, 0.004)),
                )
                values = [chance.randrange(100) for _ in range(chance.randint(2, 4))]
                own.async_infer(
                    model,
                    [request_input(values[0])],
                    lambda result, error: answers.put((result, error)),
                    sequence_id=sequence,
                    sequence_start=True,
                )
                if chance.random() < 0.7:
                    time.sleep(chance.random() * 0.004)
                    given_up.cancel()
                result, error = answers.get(timeout=PATIENCE_SECONDS)
                assert error is None, error
                assert result is not None
                results = [result]
                for place, value in enumerate(values[1:], 2):
                    results.append(ask(own, model, value, sequence, end=place == len(values)))
                sums = [int(result.as_numpy("SUM")[0, 0]) for result in results]
                assert sums == list(itertools.accumulate(values))

    run_at_once(12, run)


def test_iterative_requests_of_several_clients_share_an_id(server: RocserveProcess) -> None:
    """Also while other clients leave theirs unfinished."""

    def run(number: int) -> None:
        chance = random.Random(number)
        for _ in range(6):
            answers: queue.Queue[tuple[triton.InferResult | None, InferenceServerException | None]] = queue.Queue()
            count, leaves = chance.randint(2, 6), number % 3 == 0
            with server.client() as own:
                own.start_stream(lambda result, error, answers=answers: answers.put((result, error)))
                own.async_stream_infer(
                    "iterative_decoupled", [_iterative_input(count)], sequence_id=1 + number % 2, sequence_start=True
                )
                seen = []
                while len(seen) < (1 if leaves else count):
                    result, error = answers.get(timeout=PATIENCE_SECONDS)
                    assert error is None, error
                    assert result is not None
                    seen.append(int(result.as_numpy("OUT")[0, 0]))
                assert seen == list(range(count))[::-1][: len(seen)]
                own.stop_stream(cancel_requests=leaves)

    run_at_once(8, run)


def test_sequences_stay_with_the_version_that_began_them(serve: Callable[..., RocserveProcess], tmp_path: Path) -> None:
    repository = tmp_path / "models"
    drop_accumulator(repository, "m", OLDEST)
    server = serve(repository, flags=("--model-control-mode=poll", "--repository-poll-secs=1"))
    server.wait_until_ready()
    client = server.client()
    ask(client, "m", 3, 9, start=True)
    drop_accumulator(repository, "m", OLDEST, version=2)
    wait_until(lambda: client.is_model_ready("m", "2"), "version 2")
    result = ask(client, "m", 4, 9)
    assert (int(result.as_numpy("SUM")[0, 0]), result.get_response().model_version) == (7, "1")
    other = ask(client, "m", 1, 10, start=True, end=True)
    assert other.get_response().model_version == "2"
    result = ask(client, "m", 5, 9, end=True)
    assert (int(result.as_numpy("SUM")[0, 0]), result.get_response().model_version) == (12, "1")
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        ask(client, "m", 5, 9)
