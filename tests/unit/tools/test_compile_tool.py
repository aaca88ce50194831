"""`rocserve compile` on the real MIGraphX, with its reference target."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.load_check import model as parsed
from support.migraphx_models import mlp, reshaped_to_constant, unknown_operator, without_batch
from support.tools import Command

pytestmark = pytest.mark.long


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that asks for fp16 and two batch sizes."""
    folder = tmp_path / "models" / "scorer"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(mlp())
    (folder / "config.pbtxt").write_text(
        'platform: "onnx_onnxv1" max_batch_size: 2\n'
        'parameters { key: "precision" value { string_value: "fp16" } }\n'
        'parameters { key: "target" value { string_value: "ref" } }\n'
    )
    return folder


def test_a_model_folder_s_parameters_count_and_the_second_time_all_comes_from_the_cache(
    migraphx_root: Path, command: Command, folder: Path
) -> None:
    ran = command.on_migraphx(migraphx_root, "compile", folder)
    assert ran.status == 0
    assert "compiling batch size 2 of model 'scorer': saving" in ran.err
    assert ran.out.startswith("scorer on MIGraphX 2.")
    assert ran.row("batch size 1")[:2] == ["fp16", "compiled"]
    assert ran.row("batch size 2")[:2] == ["fp16", "compiled"]
    assert f"cache: {command.cache}\n" in ran.out
    again = command.on_migraphx(migraphx_root, "compile", folder)
    assert again.row("batch size 2")[:2] == ["fp16", "cache"]
    assert "compiling batch size" not in again.err


@pytest.mark.in_migraphx_process
def test_the_command_line_wins(migraphx_root: Path, command: Command, folder: Path) -> None:
    ran = command.on_migraphx(
        migraphx_root, "compile", folder, "--precision", "bf16", "--batch-sizes", "3", "--fast-math=false"
    )
    assert ran.status == 0
    assert ran.row("batch size 3")[:2] == ["bf16", "compiled"]
    assert "batch size 1" not in ran.out


@pytest.mark.in_migraphx_process
def test_a_bare_file_into_files(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    model = tmp_path / "scorer.onnx"
    model.write_bytes(mlp())
    ran = command.on_migraphx(
        migraphx_root, "compile", model, "--batch-sizes", "1,2", "--output", tmp_path / "scorer-{batch}.mxr"
    )
    assert ran.status == 0
    assert f"batch size 2: {tmp_path}/scorer-2.mxr\n" in ran.out
    assert sorted(path.name for path in tmp_path.glob("*.mxr")) == ["scorer-1.mxr", "scorer-2.mxr"]
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.in_migraphx_process
def test_several_programs_do_not_go_into_one_file(migraphx_root: Path, command: Command, folder: Path) -> None:
    ran = command.on_migraphx(migraphx_root, "compile", folder, "--output", "x.mxr")
    assert ran.status == 1
    assert "--output takes one program, and there are 2 (batch sizes 1, 2); choose one with --batch-sizes" in ran.err
    ran = command.on_migraphx(migraphx_root, "compile", folder, "--batch-sizes", "1", "--output", "/nowhere/x.mxr")
    assert ran.status == 1
    assert "--output: the folder /nowhere does not exist" in ran.err


@pytest.mark.in_migraphx_process
def test_programs_of_padded_sizes(migraphx_root: Path, command: Command, folder: Path, tmp_path: Path) -> None:
    network = parsed("g (float[batch, length, 2] x) => (float[batch, length, 2] y) { y = Add(x, x) }")
    (folder / "1" / "model.onnx").write_bytes(network.SerializeToString())
    (folder / "config.pbtxt").write_text(
        'platform: "onnx_onnxv1" max_batch_size: 2\n'
        'parameters { key: "target" value { string_value: "ref" } }\n'
        'parameters { key: "sizes" value { string_value: "length=4,8" } }\n'
    )
    ran = command.on_migraphx(migraphx_root, "compile", folder, "--output", tmp_path / "{batch}.mxr")
    assert "there are 4 (batch size 1, length 8; batch size 1, length 4; batch size 2, length 4; " in ran.err
    assert "); have {batch} and {sizes} in the file's name" in ran.err
    ran = command.on_migraphx(migraphx_root, "compile", folder, "--output", tmp_path / "{batch}-{sizes}.mxr")
    assert (ran.status, ran.row("batch size 2, length 4")[:2]) == (0, ["fp32", "compiled"])
    assert sorted(path.name for path in tmp_path.glob("*.mxr")) == ["1-4.mxr", "1-8.mxr", "2-4.mxr", "2-8.mxr"]
    ran = command.on_migraphx(migraphx_root, "inspect", folder)
    assert (
        "batch size 1, length 4; batch size 2, length 4; batch size 2, length 8: the same at these sizes\n" in ran.out
    )
    assert ran.row("batch size 2, length 8")[:4] == ["0", "B", "128", "B"]
    assert "all 4 programs: " in ran.out


@pytest.mark.in_migraphx_process
def test_a_model_without_a_batch(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    model = tmp_path / "turn.onnx"
    model.write_bytes(without_batch())
    ran = command.on_migraphx(migraphx_root, "compile", model, "--output", tmp_path / "turn.mxr")
    assert (ran.status, ran.row("the program")[:2]) == (0, ["fp32", "compiled"])
    assert (tmp_path / "turn.mxr").stat().st_size > 0


@pytest.mark.in_migraphx_process
@pytest.mark.parametrize(
    ("content", "error"),
    [
        (unknown_operator(), "Unknown operator: MyFancyOp"),
        (b"", "ONNX file m.onnx is empty; copy it again"),
        (b"nonsense", "ONNX file m.onnx is damaged or not an ONNX file"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_one_line(
    migraphx_root: Path, command: Command, tmp_path: Path, content: bytes, error: str
) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(content)
    ran = command.on_migraphx(migraphx_root, "compile", model, "--batch-sizes", "1")
    *_, last = ran.err.splitlines()
    assert (ran.status, ran.out) == (1, "")
    assert last.startswith(f"rocserve compile: {model}: ")
    assert error in last


@pytest.mark.in_migraphx_process
def test_a_batch_that_the_file_does_not_have(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(reshaped_to_constant())
    ran = command.on_migraphx(migraphx_root, "compile", model, "--batch-sizes", "4")
    assert ran.status == 1
    assert "batch" in ran.err.splitlines()[-1]


def test_faults_of_the_command_line(command: Command, folder: Path, tmp_path: Path) -> None:
    for words, error in (
        ((tmp_path / "absent",), "absent: does not exist; expected a model's folder, or a .onnx"),
        ((folder, "--calibration-data", tmp_path / "none.npz"), "none.npz does not exist"),
        ((folder, "--calibration-data", tmp_path), "is outside of the model's folder"),
    ):
        ran = command("compile", *words)
        assert (ran.status, ran.out) == (1, "")
        assert error in ran.err
    for words, error in (
        (("--batch-sizes", "1,x"), "expected whole numbers of 1 or more with commas between, got '1,x'"),
        (("--precision", "fp7"), "expected one of fp32, fp16, bf16, fp8, int8, got 'fp7'"),
        (("--precision", "fp16,fp8"), "argument --precision: several of them need `rocserve compare`"),
    ):
        ran = command("compile", folder, *words)
        assert ran.status == 2
        assert error in ran.err


def test_switches_stand_alone_or_have_a_value(command: Command, folder: Path, tmp_path: Path) -> None:
    """A switch never takes the model for its value."""
    for switch in ("--exhaustive-tune", "--exhaustive-tune=true", "--fast-math=false"):
        ran = command("compile", switch, folder, "--migraphx-root", tmp_path)
        assert (ran.status, "MIGraphX is not in" in ran.err) == (1, True)
    assert command("compile", folder, "--fast-math=maybe").status == 2


def test_without_migraphx(command: Command, folder: Path, tmp_path: Path) -> None:
    ran = command("compile", folder, "--migraphx-root", tmp_path)
    assert ran.status == 1
    assert ran.err.count("\n") == 1
    assert f"MIGraphX is not in {tmp_path}" in ran.err


def test_an_ensemble_has_no_programs(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "e"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(
        'platform: "ensemble" input { name: "in" data_type: TYPE_FP32 dims: 2 }'
        ' output { name: "out" data_type: TYPE_FP32 dims: 2 } ensemble_scheduling { step { model_name: "a"'
        ' model_version: -1 input_map { key: "x" value: "in" } output_map { key: "y" value: "out" } } }'
    )
    ran = command("compile", folder)
    assert ran.status == 1
    assert "is an ensemble, which no engine runs; give one of its models: a" in ran.err


@pytest.mark.in_migraphx_process
@pytest.mark.parametrize("name", ["scorer.onnx", "scorer", "."])
def test_a_program_is_written_to_mxr_files_only(
    migraphx_root: Path, command: Command, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above all not over the model."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "scorer.onnx"
    model.write_bytes(mlp())
    ran = command.on_migraphx(migraphx_root, "compile", model, "--batch-sizes", "1", "--output", name)
    assert (ran.status, ran.out) == (1, "")
    assert f"scorer.onnx: --output: expected a name that ends in .mxr, got '{name}'" in ran.err
    assert model.read_bytes() == mlp()


@pytest.mark.in_migraphx_process
def test_the_cache_that_is_named_is_the_one_that_was_written(
    migraphx_root: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the cache's folder cannot be made, programs go to another one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    model = tmp_path / "scorer.onnx"
    model.write_bytes(mlp())
    ran = command.on_migraphx(
        migraphx_root, "compile", model, "--batch-sizes", "1", "--cache-directory", "/proc/nowhere"
    )
    assert ran.status == 0
    (line,) = (line for line in ran.out.splitlines() if line.startswith("cache: "))
    assert Path(line.removeprefix("cache: ")).parent == tmp_path


@pytest.mark.in_migraphx_process
def test_batch_sizes_of_a_model_that_does_not_batch(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    model = tmp_path / "turn.onnx"
    model.write_bytes(without_batch())
    ran = command.on_migraphx(migraphx_root, "compile", model, "--batch-sizes", "1,2")
    assert (ran.status, ran.out) == (1, "")
    assert "turn.onnx: does not batch, so there is one program; remove --batch-sizes\n" in ran.err


@pytest.mark.in_migraphx_process
def test_a_damaged_file_beside_a_program_is_said_to_be_beside_it(
    migraphx_root: Path, command: Command, tmp_path: Path
) -> None:
    model, program = tmp_path / "m.onnx", tmp_path / "m.mxr"
    model.write_bytes(mlp())
    words = ("--batch-sizes", "1", "--target", "ref")
    assert command.on_migraphx(migraphx_root, "compile", model, *words, "--output", program).status == 0
    model.write_bytes(b"nonsense")
    ran = command.on_migraphx(migraphx_root, "compile", program, *words)
    assert ran.status == 1
    assert "m.mxr: m.mxr is compiled already, so m.onnx next to it is compiled: ONNX file m.onnx is damaged" in ran.err


def test_at_its_time_limit_it_does_not_advise_itself(migraphx_root: Path, command: Command, folder: Path) -> None:
    ran = command.on_migraphx(migraphx_root, "compile", folder, "--compile-timeout-secs", "0.01")
    assert ran.status == 1
    assert ran.err.endswith("; raise compile_timeout_secs (0 = no limit)\n")
