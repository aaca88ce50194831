"""The committed modules are what protos/ says, and live beside tritonclient's in one process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rocserve.protocol

PROTOCOL = Path(rocserve.protocol.__file__).parent
PROTOS = Path(__file__).resolve().parents[3] / "protos"
MODULES = ("model_config_pb2", "grpc_service_pb2", "health_pb2")

OURS = "from rocserve.protocol import grpc_service_pb2 as ours, health_pb2, model_config_pb2"
TRITONS = "from tritonclient.grpc import service_pb2 as tritons"
EXCHANGE = """
request = tritons.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"abc"])
assert ours.ModelInferRequest.FromString(request.SerializeToString()).raw_input_contents == [b"abc"]
assert ours.ModelInferRequest.DESCRIPTOR.file.pool is not tritons.ModelInferRequest.DESCRIPTOR.file.pool
print("ok")
"""


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed, so the modules cannot be made anew")
    folder = tmp_path_factory.mktemp("generated")
    subprocess.run([sys.executable, str(PROTOS / "generate.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_up_to_date(regenerated: Path, module: str) -> None:
    assert (regenerated / f"{module}.py").read_bytes() == (PROTOCOL / f"{module}.py").read_bytes(), "run `make protos`"


@pytest.mark.parametrize("module", MODULES)
def test_type_stubs_are_up_to_date(regenerated: Path, module: str) -> None:
    committed = (PROTOCOL / f"{module}.pyi").read_text()
    made_with = re.search(r"grpcio-tools ([\d.]+);", committed)
    assert made_with is not None
    installed = importlib.metadata.version("grpcio-tools")
    if made_with[1] != installed:
        pytest.skip(f"the stubs were made with grpcio-tools {made_with[1]}, and {installed} is installed")
    assert (regenerated / f"{module}.pyi").read_text() == committed, "run `make protos`"


@pytest.mark.parametrize("imports", [(OURS, TRITONS), (TRITONS, OURS)], ids=["ours first", "tritonclient first"])
def test_both_sets_of_messages_in_one_process(imports: tuple[str, str]) -> None:
    assert _run("\n".join([*imports, EXCHANGE])) == "ok\n"


def test_nothing_of_ours_is_in_the_default_pool() -> None:
    code = f"""
{OURS}
from google.protobuf import descriptor_pool
for name in ("inference.ModelInferRequest", "inference.ModelConfig", "grpc.health.v1.HealthCheckRequest"):
    try:
        descriptor_pool.Default().FindMessageTypeByName(name)
    except KeyError:
        continue
    raise SystemExit(name)
print("ok")
"""
    assert _run(code) == "ok\n"


def test_pure_python_runtime_reads_the_same() -> None:
    code = f"""
import os
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
{OURS}
tensor = ours.ModelInferRequest.InferInputTensor(name="A", shape=[1, 2])
request = ours.ModelInferRequest(inputs=[tensor])
assert ours.ModelInferRequest.FromString(request.SerializeToString()).inputs[0].shape == [1, 2]
assert model_config_pb2.DataType.Name(model_config_pb2.TYPE_BF16) == "TYPE_BF16"
print("ok")
"""
    assert _run(code) == "ok\n"
