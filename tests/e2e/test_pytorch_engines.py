"""A program of torch.export on each engine that compiles it, and the resulting package as a model."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import drop
from support.pytorch import NO_COMPILER, NO_PYTORCH, TorchFiles, has_compiler
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve import cli
from rocserve_client import Client, Internal, InvalidArgument, Unavailable

needs_compiler = pytest.mark.skipif(not has_compiler(), reason=NO_COMPILER)

ENGINE = 'parameters {{ key: "engine" value {{ string_value: "{}" }} }}\n'
PACKAGE = """
backend: "pytorch"
platform: "torch_aoti"
max_batch_size: 8
input { name: "ARGS[0]" data_type: TYPE_FP32 dims: 4 }
output [ { name: "RESULT[scores]" data_type: TYPE_FP32 dims: 3 }, { name: "RESULT[best]" data_type: TYPE_INT64 dims: 1 reshape {} } ]
"""  # noqa: E501


TEXTS = """
backend: "pytorch"
max_batch_size: 8
input [ { name: "ARGS[0]" data_type: TYPE_INT64 dims: -1 }, { name: "ARGS[1]" data_type: TYPE_INT64 dims: -1 } ]
output [
  { name: "RESULT[states]" data_type: TYPE_FP32 dims: [ -1, 8 ] }, { name: "RESULT[mean]" data_type: TYPE_FP32 dims: 8 }
]
parameters { key: "sizes" value { string_value: "ARGS[0]:0=8,16" } }
"""


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
    """Check that the model returns what PyTorch returned. `names`: of the input and the outputs."""
    inputs, expected = torch_files.values("classifier")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model=model)
        for rows in (2, 1):
            answer = client.infer(model, {names[0]: inputs["x"][:rows]})
            np.testing.assert_allclose(answer[names[1]], expected["scores"][:rows], atol=1e-6)
            assert answer[names[2]].ravel().tolist() == expected["best"][:rows].tolist()


def wait_until_refused(server: RocserveProcess, model: str, why: str) -> None:
    """Wait for the reason, and remove the model: each retry would import PyTorch again."""
    wait_until(
        lambda: any(f"'{model}' version" in line and why in line for line in server.log_text.splitlines()),
        f"why {model} is refused",
    )
    shutil.rmtree(server.repositories[0] / model)


@needs_compiler
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
    # The compiled code would read beyond the ends of its rows.
    narrow = PACKAGE.replace("FP32 dims: 4", "FP32 dims: 3")
    drop(repository, "narrow", package.read_bytes(), narrow, filename="model.pt2")
    wait_until_refused(server, "narrow", "compiled for FP32 [-1, 4]; change config.pbtxt, or compile")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="single")
        assert client.infer("single", {"ARGS[0]": np.ones((1, 4), np.float32)})["RESULT[scores]"].shape == (1, 3)
    with Client(server.address) as client:
        assert client.model_metadata("package").properties["program"] == "a package of AOTInductor"
        assert client.model_metadata("again").properties["engine"] == "inductor"


PAIR = """
backend: "pytorch"
input [ {{ name: "ARGS[0]" data_type: TYPE_FP32 dims: {} }}, {{ name: "ARGS[1]" data_type: TYPE_FP32 dims: -1 }},
        {{ name: "ARGS[2]" data_type: TYPE_FP32 dims: {} }} ]
"""


@needs_compiler
def test_sizes_that_do_not_go_together_are_refused(server: RocserveProcess, torch_files: TorchFiles) -> None:
    """The compiled program, and the package of it, would read beyond the end of the shorter input."""
    (repository,) = server.repositories
    drop(repository, "pair", torch_files.data("pair"), ENGINE.format("inductor"), filename="model.pt2")
    own = ("left", "right", "pairs")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="pair")
        programs = (repository.parent / "cache/pytorch").glob("inductor-*/program.pt2")
        (package,) = [path for path in programs if b"pairs" in path.with_name("signature.json").read_bytes()]
        drop(repository, "pair_package", package.read_bytes(), PAIR.format(-1, -1), filename="model.pt2")
        drop(repository, "pair_few", package.read_bytes(), PAIR.format(101, -1), filename="model.pt2")
        client.wait_until_ready(PATIENCE_SECONDS, model="pair_package")

        def ask(model: str, names: Sequence[str], *sizes: int) -> list[float]:
            given = {name: np.ones(size, np.float32) for name, size in zip(names, sizes, strict=True)}
            return client.infer(model, given)["OUTPUT__0"].tolist()

        for model, names, made in (
            ("pair", own, "exported"),
            ("pair_package", [f"ARGS[{place}]" for place in range(3)], "compiled"),
        ):
            for size in (1, 2, 100):
                assert ask(model, names, size, size, 2 * size) == [4] * size
            left, right, pairs = (f"dimension 0 of input '{name}'" for name in names)
            bounds = f"its program was {made} for 0 at least, at most"
            for sizes, texts in (
                ((4, 3, 8), (f"{left} is 4, but {right} is 3; its program was {made} for matching sizes",)),
                ((0, 4, 8), (f"{left} is 0, but {right} is 4; its program",)),
                ((4, 4, 6), (f"{left} is 4, but {pairs} is 6; its program was", f"{pairs} (6) == 2*{left} (4)")),
                ((4, 4, 7), (f"{pairs} is 7; {bounds} 200, in steps of 2", f"{pairs} (7) == 2*{left} (4)")),
                ((101, 101, 202), (f"{left} is 101; {bounds} 100",)),
            ):
                with pytest.raises(InvalidArgument) as refused:
                    ask(model, names, *sizes)
                assert any(text in str(refused.value) for text in texts), (model, sizes, refused.value)
        why = "FP32 [101] in config.pbtxt, but the package was compiled for 0 at least, at most 100 in dimension 0"
        wait_until_refused(server, "pair_few", why)


@pytest.fixture(scope="module")
def of_columns(server: RocserveProcess, torch_files: TorchFiles) -> Iterator[Callable[..., Any]]:
    """Ask a compiled program whose example of `x` was a transposed tensor. It takes and returns values that are not
    tensors, too, which the model leaves out."""
    drop(
        server.repositories[0], "columns", torch_files.data("columns"), ENGINE.format("inductor"), filename="model.pt2"
    )
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="columns")

        def ask(x: np.ndarray, short: int = 3, long: int = 6) -> tuple[np.ndarray, list[float]]:
            given = {"x": x, "short": np.ones(short, np.float32), "long": np.arange(long, dtype=np.float32)}
            answer = client.infer("columns", given)
            return answer["OUTPUT__0"], answer["OUTPUT__1"].tolist()

        yield ask


@needs_compiler
def test_conditions_that_compiled_code_leaves_out_are_checked(of_columns: Callable[..., Any]) -> None:
    """One of two independent lengths must be half of the other, rounded up."""
    x = np.ones((1, 4), np.float32)
    assert of_columns(x, 3, 6)[1] == of_columns(x, 3, 5)[1] == [1, 3, 5]
    with pytest.raises(InvalidArgument) as refused:
        of_columns(x, 1000, 6)
    assert (
        "sizes of the inputs do not match; its program was exported for"
        " dimension 0 of input 'short' (1000) == ((1 + dimension 0 of input 'long' (6)) // 2)" in str(refused.value)
    )


@needs_compiler
def test_inputs_are_laid_out_in_memory_as_compiled_code_reads_them(
    server: RocserveProcess, torch_files: TorchFiles, of_columns: Callable[..., Any]
) -> None:
    """The example was a transposed tensor, and a slice of another one."""
    inputs, expected = torch_files.values("columns")
    for rows in (5, 1):
        np.testing.assert_array_equal(of_columns(inputs["x"][:rows])[0], expected["OUTPUT__0"][:rows])
    drop(server.repositories[0], "part", torch_files.data("part"), ENGINE.format("inductor"), filename="model.pt2")
    wait_until_refused(server, "part", "an example for input 'x' that is a part of another tensor, or expanded")


LOOK_UP = """
backend: "pytorch"
max_batch_size: 4096
input [ { name: "ARGS[0]" data_type: TYPE_INT32 dims: 1 },
        { name: "ARGS[1]" data_type: TYPE_INT64 dims: 1 reshape {} } ]
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 1 reshape {} }
"""


@needs_compiler
def test_an_index_out_of_range_reads_nothing(server: RocserveProcess, torch_files: TorchFiles) -> None:
    """Compiled code checks each index, and ends its process or answers with an error."""
    (repository,) = server.repositories
    settings = ENGINE.format("inductor") + "max_batch_size: 4096\n"
    drop(repository, "look_up", torch_files.data("look_up"), settings, filename="model.pt2")
    expected = torch_files.values("look_up")[1]["OUTPUT__0"][0]

    def inputs(rows: int, wrong: int = 1) -> tuple[np.ndarray, np.ndarray]:
        ids = np.ones((rows, 1), np.int32)
        ids[rows // 2] = wrong
        return ids, np.full((rows, 1), -10)

    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="look_up")
        for rows in (1, 3000):
            for wrong in (10, -1, 1 << 30):
                ids, ends = inputs(rows, wrong)
                with pytest.raises(
                    InvalidArgument, match=f"input 'ids' has the value {wrong}, and its program takes 0"
                ):
                    client.infer("look_up", {"ids": ids, "ends": ends})
            ids, ends = inputs(rows)
            answer = client.infer("look_up", {"ids": ids, "ends": ends})["OUTPUT__0"]
            np.testing.assert_allclose(answer.ravel(), np.full(rows, expected), atol=1e-5)
        programs = (repository.parent / "cache/pytorch").glob("inductor-*/program.pt2")
        (package,) = [path for path in programs if b'"ends"' in path.with_name("signature.json").read_bytes()]
        drop(repository, "look_up_package", package.read_bytes(), LOOK_UP, filename="model.pt2")
        client.wait_until_ready(PATIENCE_SECONDS, model="look_up_package")

        def ask(wrong: int = 1) -> np.ndarray:
            ids, ends = inputs(3000, wrong)
            return client.infer("look_up_package", {"ARGS[0]": ids, "ARGS[1]": ends})["OUTPUT__0"]

        with pytest.raises(
            (Internal, Unavailable), match=r"index out of bounds|ended unexpectedly \(killed by signal 6\)"
        ):
            ask(wrong=10)

        def is_right() -> bool:
            try:
                return np.allclose(ask(), expected, atol=1e-5)
            except Unavailable:
                return False

        wait_until(is_right, "an answer of the worker that was started again")


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
            properties = client.model_metadata("exported").properties
        assert properties["note"] == "written as ONNX from a program of torch.export"
        assert "rows are independent" in properties["load_check"]
        assert "inputs on MIGraphX and PyTorch, largest error" in properties["load_check"]


def test_torchscript_is_not_inductor_s(server: RocserveProcess, torch_files: TorchFiles) -> None:
    config = ENGINE.format("inductor") + 'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }\n'
    drop(server.repositories[0], "traced", torch_files.data("traced"), config, filename="model.pt")
    text = "model.pt is a TorchScript program; export the module with torch.export, or remove the parameter"
    wait_until_refused(server, "traced", text)


def test_packages_of_encoders_are_padded(
    server: RocserveProcess, torch_files: TorchFiles, torch_packages: TorchFiles
) -> None:
    """Nothing tells where their ids end, nor that the second input is a mask."""
    found: dict[str, str] = {}
    names = ("encoder", "seeing_all")
    for name in names:
        drop(server.repositories[0], name, torch_packages.data(name), TEXTS, filename="model.pt2")
    with Client(server.address) as client:
        for name in names:
            client.wait_until_ready(PATIENCE_SECONDS, model=name)
            found[name] = client.model_metadata(name).properties["load_check"]
        assert "rows are independent" in found["encoder"]
        assert "dimension 'ARGS[0]:0' may be padded" in found["encoder"]
        assert "dimension 'ARGS[0]:0' must not be padded: output 'RESULT[states]'" in found["seeing_all"]
        inputs, expected = torch_files.values("encoder")
        answer = client.infer("encoder", {"ARGS[0]": inputs["ids"], "ARGS[1]": inputs["mask"]})
    for name, values in expected.items():
        np.testing.assert_allclose(answer[f"RESULT[{name}]"], values, atol=1e-6)


def int8_kernels(package: Path) -> set[str]:
    """The kinds of layers for which the package calls kernels in int8."""
    with zipfile.ZipFile(package) as archive:
        sources = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".cpp"))
    return {kind for kind in ("qconv", "qlinear") if kind.encode() in sources}


@needs_compiler
def test_fixed_sizes_have_int8_kernels(server: RocserveProcess, tmp_path: Path) -> None:
    """A program for any batch has none, and is right all the same."""
    torch = pytest.importorskip("torch", reason=NO_PYTORCH)
    networks = pytest.importorskip("support.torch_networks", reason=NO_PYTORCH)
    (repository,) = server.repositories
    images, _ = networks.held_out_digits()
    batches = images.reshape(-1, 30, *images.shape[1:])
    np.save(tmp_path / "fixed.npy", batches)
    np.save(tmp_path / "open.npy", images)
    program = torch.export.export(networks.convolutions(), (torch.from_numpy(batches[0]),))
    torch.export.save(program, tmp_path / "fixed.pt2")
    networks.save_program(networks.digits_network(), tmp_path / "open.pt2", 1, 16, 16)
    before = {*(repository.parent / "cache/pytorch").glob("inductor-*/program.pt2")}
    for name in ("fixed", "open"):
        quantised = tmp_path / f"{name}_int8.pt2"
        flags = ("--method=static", f"--data={tmp_path / name}.npy", f"--out={quantised}")
        assert cli.main(["quantise", str(tmp_path / f"{name}.pt2"), *flags]) == 0
        drop(repository, name, quantised.read_bytes(), ENGINE.format("inductor"), filename="model.pt2")
    with Client(server.address) as client:
        for name in ("fixed", "open"):
            client.wait_until_ready(PATIENCE_SECONDS, model=name)
            properties = client.model_metadata(name).properties
            assert properties["program"] == "compiled by Inductor"
            assert properties["precision"].startswith("int8")
            bare = torch.export.load(tmp_path / f"{name}_int8.pt2").module()
            for batch in batches:
                with torch.no_grad():
                    right = bare(torch.from_numpy(batch)).numpy()
                # Scores go up to 20. A tie may be rounded to either whole number.
                np.testing.assert_allclose(client.infer(name, {"input": batch})["OUTPUT__0"], right, atol=0.1)
    packages = {*(repository.parent / "cache/pytorch").glob("inductor-*/program.pt2")} - before
    assert sorted(map(int8_kernels, packages), key=len) == [set(), {"qconv", "qlinear"}]
