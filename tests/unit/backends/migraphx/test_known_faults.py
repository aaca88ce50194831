"""What MIGraphX computes otherwise than ONNX and no comparison finds is refused, by the version of the library."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from rocserve.backends.migraphx.compiling.known_faults import FLOAT_MOD, KnownFault
from rocserve.backends.migraphx.compiling.onnx_graph import read_onnx_graph


def _faults(folder: Path, datatype: int, **attributes: int) -> dict[str, KnownFault]:
    x, y = (helper.make_tensor_value_info(name, datatype, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Mod", ["x", "x"], ["y"], **attributes)], "graph", [x], [y])
    path = folder / "model.onnx"
    onnx.save_model(helper.make_model(graph), path)
    return dict(read_onnx_graph(path).faults)


def test_a_remainder_of_floats_with_an_infinite_divisor(tmp_path: Path) -> None:
    """Fails for ONNX's node test test_mod_float_edge_cases_fmod_0_float32: NaN in the places of inf and 3."""
    assert _faults(tmp_path, TensorProto.FLOAT) == {"Mod": FLOAT_MOD}
    assert _faults(tmp_path, TensorProto.FLOAT16, fmod=0) == {"Mod": FLOAT_MOD}
    assert _faults(tmp_path, TensorProto.FLOAT, fmod=1) == {}
    assert _faults(tmp_path, TensorProto.INT64) == {}


@pytest.mark.parametrize(
    ("version", "expected"), [("2.13.0", False), ("2.14.0", True), ("2.15", True), ("2.16.1", False), ("", True)]
)
def test_the_library_says_whether_it_has_a_fault(version: str, expected: bool) -> None:
    assert KnownFault("of floats", (2, 14), (2, 16)).is_in(version) is expected
