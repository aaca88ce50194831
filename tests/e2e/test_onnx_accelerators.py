"""Execution accelerators in config.pbtxt, on a server whose ONNX Runtime has none of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs/guides/from-amd-triton.md"
ABSENT = "OpenVINOExecutionProvider" not in onnxruntime.get_available_providers()


def accelerated(kind: str, name: str, parameters: str = "", more: str = "") -> str:
    return (
        f"max_batch_size: 8\n{more}\noptimization {{ execution_accelerators {{ {kind}_execution_accelerator {{"
        f' name: "{name}" {parameters} }} }} }}\n'
    )


OPENVINO = accelerated("cpu", "openvino")
AUTO = 'parameters { key: "engine" value { string_value: "auto" } }'
OF_AMDS_PORT = accelerated(
    "gpu", "migraphx", 'parameters: { key: "migraphx_max_dynamic_batch" value: "8" }', 'backend: "onnxruntime"'
)


def test_accelerators_that_are_taken_and_the_repository_of_amds_examples(serve, repository: Path) -> None:
    configs = {"amds": OF_AMDS_PORT, "openvino_or_not": accelerated("cpu", "openvino", more=AUTO)}
    for model, config in configs.items():
        drop(repository, model, add_constant(1.0), config)
    configuration = next(block for block in PAGE.read_text().split("```") if "execution_accelerators" in block)
    drop(repository, "as_it_is", add_constant(1.0), configuration, version=0)
    server: RocserveProcess = serve(repository)
    client = server.client()
    wait_until(lambda: client.is_model_ready("as_it_is", "0"), "the model")
    server.wait_until_ready()
    for model, version in (*((name, "1") for name in configs), ("as_it_is", "0")):
        entry = infer_input("X", np.ones((3, 2), np.float32))
        answer = client.infer(model, [entry])
        assert answer.as_numpy("Y").tolist() == [[2.0, 2.0]] * 3
        assert answer.get_response().model_version == version
    text = "'migraphx' is not used: the instance is on the CPU"
    wait_until(lambda: text in server.log_text, "the worker's line in the log")
    assert "settings without effect in this version of rocserve: optimization.cuda" in server.log_text
