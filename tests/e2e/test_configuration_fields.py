"""Configuration fields that need a whole server: host policies, checksums, samples of ensembles."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from support.models import add_constant, drop
from support.server import RocserveProcess

Serve = Callable[..., RocserveProcess]

CHAIN = """
platform: "ensemble" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 2 } output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling { step { model_name: "member" model_version: -1
  input_map { key: "X" value: "IN" } output_map { key: "Y" value: "OUT" } } }
model_warmup { name: "warm" batch_size: 2 count: 3
  inputs { key: "IN" value { data_type: TYPE_FP32 dims: 2 random_data: true } } }
"""


def reason(client: triton.InferenceServerClient, model: str) -> str:
    rows = client.get_model_repository_index().models
    return " ".join(row.reason for row in rows if row.name == model)


def test_fields_and_flags(serve: Serve, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    drop(tmp_path, "kept", add_constant(1), 'instance_group { kind: KIND_CPU count: 1 host_policy: "corner" }')
    model = add_constant(2)
    digest = hashlib.md5(model, usedforsecurity=False).hexdigest()
    agent = (
        'model_repository_agents {{ agents {{ name: "checksum"'
        ' parameters {{ key: "MD5:1/model.onnx" value: "{}" }} }} }}'
    )
    drop(tmp_path, "sealed", model, agent.format(digest))
    drop(tmp_path, "broken", model, agent.format("0" * 32))
    drop(tmp_path, "member", add_constant(3))
    drop(tmp_path, "chain", None, CHAIN)
    server = serve(
        tmp_path,
        flags=(
            "--model-control-mode=explicit",
            "--load-model=kept",
            f"--host-policy=corner,cpu-cores={core}-{core}",
            "--backend-config=onnxruntime,default-max-batch-size=8",
        ),
    )
    server.wait_until_ready()
    with triton.InferenceServerClient(server.address) as client:
        (worker,) = server.workers("kept")
        assert worker.cpu_affinity() == [core]
        for thread in worker.threads():
            with suppress(ProcessLookupError):  # It has ended meanwhile.
                assert os.sched_getaffinity(thread.id) == {core}
        config = client.get_model_config("kept").config
        assert config.max_batch_size == 8 and config.instance_group[0].host_policy == "corner"

        client.load_model("sealed")
        with pytest.raises(triton.InferenceServerException) as raised:
            client.load_model("broken")
        fault = f"Invalid argument: Mismatched MD5 hash for file 1/model.onnx, expect: {'0' * 32}, got: {digest}"
        load_failed = f"load failed for model 'broken': version 1 is at UNAVAILABLE state: {fault};"
        assert raised.value.message().rstrip("\n") == load_failed
        assert reason(client, "broken") == fault

        client.load_model("chain")
        member = client.get_inference_statistics("member").model_stats[0]
        chain = client.get_inference_statistics("chain").model_stats[0]
        assert (member.inference_count, member.execution_count) == (6, 3), "the samples went through the member"
        assert chain.inference_stats.success.count == 0, "and nobody had asked for them"
