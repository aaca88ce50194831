"""What programs are bound to (GPU, driver, ROCm), read from trees as the kernel driver and ROCm write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gpu_tree import GpuTree

from rocserve.backends.host import Host
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, program_environment
from rocserve.backends.migraphx.options import Target
from rocserve.core.errors import ServeError, StatusCode


@pytest.fixture
def tree(tmp_path: Path) -> GpuTree:
    return GpuTree(tmp_path / "sys")


def host(tree: GpuTree, rocm: Path = Path("/nowhere"), **variables: str) -> Host:
    return Host(system=tree.system, rocm=rocm, variables=variables)


def test_programs_for_a_gpu_are_bound_to_its_architecture_and_to_rocm(tree: GpuTree, tmp_path: Path) -> None:
    (tmp_path / "rocm/.info").mkdir(parents=True)
    (tmp_path / "rocm/.info/version").write_text("7.1.1-38\n")
    tree.add_cpu()
    tree.add_gpu(version=90010)
    tree.add_gpu(version=110000)
    here = host(tree, tmp_path / "rocm")
    assert program_environment(Target.GPU, 0, "2.14.0", here) == ProgramEnvironment("2.14.0", "7.1.1", "gfx90a")
    assert program_environment(Target.GPU, None, "2.14.0", here).gpu_architecture == "gfx90a"
    assert program_environment(Target.GPU, 1, "2.14.0", here).gpu_architecture == "gfx1100"
    named = host(tree, ROCM_PATH=str(tmp_path / "rocm"))
    assert program_environment(Target.GPU, 1, "2.14.0", named).rocm_version == "7.1.1"


def test_other_programs_are_bound_to_the_version_alone(tree: GpuTree) -> None:
    tree.add_gpu(version=90010)
    for target in (Target.CPU, Target.REF):
        assert program_environment(target, 0, "2.14.0", host(tree)) == ProgramEnvironment("2.14.0")


def test_variables_that_change_what_is_compiled_count(tree: GpuTree) -> None:
    here = host(tree, MIGRAPHX_SET_GEMM_PROVIDER="rocblas", MIGRAPHX_ENABLE_NHWC="1", MIGRAPHX_TRACE_EVAL="1", HOME="/")
    found = program_environment(Target.REF, None, "2.14.0", here)
    assert list(found.variables.items()) == [("MIGRAPHX_ENABLE_NHWC", "1"), ("MIGRAPHX_SET_GEMM_PROVIDER", "rocblas")]


def test_a_gpu_that_is_not_there(tree: GpuTree) -> None:
    tree.add_gpu(version=90010)
    with pytest.raises(ServeError) as caught:
        program_environment(Target.GPU, 1, "2.14.0", host(tree))
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert caught.value.text == (
        "target gpu needs an AMD GPU, and this process cannot use a GPU with number 1 (looked in"
        f" {tree.system}/class/kfd); in a container pass /dev/kfd and /dev/dri, or set parameter"
        ' "target" to "cpu" or "ref"'
    )


def test_a_driver_that_does_not_tell_the_architecture(tree: GpuTree) -> None:
    node = tree.add_gpu(version=90010)
    (node / "properties").write_text("simd_count 304\n")
    with pytest.raises(ServeError, match=r"the architecture of GPU 0 is unknown, .* older than Linux 5\.15"):
        program_environment(Target.GPU, 0, "2.14.0", host(tree))
    overridden = host(tree, HSA_OVERRIDE_GFX_VERSION="9.0.10")
    assert program_environment(Target.GPU, 0, "2.14.0", overridden).gpu_architecture == "gfx90a"


def test_no_rocm(tree: GpuTree) -> None:
    assert host(tree).rocm_version == ""
