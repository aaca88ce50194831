"""Program texts: of target gpu as upstream's reports show them; test_jobs_inspect.py has real ones of target ref."""

from __future__ import annotations

from rocserve.backends.migraphx.program_text import fused_operators, plain_operator, read_program_text

_GPU = """Compiling ...
module: "main"
@0 = check_context::migraphx::gpu::context -> float_type, {}, {}, target_id=0
@1 = hip::hip_allocate_memory[shape=int8_type, {4096}, {1},id=main:scratch] -> int8_type, {4096}, {1}, target_id=0
@2 = hip::hip_copy_literal[id=main:@literal:17] -> half_type, {64, 3, 7, 7}, {147, 49, 7, 1}, target_id=0
data = @param:data -> float_type, {1, 3, 224, 224}, {150528, 50176, 224, 1}, target_id=0
@4 = load[offset=0,end=602112](@1) -> float_type, {1, 3, 224, 224}, {150528, 50176, 224, 1}, target_id=0
@5 = hip::copy_to_gpu(data,@4) -> float_type, {1, 3, 224, 224}, {150528, 50176, 224, 1}, target_id=0
@6 = gpu::code_object[symbol_name=mlir_convolution_add_relu,](@5,@2) -> half_type, {1, 4, 8, 8}, {256, 64, 8, 1}
@7 = gpu::pooling[mode=max,padding={1, 1, 1, 1},lengths={3, 3}](@6) -> half_type, {1, 4, 4, 4}, {64, 16, 4, 1}
@8 = if[](@7), [then, else] -> [half_type, {1, 64}, {64, 1}, int64_type, {1}, {1}]
@9 = hip::copy_from_gpu(@8) -> dynamic, float_type, {[1, 4, {}], 10}
@10 = @return(@9)

module: "main:then"
@0 = @literal{0.5, 0.25} -> float_type, {2}, {1}
"""


def test_a_compiled_program_for_a_gpu() -> None:
    *main, inner = read_program_text(_GPU)
    by_name = {one.name: one for one in main}
    assert [one.operator for one in main] == [
        "check_context::migraphx::gpu::context",
        "hip::hip_allocate_memory",
        "hip::hip_copy_literal",
        "@param",
        "load",
        "hip::copy_to_gpu",
        "gpu::code_object",
        "gpu::pooling",
        "if",
        "hip::copy_from_gpu",
        "@return",
    ]
    assert by_name["@1"].bytes == 4096
    assert by_name["@2"].bytes == 2 * 64 * 3 * 7 * 7
    assert by_name["data"].bytes == 4 * 3 * 224 * 224
    assert by_name["@6"].symbol == "mlir_convolution_add_relu"
    assert by_name["@6"].title == "gpu::code_object mlir_convolution_add_relu"
    assert by_name["@7"].symbol == ""
    assert by_name["@8"].bytes == 2 * 64 + 8
    assert by_name["@9"].bytes == 0, "a dimension varies"
    assert not by_name["@10"].is_computing
    assert inner.operator == "@literal"


def test_kernels_are_named_after_what_they_fuse() -> None:
    known = frozenset({"reduce_sum", "convolution", "add"})
    assert fused_operators("mlir_convolution_add_relu", known) == ("convolution", "add", "relu")
    assert fused_operators("mul_reduce_sum_kernel", known) == ("mul", "reduce_sum")
    assert fused_operators("mul_reduce_sum_kernel", frozenset()) == ("mul", "reduce", "sum")
    assert fused_operators("convert_kernel", known) == ("convert",)


def test_targets_prefixes_are_no_part_of_an_operator() -> None:
    assert [plain_operator(name) for name in ("ref::add", "gpu::gemm", "dot")] == ["add", "gemm", "dot"]


def test_no_program() -> None:
    assert read_program_text("") == []
    assert read_program_text("nothing\nof = \n") == []
