"""Real server processes: one for a test, or shared by several."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tritonclient.http as http_client
from onnx import TensorProto
from support.front_ends import MOST_REQUESTS
from support.gated_models import drop_gated
from support.metrics import FLAGS as METRICS
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop, identity
from support.parity.models import parity_models, write_model
from support.sequences import drop_accumulator
from support.server import RocserveProcess
from support.simple_models import drop_simple_models
from support.tools import Command

SAMPLE_REPOSITORY = Path(__file__).parents[2] / "model_repository"
PYTHON_MODELS = Path(__file__).parents[1] / "data" / "python-models"
LARGE_CONFIG = """
platform: "onnx_onnxv1"
input { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
"""
HTTP_MODELS = ("add_sub", "types", "seen", "repeat", "faults", "labelled")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., RocserveProcess]]:
    """Start a server on repositories with further flags; it ends with the test."""
    with ExitStack() as running:
        count = 0

        def start(*repositories: Path, flags: tuple[str, ...] = ()) -> RocserveProcess:
            nonlocal count
            count += 1
            return running.enter_context(RocserveProcess(repositories, *flags, log=tmp_path / f"server-{count}.log"))

        yield start


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command `rocserve`, in this process."""
    return Command(tmp_path / "cache", capsys)


@pytest.fixture(scope="session")
def rocserve_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """One server on the sample repository, for tests that change nothing."""
    with RocserveProcess([SAMPLE_REPOSITORY], log=tmp_path_factory.mktemp("sample") / "log") as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(params=["one_process", "front_ends"], ids=["one-process", "front-ends"])
def http_server(request: pytest.FixtureRequest) -> RocserveProcess:
    """A server for HTTP tests that change nothing: once as one process, once with front ends. Both are started once:
    pytest would end a fixture with parameters before it makes the next one."""
    running: RocserveProcess = request.getfixturevalue(f"http_server_of_{request.param}")
    return running


@pytest.fixture(scope="session")
def http_server_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    yield from _http_server(tmp_path_factory.mktemp("http"), 0)


@pytest.fixture(scope="session")
def http_server_of_front_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    yield from _http_server(tmp_path_factory.mktemp("http"), 2)


def _http_server(folder: Path, front_ends: int) -> Iterator[RocserveProcess]:
    repository = folder / "repository"
    repository.mkdir()
    for model in parity_models():
        if model.name in HTTP_MODELS:
            write_model(repository, model)
    shutil.copytree(PYTHON_MODELS / "patient", repository / "patient")
    flags = (
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
        "--allow-remote-files=true",
        "--allow-remote-models=true",
        "--http-header-forward-pattern=^x-forwarded-.*",
        f"--front-ends={front_ends}",
        "--http-max-input-size=1000000",
        "--grpc-reflection=true",
        *METRICS,
    )
    with RocserveProcess([repository], *flags, log=folder / "server.log") as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="session")
def front_ends_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    """A server whose two front ends serve both protocols. Each protocol has its own restricted calls."""
    folder = tmp_path_factory.mktemp("front-ends")
    repository = folder / "repository"
    repository.mkdir()
    drop_simple_models(repository)
    for name in ("digits", "digits_classifier", "digits_preprocess"):
        shutil.copytree(SAMPLE_REPOSITORY / name, repository / name)
    drop_gated(repository)
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    drop(repository, "large", identity(TensorProto.UINT8, ["n"]), LARGE_CONFIG)
    drop_accumulator(repository, "sums", "max_sequence_idle_microseconds: 90000000")
    flags = (
        "--front-ends=2",
        "--log-verbose=1",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
        "--allow-remote-files=true",
        "--allow-remote-models=true",
        "--repository-settle-secs=0.1",
        "--grpc-restricted-protocol=logging:key=word",
        "--http-restricted-api=shared-memory:key=word",
        f"--max-requests-per-client={MOST_REQUESTS}",
        f"--trace-config=triton,file={folder / 'traces'}",
        "--trace-config=level=TIMESTAMPS",
        *METRICS,
    )
    with RocserveProcess([repository], *flags, log=folder / "server.log") as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def triton_http(http_server: RocserveProcess) -> Iterator[http_client.InferenceServerClient]:
    with http_client.InferenceServerClient(http_server.http_address, concurrency=4) as client:
        yield client
