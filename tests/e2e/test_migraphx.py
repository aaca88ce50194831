"""Models that MIGraphX's reference target serves over gRPC, compared with ONNX Runtime: all kinds of files, and what
config.pbtxt can ask for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto
from support import load_check, migraphx_models
from support.encoders import VOCABULARY, encoder
from support.graphdef import classified, classifier
from support.migraphx_serving import Array, ask, compiled, config, expected, index_entry, place
from support.pictures import jpeg
from support.server import RocserveProcess
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

from rocserve_client import Client

MLP = migraphx_models.mlp()
RESNET = migraphx_models.mini_resnet()
NETWORKS = {
    "resnet": RESNET,
    "mlp": MLP,
    "two": migraphx_models.two_in_two_out(),
    "baked": migraphx_models.reshaped_to_free(),
}
INPUTS = migraphx_models.random_inputs(MLP, 3)
SCORES = expected(MLP, INPUTS)["scores"]
TEXT = encoder(layers=1, longest=24).SerializeToString()
MEAN = load_check.model(
    "g (float[batch, time, 4] x) => (float[batch, 4] y) { y = ReduceMean<axes = [1], keepdims = 0>(x) }"
).SerializeToString()
BATCHED = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 80000000 }"
ON_CPU = "instance_group [ { kind: KIND_CPU } ]"


def accelerated(**parameters: str) -> str:
    """An accelerator with these parameters."""
    entries = "".join(f'parameters {{ key: "{key}" value: "{value}" }} ' for key, value in parameters.items())
    named = f'{{ name: "migraphx" {entries} }}'
    return f"optimization {{ execution_accelerators {{ gpu_execution_accelerator [ {named} ] }} }}"


MODELS: Mapping[str, tuple[bytes, str]] = {
    **{name: (model, config(4, batch_sizes="1, 4")) for name, model in NETWORKS.items()},
    "by_parameters": (MLP, config(4, batch_sizes="4", precision="fp16")),
    "by_accelerator": (MLP, config(4, tensors=accelerated(precision="fp16", batch_sizes="4"))),
    "one_batch": (MLP, config(4, batch="3", pad_batch="false")),
    "on_cpu": (MLP, config(4, batch_sizes="4", tensors=ON_CPU, target="")),
    # No other model has its program.
    "two_instances": (MLP, config(5, batch_sizes="5", tensors="instance_group [ { kind: KIND_CPU count: 2 } ]")),
    "brain_floats": (migraphx_models.identity(TensorProto.BFLOAT16), config(4, batch_sizes="4")),
    "brain_floats_on_onnx_runtime": (
        migraphx_models.identity(TensorProto.BFLOAT16),
        config(4, engine="onnxruntime", target=""),
    ),
    "quantised": (migraphx_models.quantised(), config(4, batch_sizes="4")),
    "without_a_mask": (MEAN, config(2, engine="auto")),
    "too_large": (
        migraphx_models.identity(shape=("batch", 2_000_000, 3_000_000)),
        config(1, batch_sizes="1"),
    ),
}


PIPELINE = {
    "mean_std_range": "pixel",
    "pipeline": [
        {
            "operation": "ResizeMirrorNormalize",
            "dest_width": 8,
            "dest_height": 8,
            "mean": [127, 127, 127],
            "std_dev": [60, 60, 60],
            "is_output": True,
        }
    ],
}


def place_calibrated(repository: Path) -> None:
    """Calibrate int8 with pictures that pass the model's own pipeline, and fp8 with arrays."""
    pictures = config(2, batch_sizes="2", precision="int8", calibration_data="pictures")
    folder = place(repository, "by_pictures", "model.onnx", RESNET, pictures)
    (folder / "pipeline.json").write_text(json.dumps(PIPELINE))
    (folder / "pictures").mkdir()
    for index in range(8):
        (folder / "pictures" / f"{index}.jpg").write_bytes(jpeg(20 + index, 30))
    arrays = config(2, batch_sizes="2", precision="fp8", calibration_data="samples.npz")
    folder = place(repository, "by_arrays", "model.onnx", RESNET, arrays)
    np.savez(folder / "samples.npz", **migraphx_models.random_inputs(RESNET, 8, seed=5))


def place_external(repository: Path) -> None:
    folder = place(repository, "external", "model.onnx", b"", config(4, batch_sizes="4"))
    model = onnx.load_from_string(MLP)
    onnx.save_model(
        model, folder / "1" / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    assert (folder / "1" / "weights.bin").stat().st_size > 64


@pytest.fixture(scope="module")
def server(migraphx_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """Serves every model, all programs compiled."""
    repository = tmp_path_factory.mktemp("repository")
    for name, (model, text) in MODELS.items():
        place(repository, name, "model.onnx", model, text)
    place_external(repository)
    place_calibrated(repository)
    graph = config(4, "tensorflow_graphdef", batch_sizes="4")
    place(repository, "graph", "model.graphdef", classifier(), graph)
    program = compiled(migraphx_root, NETWORKS["two"], tmp_path_factory.mktemp("program"), batch=2)
    place(repository, "program", "model.mxr", program, config(4, "migraphx_mxr"))
    folder = tmp_path_factory.mktemp("server")
    flags = (f"--migraphx-root={migraphx_root}", f"--cache-directory={folder}/cache")
    with RocserveProcess([repository], *flags, log=folder / "server.log") as running:
        client = running.client()
        for name in (*MODELS, "external", "by_pictures", "by_arrays", "graph", "program"):
            state = "UNAVAILABLE" if name == "too_large" else "READY"
            wait_until(ends(client, name, state), f"state {state} of '{name}'")
        yield running


def ends(client: triton.InferenceServerClient, name: str, state: str) -> Callable[[], bool]:
    def has_ended() -> bool:
        seen, reason = index_entry(client, name)
        assert seen in (state, "LOADING", "CHECKING", "UNKNOWN", ""), f"{name} is {seen}: {reason}"
        return seen == state and not reason.startswith("serving; ")

    return has_ended


def properties(server: RocserveProcess, name: str) -> Mapping[str, str]:
    with Client(server.address) as client:
        return client.model_metadata(name).properties


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_answers_are_those_of_onnx_runtime(server: RocserveProcess, name: str, rows: int) -> None:
    inputs = migraphx_models.random_inputs(NETWORKS[name], rows)
    if name == "baked":
        # The file itself has a batch of 1.
        singles = [expected(NETWORKS[name], {"x": inputs["x"][row : row + 1]})["y"] for row in range(rows)]
        wanted = {"y": np.concatenate(singles)}
    else:
        wanted = expected(NETWORKS[name], inputs)
    answers = ask(server.client(), name, inputs)
    assert list(answers) == list(wanted)
    for output, values in wanted.items():
        np.testing.assert_allclose(answers[output], values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_of_a_padded_batch_are_what_they_are_alone_bit_for_bit(server: RocserveProcess, name: str) -> None:
    inputs = migraphx_models.random_inputs(NETWORKS[name], 3)
    together = ask(server.client(), name, inputs)
    for row in range(3):
        alone = ask(server.client(), name, {key: values[row : row + 1] for key, values in inputs.items()})
        for output, values in alone.items():
            np.testing.assert_array_equal(together[output][row : row + 1], values)


def test_a_program_from_a_file_takes_any_batch_at_its_own_size(server: RocserveProcess) -> None:
    inputs = migraphx_models.random_inputs(NETWORKS["two"], 3)
    answers = ask(server.client(), "program", inputs)
    wanted = expected(NETWORKS["two"], inputs)
    # A program does not know its outputs' names.
    assert list(answers) == ["output_0", "output_1"]
    for values, name in zip(answers.values(), wanted, strict=True):
        np.testing.assert_allclose(values, wanted[name], rtol=1e-4, atol=1e-4)


def test_a_tensorflow_graph_takes_images_in_its_own_layout(server: RocserveProcess) -> None:
    images = np.random.default_rng(7).uniform(-1, 1, (3, 8, 8, 3)).astype(np.float32)
    scores = ask(server.client(), "graph", {"image": images})["scores"]
    np.testing.assert_allclose(scores, classified(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["one_batch", "on_cpu", "external"])
def test_configured_models_answer_as_onnx_runtime_does(server: RocserveProcess, name: str) -> None:
    assert properties(server, name)["engine"] == "migraphx"
    np.testing.assert_allclose(ask(server.client(), name, INPUTS)["scores"], SCORES, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("mlp", "1, 4"), ("one_batch", "3"), ("by_accelerator", "4")],
)
def test_the_batch_sizes_that_are_asked_for(server: RocserveProcess, name: str, sizes: str) -> None:
    assert properties(server, name)["batch_sizes"] == sizes


def test_an_accelerator_says_the_same_as_parameters(server: RocserveProcess) -> None:
    answers = {name: ask(server.client(), name, INPUTS)["scores"] for name in ("by_parameters", "by_accelerator")}
    np.testing.assert_array_equal(*answers.values())
    for name, scores in answers.items():
        assert properties(server, name)["precision"] == "fp16"
        assert not np.array_equal(scores, SCORES)
        np.testing.assert_allclose(scores, SCORES, atol=0.01)


@pytest.mark.parametrize(("name", "precision", "most"), [("by_pictures", "int8", 0.15), ("by_arrays", "fp8", 0.3)])
def test_precisions_that_are_calibrated(server: RocserveProcess, name: str, precision: str, most: float) -> None:
    assert properties(server, name)["precision"] == precision
    inputs = migraphx_models.random_inputs(RESNET, 2)
    exact = expected(RESNET, inputs)["logits"]
    difference = np.linalg.norm(ask(server.client(), name, inputs)["logits"] - exact)
    assert 0 < difference < most * np.linalg.norm(exact)


def test_the_metadata_tells_what_runs_it(server: RocserveProcess) -> None:
    assert properties(server, "mlp")["target"] == "ref"
    assert properties(server, "mlp")["migraphx_binding"] == "c_api"
    assert properties(server, "on_cpu")["target"] in ("cpu", "ref")


@pytest.mark.parametrize(
    ("name", "engine"), [("brain_floats", "migraphx"), ("brain_floats_on_onnx_runtime", "onnxruntime")]
)
def test_brain_floats(server: RocserveProcess, name: str, engine: str) -> None:
    with Client(server.address) as client:
        metadata = client.model_metadata(name)
        assert metadata.properties["engine"] == engine
        assert [tensor.datatype for tensor in (*metadata.inputs, *metadata.outputs)] == ["BF16", "BF16"]
        values = np.array([[1.5, -2.25, 3e38, 0]] * 3, ml_dtypes.bfloat16)
        found = np.asarray(client.infer(name, {"x": values})["y"])
    np.testing.assert_array_equal(found.view(np.uint16), values.view(np.uint16))


def test_a_quantised_file_runs_as_it_is(server: RocserveProcess) -> None:
    inputs = {"x": np.random.default_rng(3).normal(0, 1, (3, 3)).astype(np.float32)}
    found = ask(server.client(), "quantised", inputs)["y"]
    np.testing.assert_allclose(found, expected(migraphx_models.quantised(), inputs)["y"], rtol=1e-4, atol=1e-4)


def test_instances_have_programs_of_their_own_and_all_answer(server: RocserveProcess) -> None:
    wrong: list[object] = []

    def asks(seed: int) -> None:
        client, inputs = server.client(), migraphx_models.random_inputs(MLP, 3, seed=seed)
        wanted = expected(MLP, inputs)["scores"]
        for _ in range(20):
            found: Array = ask(client, "two_instances", inputs)["scores"]
            if not np.allclose(found, wanted, rtol=1e-4, atol=1e-4):
                wrong.append(found)

    threads = [threading.Thread(target=asks, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    maps = [Path(f"/proc/{worker.pid}/maps").read_text() for worker in server.workers("two_instances")]
    assert ["libmigraphx" in one for one in maps] == [True, True]
    assert server.log_text.count("of model 'two_instances': saving") == 1, "compiled once"


def test_requests_of_unlike_lengths_are_padded_by_default_and_share_a_batch(server: RocserveProcess) -> None:
    (repository,) = server.repositories
    place(repository, "unlike_lengths", "model.onnx", TEXT, config(2, tensors=BATCHED))
    chance = np.random.default_rng(3)
    requests = [
        {"input_ids": chance.integers(1, VOCABULARY, (1, length)), "attention_mask": np.ones((1, length), np.int64)}
        for length in (3, 16, 21, 24)
    ]

    def ask_all() -> None:
        # The queue waits for the second request of a batch. A text of 16 may fill up a batch of 24: of all four at
        # once 3 and 21 could be left, and wait for others in vain.
        for pair in (requests[:2], requests[2:]):
            with ThreadPoolExecutor(len(pair)) as threads:
                found = [*threads.map(lambda inputs: ask(server.client(), "unlike_lengths", inputs), pair)]
            for inputs, answers in zip(pair, found, strict=True):
                for output, values in expected(TEXT, inputs).items():
                    np.testing.assert_allclose(answers[output], values, atol=1e-5)

    client = server.client()
    # The first program answers while the others are compiled.
    wait_until(lambda: client.is_model_ready("unlike_lengths"), "the first program")
    ask_all()
    wait_until(lambda: index_entry(client, "unlike_lengths") == ("READY", ""), "all programs")
    ask_all()
    (statistics,) = client.get_inference_statistics("unlike_lengths").model_stats
    assert [(stats.batch_size, stats.compute_infer.count) for stats in statistics.batch_stats] == [(2, 4)]
    facts = properties(server, "unlike_lengths")
    assert facts["sizes"] == "sequence=16,24"
    assert "dimension 'sequence' may be padded" in facts["load_check"]
    too_long = np.ones((1, 25), np.int64)
    with pytest.raises(InferenceServerException, match="is 25, expected 1 to 24, the largest of its sizes 16, 24"):
        ask(client, "unlike_lengths", {"input_ids": too_long, "attention_mask": too_long})
    assert "no sizes are written, so it is padded to sequence=16,24 in batches of 1, 2: 4 programs" in server.log_text


def test_where_padding_changes_answers_onnx_runtime_serves_each_length(server: RocserveProcess) -> None:
    _, reason = index_entry(server.client(), "without_a_mask")
    assert reason.startswith("served by onnxruntime instead: engine migraphx cannot load it: ")
    assert "dimension 'time' must not be padded: output 'y' changes by " in reason
    facts = properties(server, "without_a_mask")
    assert facts["engine"] == "onnxruntime" and "sizes" not in facts
    x = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)
    np.testing.assert_allclose(ask(server.client(), "without_a_mask", {"x": x})["y"], x.mean(1), rtol=1e-5, atol=1e-6)


def test_what_cannot_fit_into_memory_is_refused_with_numbers(server: RocserveProcess) -> None:
    """22 TiB of input and as much output, refused before anything is compiled."""
    _, reason = index_entry(server.client(), "too_large")
    # The prefix changes while the next attempt runs.
    assert (
        reason.removeprefix("failed before: ")
        .removeprefix("Unavailable: ")
        .startswith("model too_large does not fit into ")
    )
    assert "it needs at least 43.66 TiB (batch size 1: weights 0 B, inputs and outputs 43.66 TiB), and " in reason
    assert " are free; use fewer instances (instance_group count) or more memory" in reason
    assert "model 'too_large': reading the model" not in server.log_text


def test_a_size_that_cannot_be_had_leaves_the_others_in_service(server: RocserveProcess) -> None:
    """A Reshape to constants is right at the file's own batch only; the server finds out by comparing."""
    model = migraphx_models.reshaped_to_constant()
    place(server.repositories[0], "fixed", "model.onnx", model, config(2, batch_sizes="1, 2"))
    client = server.client()
    wait_until(lambda: "serving without" in index_entry(client, "fixed")[1], "the failure of batch size 2")
    inputs = migraphx_models.random_inputs(model, 2)
    answer = ask(client, "fixed", inputs)["y"]
    for row in range(2):
        alone = expected(model, {"x": inputs["x"][row : row + 1]})["y"]
        np.testing.assert_allclose(answer[row : row + 1], alone, atol=1e-4)
    assert index_entry(client, "fixed")[0] == "READY"


def test_a_worker_that_is_killed_comes_back_without_a_compile(server: RocserveProcess) -> None:
    client, saved = server.client(), server.log_text.count("of model 'mlp': saving")
    (worker,) = server.workers("mlp")
    worker.kill()
    wait_until(lambda: [one.pid for one in server.workers("mlp")] not in ([], [worker.pid]), "another worker")
    wait_until(lambda: answers(client, "mlp", INPUTS), "an answer")
    assert server.log_text.count("of model 'mlp': saving") == saved


def answers(client: triton.InferenceServerClient, model: str, inputs: dict[str, Array]) -> bool:
    try:
        ask(client, model, inputs)
    except InferenceServerException:
        return False
    return True
