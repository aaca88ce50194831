"""What the source in a package of AOTInductor says of its inputs; needs PyTorch, but no compiler."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from support.pytorch import NO_PYTORCH

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.requests import TensorSpec

if TYPE_CHECKING:
    from rocserve.backends.pytorch.package_source import PackageSource

# Importing PyTorch takes seconds.
pytestmark = [pytest.mark.long, pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=NO_PYTORCH)]

FP32 = DataType.FP32


def checked(place: int, sizes: Sequence[int | None], stride: int = 1, datatype: str = "float32", least: int = 2) -> str:
    """The checks that PyTorch writes for an input; None: a variable size."""
    name = f"arg{place}_1"
    lines = [f"int32_t {name}_expected_dtype = aoti_torch_dtype_{datatype}();"]
    for dimension, size in enumerate(sizes):
        test = f"{name}_size[{dimension}] < {least}" if size is None else f"{size} != {name}_size[{dimension}]"
        lines.append(f"if ({test}) {{")
    return "\n".join([*lines, f"if ({stride} != {name}_stride[{len(sizes) - 1}]) {{"])


def read(file: Path) -> PackageSource:
    """Imports PyTorch only in the process that runs these tests, not in each that collects them."""
    from rocserve.backends.pytorch.package_source import read_source

    return read_source(file, "model")


def asserted(place: int, sizes: str) -> str:
    return f'if (_checks()) {{ assert_size_stride(arg{place}_1, {{{sizes}}}, {{1L, }}, "input"); }}'


def package(folder: Path, *lines: str, inputs: int = 2) -> PackageSource:
    taken = [f"auto arg{place}_1 = std::move(inputs[{place}]);" for place in range(inputs)]
    file = folder / "model.pt2"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/data/aotinductor/model/a.wrapper.cpp", "\n".join(["void M::run_impl(", *taken, *lines]))
        archive.writestr("m/data/aotinductor/model/a.kernel.cpp", "void kernel();")
    return read(file)


def specs(*shapes: tuple[int, ...]) -> list[TensorSpec]:
    return [TensorSpec(f"x{place}", FP32, shape) for place, shape in enumerate(shapes)]


def refusal(source: PackageSource, declared: Sequence[TensorSpec], batches: bool = False) -> str:
    with pytest.raises(ServeError) as raised:
        source.check(declared, batches)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    return raised.value.text


SYMBOL = "int64_t s3 = arg0_1_size[0];"
TWICE = (checked(0, [None]), checked(1, [None], least=4), SYMBOL, asserted(0, "s3, "))


@pytest.mark.parametrize(
    ("expression", "first", "wanted"),
    [
        ("s3, ", 5, 5),
        ("2L*s3, ", 5, 10),
        ("1L + s3, ", 5, 6),
        ("c10::div_floor_integer(static_cast<int64_t>(1L + s3), static_cast<int64_t>(2L)), ", 5, 3),
        ("std::max(3L, s3), ", 2, 3),
    ],
)
def test_sizes_that_are_tied(tmp_path: Path, expression: str, first: int, wanted: int) -> None:
    source = package(tmp_path, *TWICE, asserted(1, expression))
    source.check(specs((-1,), (-1,)), batches=False)
    source.check(specs((first,), (wanted,)), batches=False)
    assert "x" in refusal(source, specs((first,), (wanted + 1,)))
    for second in (0, wanted - 1, wanted + 1):
        with pytest.raises(ServeError, match="its program was compiled for"):
            source.check_sizes(["a", "b"], [SimpleNamespace(shape=(first,)), SimpleNamespace(shape=(second,))])
    source.check_sizes(["a", "b"], [SimpleNamespace(shape=(first,)), SimpleNamespace(shape=(wanted,))])
    source.check_sizes(["a", "b"], [SimpleNamespace(shape=own.sample) for own in source.inputs])


def test_sizes_of_which_an_older_package_says_nothing(tmp_path: Path) -> None:
    """It has checks for independent sizes only."""
    source = package(tmp_path, checked(0, [None, 4]), checked(1, [None, 4]), SYMBOL)
    text = refusal(source, specs((-1, 4), (-1, 4)))
    assert text.startswith("dimension 0 of input 'x1' varies in the package, which does not relate it to the other")
    assert "PyTorch 2.13 or newer" in text
    refusal(source, specs((-1, 4), (5, 4)))
    # The server gives all inputs of a batch the same rows, and fixed sizes of config.pbtxt are not the client's.
    source.check(specs((-1, 4), (-1, 4)), batches=True)
    source.check(specs((5, 4), (5, 4)), batches=False)
    wider = package(tmp_path, checked(0, [None, None]), checked(1, [None, None]), SYMBOL)
    refusal(wider, specs((-1, -1), (-1, -1)), batches=True)
    alone = package(tmp_path, checked(0, [None]), inputs=1)
    alone.check(specs((-1,)), batches=False)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((-1, 3), "input 'x0' is FP32 [-1, 3] in config.pbtxt, but the package was compiled for FP32 [-1, 4];"),
        ((-1, -1), "FP32 [-1, -1] in config.pbtxt, but the package was compiled for "),
        ((-1, 4, 1), "FP32 [-1, 4, 1] in config.pbtxt, but the package was compiled for "),
        ((-1,), "FP32 [-1] in config.pbtxt, but the package was compiled for "),
        ((4, 4), "FP32 [4, 4] in config.pbtxt, but the package was compiled for 5 at least in dimension 0; write one"),
    ],
)
def test_what_it_was_not_compiled_for(tmp_path: Path, shape: tuple[int, ...], text: str) -> None:
    source = package(tmp_path, checked(0, [None, 4], least=5), SYMBOL, inputs=1)
    assert text in refusal(source, specs(shape))
    source.check(specs((-1, 4)), batches=True)
    source.check(specs((5, 4)), batches=False)


def test_other_datatypes_strings_and_another_order_in_memory(tmp_path: Path) -> None:
    whole = package(tmp_path, checked(0, [3], datatype="int64"), inputs=1)
    assert "compiled for INT64 [3]" in refusal(whole, specs((3,)))
    assert "has TYPE_STRING in config.pbtxt" in refusal(whole, [TensorSpec("x0", DataType.BYTES, (3,))])
    turned = package(tmp_path, checked(0, [3, 2], stride=3), inputs=1)
    assert "with another memory layout" in refusal(turned, specs((3, 2)))


@pytest.mark.parametrize("lines", [(), (checked(0, [3], datatype="nothing"),)])
def test_a_package_without_the_source_of_its_code(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(ServeError, match=r"model\.pt2 lacks the source of its code"):
        package(tmp_path, *lines, inputs=1)
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as archive:
        archive.writestr("m/data/aotinductor/model/a.wrapper.so", b"")
    with pytest.raises(ServeError, match="lacks the source"):
        read(tmp_path / "model.pt2")


def test_the_smallest_table_that_a_package_indexes(tmp_path: Path) -> None:
    from rocserve.backends.pytorch.package_source import smallest_table

    def table(*kernels: str) -> int | None:
        file = tmp_path / "kernels.pt2"
        with zipfile.ZipFile(file, "w") as archive:
            for number, kernel in enumerate(kernels):
                archive.writestr(f"m/data/aotinductor/model/{number}.kernel.cpp", kernel)
            archive.writestr("m/data/aotinductor/other/0.kernel.cpp", indexed("tmp1", "2L"))
        return smallest_table(file, "model")

    def indexed(name: str, end: str) -> str:
        error = f"index out of bounds: 0 <= {name} < {end}"
        return f'AOTI_TORCH_CHECK((0 <= {name}) & ({name} < {end}), "{error}")'

    assert table("void kernel();") is None
    assert table(indexed("tmp2", "30522L"), indexed("tmp12", "512L") + indexed("tmp3", "ks0")) == 512
