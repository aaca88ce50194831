"""PyTorch files in a repository: dropped, converted from an archive, replaced under load, refused, removed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.migraphx import CHECKOUT
from support.models import drop
from support.pytorch import TorchFiles
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve import cli
from rocserve.load_check.recorded import RecordedAnswers, write_recorded
from rocserve_client import Client, Internal

TWO_AT_ONCE = """
dynamic_batching { }
parameters { key: "batches_at_once" value { string_value: "2" } }
"""

FINDING = """
max_batch_size: 4
instance_group { kind: KIND_MODEL }
dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 300000 }
input { name: "x" data_type: TYPE_FP32 dims: 3 }
output [ { name: "scores" data_type: TYPE_FP32 dims: 3 }, { name: "boxes" data_type: TYPE_FP32 dims: 3 } ]
"""

COUNTING = """
input { name: "x" data_type: TYPE_FP32 dims: [ 5, 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 5, 4 ] }
model_warmup {
  name: "zeros" batch_size: 1
  inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 5, 4 ] zero_data: true } }
}
"""


@pytest.fixture(scope="module")
def server(torch_files: TorchFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("pytorch-server")
    repository = folder / "repository"
    drop(repository, "exported", torch_files.data("classifier"), filename="model.pt2")
    drop(repository, "finding", torch_files.data("finding"), FINDING, filename="model.pt")
    counting = drop(repository, "counting", torch_files.data("counting"), COUNTING, filename="model.pt")
    write_recorded(counting / "check.npz", RecordedAnswers(*torch_files.values("counting")))
    with zipfile.ZipFile(folder / "archived.mar", "w") as archive:
        model = {"modelName": "archived", "modelVersion": "1.0", "serializedFile": "net.pt", "handler": "own.py"}
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": model}))
        archive.writestr("net.pt", torch_files.data("traced"))
    flags = (f"--model-repository={repository}", "--input=INPUT__0:FP32:4", "--max-batch-size=8")
    assert cli.main(["convert-mar", str(folder / "archived.mar"), *flags]) == 0
    config = repository / "archived" / "config.pbtxt"
    config.write_text(config.read_text() + TWO_AT_ONCE)
    with RocserveProcess([repository], log=folder / "server.log") as server:
        yield server
        assert server.terminate() == 0


def test_dropped_files_are_served(server: RocserveProcess, torch_files: TorchFiles) -> None:
    inputs, expected = torch_files.values("classifier")
    with Client(server.address) as client:
        for model, name in (("exported", "x"), ("archived", "INPUT__0")):
            client.wait_until_ready(PATIENCE_SECONDS, model=model)
            for rows in (1, 5):
                answer = client.infer(model, {name: inputs["x"][:rows]})
                np.testing.assert_allclose(answer["scores"], expected["scores"][:rows], atol=1e-6)
                assert answer["best"].ravel().tolist() == expected["best"][:rows].tolist()
        metadata = client.model_metadata("exported")
        assert metadata.platform == "pytorch_libtorch"
        assert metadata.properties["engine"] == "eager"
        assert metadata.properties["program"] == "a program of torch.export"


def test_a_missing_output_is_an_error_of_the_request_that_wants_it(server: RocserveProcess) -> None:
    """The two requests become one batch, if the server is fast enough."""
    with Client(server.address) as client, ThreadPoolExecutor(2) as threads:
        client.wait_until_ready(PATIENCE_SECONDS, model="finding")
        nothing = np.full((1, 3), -1, np.float32)
        found = client.infer("finding", {"x": -nothing})
        assert (found["boxes"].tolist(), found["scores"].tolist()) == ([[10] * 3], [[2] * 3])
        scores = threads.submit(client.infer, "finding", {"x": nothing}, outputs=["scores"])
        all_of_them = threads.submit(client.infer, "finding", {"x": nothing})
        assert scores.result()["scores"].tolist() == [[0] * 3]
        with pytest.raises(Internal, match="has no output 'boxes'"):
            all_of_them.result()


def test_samples_and_recorded_answers_change_no_state(server: RocserveProcess, torch_files: TorchFiles) -> None:
    inputs, expected = torch_files.values("counting")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="counting")
        assert "recorded answers" in client.model_metadata("counting").properties["load_check"]
        for earlier in (0, 1):
            np.testing.assert_allclose(client.infer("counting", inputs)["y"], expected["y"] + earlier, atol=1e-6)


def test_a_model_places_its_parts_itself(server: RocserveProcess) -> None:
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="finding")
        assert client.model_metadata("finding").properties["devices"] == "chosen by the model"
        (group,) = client.model_config("finding").instance_group
        assert group.kind == group.KIND_MODEL


def test_an_instance_with_two_batches_under_way_answers_each_request_with_its_own(
    server: RocserveProcess, torch_files: TorchFiles
) -> None:
    inputs, expected = torch_files.values("classifier")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="archived")

        def ask(number: int) -> None:
            row = number % len(inputs["x"])
            answer = client.infer("archived", {"INPUT__0": inputs["x"][row : row + 1]})
            np.testing.assert_allclose(answer["scores"], expected["scores"][row : row + 1], atol=1e-6)

        rounds, before = 0, client.statistics("archived")[0].inference_count

        def were_batched() -> bool:
            nonlocal rounds
            rounds += 1
            with ThreadPoolExecutor(16) as threads:
                list(threads.map(ask, range(400)))
            statistics = client.statistics("archived")[0]
            assert statistics.inference_count == before + 400 * rounds
            return statistics.execution_count < 400 * rounds

        wait_until(were_batched, "a batch of several requests")


RAISING = """
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output [
  { name: "same" data_type: TYPE_FP32 dims: [ -1, 4 ] }, { name: "turned" data_type: TYPE_FP32 dims: [ 4, -1 ] },
  { name: "repeated" data_type: TYPE_FP32 dims: [ 3, 4 ] }, { name: "rest" data_type: TYPE_FP32 dims: [ -1, 4 ] },
  { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] }
]
"""


def test_what_a_program_may_do_hurts_its_own_request_only(server: RocserveProcess, torch_files: TorchFiles) -> None:
    """It raises, or returns tensors without rows: also views, and its inputs."""
    drop(server.repositories[0], "raising", torch_files.data("raising"), RAISING, filename="model.pt")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="raising")
        for _ in range(2):
            with pytest.raises(Internal, match="nothing negative"):
                client.infer("raising", {"x": -x})
            answer = client.infer("raising", {"x": x})
            np.testing.assert_array_equal(answer["same"], x)
            np.testing.assert_array_equal(answer["turned"], x.T)
            np.testing.assert_array_equal(answer["repeated"], x[[0, 0, 0]])
            assert answer["rest"].shape == (0, 4) and answer["sum"].tolist() == [np.inf]
            assert client.infer("raising", {"x": x[:1]})["same"].shape == (1, 4)
    assert "ended unexpectedly" not in server.log_text


def test_the_server_itself_has_no_pytorch(server: RocserveProcess) -> None:
    libraries = Path(f"/proc/{server.server_process().pid}/maps").read_text()
    assert "libtorch" not in libraries


WRITE_WEIGHTS = """
import json, sys, torch
from network import Scorer
torch.manual_seed(1)
network = Scorer().eval()
torch.save(network.state_dict(), "weights.pt")
print(json.dumps(network(torch.tensor(json.loads(sys.argv[1]))).tolist()))
"""


def test_a_class_and_its_weights_are_served_as_the_page_says(server: RocserveProcess, tmp_path: Path) -> None:
    page = (CHECKOUT / "docs/reference/pytorch.md").read_text()
    files = re.findall(r"`(model_repository/scorer/[\w./]+)`:\n\n```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for name, text in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    features = np.random.default_rng(1).standard_normal((40, 8), np.float32)
    command = [sys.executable, "-c", WRITE_WEIGHTS, json.dumps(features.tolist())]
    version = tmp_path / "model_repository/scorer/1"
    expected = np.array(json.loads(subprocess.run(command, cwd=version, check=True, capture_output=True).stdout))
    shutil.copytree(tmp_path / "model_repository", server.repositories[0], dirs_exist_ok=True)
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="scorer")
        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(lambda row: client.infer("scorer", {"FEATURES": row[None]})["SCORES"], features)
            np.testing.assert_allclose(np.concatenate(list(answers)), expected, rtol=1e-5)
