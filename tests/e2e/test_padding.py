"""Requests of unlike lengths that share batches, padded by the server: each answer is compared with the bare session on
the input as the client sent it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from support import metrics
from support.encoders import VOCABULARY, demanding, encoder, with_own_names
from support.infer_inputs import infer_input
from support.models import drop, graph
from support.repository_index import reason_of
from support.server import RocserveProcess, Start
from support.shared_memory import shared_file
from support.waiting import LOAD_CHECK_SECONDS, PATIENCE_SECONDS, wait_until

from rocserve.load_check.recorded import RecordedAnswers, write_recorded
from rocserve_client import Client

Arrays = Mapping[str, np.ndarray[Any, Any]]

SIZES = 'parameters { key: "sizes" value: { string_value: "sequence=8,16,32" } }'
OUTPUTS = ("tokens", "pooled")
TOLERANCE = 1e-5
"""The sums over a longer axis are rounded otherwise."""

TENSORS = f"""
backend: "onnxruntime"
max_batch_size: 8
input {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }}
input {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }}
output {{ name: "tokens" data_type: TYPE_FP32 dims: [ -1, 16 ] }}
output {{ name: "pooled" data_type: TYPE_FP32 dims: [ 16 ] }}
{SIZES}
"""
JOINED = TENSORS + "dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 80000000 }"
UNNAMED = JOINED.replace("sequence=", "attention_mask:0=")
"""Names one of the dimensions that must be equal. The index does not count the batch."""
TRIED = (
    TENSORS
    + """
model_warmup { name: "short" batch_size: 2
  inputs { key: "input_ids" value { data_type: TYPE_INT64 dims: [ 5 ] zero_data: true } }
  inputs { key: "attention_mask" value { data_type: TYPE_INT64 dims: [ 5 ] zero_data: true } } }
"""
)

WHOLE = f"""
backend: "onnxruntime"
max_batch_size: 0
input {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1, -1 ] }}
input {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1, -1 ] }}
output {{ name: "tokens" data_type: TYPE_FP32 dims: [ -1, -1, 16 ] }}
output {{ name: "pooled" data_type: TYPE_FP32 dims: [ -1, 16 ] }}
{SIZES}
"""

TOKENIZER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        (text,) = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel()
        ids = np.array([[*text]], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("IDS", ids), pb_utils.Tensor("MASK", np.ones_like(ids))])
"""
TOKENIZER_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "IDS" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "MASK" data_type: TYPE_INT64 dims: [ -1 ] }
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "TOKENS" data_type: TYPE_FP32 dims: [ -1, 16 ] }
output { name: "POOLED" data_type: TYPE_FP32 dims: [ 16 ] }
ensemble_scheduling {
  step { model_name: "tokenizer" model_version: -1
    input_map { key: "TEXT" value: "TEXT" }
    output_map { key: "IDS" value: "ids" } output_map { key: "MASK" value: "mask" } }
  step { model_name: "encoder" model_version: -1
    input_map { key: "input_ids" value: "ids" } input_map { key: "attention_mask" value: "mask" }
    output_map { key: "tokens" value: "TOKENS" } output_map { key: "pooled" value: "POOLED" } }
}
"""

PREFIXES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            ids = pb_utils.get_input_tensor_by_name(request, "IDS").as_numpy()
            for length in range(1, ids.shape[1] + 1):
                own = np.ascontiguousarray(ids[:, :length])
                inputs = [pb_utils.Tensor("input_ids", own), pb_utils.Tensor("attention_mask", np.ones_like(own))]
                call = pb_utils.InferenceRequest(
                    model_name="encoder", requested_output_names=["tokens"], inputs=inputs
                )
                answer = call.exec()
                tokens = pb_utils.get_output_tensor_by_name(answer, "tokens").as_numpy()
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("TOKENS", tokens)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PREFIXES_CONFIG = """
backend: "python"
max_batch_size: 4
model_transaction_policy { decoupled: true }
input { name: "IDS" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "TOKENS" data_type: TYPE_FP32 dims: [ -1, 16 ] }
"""

SEQUENCES = """
backend: "onnxruntime"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "DOUBLED" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "TOTAL" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  %s
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  state { input_name: "STATE" output_name: "NEXT" data_type: TYPE_FP32 dims: [ 1 ] }
}
parameters { key: "sizes" value: { string_value: "n=4,8,16" } }
"""


def summing() -> bytes:
    """DOUBLED = 2 X, TOTAL = NEXT = STATE + the sum of X."""
    floats, one = TensorProto.FLOAT, ["batch", 1]
    return graph(
        [
            helper.make_node("Add", ["X", "X"], ["DOUBLED"]),
            helper.make_node("Constant", [], ["axis"], value=helper.make_tensor("axis", TensorProto.INT64, [1], [1])),
            helper.make_node("ReduceSum", ["X", "axis"], ["sum"], keepdims=1),
            helper.make_node("Add", ["sum", "STATE"], ["TOTAL"]),
            helper.make_node("Identity", ["TOTAL"], ["NEXT"]),
            helper.make_node("Identity", ["START"], ["SEEN"]),
        ],
        {"X": (floats, ["batch", "n"]), "STATE": (floats, one), "START": (TensorProto.INT32, one)},
        {"DOUBLED": (floats, ["batch", "n"]), "TOTAL": (floats, one), "NEXT": (floats, one)},
    )


@pytest.fixture(scope="module")
def bare() -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(encoder().SerializeToString(), options)


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory, bare: ort.InferenceSession) -> RocserveProcess:
    repository = tmp_path_factory.mktemp("padding")
    model = encoder().SerializeToString()
    drop(repository, "encoder", model, SIZES)
    drop(repository, "joined", model, JOINED)
    drop(repository, "unnamed", with_own_names(encoder(), "").SerializeToString(), UNNAMED)
    drop(repository, "numbered", with_own_names(encoder()).SerializeToString(), SIZES.replace("sequence=", "unk__4="))
    drop(repository, "demanding", demanding().SerializeToString(), SIZES.replace("sequence=", "b="))
    drop(repository, "whole", model, WHOLE)
    recorded = feed(np.random.default_rng(6), 2, 7)
    answers = dict(zip(OUTPUTS, bare.run([*OUTPUTS], recorded), strict=True))
    write_recorded(drop(repository, "tried", model, TRIED) / "check.npz", RecordedAnswers(recorded, answers))
    drop(repository, "tokenizer", TOKENIZER, TOKENIZER_CONFIG)
    drop(repository, "texts", None, ENSEMBLE)
    drop(repository, "prefixes", PREFIXES, PREFIXES_CONFIG)
    drop(repository, "direct", summing(), SEQUENCES % "direct { }")
    drop(repository, "oldest", summing(), SEQUENCES % "oldest { }")
    # For inputs that are found on a busy machine, too.
    return start(repository, "--allow-client-shm=true", f"--load-check-seconds={LOAD_CHECK_SECONDS:g}", *metrics.FLAGS)


def feed(rng: np.random.Generator, rows: int, length: int) -> dict[str, np.ndarray]:
    ids = rng.integers(0, VOCABULARY, (rows, length))
    mask = (np.arange(length) < rng.integers(1, length + 1, (rows, 1))).astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask}


def ask(server: RocserveProcess, model: str, inputs: Arrays, **more: Any) -> triton.InferResult:
    entries = [infer_input(name, array) for name, array in inputs.items()]
    return server.client().infer(model, entries, client_timeout=PATIENCE_SECONDS, **more)


def check(answer: triton.InferResult, bare: ort.InferenceSession, inputs: Arrays, names: tuple[str, ...]) -> None:
    assert [output.name for output in answer.get_response().outputs] == [*names]
    for name, expected in zip(names, bare.run([*names], dict(inputs)), strict=True):
        found = answer.as_numpy(name)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def together(server: RocserveProcess, model: str, feeds: list[dict[str, np.ndarray]]) -> list[triton.InferResult]:
    with ThreadPoolExecutor(len(feeds)) as pool:
        return list(pool.map(lambda inputs: ask(server, model, inputs), feeds))


@pytest.mark.parametrize("model", ["joined", "unnamed"])
def test_requests_of_unlike_lengths_share_a_batch(
    server: RocserveProcess, bare: ort.InferenceSession, model: str
) -> None:
    rng = np.random.default_rng(1)
    feeds = [feed(rng, 1, length) for length in (5, 8, 1)]
    for inputs, answer in zip(feeds, together(server, model, feeds), strict=True):
        check(answer, bare, inputs, OUTPUTS)
    (statistics,) = server.client().get_inference_statistics(model).model_stats
    assert [batch.batch_size for batch in statistics.batch_stats] == [3]
    samples, labels = metrics.scrape(metrics.port_of(server)), f'{{model="{model}",version="1"}}'
    # Two inputs of 14 elements, filled up to 3 rows of 8.
    assert samples[f"rocserve_real_elements_total{labels}"] == "28"
    assert samples[f"rocserve_padded_elements_total{labels}"] == "20"
    assert not [name for name in samples if name.startswith("rocserve_real") and "tokenizer" in name]


@pytest.mark.parametrize("model", ["encoder", "numbered"])
def test_random_requests(server: RocserveProcess, bare: ort.InferenceSession, model: str) -> None:
    rng = np.random.default_rng(0)
    requests = []
    for number in range(150):
        inputs = feed(rng, int(rng.integers(1, 4)), int(rng.integers(1, 33)))
        if number % 3 == 0:
            inputs = dict(reversed(inputs.items()))
        requests.append((inputs, (OUTPUTS, OUTPUTS[:1], OUTPUTS[1:])[number % 3]))
    client = server.client()

    def run(request: tuple[dict[str, np.ndarray], tuple[str, ...]]) -> triton.InferResult:
        inputs, names = request
        entries = [infer_input(name, array) for name, array in inputs.items()]
        outputs = [triton.InferRequestedOutput(name) for name in names]
        return client.infer(model, entries, outputs=outputs, client_timeout=PATIENCE_SECONDS)

    with ThreadPoolExecutor(24) as pool:
        for (inputs, names), answer in zip(requests, pool.map(run, requests), strict=True):
            check(answer, bare, inputs, names)


def test_a_model_without_batches_is_padded_too(server: RocserveProcess, bare: ort.InferenceSession) -> None:
    rng = np.random.default_rng(3)
    for rows, length in ((1, 5), (3, 16), (2, 17)):
        inputs = feed(rng, rows, length)
        check(ask(server, "whole", inputs), bare, inputs, OUTPUTS)


def test_a_model_that_refuses_zeros(server: RocserveProcess) -> None:
    own, rng = ort.InferenceSession(demanding().SerializeToString()), np.random.default_rng(7)
    feeds = [feed(rng, rows, length) for rows, length in ((1, 5), (2, 8), (1, 1), (3, 20), (1, 32))]
    for inputs, answer in zip(feeds, together(server, "demanding", feeds), strict=True):
        check(answer, own, inputs, ("tokens",))


@pytest.mark.parametrize(
    ("model", "label"),
    [("encoder", "sequence"), ("whole", "sequence"), ("unnamed", "attention_mask:0"), ("numbered", "unk__4")],
)
@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ((33, 33), "is 33, expected 1 to 32, the largest of its sizes 8, 16, 32; send less, or write larger sizes"),
        ((0, 0), "is 0, expected 1 to 32"),
        ((5, 6), "dimension 'LABEL' is 5 in input 'input_ids' and 6 in input 'attention_mask'; both must be equal"),
    ],
)
def test_refusals(server: RocserveProcess, model: str, label: str, lengths: tuple[int, int], text: str) -> None:
    inputs = {
        name: np.ones((1, length), np.int64)
        for name, length in zip(("input_ids", "attention_mask"), lengths, strict=True)
    }
    with pytest.raises(triton.InferenceServerException) as refused:
        ask(server, model, inputs)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert text.replace("LABEL", label) in refused.value.message()


def test_metadata_tell_the_sizes(server: RocserveProcess) -> None:
    with Client(server.address) as client:
        assert client.model_metadata("encoder").properties["sizes"] == "sequence=8,16,32"
        assert client.model_metadata("numbered").properties["sizes"] == "unk__4=8,16,32"
        assert "sizes" not in client.model_metadata("tokenizer").properties


def test_samples_and_recorded_requests_are_padded_too(server: RocserveProcess) -> None:
    with Client(server.address) as client:
        assert "recorded answers" in client.model_metadata("tried").properties["load_check"]


def test_an_ensemble_whose_member_is_padded(server: RocserveProcess, bare: ort.InferenceSession) -> None:
    texts = [b"a", b"cde", b"fghijklmnopq", b"a text that needs twenty-four"[:24], b"xy"]
    feeds = [{"TEXT": np.array([[text]], np.object_)} for text in texts]
    for text, answer in zip(texts, together(server, "texts", feeds), strict=True):
        ids = np.array([[*text]], np.int64)
        tokens, pooled = bare.run([*OUTPUTS], {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        np.testing.assert_allclose(answer.as_numpy("TOKENS"), tokens, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(answer.as_numpy("POOLED"), pooled, rtol=0, atol=TOLERANCE)


def test_an_ensemble_tells_which_length_is_too_long(server: RocserveProcess) -> None:
    with pytest.raises(triton.InferenceServerException, match=r"in ensemble 'texts', .* is 33, expected 1 to 32"):
        ask(server, "texts", {"TEXT": np.array([[b"t" * 33]], np.object_)})


def test_a_decoupled_model_that_calls_a_padded_one(server: RocserveProcess, bare: ort.InferenceSession) -> None:
    ids = np.random.default_rng(4).integers(0, VOCABULARY, (1, 10))
    found = [answer.as_numpy("TOKENS") for answer in _stream(server.client(), "prefixes", ids)]
    assert [tokens.shape[1] for tokens in found] == [*range(1, 11)]
    for length, tokens in enumerate(found, 1):
        own = ids[:, :length]
        (expected,) = bare.run(["tokens"], {"input_ids": own, "attention_mask": np.ones_like(own)})
        np.testing.assert_allclose(tokens, expected, rtol=0, atol=TOLERANCE)


def _stream(client: triton.InferenceServerClient, model: str, ids: np.ndarray) -> list[triton.InferResult]:
    """The responses of a decoupled model, as many as `ids` has columns."""
    results: Queue[tuple[triton.InferResult | None, Exception | None]] = Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    client.async_stream_infer(model, [infer_input("IDS", ids)])
    answers = []
    for _ in range(ids.shape[1]):
        result, error = results.get(timeout=PATIENCE_SECONDS)
        assert error is None and result is not None, error
        answers.append(result)
    client.stop_stream()
    return answers


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_sequences_with_states(server: RocserveProcess, strategy: str) -> None:
    def run(sequence: int) -> None:
        rng, client, total = np.random.default_rng(sequence), server.client(), 0
        for step in range(6):
            values = rng.integers(1, 100, (1, int(rng.integers(1, 17)))).astype(np.float32)
            total += values.sum()
            answer = client.infer(
                strategy,
                [infer_input("X", values)],
                sequence_id=sequence,
                sequence_start=step == 0,
                sequence_end=step == 5,
                client_timeout=PATIENCE_SECONDS,
            )
            np.testing.assert_array_equal(answer.as_numpy("DOUBLED"), 2 * values)
            assert answer.as_numpy("TOTAL").tolist() == [[total]]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(1, 7)))


def test_inputs_and_outputs_in_shared_memory(server: RocserveProcess, bare: ort.InferenceSession) -> None:
    inputs = feed(np.random.default_rng(5), 2, 11)
    client, nbytes = server.client(), 2 * 11 * 8
    with shared_file(4096, "padding") as file:
        client.register_system_shared_memory("padding", file.key, 4096)
        entries = []
        for place, (name, array) in enumerate(inputs.items()):
            file.put(place * nbytes, array.tobytes())
            entry = triton.InferInput(name, [*array.shape], "INT64")
            entry.set_shared_memory("padding", nbytes, place * nbytes)
            entries.append(entry)
        output = triton.InferRequestedOutput("tokens")
        output.set_shared_memory("padding", 2 * 11 * 16 * 4, 1024)
        client.infer("encoder", entries, outputs=[output], client_timeout=PATIENCE_SECONDS)
        found = np.frombuffer(file.get(1024, 2 * 11 * 16 * 4), np.float32).reshape(2, 11, 16)
        client.unregister_system_shared_memory("padding")
    (expected,) = bare.run(["tokens"], inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_a_size_that_the_model_does_not_have(server: RocserveProcess) -> None:
    model = encoder().SerializeToString()
    folder = drop(server.repositories[0], "unlike", model, SIZES.replace("sequence=", "length="))
    texts = ("parameter 'sizes' of model 'unlike' names the dimension 'length'", "its open dimensions are: sequence")

    def is_refused() -> bool:
        reason = reason_of(server, "unlike")
        return all(text in reason for text in texts)

    wait_until(is_refused)
    # Otherwise the server tries again and again.
    shutil.rmtree(folder)
