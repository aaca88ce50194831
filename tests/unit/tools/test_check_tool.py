"""`rocserve check` on real engines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.migraphx_models import mlp, two_in_two_out
from support.models import drop, graph
from support.pytorch import TorchFiles
from support.tools import Command

pytestmark = pytest.mark.long


def _file(tmp_path: Path, content: bytes, name: str = "m.onnx") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def _with_softplus() -> bytes:
    """MIGraphX 2.16 and older compute Softplus as log(1 + exp(x)), which is infinite from 89 on."""
    weights = 40 * np.eye(4, dtype=np.float32)
    model = onnx.load_from_string(
        graph(
            [
                helper.make_node("MatMul", ["x", "w"], ["scaled"], name="scale"),
                helper.make_node("Softplus", ["scaled"], ["soft"], name="gate"),
                helper.make_node("Neg", ["soft"], ["y"]),
            ],
            {"x": (TensorProto.FLOAT, ["batch", 4]), "w": (TensorProto.FLOAT, [4, 4])},
            {"y": (TensorProto.FLOAT, ["batch", 4])},
        )
    )
    del model.graph.input[1:]
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return model.SerializeToString()


def test_a_model_on_the_reference_itself_is_right(command: Command, tmp_path: Path) -> None:
    ran = command("check", _file(tmp_path, mlp()))
    assert (ran.status, "rocserve check: " in ran.err) == (0, False)
    assert "m: ONNX Runtime " in ran.out
    assert "against: " not in ran.out
    assert "not compared: this engine is the reference, or there is none" in ran.out
    assert "a server finds at the load: rows are independent" in ran.out
    assert [line.split() for line in ran.out.splitlines() if " scores " in line] == [["scores", "FP32", "[3,", "10]"]]


def test_rows_that_depend_on_each_other_are_wrong_only_if_a_configuration_joins_them(
    command: Command, tmp_path: Path
) -> None:
    shape = (TensorProto.FLOAT, ["steps", 3])
    model = graph(
        [helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0]), helper.make_node("Sub", ["x", "mean"], ["y"])],
        {"x": shape},
        {"y": shape},
    )
    ran = command("check", _file(tmp_path, model))
    assert ran.status == 0
    assert "a server finds at the load: rows depend on each other: output 'y' of a row " in ran.out
    config = 'platform: "onnx_onnxv1" max_batch_size: 8'
    ran = command("check", drop(tmp_path, "written", model, config))
    assert ran.status == 1
    assert "rocserve check: written: batched as configured, but rows depend on each other: output 'y' of a " in ran.err


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            'input { name: "x" data_type: TYPE_FP64 dims: [4] }',
            "expects datatype TYPE_FP64 for input 'x'",
        ),
        ('input { name: "x" data_type: TYPE_FP32 dims: [5] }', "dimension 1 is 4 in the model, 5 in the configuration"),
        ('input { name: "z" data_type: TYPE_FP32 dims: [4] }', "unexpected inference input 'z', allowed inputs are: x"),
    ],
)
def test_a_configuration_that_a_server_refuses_is_not_right(
    command: Command, tmp_path: Path, config: str, reason: str
) -> None:
    folder = drop(tmp_path, "written", _with_softplus(), f"max_batch_size: 8 {config}")
    ran = command("check", folder)
    assert ran.status == 1
    assert "rocserve check: written: " in ran.err
    assert reason in ran.err


def test_what_was_recorded_is_verified(command: Command, tmp_path: Path) -> None:
    folder = drop(tmp_path, "m", mlp())
    recorded = folder / "check.npz"
    assert command("check", folder, "--record", recorded).status == 0
    ran = command("check", folder)
    assert ran.status == 0
    assert "recorded answers are equal" in ran.out
    with np.load(recorded) as arrays:
        changed = {**arrays, "output.scores": arrays["output.scores"] + np.float32(0.5)}
    np.savez(recorded, **changed)
    ran = command("check", folder)
    assert ran.status == 1
    assert "m: it does not answer as check.npz says: output 'scores' differs by " in ran.err
    # The old file does not hinder a new one.
    assert command("check", folder, "--record", recorded).status == 0


def test_recorded_texts_need_no_pickle(command: Command, tmp_path: Path) -> None:
    model = graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        {"x": (TensorProto.STRING, ["batch", 2])},
        {"y": (TensorProto.STRING, ["batch", 2])},
    )
    ran = command("check", _file(tmp_path, model), "--record", tmp_path / "check.npz")
    assert ran.status == 0
    with np.load(tmp_path / "check.npz") as arrays:
        assert arrays["input.x"].shape == (3, 2)
        assert arrays["input.x"].dtype.kind == "S"
        assert arrays["input.x"].tolist() == arrays["output.y"].tolist()


def test_migraphx_computes_a_model_as_onnx_runtime_does(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    ran = command.on_migraphx(
        migraphx_root, "check", _file(tmp_path, two_in_two_out()), "--engine", "migraphx", "--target", "ref", "--json"
    )
    assert ran.status == 0
    checked = json.loads(ran.out)
    assert checked["engine"].startswith("MIGraphX 2.")
    assert checked["against"].startswith("ONNX Runtime ")
    assert [one["output"] for one in checked["outputs"]] == ["difference", "product"]
    assert all(one["error"]["verdict"]["right"] for one in checked["outputs"])
    assert all(one["error"]["verdict"]["largest_error"] < 1e-5 for one in checked["outputs"])
    assert checked["cases"] > 1
    assert checked["operator"] is None


def test_nodes_names_the_operator_that_migraphx_computes_differently_and_the_reference_is_recorded(
    migraphx_root: Path, command: Command, tmp_path: Path
) -> None:
    file, recorded = _file(tmp_path, _with_softplus()), tmp_path / "check.npz"
    words = ("--engine", "migraphx", "--target", "ref", "--nodes", "--record", recorded)
    ran = command.on_migraphx(migraphx_root, "check", file, *words)
    assert ran.status == 1
    assert "the first operator that differs, 2 of 3: Softplus 'gate' (scaled -> soft)" in ran.out
    assert "soft [3, 4] has NaN or infinity at other places with " in ran.out
    values = [line.split() for line in ran.out.splitlines() if line.startswith(" [")]
    assert values[0][-1] == "inf"
    assert float(values[0][-2]) > 88
    assert "rocserve check: m: output 'y' is wrong with" in ran.err
    # The programs of the cuts are in no cache.
    assert len(list((command.cache / "programs").glob("[0-9a-f]*"))) <= 3
    # MIGraphX is wrong, but what is recorded is right.
    assert f"recorded: {recorded}; put it beside the model as check.npz" in ran.out
    with np.load(recorded) as arrays:
        assert sorted(arrays) == ["input.x", "output.y"]
        x = arrays["input.x"].astype(np.float64)
        np.testing.assert_allclose(arrays["output.y"], -np.logaddexp(0, 40 * x), rtol=1e-5)


def test_an_engine_that_is_wrong_can_be_timed(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    ran = command.on_migraphx(
        migraphx_root, "bench", _file(tmp_path, _with_softplus()), "--engine", "migraphx", "--target", "ref",
        "--batch-sizes", "3", "--seconds", "0", "--repeats", "1", "--against", "cpu",
    )  # fmt: skip
    assert ran.status == 0
    assert [line.split()[0] for line in ran.out.splitlines() if " 3 " in line] == ["migraphx", "cpu"]


def test_nodes_names_the_operator_that_migraphx_does_not_know(
    migraphx_root: Path, command: Command, tmp_path: Path
) -> None:
    model = graph(
        [helper.make_node("Det", ["x"], ["y"], name="area")],
        {"x": (TensorProto.FLOAT, ["batch", 3, 3])},
        {"y": (TensorProto.FLOAT, ["batch"])},
    )
    ran = command.on_migraphx(
        migraphx_root, "check", _file(tmp_path, model), "--engine", "migraphx", "--target", "ref", "--nodes"
    )
    assert ran.status == 1
    assert "the first operator at which the engine fails, 1 of 1: Det 'area' (x -> y)" in ran.out
    assert "Unknown operator: Det" in ran.out


def test_a_model_of_the_engine_that_it_is_checked_against(
    migraphx_root: Path, command: Command, tmp_path: Path
) -> None:
    file = _file(tmp_path, _with_softplus())
    ran = command.on_migraphx(
        migraphx_root, "check", file, "--engine", "onnxruntime", "--against", "migraphx", "--target", "ref", "--json"
    )
    # The other one is wrong, but it is the one that counts here.
    assert ran.status == 1
    assert json.loads(ran.out)["against"].startswith("MIGraphX ")


def test_a_program_of_pytorch_in_eager_is_its_own_reference(torch_files: TorchFiles, command: Command) -> None:
    ran = command("check", torch_files.path("classifier"), "--engine", "eager", "--json")
    assert ran.status == 0
    checked = json.loads(ran.out)
    assert (checked["against"], checked["cases"] > 0) == ("", True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--record", "answers.txt"), "argument --record: expected a name that ends in .npz, got 'answers.txt'"),
        (("--load-check", "off"), "argument --load-check: expected on or strict, got off, which checks nothing"),
        (("--against", "tensorrt"), "argument --against: "),
    ],
)
def test_options_that_make_no_sense(command: Command, tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    ran = command("check", _file(tmp_path, mlp()), *words)
    assert ran.status == 2
    assert text in ran.err


def test_a_file_that_no_engine_loads_is_one_line(command: Command, tmp_path: Path) -> None:
    ran = command("check", _file(tmp_path, b"nothing"))
    assert ran.status == 1
    assert ran.out == ""
    assert "m.onnx" in ran.err


def test_nodes_needs_a_graph(torch_files: TorchFiles, command: Command) -> None:
    ran = command("check", torch_files.path("classifier"), "--nodes")
    assert ran.status == 1
    assert "--nodes needs an ONNX file, and the model has none" in ran.err
