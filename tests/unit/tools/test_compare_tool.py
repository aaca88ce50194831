"""`rocserve compare` on the real MIGraphX, with the precisions of its reference target; test_differences.py has the
differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.graphdef import classifier
from support.migraphx_models import IMAGE_SHAPE, mini_resnet, two_in_two_out
from support.tools import Command, Ran

pytestmark = pytest.mark.long

_QUICK = ("--seconds", "0", "--repeats", "5", "--warm-up", "0")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "resnet.onnx"
    path.write_bytes(mini_resnet())
    return path


def _relative(ran: Ran, precision: str) -> float:
    output, _, _, relative, *_ = ran.row(precision)
    assert output == "logits"
    return float(relative)


def test_on_calibration_data(migraphx_root: Path, command: Command, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "elsewhere" / "samples.npz"
    data.parent.mkdir()
    np.savez(data, image=np.random.default_rng(1).random((3, *IMAGE_SHAPE), dtype=np.float32))
    ran = command.on_migraphx(migraphx_root, "compare", model, "--calibration-data", data, "--target", "ref", *_QUICK)
    assert ran.status == 0
    assert ran.row("fp32")[1:6] == ["0", "0", "0", "1.000000", "100.0%"]
    assert 0 < _relative(ran, "fp16") < _relative(ran, "bf16") < 0.1
    assert 0 < _relative(ran, "int8") < 0.2
    assert 0 < _relative(ran, "fp8") < 0.3
    assert f"errors against fp32, on 3 of 3 runs of the calibration data {data}\n" in ran.out
    assert "resnet, batch size 1, target ref" in ran.out


def test_images_of_a_tensorflow_graph(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    """Clients' images are NHWC, the program's NCHW."""
    (tmp_path / "m.pb").write_bytes(classifier())
    np.savez(tmp_path / "samples.npz", image=np.random.default_rng(1).random((3, 8, 8, 3), dtype=np.float32))
    ran = command.on_migraphx(
        migraphx_root, "compare", tmp_path / "m.pb", "--calibration-data", tmp_path / "samples.npz",
        "--precision", "fp16", "--target", "ref", *_QUICK,
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert "on 3 of 3 runs of the calibration data" in ran.out
    assert 0 < float(ran.row("fp16")[3]) < 0.1


def test_on_random_data_which_is_said_as_is_a_precision_that_needs_others(
    migraphx_root: Path, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "two.onnx"
    path.write_bytes(two_in_two_out())
    words = ("compare", path, "--precision", "int8,fp16", "--batch-sizes", "2", "--target", "ref", *_QUICK)
    ran = command.on_migraphx(migraphx_root, *words)
    assert ran.status == 1
    assert ran.row("int8")[:2] == ["failed", "-"]
    assert "rocserve compare: int8: model 'two': precision \"int8\" needs 'calibration_data'" in ran.err
    assert "on 8 runs of RANDOM inputs: name real ones with --calibration-data for errors that count\n" in ran.out
    rows = [line.split()[:2] for line in ran.out.splitlines() if line.strip().startswith("fp")]
    assert rows == [["fp32", "difference"], ["fp32", "product"], ["fp16", "difference"], ["fp16", "product"]]


def test_the_shape_of_the_data_is_checked_before_anything_is_compiled(
    migraphx_root: Path, command: Command, model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "samples.npz"
    np.savez(data, image=np.zeros((2, 5), np.float32))
    words = ("compare", model, "--calibration-data", data, "--target", "ref", *_QUICK)
    ran = command.on_migraphx(migraphx_root, *words)
    assert (ran.status, ran.out) == (1, "")
    assert f"the calibration data {data} has shape [2, 5] for input 'image' (samples.npz)" in ran.err.splitlines()[-1]
    assert not list((tmp_path / "cache").rglob("*.mxr")), "nothing was compiled"


def test_data_that_do_not_fit(migraphx_root: Path, command: Command, model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", picture=np.zeros((2, *IMAGE_SHAPE), np.float32))
    ran = command.on_migraphx(
        migraphx_root, "compare", model, "--calibration-data", tmp_path / "samples.npz", "--precision",
        "fp16", "--target", "ref", *_QUICK,
    )  # fmt: skip
    assert (ran.status, ran.out) == (1, "")
    assert "'image'" in ran.err.splitlines()[-1]
