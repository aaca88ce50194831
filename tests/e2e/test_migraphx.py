"""Models that MIGraphX's reference target serves over gRPC, compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from support import migraphx_models
from support.encoders import VOCABULARY, encoder
from support.graphdef import classified, classifier
from support.migraphx_serving import (
    Array,
    ask,
    compiled,
    config,
    expected,
    index_entry,
    place,
)
from support.processes import has_ended
from support.server import RocserveProcess
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

NETWORKS = {
    "resnet": migraphx_models.mini_resnet(),
    "mlp": migraphx_models.mlp(),
    "two": migraphx_models.two_in_two_out(),
    "baked": migraphx_models.reshaped_to_free(),
}

ENCODER = encoder(layers=1).SerializeToString()
BATCHED = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 80000000 }"


@pytest.fixture(scope="module")
def server(migraphx_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """Serves every network at batch sizes 1 and 4, all compiled."""
    repository = tmp_path_factory.mktemp("repository")
    for name, model in NETWORKS.items():
        place(repository, name, "model.onnx", model, config(4, batch_sizes="1, 4"))
    graph = config(4, "tensorflow_graphdef", batch_sizes="1, 4")
    place(repository, "graph", "model.graphdef", classifier(), graph)
    program = compiled(migraphx_root, NETWORKS["two"], tmp_path_factory.mktemp("program"), batch=2)
    place(repository, "program", "model.mxr", program, config(4, "migraphx_mxr"))
    folder = tmp_path_factory.mktemp("server")
    flags = (f"--migraphx-root={migraphx_root}", f"--cache-directory={folder}/cache")
    with RocserveProcess([repository], *flags, log=folder / "server.log") as running:
        running.wait_until_ready()
        client = running.client()
        for name in (*NETWORKS, "graph", "program"):
            wait_until(lambda name=name: index_entry(client, name) == ("READY", ""), f"all programs of '{name}'")
        yield running


class TestAnswers:
    @pytest.mark.parametrize("name", NETWORKS)
    @pytest.mark.parametrize("rows", [1, 3, 4])
    def test_they_are_those_of_onnx_runtime(self, server: RocserveProcess, name: str, rows: int) -> None:
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
    def test_rows_of_a_padded_batch_are_what_they_are_alone_bit_for_bit(
        self, server: RocserveProcess, name: str
    ) -> None:
        inputs = migraphx_models.random_inputs(NETWORKS[name], 3)
        together = ask(server.client(), name, inputs)
        for row in range(3):
            alone = ask(server.client(), name, {key: values[row : row + 1] for key, values in inputs.items()})
            for output, values in alone.items():
                np.testing.assert_array_equal(together[output][row : row + 1], values)

    def test_a_program_from_a_file_takes_any_batch_at_its_own_size(self, server: RocserveProcess) -> None:
        inputs = migraphx_models.random_inputs(NETWORKS["two"], 3)
        answers = ask(server.client(), "program", inputs)
        wanted = expected(NETWORKS["two"], inputs)
        # A program does not know its outputs' names.
        assert list(answers) == ["output_0", "output_1"]
        for values, name in zip(answers.values(), wanted, strict=True):
            np.testing.assert_allclose(values, wanted[name], rtol=1e-4, atol=1e-4)

    def test_a_tensorflow_graph_takes_images_in_its_own_layout(self, server: RocserveProcess) -> None:
        images = np.random.default_rng(7).uniform(-1, 1, (3, 8, 8, 3)).astype(np.float32)
        scores = ask(server.client(), "graph", {"image": images})["scores"]
        np.testing.assert_allclose(scores, classified(images), rtol=1e-4, atol=1e-4)


def test_requests_of_unlike_lengths_share_a_batch(server: RocserveProcess) -> None:
    (repository,) = server.repositories
    place(repository, "encoder", "model.onnx", ENCODER, config(2, tensors=BATCHED, sizes="sequence=4,8"))
    chance = np.random.default_rng(3)
    requests = [
        {"input_ids": chance.integers(1, VOCABULARY, (1, length)), "attention_mask": np.ones((1, length), np.int64)}
        # 4 must not fill up a batch with 8, whichever comes first: 3 and 5 would then wait for others in vain.
        for length in (3, 4, 5, 7)
    ]

    def ask_all() -> None:
        # The queue waits for the second request of a batch.
        with ThreadPoolExecutor(len(requests)) as threads:
            found = [*threads.map(lambda inputs: ask(server.client(), "encoder", inputs), requests)]
        for inputs, answers in zip(requests, found, strict=True):
            for output, values in expected(ENCODER, inputs).items():
                np.testing.assert_allclose(answers[output], values, rtol=1e-4, atol=1e-4)

    client = server.client()
    # The first program answers while the others are compiled.
    wait_until(lambda: client.is_model_ready("encoder"), "the first program")
    ask_all()
    wait_until(lambda: index_entry(client, "encoder") == ("READY", ""), "all programs")
    ask_all()
    (statistics,) = client.get_inference_statistics("encoder").model_stats
    assert [(stats.batch_size, stats.compute_infer.count) for stats in statistics.batch_stats] == [(2, 4)]


class TestWhatGoesWrong:
    def test_nothing_goes_on_after_a_server_that_was_killed(
        self, serve: Callable[..., RocserveProcess], migraphx_root: Path, repository: Path, tmp_path: Path
    ) -> None:
        model = migraphx_models.slow_to_compile()
        place(repository, "slow", "model.onnx", model, config(1, load_check="off"))
        server = serve(
            repository, flags=(f"--migraphx-root={migraphx_root}", f"--cache-directory={tmp_path / 'cache'}")
        )
        with server.client() as client:
            wait_until(
                lambda: (entry := index_entry(client, "slow"))[0] == "LOADING" and "reading the model" in entry[1],
                "the index to name the compile's phase",
            )
        assert compiles(server)
        processes = server.workers()
        server.kill()
        wait_until(lambda: all(has_ended(process.pid) for process in processes), "the end of all of them")

    def test_a_size_that_cannot_be_had_leaves_the_others_in_service(self, server: RocserveProcess) -> None:
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


class TestSharedPrograms:
    def test_instances_of_a_model_compile_it_once(self, server: RocserveProcess) -> None:
        text = config(2, tensors="instance_group [ { kind: KIND_CPU count: 3 } ]", batch_sizes="2")
        place(server.repositories[0], "instances", "model.onnx", NETWORKS["mlp"], text)
        client = server.client()
        wait_until(lambda: index_entry(client, "instances") == ("READY", ""), "the program")
        assert len(server.workers("instances")) == 3
        assert server.log_text.count("of model 'instances': saving") == 1

    def test_a_worker_that_is_killed_comes_back_without_a_compile(self, server: RocserveProcess) -> None:
        client = server.client()
        (worker,) = server.workers("mlp")
        worker.kill()
        wait_until(lambda: [one.pid for one in server.workers("mlp")] not in ([], [worker.pid]), "another worker")
        inputs = migraphx_models.random_inputs(NETWORKS["mlp"], 2)
        wait_until(lambda: answers(client, "mlp", inputs), "an answer")
        assert server.log_text.count("of model 'mlp': saving") == 2


def compiles(server: RocserveProcess) -> list[psutil.Process]:
    """The processes that compile."""
    return server.workers("compiling")


def answers(client: triton.InferenceServerClient, model: str, inputs: dict[str, Array]) -> bool:
    try:
        ask(client, model, inputs)
    except InferenceServerException:
        return False
    return True
