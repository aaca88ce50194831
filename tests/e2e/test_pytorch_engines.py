"""A program of torch.export on each engine that compiles it, and the resulting package as a model."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.migraphx import find_root
from support.migraphx_serving import config
from support.models import drop
from support.pytorch import NO_COMPILER, NO_PYTORCH, TorchFiles, has_compiler
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve import cli
from rocserve_client import Client, Internal, InvalidArgument, Unavailable

needs_compiler = pytest.mark.skipif(not has_compiler(), reason=NO_COMPILER)

ENGINE = 'parameters {{ key: "engine" value {{ string_value: "{}" }} }}\n'


@pytest.fixture(scope="module")
def server(torch_files: TorchFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("pytorch-engines")
    repository = folder / "repository"
    repository.mkdir()
    # Inductor trusts what the processor says of its instruction sets. Trials of each take as long as a program.
    cheap = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0"}
    flags = [f"--cache-directory={folder / 'cache'}", *(f"--worker-environment={name}" for name in cheap)]
    if root := find_root():
        flags.append(f"--migraphx-root={root}")
    with RocserveProcess([repository], *flags, log=folder / "server.log", environment=cheap) as server:
        yield server
        assert server.terminate() == 0


def compiled(server: RocserveProcess) -> dict[Path, int]:
    """The compiled programs in the server's cache, with the times at which they were written."""
    programs = (server.repositories[0].parent / "cache/pytorch").glob("inductor-*/program.pt2")
    return {path: path.stat().st_mtime_ns for path in programs}


SEVERAL = """
backend: "pytorch"
input [ { name: "ARGS[0]" data_type: TYPE_FP32 dims: -1 }, { name: "ARGS[1]" data_type: TYPE_FP32 dims: -1 },
        { name: "ARGS[2]" data_type: TYPE_FP32 dims: -1 }, { name: "ARGS[3]" data_type: TYPE_INT32 dims: [ -1, 1 ] },
        { name: "ARGS[4]" data_type: TYPE_INT64 dims: -1 }, { name: "ARGS[5]" data_type: TYPE_FP32 dims: -1 },
        { name: "ARGS[6]" data_type: TYPE_FP32 dims: -1 } ]
"""
OWN_NAMES = ("left", "right", "pairs", "ids", "ends", "short", "long")
PACKAGE_NAMES = tuple(f"ARGS[{place}]" for place in range(len(OWN_NAMES)))
ONE_ID = np.ones((1, 1), np.int32)


@pytest.fixture(scope="module")
def several(server: RocserveProcess, torch_files: TorchFiles) -> Iterator[Callable[..., list[np.ndarray]]]:
    """Ask `several`, compiled, or its package: sizes of the three inputs of `pair`, ids of `look_up`, sizes of the last
    two inputs."""
    (repository,) = server.repositories
    drop(repository, "several", torch_files.data("several"), ENGINE.format("inductor"), filename="model.pt2")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="several")
        (package,) = [path for path in compiled(server) if b"pairs" in path.with_name("signature.json").read_bytes()]
        drop(repository, "package", package.read_bytes(), SEVERAL, filename="model.pt2")
        client.wait_until_ready(PATIENCE_SECONDS, model="package")

        def ask(
            model: str,
            sizes: Sequence[int] = (1, 1, 2),
            ids: np.ndarray = ONE_ID,
            short: int = 3,
            long: int = 6,
        ) -> list[np.ndarray]:
            names = PACKAGE_NAMES if model == "package" else OWN_NAMES
            ones = [np.ones(size, np.float32) for size in sizes]
            last = np.ones(short, np.float32), np.arange(long, dtype=np.float32)
            given = [*ones, ids, np.full(len(ids), -10), *last]
            answer = client.infer(model, dict(zip(names, given, strict=True)))
            return [answer[f"OUTPUT__{place}"] for place in range(3)]

        yield ask


@needs_compiler
@pytest.mark.parametrize(("model", "made"), [("several", "exported"), ("package", "compiled")])
def test_sizes_that_do_not_go_together_are_refused(several: Callable[..., Any], model: str, made: str) -> None:
    """The compiled program, and the package of it, would read beyond the end of the shorter input."""
    for size in (1, 2, 100):
        assert several(model, (size, size, 2 * size))[0].tolist() == [4] * size
    names = PACKAGE_NAMES if model == "package" else OWN_NAMES
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
            several(model, sizes)
        assert any(text in str(refused.value) for text in texts), (model, sizes, refused.value)


@needs_compiler
def test_a_program_is_compiled_once(server: RocserveProcess, several: Callable[..., Any]) -> None:
    (repository,) = server.repositories
    before = compiled(server)
    shutil.copytree(repository / "several", repository / "again")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="again")
        assert client.model_metadata("again").properties["engine"] == "inductor"
    assert several("again", (2, 2, 4))[0].tolist() == [4, 4]
    assert compiled(server) == before


@needs_compiler
def test_conditions_that_compiled_code_leaves_out_are_checked(several: Callable[..., Any]) -> None:
    """One of two independent lengths must be half of the other, rounded up."""
    for long in (6, 5):
        assert several("several", short=3, long=long)[2].tolist() == [1, 3, 5]
    with pytest.raises(InvalidArgument) as refused:
        several("several", short=1000, long=6)
    assert (
        "sizes of the inputs do not match; its program was exported for"
        " dimension 0 of input 'short' (1000) == ((1 + dimension 0 of input 'long' (6)) // 2)" in str(refused.value)
    )


@needs_compiler
def test_an_index_out_of_range_reads_nothing(several: Callable[..., Any], torch_files: TorchFiles) -> None:
    """Compiled code checks each index, and ends its process or answers with an error."""
    expected = torch_files.values("several")[1]["OUTPUT__1"][0]

    def ids(rows: int, wrong: int = 1) -> np.ndarray:
        made = np.ones((rows, 1), np.int32)
        made[rows // 2] = wrong
        return made

    for rows in (1, 3000):
        for wrong in (10, -1, 1 << 30):
            with pytest.raises(InvalidArgument, match=f"input 'ids' has the value {wrong}, and its program takes 0"):
                several("several", ids=ids(rows, wrong))
        np.testing.assert_allclose(several("several", ids=ids(rows))[1], np.full(rows, expected), atol=1e-5)
    with pytest.raises((Internal, Unavailable), match=r"index out of bounds|ended unexpectedly \(killed by signal 6\)"):
        several("package", ids=ids(3000, 10))

    def is_right() -> bool:
        try:
            return np.allclose(several("package", ids=ids(3000))[1], expected, atol=1e-5)
        except Unavailable:
            return False

    wait_until(is_right, "an answer of the worker that was started again")


def int8_kernels(package: Path) -> set[str]:
    """The kinds of layers for which the package calls kernels in int8."""
    with zipfile.ZipFile(package) as archive:
        sources = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".cpp"))
    return {kind for kind in ("qconv", "qlinear") if kind.encode() in sources}


def quantised(program: Path, data: np.ndarray) -> Path:
    """Quantise a program statically with the data by the command; return the file."""
    samples, out = program.with_suffix(".npy"), program.with_name(f"{program.stem}_static.pt2")
    np.save(samples, data)
    assert cli.main(["quantise", str(program), "--method=static", f"--data={samples}", f"--out={out}"]) == 0
    return out


def answers(client: Client, model: str, images: np.ndarray, name: str) -> np.ndarray:
    """The scores of the images, 30 at a time. `name`: of the input."""
    batches = np.split(images, len(images) // 30)
    return np.concatenate([client.infer(model, {name: batch})["OUTPUT__0"] for batch in batches])


@needs_compiler
def test_fixed_sizes_have_int8_kernels(server: RocserveProcess, tmp_path: Path) -> None:
    """The program's example is laid out otherwise in memory than requests are, which its code relies on. It takes and
    returns values that are not tensors, too, which the model leaves out."""
    torch = pytest.importorskip("torch", reason=NO_PYTORCH)
    networks = pytest.importorskip("support.torch_networks", reason=NO_PYTORCH)
    images = np.random.default_rng(1).standard_normal((60, 1, 16, 16), np.float32)
    batches = torch.from_numpy(images).split(30)
    file = tmp_path / "fixed.pt2"
    torch.export.save(torch.export.export(networks.Scaled().eval(), (2, batches[0], None)), file)
    module = torch.export.load(quantised(file, images.reshape(2, 30, 1, 16, 16))).module()
    torch.export.save(torch.export.export(module, (2, batches[0].mT.contiguous().mT, None)), file)
    with torch.no_grad():
        right = np.concatenate([module(2, batch, None)[1].numpy() for batch in batches])
    before = compiled(server)
    drop(server.repositories[0], "fixed", file.read_bytes(), ENGINE.format("inductor"), filename="model.pt2")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="fixed")
        properties = client.model_metadata("fixed").properties
        assert properties["program"] == "compiled by Inductor"
        assert properties["precision"].startswith("int8")
        # A tie may be rounded to either whole number.
        np.testing.assert_allclose(answers(client, "fixed", images, "x"), right, atol=0.01)
    (package,) = {*compiled(server)} - {*before}
    assert int8_kernels(package) == {"qconv", "qlinear"}


def test_migraphx_computes_quantised_programs_in_int8(
    server: RocserveProcess, migraphx_root: Path, tmp_path: Path
) -> None:
    """The sample's classifier, quantised statically."""
    torch = pytest.importorskip("torch", reason=NO_PYTORCH)
    networks = pytest.importorskip("support.torch_networks", reason=NO_PYTORCH)
    images, labels = networks.held_out_digits()
    networks.save_program(networks.digits_network(), tmp_path / "digits.pt2", 1, 16, 16)
    static = quantised(tmp_path / "digits.pt2", images)
    with torch.no_grad():
        scores = torch.export.load(static).module()(torch.from_numpy(images)).numpy()
    names = 'input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 1, 16, 16 ] }\n'
    text = config(30, "pytorch_libtorch", names, engine="migraphx-onnx", batch_sizes=30)
    drop(server.repositories[0], "static", static.read_bytes(), text, filename="model.pt2")
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS, model="static")
        properties = client.model_metadata("static").properties
        read = answers(client, "static", images, "INPUT__0").argmax(1)
    assert properties["engine"] == "migraphx-onnx"
    assert properties["precision"] == "int8"
    assert properties["note"] == "written as ONNX from a program of torch.export"
    assert "rows are independent" in properties["load_check"]
    assert "inputs on MIGraphX and PyTorch, largest error" in properties["load_check"]
    right, of_pytorch = ((found == labels).sum() for found in (read, scores.argmax(1)))
    # MIGraphX may round a tie to the other whole number.
    assert abs(right - of_pytorch) <= 1
