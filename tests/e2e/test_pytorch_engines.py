"""A program of torch.export on each engine that compiles it, and the resulting package as a model."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.migraphx_serving import config
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


BOTH = """
backend: "pytorch"
input [ { name: "ARGS[0]" data_type: TYPE_FP32 dims: -1 }, { name: "ARGS[1]" data_type: TYPE_FP32 dims: -1 },
        { name: "ARGS[2]" data_type: TYPE_FP32 dims: -1 }, { name: "ARGS[3]" data_type: TYPE_INT32 dims: [ -1, 1 ] },
        { name: "ARGS[4]" data_type: TYPE_INT64 dims: -1 } ]
"""
OWN_NAMES = ("left", "right", "pairs", "ids", "ends")
PACKAGE_NAMES = tuple(f"ARGS[{place}]" for place in range(len(OWN_NAMES)))
ONE_ID = np.ones((1, 1), np.int32)


@pytest.fixture(scope="module")
def both(server: RocserveProcess, torch_files: TorchFiles) -> Iterator[Callable[..., list[np.ndarray]]]:
    """Ask `pair_and_look_up`, compiled, or its package: sizes of the three inputs of `pair`, ids of `look_up`."""
    (repository,) = server.repositories
    drop(repository, "both", torch_files.data("pair_and_look_up"), ENGINE.format("inductor"), filename="model.pt2")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="both")
        programs = (repository.parent / "cache/pytorch").glob("inductor-*/program.pt2")
        (package,) = [path for path in programs if b"pairs" in path.with_name("signature.json").read_bytes()]
        drop(repository, "both_package", package.read_bytes(), BOTH, filename="model.pt2")
        client.wait_until_ready(PATIENCE_SECONDS, model="both_package")

        def ask(model: str, sizes: Sequence[int] = (1, 1, 2), ids: np.ndarray = ONE_ID) -> list[np.ndarray]:
            names = PACKAGE_NAMES if model == "both_package" else OWN_NAMES
            given = [*(np.ones(size, np.float32) for size in sizes), ids, np.full(len(ids), -10)]
            answer = client.infer(model, dict(zip(names, given, strict=True)))
            return [answer["OUTPUT__0"], answer["OUTPUT__1"]]

        yield ask


@needs_compiler
@pytest.mark.parametrize(("model", "made"), [("both", "exported"), ("both_package", "compiled")])
def test_sizes_that_do_not_go_together_are_refused(both: Callable[..., Any], model: str, made: str) -> None:
    """The compiled program, and the package of it, would read beyond the end of the shorter input."""
    for size in (1, 2, 100):
        assert both(model, (size, size, 2 * size))[0].tolist() == [4] * size
    names = PACKAGE_NAMES if model == "both_package" else OWN_NAMES
    left, right, pairs = (f"dimension 0 of input '{name}'" for name in names[:3])
    bounds = f"its program was {made} for 0 at least, at most"
    for sizes, texts in (
        ((4, 3, 8), (f"{left} is 4, but {right} is 3; its program was {made} for matching sizes",)),
        ((0, 4, 8), (f"{left} is 0, but {right} is 4; its program",)),
        ((4, 4, 6), (f"{left} is 4, but {pairs} is 6; its program was", f"{pairs} (6) == 2*{left} (4)")),
        ((4, 4, 7), (f"{pairs} is 7; {bounds} 200, in steps of 2", f"{pairs} (7) == 2*{left} (4)")),
        ((101, 101, 202), (f"{left} is 101; {bounds} 100",)),
    ):
        with pytest.raises(InvalidArgument) as refused:
            both(model, sizes)
        assert any(text in str(refused.value) for text in texts), (model, sizes, refused.value)


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


@needs_compiler
def test_an_index_out_of_range_reads_nothing(both: Callable[..., Any], torch_files: TorchFiles) -> None:
    """Compiled code checks each index, and ends its process or answers with an error."""
    expected = torch_files.values("pair_and_look_up")[1]["OUTPUT__1"][0]

    def ids(rows: int, wrong: int = 1) -> np.ndarray:
        made = np.ones((rows, 1), np.int32)
        made[rows // 2] = wrong
        return made

    for rows in (1, 3000):
        for wrong in (10, -1, 1 << 30):
            with pytest.raises(InvalidArgument, match=f"input 'ids' has the value {wrong}, and its program takes 0"):
                both("both", ids=ids(rows, wrong))
        np.testing.assert_allclose(both("both", ids=ids(rows))[1], np.full(rows, expected), atol=1e-5)
    with pytest.raises((Internal, Unavailable), match=r"index out of bounds|ended unexpectedly \(killed by signal 6\)"):
        both("both_package", ids=ids(3000, 10))

    def is_right() -> bool:
        try:
            return np.allclose(both("both_package", ids=ids(3000))[1], expected, atol=1e-5)
        except Unavailable:
            return False

    wait_until(is_right, "an answer of the worker that was started again")


@pytest.fixture(scope="module")
def on_migraphx(migraphx_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("migraphx-onnx")
    repository = folder / "repository"
    repository.mkdir()
    flags = (f"--migraphx-root={migraphx_root}", f"--cache-directory={folder / 'cache'}")
    with RocserveProcess([repository], *flags, log=folder / "server.log") as server:
        yield server
        assert server.terminate() == 0


def test_migraphx_by_way_of_onnx(on_migraphx: RocserveProcess, torch_files: TorchFiles) -> None:
    names = 'input { name: "INPUT__0" data_type: TYPE_FP32 dims: 4 }\n'
    text = config(2, "pytorch_libtorch", names, engine="migraphx-onnx")
    drop(on_migraphx.repositories[0], "named", torch_files.data("classifier"), text, filename="model.pt2")
    check(on_migraphx, torch_files, "named", ("INPUT__0", "scores", "best"))
    with Client(on_migraphx.address) as client:
        properties = client.model_metadata("named").properties
    assert properties["note"] == "written as ONNX from a program of torch.export"
    assert "rows are independent" in properties["load_check"]
    assert "inputs on MIGraphX and PyTorch, largest error" in properties["load_check"]


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


@dataclass(frozen=True, slots=True)
class Digits:
    """A program of the sample's classifier, quantised statically and dynamically, with images and their digits."""

    static: bytes
    dynamic_onnx: bytes
    images: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    """Of the static program in PyTorch."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    torch = pytest.importorskip("torch", reason=NO_PYTORCH)
    networks = pytest.importorskip("support.torch_networks", reason=NO_PYTORCH)
    folder = tmp_path_factory.mktemp("digits")
    images, labels = networks.held_out_digits()
    networks.save_program(networks.digits_network(), folder / "digits.pt2", 1, 16, 16)
    static = quantised(folder / "digits.pt2", images, "static")
    dynamic = quantised(folder / "digits.pt2", images, "dynamic", ".onnx")
    with torch.no_grad():
        scores = torch.export.load(static).module()(torch.from_numpy(images)).numpy()
    return Digits(static.read_bytes(), dynamic.read_bytes(), images, labels, scores)


def quantised(program: Path, data: np.ndarray, method: str, suffix: str = ".pt2") -> Path:
    """Quantise a program with the data by the command; return the file."""
    samples, out = program.with_suffix(".npy"), program.with_name(f"{program.stem}_{method}{suffix}")
    np.save(samples, data)
    assert cli.main(["quantise", str(program), f"--method={method}", f"--data={samples}", f"--out={out}"]) == 0
    return out


def answers(client: Client, model: str, images: np.ndarray) -> np.ndarray:
    """The scores of the images, 30 at a time."""
    batches = np.split(images, len(images) // 30)
    return np.concatenate([client.infer(model, {"input": batch})["OUTPUT__0"] for batch in batches])


@needs_compiler
def test_fixed_sizes_have_int8_kernels(server: RocserveProcess, digits: Digits, tmp_path: Path) -> None:
    """A program for any batch has none, and is right all the same."""
    torch = pytest.importorskip("torch", reason=NO_PYTORCH)
    networks = pytest.importorskip("support.torch_networks", reason=NO_PYTORCH)
    (repository,) = server.repositories
    batches = digits.images.reshape(-1, 30, *digits.images.shape[1:])
    program = torch.export.export(networks.convolutions(), (torch.from_numpy(batches[0]),))
    torch.export.save(program, tmp_path / "fixed.pt2")
    fixed = quantised(tmp_path / "fixed.pt2", batches, "static")
    bare = torch.export.load(fixed).module()
    with torch.no_grad():
        right = {
            "fixed": np.concatenate([bare(torch.from_numpy(batch)).numpy() for batch in batches]),
            "open": digits.scores,
        }
    before = {*(repository.parent / "cache/pytorch").glob("inductor-*/program.pt2")}
    drop(repository, "fixed", fixed.read_bytes(), ENGINE.format("inductor"), filename="model.pt2")
    drop(repository, "open", digits.static, ENGINE.format("inductor"), filename="model.pt2")
    with Client(server.address) as client:
        for name, scores in right.items():
            client.wait_until_ready(PATIENCE_SECONDS, model=name)
            properties = client.model_metadata(name).properties
            assert properties["program"] == "compiled by Inductor"
            assert properties["precision"].startswith("int8")
            # Scores go up to 20. A tie may be rounded to either whole number.
            np.testing.assert_allclose(answers(client, name, digits.images), scores, atol=0.1)
    packages = {*(repository.parent / "cache/pytorch").glob("inductor-*/program.pt2")} - before
    assert sorted(map(int8_kernels, packages), key=len) == [set(), {"qconv", "qlinear"}]


def test_quantised_programs_are_served_as_bare_ones(on_migraphx: RocserveProcess, digits: Digits) -> None:
    (repository,) = on_migraphx.repositories
    text = config(30, "pytorch_libtorch", engine="migraphx-onnx", batch_sizes=30)
    drop(repository, "static", digits.static, filename="model.pt2")
    drop(repository, "static_mgx", digits.static, text, filename="model.pt2")
    drop(repository, "dynamic_onnx", digits.dynamic_onnx)
    right = (digits.scores.argmax(1) == digits.labels).sum()
    with Client(on_migraphx.address) as client:
        for model, engine in (("static", "eager"), ("static_mgx", "migraphx-onnx"), ("dynamic_onnx", "onnxruntime")):
            client.wait_until_ready(PATIENCE_SECONDS, model=model)
            properties = client.model_metadata(model).properties
            assert properties["engine"] == engine
            assert engine != "migraphx-onnx" or properties["precision"] == "int8"
            read = (answers(client, model, digits.images).argmax(1) == digits.labels).sum()
            # Another engine may round a tie to the other whole number.
            assert abs(read - right) <= (0 if engine == "eager" else 1)
