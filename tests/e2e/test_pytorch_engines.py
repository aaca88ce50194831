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

from rocserve_client import Client, InvalidArgument

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
    drop(repository, "single", package.read_bytes(), PACKAGE.replace("size: 8", "size: 1"), filename="model.pt2")
    for name, before, after, reason in (
        ("open", "FP32 dims: 4", "FP32 dims: -1", "FP32 [-1, -1] in config.pbtxt, and the package was compiled for"),
        ("narrow", "FP32 dims: 4", "FP32 dims: 3", "another (dim value at 1, expected: 4, but got: 3"),
        ("bytes", "FP32 dims: 4", "INT8 dims: 4", "another (dtype, expected: 6(at::kFloat), but got: 1"),
        ("strings", "FP32 dims: 4", "STRING dims: 4", "is of strings in config.pbtxt, and packages take tensors"),
    ):
        # It would read their rows beyond the ends.
        drop(repository, name, package.read_bytes(), PACKAGE.replace(before, after), filename="model.pt2")
        wait_until(
            lambda text=f"model '{name}'", why=reason: any(
                text in line and why in line for line in server.log_text.splitlines()
            ),
            f"why {name} is refused",
            seconds=COMPILE_SECONDS,
        )
    with Client(server.address) as client:
        client.wait_until_ready(COMPILE_SECONDS, model="single")
        assert client.infer("single", {"ARGS[0]": np.ones((1, 4), np.float32)})["RESULT[scores]"].shape == (1, 3)
    with Client(server.address) as client:
        assert client.model_metadata("package").properties["program"] == "a package of AOTInductor"
        assert client.model_metadata("again").properties["engine"] == "inductor"


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler here")
def test_sizes_that_do_not_go_together_are_refused(server: RocserveProcess, torch_files: TorchFiles) -> None:
    """Compiled, it would read beyond the end of the shorter one."""
    drop(server.repositories[0], "pair", torch_files.data("pair"), ENGINE.format("inductor"), filename="model.pt2")
    with Client(server.address) as client:
        client.wait_until_ready(COMPILE_SECONDS, model="pair")

        def ask(left: int, right: int, pairs: int) -> list[float]:
            sizes = {"left": left, "right": right, "pairs": pairs}
            answer = client.infer("pair", {name: np.ones(size, np.float32) for name, size in sizes.items()})
            return answer["OUTPUT__0"].tolist()

        for size in (1, 2, 100):
            assert ask(size, size, 2 * size) == [4] * size
        for sizes, text in (
            ((4, 3, 8), "dimension 0 of input 'left' is 4, and dimension 0 of input 'right' is 3; its program was"),
            ((4, 4, 6), "dimension 0 of input 'left' is 4, and dimension 0 of input 'pairs' is 6; its program was"),
            ((4, 4, 7), "dimension 0 of input 'pairs' is 7; its program was exported for 0 at least, at most 200, in"),
            ((101, 101, 202), "dimension 0 of input 'left' is 101; its program was exported for 0 at least, at most"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                ask(*sizes)


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
