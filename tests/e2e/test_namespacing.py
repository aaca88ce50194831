"""Repositories as namespaces: models of one name in several repositories, and their ensembles."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
ensemble_scheduling { step { model_name: "member" model_version: -1
  input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }
"""


@pytest.fixture
def repositories(tmp_path: Path) -> tuple[Path, Path]:
    """Each repository has a model `member`, an ensemble of it, and an ensemble `same`."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, value, name in ((first, 1, "one"), (second, 2, "two")):
        drop(folder, "member", add_constant(value))
        for ensemble in (name, "same"):
            drop(folder, ensemble, None, ENSEMBLE)
    return first, second


def infer(client: triton.InferenceServerClient, model: str) -> float:
    """The constant that the model adds."""
    return float(client.infer(model, [infer_input("X", np.zeros((1, 2), np.float32))]).as_numpy("Y")[0, 0])


def adds(client: triton.InferenceServerClient, model: str, constant: float) -> bool:
    """False also while the model has lost its member and not yet got the other."""
    with suppress(InferenceServerException):
        return infer(client, model) == constant
    return False


def test_ensembles_take_the_members_of_their_own_repository(serve, repositories: tuple[Path, Path]) -> None:
    server: RocserveProcess = serve(*repositories, flags=("--model-namespacing=true",))
    server.wait_until_ready()
    with server.client() as client:
        assert (infer(client, "one"), infer(client, "two")) == (1, 2)
        index = [entry.name for entry in client.get_model_repository_index().models]
        assert sorted(index) == ["member", "member", "one", "same", "same", "two"]
        counts = {(stats.name, stats.inference_count) for stats in client.get_inference_statistics().model_stats}
        assert counts >= {("member", 1), ("one", 1), ("two", 1)}

        # The other repository's member replaces a removed one, until that comes back.
        aside = repositories[0].parent / "aside"
        shutil.move(repositories[0] / "member", aside)
        wait_until(lambda: client.is_model_ready("member") and adds(client, "one", 2))
        assert (infer(client, "member"), infer(client, "two")) == (2, 2)
        shutil.move(aside, repositories[0] / "member")
        wait_until(lambda: not client.is_model_ready("member") and adds(client, "one", 1))
        assert infer(client, "two") == 2


def test_explicit_control_means_all_models_of_a_name(serve, repositories: tuple[Path, Path]) -> None:
    flags = ("--model-namespacing=true", "--model-control-mode=explicit", "--load-model=one")
    server: RocserveProcess = serve(*repositories, flags=flags)
    server.wait_until_ready()
    with server.client() as client:
        assert infer(client, "one") == 1
        client.load_model("two")
        assert (infer(client, "one"), infer(client, "two")) == (1, 2)
        client.unload_model("member")
        wait_until(lambda: not client.is_model_ready("one") and not client.is_model_ready("two"))
        client.load_model("member")
        wait_until(lambda: client.is_model_ready("one") and client.is_model_ready("two"))
        assert (infer(client, "one"), infer(client, "two")) == (1, 2)
