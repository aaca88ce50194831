"""`rocserve inspect` on the real MIGraphX; the summaries of printed programs include a GPU's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.graphdef import classifier
from support.migraphx_models import mini_resnet, two_in_two_out
from support.tools import Command

from rocserve.backends.migraphx.binding import DimensionRange
from rocserve.core.plain import to_json
from rocserve.verbs.inspect import TensorFacts, summarise_program

pytestmark = pytest.mark.long

_GPU = """module: "main"
@0 = check_context::migraphx::gpu::context -> float_type, {}, {}, target_id=0
@1 = hip::hip_allocate_memory[shape=int8_type, {4096}, {1},id=main:scratch] -> int8_type, {4096}, {1}, target_id=0
@2 = hip::hip_copy_literal[id=main:@literal:17] -> float_type, {8, 3, 3, 3}, {27, 9, 3, 1}, target_id=0
data = @param:data -> float_type, {1, 3, 8, 8}, {192, 64, 8, 1}, target_id=0
@4 = load[offset=0,end=768](@1) -> float_type, {1, 3, 8, 8}, {192, 64, 8, 1}, target_id=0
@5 = hip::copy_to_gpu(data,@4) -> float_type, {1, 3, 8, 8}, {192, 64, 8, 1}, target_id=0
@6 = gpu::code_object[symbol_name=mlir_convolution_add_relu,](@5,@2) -> float_type, {1, 8, 8, 8}, {512, 64, 8, 1}
@7 = gpu::code_object[symbol_name=mlir_convolution_add_relu,](@6,@2) -> float_type, {1, 8, 8, 8}, {512, 64, 8, 1}
@8 = gpu::code_object[symbol_name=convert_kernel,](@7) -> half_type, {1, 8, 8, 8}, {512, 64, 8, 1}
@9 = hip::copy_from_gpu(@8) -> half_type, {1, 8, 8, 8}, {512, 64, 8, 1}
@10 = hip::sync_stream(@9) -> half_type, {1, 8, 8, 8}, {512, 64, 8, 1}
@11 = @return(@10)
"""


def test_a_program_for_a_gpu_its_fusion_its_memory_and_its_copies() -> None:
    summary = summarise_program(_GPU)
    assert [(kernel.name, kernel.operators, kernel.count) for kernel in summary.kernels] == [
        ("mlir_convolution_add_relu", ("convolution", "add", "relu"), 2)
    ]
    assert summary.operators[0].name == "gpu::code_object mlir_convolution_add_relu"
    assert summary.instructions == 6
    assert (summary.constant_bytes, summary.scratch_bytes) == (4 * 8 * 27, 4096)
    assert (summary.to_gpu.count, summary.to_gpu.bytes) == (1, 768)
    assert (summary.from_gpu.count, summary.from_gpu.bytes) == (1, 1024)


@pytest.mark.in_migraphx_process
def test_a_model_before_and_after(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    model = tmp_path / "resnet.onnx"
    model.write_bytes(mini_resnet())
    ran = command.on_migraphx(migraphx_root, "inspect", model, "--batch-sizes", "1,2", "--target", "ref")
    assert ran.status == 0
    assert ran.row("input") == ["image", "float", "[1,", "3,", "8,", "8]", "768", "B"]
    assert ran.row("output") == ["logits", "float", "[1,", "10]", "40", "B"]
    assert ran.row("convolution") == ["4", "4"]
    assert "batch size 2: the same at these sizes\n" in ran.out
    assert "no fused kernels; the target ref runs operator by operator\n" in ran.out
    assert ran.row("instructions of a run:")[1:5] == ["as", "it", "was", "read,"]
    assert "module:" not in ran.out


@pytest.mark.in_migraphx_process
def test_the_print_itself(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    model = tmp_path / "two.onnx"
    model.write_bytes(two_in_two_out())
    ran = command.on_migraphx(migraphx_root, "inspect", model, "--batch-sizes", "1", "--text")
    assert "batch size 1, as it was read:\n" in ran.out
    assert "batch size 1, compiled:\n" in ran.out
    assert "ref::sub(" in ran.out


def test_a_compiled_file_and_json(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    model, program = tmp_path / "two.onnx", tmp_path / "two.mxr"
    model.write_bytes(two_in_two_out())
    assert command.on_migraphx(
        migraphx_root, "compile", model, "--batch-sizes", "3", "--target", "ref", "--output", program
    ).status == 0  # fmt: skip
    ran = command.on_migraphx(migraphx_root, "inspect", program, "--json")
    facts = json.loads(ran.out)
    assert facts["mxr"]["targets"] == ["ref"]
    (only,) = facts["programs"]
    assert [(one["name"], one["shape"]) for one in only["inputs"]] == [("left", [3, 4]), ("right", [3, 4])]
    assert [one["name"] for one in only["outputs"]] == ["output_0", "output_1"]
    assert only["before"] is None
    assert {"name": "ref::sub", "count": 1} in only["after"]["operators"]
    shown = command.on_migraphx(migraphx_root, "inspect", program)
    assert "for target ref" in shown.out
    assert shown.row("ref::sub") == ["1"]
    assert "a server would not run it" not in shown.out
    program.write_bytes(program.read_bytes().replace(b"2.14.0", b"2.13.0"))
    shown = command.on_migraphx(migraphx_root, "inspect", program)
    assert "a server would not run it: MIGraphX program two.mxr was compiled by MIGraphX 2.13.0" in shown.out
    assert shown.row("ref::sub") == ["1"]


@pytest.mark.in_migraphx_process
def test_a_tensorflow_graph_is_shown_in_the_program_s_own_layout(
    migraphx_root: Path, command: Command, tmp_path: Path
) -> None:
    model = tmp_path / "classifier.pb"
    model.write_bytes(classifier())
    ran = command.on_migraphx(migraphx_root, "inspect", model, "--batch-sizes", "2", "--target", "ref")
    assert ran.row("input")[:6] == ["image", "float", "[2,", "3,", "8,", "8]"]
    assert ran.row("output")[:4] == ["scores", "float", "[2,", "5]"]


def test_a_dimension_that_varies_is_a_range_in_json() -> None:
    facts = TensorFacts("x", "float", (DimensionRange(1, 8), 16), 512)
    assert json.loads(to_json(facts))["shape"] == [{"least": 1, "most": 8}, 16]


def test_a_damaged_file(migraphx_root: Path, command: Command, tmp_path: Path) -> None:
    program = tmp_path / "m.mxr"
    program.write_bytes(b"\x81\xa7version")
    ran = command.on_migraphx(migraphx_root, "inspect", program)
    assert (ran.status, ran.out) == (1, "")
    assert "MIGraphX program m.mxr is damaged or not an .mxr file" in ran.err.splitlines()[-1]
