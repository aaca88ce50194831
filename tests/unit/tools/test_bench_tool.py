"""`rocserve bench` on real engines. No test asserts a time, only that all of them are printed."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.encoders import encoder
from support.migraphx_models import any_length, mini_resnet, mlp, two_in_two_out
from support.models import drop
from support.pytorch import TorchFiles
from support.tools import Command
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve.core.errors import ServeError
from rocserve.verbs.printing import console_on, say_json
from rocserve_tools.bench import EngineTimes
from rocserve_tools.bench_plot import draw
from rocserve_tools.measuring.figures import Difference, LatencySummary

pytestmark = pytest.mark.long

_QUICK = ("--seconds", "0", "--repeats", "6", "--warm-up", "1")


def _file(tmp_path: Path, content: bytes, name: str = "m.onnx") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_onnx_runtime_at_each_batch_size_against_itself_with_a_plot(command: Command, tmp_path: Path) -> None:
    model, plot = _file(tmp_path, mlp()), tmp_path / "curve.png"
    words = ("--engine", "onnxruntime", "--against", "onnxruntime", "--batch-sizes", "1,4", "--plot", plot, *_QUICK)
    ran = command("bench", model, *words)
    assert ran.status == 0
    assert "onnxruntime: ONNX Runtime " in ran.out
    rows = [line.split() for line in ran.out.splitlines() if line.strip().startswith("onnxruntime  ")]
    # 5 rounds of 2 runs each: at least the 6 that were asked for.
    assert [row[1:3] for row in rows] == [["1", "10"], ["4", "10"]]
    assert all(float(figure.replace(",", "")) >= 0 for row in rows for figure in row[3:])
    assert "speed" not in ran.out
    assert "nothing to compare with: the model is on onnxruntime already; --engine names another\n" in ran.out
    assert ran.out.splitlines()[-1] == f"curve: {plot}"
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("verb", "name", "expected"),
    [
        ("compile", "m.pt2", "is of backend 'pytorch', whose models have no compiled programs; this is for ONNX,"),
        ("inspect", "m.pt", "is of backend 'pytorch', whose models have no compiled programs; this is for ONNX,"),
    ],
)
def test_the_error_of_another_engines_file_follows_its_ending(
    command: Command, tmp_path: Path, verb: str, name: str, expected: str
) -> None:
    ran = command(verb, _file(tmp_path, b"PK", name))
    assert ran.status == 1
    assert f"{name}: {expected}" in ran.err


def test_a_plot_is_a_png(command: Command, tmp_path: Path) -> None:
    ran = command("bench", _file(tmp_path, mlp()), "--plot", tmp_path / "curve.pdf")
    assert ran.status == 1
    assert "--plot: expected a name that ends in .png" in ran.err


def _times(engine: str, size: int, p50: float, failure: str = "") -> EngineTimes:
    latency = None if failure else LatencySummary(10, p50, p50, p50, 2 * p50, 3 * p50, 0.0)
    return EngineTimes(engine, size, float(size), None, latency, 1000 * size / p50, 1.0, None, failure)


def test_engines_in_one_plot(tmp_path: Path) -> None:
    times = [_times(engine, size, 1.0 + size) for engine in ("migraphx", "torch") for size in (0, 1, 8)]
    draw([*times, _times("onnxruntime", 1, 1.0, "it does not run")], "m", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    with pytest.raises(ServeError, match="no engine could run the model, so there is nothing to draw"):
        draw([_times("onnxruntime", 1, 1.0, "it does not run")], "m", tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()


def test_migraphx_against_onnx_runtime_in_one_run(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    model = _file(tmp_path, two_in_two_out())
    ran = command.on_migraphx(
        migraphx_root, "bench", model, "--target", "ref", "--batch-sizes", "1,3", "--against", "onnxruntime", "--json",
        *_QUICK,
    )  # fmt: skip
    assert ran.status == 0
    result = json.loads(ran.out)
    assert list(result["engines"]) == ["migraphx", "onnxruntime"]
    assert result["engines"]["migraphx"].startswith("MIGraphX 2.")
    assert [(one["engine"], one["batch_size"]) for one in result["times"]] == [
        ("migraphx", 1), ("onnxruntime", 1), ("migraphx", 3), ("onnxruntime", 3),
    ]  # fmt: skip
    first, second = result["times"][:2]
    assert (first["speed"], first["difference"]) == (1.0, None)
    assert second["difference"]["largest"] < 1e-4
    assert second["speed"] == pytest.approx(second["throughput"] / first["throughput"])
    assert set(first["latency"]) == {"runs", "min", "mean", "p50", "p95", "p99", "std"}


def test_an_engine_that_is_not_there_is_said_and_the_rest_is_measured(command: Command, tmp_path: Path) -> None:
    model = _file(tmp_path, mlp())
    ran = command("bench", model, "--engine", "onnxruntime", "--against", "torch", "--batch-sizes", "1", *_QUICK)
    if ran.status == 0:
        pytest.skip("PyTorch and onnx2torch are installed")
    assert ran.row("onnxruntime ")[0] == "1"
    assert "rocserve bench: torch: PyTorch is not installed; pip install torch" in ran.err or "onnx2torch" in ran.err


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "onnx2torch"))), reason="PyTorch or onnx2torch is not installed"
)
@pytest.mark.parametrize("network", [two_in_two_out(), mini_resnet()], ids=["two", "resnet"])
def test_pytorch_where_it_is_installed(command: Command, tmp_path: Path, network: bytes) -> None:
    ran = command(
        "bench", _file(tmp_path, network), "--engine", "onnxruntime", "--against", "torch", "--batch-sizes", "1,3",
        "--json", *_QUICK,
    )  # fmt: skip
    assert ran.status == 0
    result = json.loads(ran.out)
    assert result["engines"]["torch"].startswith("PyTorch ")
    measured = [one for one in result["times"] if one["engine"] == "torch"]
    assert [one["batch_size"] for one in measured] == [1, 3]
    assert all(one["difference"]["largest"] < 1e-4 for one in measured)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
class TestPyTorchFiles:
    def test_a_program_beside_the_bare_loop_and_by_way_of_onnx(
        self, migraphx_root: Path, command: Command, torch_files: TorchFiles
    ) -> None:
        file = torch_files.folder / "classifier.pt2"
        words = ("--against", "torch", "--against", "migraphx-onnx", "--target", "ref", "--batch-sizes", "8", *_QUICK)
        ran = command.on_migraphx(migraphx_root, "bench", file, "--engine", "eager", *words, "--json")
        assert ran.status == 0
        result = json.loads(ran.out)
        assert result["engines"]["eager"].endswith("(a program of torch.export, cpu, fp32)")
        assert result["engines"]["torch"].endswith("(cpu, classifier.pt2)")
        assert result["engines"]["migraphx-onnx"].startswith("MIGraphX 2.")
        assert [(one["engine"], one["batch_size"]) for one in result["times"]] == [
            ("eager", 8), ("torch", 8), ("migraphx-onnx", 8),
        ]  # fmt: skip
        _, bare, by_onnx = (one["difference"] for one in result["times"])
        assert bare["largest"] == 0 and by_onnx["largest"] < 1e-6

    def test_a_tuned_folder(self, command: Command, torch_files: TorchFiles, tmp_path: Path) -> None:
        config = 'backend: "pytorch"\ninput { name: "x" data_type: TYPE_FP32 dims: 4 }\nmax_batch_size: 8\n'
        folder = drop(tmp_path, "m", torch_files.data("traced"), config, filename="model.pt")
        ran = command("tune", folder, "--batch-sizes", "4,8", "--instances", "2", "--write", *_QUICK)
        assert ran.status == 0
        assert "m on PyTorch " in ran.out
        rows = [line.split()[:2] for line in ran.out.splitlines() if line.split()[:1] == ["2"]]
        assert rows == [["2", "4"], ["2", "8"]]
        text = (folder / "config.pbtxt").read_text()
        assert "instance_group [ { count: 2 } ]" in text and "batch_sizes" not in text

    def test_engines_that_have_no_part_in_it(self, command: Command, torch_files: TorchFiles, tmp_path: Path) -> None:
        file = torch_files.folder / "classifier.pt2"
        ran = command("bench", file, "--engine", "onnxruntime", *_QUICK)
        assert (ran.status, "must be one of auto, eager, inductor, migraphx, migraphx-onnx" in ran.err) == (1, True)
        ran = command("bench", _file(tmp_path, mlp()), "--engine", "eager", *_QUICK)
        assert (ran.status, "eager runs PyTorch files, and m.onnx is not one" in ran.err) == (1, True)


def test_a_batch_that_the_file_does_not_have(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    """Each engine also runs a file with a fixed batch of 1 at other sizes; ONNX Runtime row by row."""
    model = _file(tmp_path, mlp(batch=1))
    ran = command.on_migraphx(
        migraphx_root, "bench", model, "--target", "ref", "--batch-sizes", "1,2", "--against", "onnxruntime", *_QUICK
    )
    assert ran.status == 0
    rows = [line.split() for line in ran.out.splitlines() if line.strip().startswith("onnxruntime  ")]
    assert [row[1] for row in rows] == ["1", "2"]
    assert all(float(row[2]) > 0 for row in rows)


def test_a_compiled_file(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    model, program = _file(tmp_path, mlp()), tmp_path / "m.mxr"
    words = ("compile", model, "--target", "ref", "--batch-sizes", "2", "--output", program)
    assert command.on_migraphx(migraphx_root, *words).status == 0
    bench = ("bench", program, "--target", "ref", "--against", "onnxruntime", *_QUICK)
    # The other engines take the ONNX file next to it.
    ran = command.on_migraphx(migraphx_root, *bench)
    assert (ran.status, ran.row("migraphx ")[0], ran.row("onnxruntime  ")[0]) == (0, "2", "2")
    # An engine that cannot have the model is said, and the rest is measured.
    model.write_bytes(b"nonsense")
    ran = command.on_migraphx(migraphx_root, *bench)
    assert (ran.status, ran.row("migraphx ")[0]) == (1, "2")
    assert (
        "rocserve bench: onnxruntime: m.mxr runs on MIGraphX only, so m.onnx next to it is measured: "
    ) in ran.err and "m.onnx failed:Protobuf parsing failed" in ran.err
    model.unlink()
    ran = command.on_migraphx(migraphx_root, *bench, "--json")
    result = json.loads(ran.out)
    assert (ran.status, [one["batch_size"] for one in result["times"]]) == (1, [2])
    assert "rocserve bench: onnxruntime: m.mxr can only be measured on MIGraphX; other engines need" in ran.err
    assert result["missing"] == ["onnxruntime"]


def test_migraphx_is_one_of_those_that_may_be_missing(command: Command, tmp_path: Path) -> None:
    words = ("--engine", "onnxruntime", "--against", "migraphx", "--migraphx-root", tmp_path, "--batch-sizes", "1")
    ran = command("bench", _file(tmp_path, mlp()), *words, *_QUICK)
    assert (ran.status, ran.row("onnxruntime ")[0]) == (1, "1")
    assert f"rocserve bench: migraphx: MIGraphX is not in {tmp_path}" in ran.err


def test_dimensions_that_the_model_leaves_open(command: Command, tmp_path: Path) -> None:
    model = _file(tmp_path, any_length())
    words = ("bench", model, "--engine", "onnxruntime", "--batch-sizes", "1", *_QUICK)
    ran = command(*words)
    assert ran.status == 1
    assert "input_shapes" in ran.err
    assert command(*words, "--input-shapes", "x: 7").status == 0


_PADDED = """
max_batch_size: 4
parameters { key: "sizes" value { string_value: "sequence=8,16" } }
"""
_UNLIKE = ("--lengths", "uniform:min=1,max=16")
_TWO_ROUNDS = ("--seconds", "0", "--repeats", "2", "--warm-up", "0")


def test_requests_of_drawn_lengths(command: Command, tmp_path: Path) -> None:
    content = encoder().SerializeToString()
    padded, alone = drop(tmp_path, "padded", content, _PADDED), drop(tmp_path, "alone", content, "max_batch_size: 4\n")
    words = ("--engine", "onnxruntime", "--batch-sizes", "1,4", *_TWO_ROUNDS)
    ran = command("bench", padded, "--lengths", "5", "--against", "cpu", *words)
    assert ran.status == 0
    # Each of two rounds runs all batches: 128 requests, alone or by four. All of them are padded from 5 to 8.
    rows = [line.split() for line in ran.out.splitlines() if line.strip().startswith(("onnxruntime  ", "cpu  "))]
    assert [row[:5] for row in rows] == [
        ["onnxruntime", "1", "1", "0.60", "256"], ["cpu", "1", "1", "0.60", "256"],
        ["onnxruntime", "4", "4", "0.60", "64"], ["cpu", "4", "4", "0.60", "64"],
    ]  # fmt: skip
    assert all(float(row[-2]) < 1e-4 for row in rows[1::2]), "both engines are the same"
    assert "dimension 'sequence': 128 lengths, median 5, largest 5\n" in ran.out
    result = json.loads(command("bench", padded, *_UNLIKE, *words, "--json").out)
    assert result["lengths"] == {"sequence": {"requests": 128, "median": 8.5, "largest": 16}}
    one, four = ((item["rows"], item["padded"]) for item in result["times"])
    assert one == (1, pytest.approx((8 + 16) / (2 * 8.5) - 1))
    assert four[0] > 3
    times = json.loads(command("bench", alone, "--lengths", "sequence=uniform:min=1,max=16", *words, "--json").out)[
        "times"
    ]
    assert [one["padded"] for one in times] == [None, None]
    assert times[1]["rows"] < 1.5, "requests of unlike lengths run one by one"


def test_lengths_that_do_not_fit_the_model(command: Command, tmp_path: Path) -> None:
    folder = drop(tmp_path, "padded", encoder().SerializeToString(), _PADDED)
    for lengths, error in (
        ("17", "dimension 'sequence' has lengths up to 17, expected 1 to 16, the largest of its sizes 8, 16;"),
        ("batch=3", "expected the name of an open dimension, got 'batch'; the open dimensions are: sequence"),
    ):
        ran = command("bench", folder, "--engine", "onnxruntime", "--lengths", lengths, *_QUICK)
        assert (ran.status, f"--lengths: {error}" in ran.err) == (1, True)
    ran = command("bench", folder, "--lengths", "nowhere.txt")
    assert ran.status == 2
    assert "argument --lengths: expected lognormal:median=M,max=N, uniform:min=N,max=N, a length, or a file" in ran.err


def test_drawn_lengths_on_migraphx_have_the_names_of_the_file(
    migraphx_root: Path, command: Command, tmp_path: Path
) -> None:
    content, config = encoder(layers=1).SerializeToString(), _PADDED.replace("8,16", "16")
    ran = command.on_migraphx(
        migraphx_root, "bench", drop(tmp_path, "padded", content, config), "--engine", "migraphx", "--target", "ref",
        "--batch-sizes", "2", "--against", "onnxruntime", "--lengths", "sequence=uniform:min=1,max=16", "--json",
        *_TWO_ROUNDS,
    )  # fmt: skip
    assert ran.status == 0
    first, second = json.loads(ran.out)["times"]
    assert first["padded"] == second["padded"] > 0
    assert second["difference"]["largest"] < 1e-4


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(signal.SIGINT, 130, "rocserve bench: ended by you\n"), (signal.SIGKILL, -signal.SIGKILL, "")],
)
def test_no_process_is_left_behind(tmp_path: Path, number: int, status: int, words: str) -> None:
    model = _file(tmp_path, mlp())
    command = [sys.executable, "-m", "rocserve.cli", "bench", str(model), "--engine", "onnxruntime", "--seconds", "600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "timing" not in process.stderr.readline():
        assert process.poll() is None
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert children
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (status, words)
    wait_until(lambda: not any(map(_is_running, children)), "the end of its children")


def _is_running(pid: int) -> bool:
    """An ended orphan may stay a zombie if nobody reaps it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_json_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    say_json(console_on(sys.stdout), Difference(math.inf, 1.0, math.nan, 0.5, None))
    assert capsys.readouterr().out == '{"largest":null,"mean":1.0,"relative":null,"cosine":0.5,"top1":null}\n'
