"""PyTorch programs whose requests are padded, on a server: recorded answers, two versions."""

from __future__ import annotations

import numpy as np
import pytest
from support.models import drop
from support.pytorch import TorchFiles
from support.server import RocserveProcess, Start
from support.waiting import LOAD_CHECK_SECONDS

from rocserve.load_check.recorded import RecordedAnswers, write_recorded
from rocserve_client import Client

ENCODER = """
platform: "pytorch_libtorch"
max_batch_size: 8
input [ { name: "ids" data_type: TYPE_INT64 dims: -1 }, { name: "mask" data_type: TYPE_INT64 dims: -1 } ]
output [ { name: "states" data_type: TYPE_FP32 dims: [ -1, 8 ] }, { name: "mean" data_type: TYPE_FP32 dims: 8 } ]
version_policy { all { } }
dynamic_batching { }
parameters { key: "sizes" value { string_value: "ids:0=8,16" } }
"""


@pytest.fixture(scope="module")
def server(start: Start, torch_files: TorchFiles, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    repository = tmp_path_factory.mktemp("padded") / "repository"
    repository.mkdir()
    traced, exported = torch_files.data("traced_encoder"), torch_files.data("encoder")
    inputs, outputs = torch_files.values("traced_encoder")
    # The second version sees what the mask hides, and has a bound of its length.
    folder = drop(repository, "two", traced, ENCODER, filename="model.pt")
    write_recorded(folder / "check.npz", RecordedAnswers(inputs, outputs))
    drop(repository, "two", exported, ENCODER, version=2, filename="model.pt2")
    return start(repository, f"--load-check-seconds={LOAD_CHECK_SECONDS:g}")


def test_recorded_answers(server: RocserveProcess, torch_files: TorchFiles) -> None:
    """The request is shorter than the smallest size."""
    inputs, outputs = torch_files.values("traced_encoder")
    with Client(server.address) as client:
        properties = client.model_metadata("two", "1").properties
        assert properties["sizes"] == "ids:0=8,16"
        assert "recorded answers" in properties["load_check"]
        answer = client.infer("two", inputs, version="1")
    for name, values in outputs.items():
        np.testing.assert_allclose(answer[name], values, atol=1e-6)


def test_two_versions(server: RocserveProcess) -> None:
    rng = np.random.default_rng(1)
    with Client(server.address) as client:
        for length in (1, 5, 8, 13):
            ids = rng.integers(1, 50, (2, length))
            inputs = {"ids": ids, "mask": np.ones_like(ids)}
            one, two = (client.infer("two", inputs, version=version) for version in ("1", "2"))
            assert one["states"].shape == (2, length, 8)
            np.testing.assert_allclose(one["states"], two["states"], atol=1e-6)
