"""The hints to MIGraphX's errors, except those in tests/support/migraphx_error_texts.py; the distance between
results, and the inputs of comparisons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from rocserve.backends.migraphx.binding import DimensionRange, Program, ProgramTensor
from rocserve.backends.migraphx.compiling.child_process import with_hint
from rocserve.backends.migraphx.compiling.compile_job import distance, row_fault
from rocserve.backends.migraphx.compiling.probe_jobs import Samples
from rocserve.backends.migraphx.options import Precision
from rocserve.core.errors import ServeError
from rocserve.jobs.runner import describe_end


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("src/tf/tf_parser.cpp:1: parse_graph: Unknown operator: Foo", "export the model without it"),
        ("PARSE_FROM: Failed reading onnx file: /m/model.onnx", "the file is damaged, incomplete or not an ONNX"),
        ('PARSE_GRAPH: invalid onnx file. Input "x" is unavailable due to unordered nodes!', "graph is inconsistent"),
        ("Reshape: Wrong number of elements for reshape: reshape has 6 elements", "input_shapes and the config"),
        ("generic_read_file: Failure opening file: /m/model.mxr", "the file is missing or empty"),
        ("generic_read_file: Invalid size for: /m/model.mxr", "the file is missing or empty"),
        ("at: Not an object for field: version", "the .mxr is damaged or not a compiled program"),
        ("src/shape.cpp:391: lens: SHAPE: lens() called on a dynamic shape", "give every symbolic dimension a size"),
        ("from_device: Failed to get device properties: no ROCm-capable device is detected", "--device=/dev/kfd"),
        (
            "hip_code_object.cpp:92: guarantee(false && \"hipErrorNoBinaryForGpu: Coudn't find binary for current"
            ' devices!")',
            "was built for another GPU architecture",
        ),
        ("hip.cpp:109: allocate_gpu: Memory not available to allocate buffer: 41943040", "the GPU's memory does not"),
        ("allocate_gpu: Gpu allocation failed: out of memory", "use a smaller max_batch_size or batch_sizes"),
        ("HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate", "the GPU's memory does not suffice"),
        ("hip_device: Failed to allocate stream", "the versions of the amdgpu driver, ROCm and MIGraphX must fit"),
        ("get_available_gpu_memory: Failed getting available memory: invalid argument", "check `rocminfo` and the"),
        ("Memory access fault by GPU node-1 on address 0x7a8a4be00000. Reason: Page not present", "outside its memory"),
        ("compile: hiprtc: HIPRTC_ERROR_COMPILATION: Compilation failed.", "ROCm's compiler failed"),
        ("compile_hip_src: Unknown hip compiler: /opt/rocm", "ROCm's compiler failed"),
        ("compile_ops.cpp:175: benchmark: No configs to tune", "remove exhaustive_tune"),
        ("No valid tuned compilation for mlir_dot", "remove exhaustive_tune"),
        (
            "mlir.cpp:728: run_high_level_pipeline: Invalid MLIR created: Error: num_cu=30 : i64 cannot be lower than"
            " arch minNumCU=48",
            "MIGRAPHX_DISABLE_MLIR=1",
        ),
        ("MIOpen Error: /src/hipoc/hipoc_program.cpp:299: Code object build failed.", "ROCm's compiler failed"),
        ("MIOpen(HIP): Error [FindConvFwdAlgorithm] database is locked", "the folder `miopen` in the cache directory"),
        ("write: No space left on device", "--cache-directory and the temporary folder need room"),
        ("/lib/libamdhip64.so: undefined symbol: hsa_x", "`rocserve doctor` says which"),
    ],
)  # fmt: skip
def test_known_words_get_a_remedy(message: str, remedy: str) -> None:
    hinted = with_hint(message)
    assert hinted.startswith(f"{message}; ")
    assert remedy in hinted.removeprefix(message)


def test_a_model_is_not_told_to_be_a_damaged_program() -> None:
    assert with_hint("unordered_map::at") == (
        "unordered_map::at; the .mxr is damaged or not a compiled program: copy it or compile it again"
    )
    assert with_hint("unordered_map::at", compiles=True) == "unordered_map::at"
    assert "or parameter 'engine'" in with_hint("Unknown operator: Foo", compiles=True)


def test_unknown_words_are_handed_on_as_they_are() -> None:
    assert with_hint("src/x.cpp:1: f: Something new") == "src/x.cpp:1: f: Something new"


def test_the_text_of_a_jobs_end_has_its_last_lines() -> None:
    aborted = describe_end(-6, ["a", "b", "c", "d", "e"], 0, "MIGraphX")
    assert aborted == "MIGraphX ended by signal 6 (SIGABRT): b; c; d; e"
    assert describe_end(-63, [], 0, "MIGraphX") == "MIGraphX ended by signal 63 (unknown) without a message"
    assert describe_end(1, ["x" * 2000], 0, "MIGraphX") == "the process ended with exit status 1: ..." + "x" * 600


def test_the_text_of_a_killed_job_has_its_memory_and_a_remedy() -> None:
    hinted = with_hint(describe_end(-9, [], 3 << 30, "MIGraphX"))
    assert hinted.startswith(
        "it was killed by signal 9 (SIGKILL) from outside (it had 3072 MiB); the kernel does this when memory runs out"
    )
    assert "then use smaller batch_sizes" in hinted
    assert describe_end(-9, ["x"], 0, "MIGraphX") == "it was killed by signal 9 (SIGKILL) from outside: x"


def test_floats_are_apart_by_their_relative_error() -> None:
    expected = np.array([3.0, 4.0], np.float32)
    assert distance(expected, expected, "float") == 0
    assert distance(expected + np.array([0, 0.5], np.float32), expected, "float") == pytest.approx(0.1, rel=1e-3)
    assert distance(np.zeros(2, np.float32), np.zeros(2, np.float32), "float") == 0
    assert distance(expected[:1], expected, "float") == np.inf


def test_bf16_is_compared_by_its_values() -> None:
    def bits(*values: float) -> np.ndarray:
        return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    assert distance(bits(2.0, 0.0), bits(1.0, 0.0), "bf16") == pytest.approx(1.0, rel=1e-3)


def test_what_is_no_number_must_be_so_in_both() -> None:
    expected = np.array([1.0, np.nan, np.inf], np.float32)
    assert distance(np.array([1.1, np.nan, np.inf], np.float32), expected, "float") == pytest.approx(0.1, rel=1e-3)
    assert distance(np.array([1.0, np.nan, -np.inf], np.float32), expected, "float") == np.inf
    assert distance(np.array([np.nan, np.nan, np.inf], np.float32), expected, "float") == np.inf


def test_the_distance_of_floats_is_a_number_where_their_squares_are_none() -> None:
    expected = np.array([3e300, 4e300])
    assert distance(expected * 1.1, expected, "double") == pytest.approx(0.1)
    assert distance(-expected, expected, "double") == pytest.approx(2)
    # All are NaNs with different bits.
    nothing = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert distance(nothing, nothing[::-1].copy(), "float") == 0


def test_an_error_is_found_in_a_row_whose_squares_overflow() -> None:
    """Its distance was NaN, which `max` dropped."""
    tensor = ProgramTensor("x", "double", (DimensionRange(4, 4), DimensionRange(2, 2)))
    whole = SimpleNamespace(parameters={"x": tensor}, outputs=(tensor,), run=lambda inputs: [np.full((4, 2), -1e300)])
    own = SimpleNamespace(parameters={"x": tensor}, run=lambda inputs: [np.full((1, 2), 1e300)])
    fault = row_fault(cast(Program, whole), cast(Program, own), 1, ["y"], Precision.FP32)
    assert fault.startswith("output 'y' of random rows differs from that in a batch of 1 (relative error 2,")


def test_integers_are_apart_by_the_share_that_differs() -> None:
    assert distance(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), "int64") == 0.25
    assert distance(np.array([True, False]), np.array([False, True]), "bool") == 1


@pytest.mark.parametrize(
    ("datatype", "least", "most"),
    [("float", 0, 1), ("half", 0, 1), ("double", 0, 1), ("int64", 0, 1), ("uint8", 0, 1), ("bool", 0, 1)],
)
def test_samples_are_values_that_a_graph_can_take(datatype: str, least: int, most: int) -> None:
    samples = Samples()
    tensors = {"x": ProgramTensor("x", datatype, (4, 50))}
    values, others = samples.inputs(tensors)["x"], samples.inputs(tensors)["x"]
    assert values.shape == (4, 50)
    assert values.min() >= least
    assert values.max() <= most
    assert len(np.unique(values)) > 1
    assert not np.array_equal(values, others)
    assert np.array_equal(values, Samples().inputs(tensors)["x"])


def test_samples_of_floats_without_a_numpy_type_are_their_bits() -> None:
    tensors = {name: ProgramTensor(name, name, (200,)) for name in ("bf16", "fp8e4m3fn", "fp8e5m2")}
    made = Samples().inputs(tensors)
    bf16 = (made["bf16"].astype(np.uint32) << 16).view(np.float32)
    assert made["bf16"].dtype == np.uint16
    assert bf16.min() >= 0
    assert bf16.max() <= 1
    assert made["fp8e4m3fn"].min() == 0x30  # 0.5
    assert made["fp8e4m3fn"].max() == 0x38  # 1
    assert made["fp8e5m2"].max() == 0x3C


def test_samples_take_the_most_of_a_range_or_the_rows_that_are_asked_for() -> None:
    tensors = {"x": ProgramTensor("x", "float", (DimensionRange(1, 6), 3))}
    assert Samples().inputs(tensors)["x"].shape == (6, 3)
    assert Samples().inputs(tensors, 2)["x"].shape == (2, 3)


def test_a_datatype_that_no_array_holds_is_refused() -> None:
    with pytest.raises(ServeError, match="an input has MIGraphX's type tuple, which requests cannot carry"):
        Samples().inputs({"x": ProgramTensor("x", "tuple", (1,))})
