"""A GPU that MIGraphX cannot use: which models are served otherwise, which are refused, and where the reason is shown.
HIP_VISIBLE_DEVICES makes the server see a GPU; the tests' MIGraphX has no target for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import metrics
from support.migraphx_models import MLP_WIDTH, mlp
from support.models import drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve_client import Client

ON_GPU = """
platform: "onnx_onnxv1"
max_batch_size: 4
instance_group { kind: KIND_GPU }
"""


@pytest.fixture(scope="module")
def server(migraphx_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("fallback")
    repository = folder / "repository"
    drop(repository, "anywhere", mlp())
    drop(repository, "on_gpu", mlp(), ON_GPU)
    flags = (f"--migraphx-root={migraphx_root}", f"--cache-directory={folder / 'cache'}", *metrics.FLAGS)
    environment = {"HIP_VISIBLE_DEVICES": "0"}
    with RocserveProcess([repository], *flags, log=folder / "server.log", environment=environment) as running:
        yield running


def test_onnx_runtime_takes_over_where_the_cpu_is_allowed(server: RocserveProcess) -> None:
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="anywhere")
        properties = client.model_metadata("anywhere").properties
        assert properties["engine"] == "onnxruntime" and properties["engine_replaces"] == "migraphx"
        reason = properties["engine_reason"]
        assert reason.startswith("engine migraphx cannot load it: MIGraphX's target gpu cannot be used: ")
        rows = {row.name: row for row in client.repository_index()}
        assert rows["anywhere"].state == "READY"
        assert rows["anywhere"].reason.startswith(f"served by onnxruntime instead: {reason[:100]}")
        x = np.ones((1, MLP_WIDTH), np.float32)
        assert abs(client.infer("anywhere", {"x": x})["scores"].sum() - 1) < 1e-5
    counted = metrics.scrape(metrics.port_of(server))
    labels = 'engine="migraphx",model="anywhere",replaced_by="onnxruntime",version="1"'
    assert counted[f"rocserve_engine_fallback_total{{{labels}}}"] == "1"
    labels = 'engine="onnxruntime",model="anywhere",replaces="migraphx",version="1"'
    assert counted[f"rocserve_model_engine_info{{{labels}}}"] == "1"
    warnings = [line for line in server.log_text.splitlines() if line.startswith("W") and "replaces it" in line]
    assert len(warnings) == 1 and reason in warnings[0]


def test_a_model_that_asks_for_the_gpu_is_not_moved_to_the_cpu(server: RocserveProcess) -> None:
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="anywhere")

        reasons: list[str] = []

        def has_failed() -> bool:
            (row,) = [row for row in client.repository_index() if row.name == "on_gpu"]
            reasons.extend([row.reason] if row.state == "UNAVAILABLE" else [])
            return bool(reasons)

        wait_until(has_failed)
    text = reasons[0]
    assert text.startswith("Unavailable: MIGraphX's target gpu cannot be used: ")
    assert "; engine onnxruntime cannot replace it: instance group on_gpu_0 of model on_gpu has kind" in text
    assert "parameter 'engine' to \"auto\" to accept the CPU" in text
