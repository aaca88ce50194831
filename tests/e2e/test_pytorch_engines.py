"""A program of torch.export on each engine that compiles it, and the package that came of it as a model of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.models import drop
from support.pytorch import TorchFiles
from support.server import RocserveProcess
from support.waiting import wait_until

from rocserve_client import Client

COMPILE_SECONDS = 400
"""A compile takes half a minute where nothing else runs."""
pytestmark = pytest.mark.timeout(COMPILE_SECONDS + 60)

ENGINE = 'parameters {{ key: "engine" value {{ string_value: "{}" }} }}\n'
PACKAGE = """
backend: "pytorch"
platform: "torch_aoti"
max_batch_size: 8
input { name: "ARGS[0]" data_type: TYPE_FP32 dims: 4 }
output [ { name: "RESULT[scores]" data_type: TYPE_FP32 dims: 3 }, { name: "RESULT[best]" data_type: TYPE_INT64 dims: 1 reshape {} } ]
"""  # noqa: E501


@pytest.fixture(scope="module")
def server(torch_files: TorchFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("pytorch-engines")
    repository = folder / "repository"
    repository.mkdir()
    with RocserveProcess([repository], f"--cache-directory={folder / 'cache'}", log=folder / "server.log") as server:
        yield server
        assert server.terminate() == 0


def check(
    server: RocserveProcess, torch_files: TorchFiles, model: str, names: tuple[str, str, str] = ("x", "scores", "best")
) -> None:
    """It gives what PyTorch gave. `names`: of the input and the outputs."""
    inputs, expected = torch_files.values("classifier")
    with Client(server.address) as client:
        client.wait_until_ready(COMPILE_SECONDS, model=model)
        for rows in (2, 1):
            answer = client.infer(model, {names[0]: inputs["x"][:rows]})
            np.testing.assert_allclose(answer[names[1]], expected["scores"][:rows], atol=1e-6)
            assert answer[names[2]].ravel().tolist() == expected["best"][:rows].tolist()


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler here")
def test_inductor_compiles_once_and_its_package_is_a_model_too(
    server: RocserveProcess, torch_files: TorchFiles
) -> None:
    (repository,) = server.repositories
    drop(repository, "compiled", torch_files.data("classifier"), ENGINE.format("inductor"), filename="model.pt2")
    check(server, torch_files, "compiled")
    (package,) = (repository.parent / "cache/pytorch").glob("inductor-*/program.pt2")
    written = package.stat().st_mtime_ns
    shutil.copytree(repository / "compiled", repository / "again")
    check(server, torch_files, "again")
    assert [file.stat().st_mtime_ns for file in package.parent.parent.glob("*/program.pt2")] == [written]
    drop(repository, "package", package.read_bytes(), PACKAGE, filename="model.pt2")
    check(server, torch_files, "package", ("ARGS[0]", "RESULT[scores]", "RESULT[best]"))
    with Client(server.address) as client:
        assert client.model_metadata("package").properties["program"] == "a package of AOTInductor"
        assert client.model_metadata("again").properties["engine"] == "inductor"


def test_migraphx_by_way_of_onnx(migraphx_root: Path, torch_files: TorchFiles, tmp_path: Path) -> None:
    parameters = ENGINE.format("migraphx-onnx") + 'parameters { key: "target" value { string_value: "ref" } }\n'
    names = 'max_batch_size: 2 input { name: "INPUT__0" data_type: TYPE_FP32 dims: 4 }\n'
    flags = (f"--migraphx-root={migraphx_root}", f"--cache-directory={tmp_path / 'cache'}")
    repository = tmp_path / "repository"
    drop(repository, "exported", torch_files.data("classifier"), parameters, filename="model.pt2")
    drop(repository, "named", torch_files.data("classifier"), parameters + names, filename="model.pt2")
    with RocserveProcess([repository], *flags, log=tmp_path / "server.log") as server:
        check(server, torch_files, "exported")
        check(server, torch_files, "named", ("INPUT__0", "scores", "best"))
        with Client(server.address) as client:
            note = client.model_metadata("exported").properties["note"]
            assert note == "written as ONNX from a program of torch.export"


def test_torchscript_is_not_inductor_s(server: RocserveProcess, torch_files: TorchFiles) -> None:
    config = ENGINE.format("inductor") + 'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }\n'
    drop(server.repositories[0], "traced", torch_files.data("traced"), config, filename="model.pt")
    text = "model.pt is a TorchScript program; export the module with torch.export, or leave the parameter out"
    wait_until(lambda: text in server.log_text, "the line in the log")
