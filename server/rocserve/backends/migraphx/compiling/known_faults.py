"""Operators that MIGraphX computes differently from ONNX, and that no made-up input reveals. Differences that a
comparison with ONNX Runtime finds do not belong here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class KnownFault:
    """An operator that versions of MIGraphX compute differently."""

    text: str
    """Follows the operator's name."""
    first: tuple[int, int]
    """The first version of MIGraphX in which the fault was measured."""
    mended: tuple[int, int] | None = None
    """None = no fix is known."""

    def is_in(self, version: str) -> bool:
        """Return whether a version of MIGraphX, such as "2.14.0", has the fault; "" = unknown, so it may."""
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        return len(numbers) < 2 or (numbers >= self.first and (self.mended is None or numbers < self.mended))


FLOAT_MOD = KnownFault("of floats without fmod is NaN for an infinite divisor, where it should be a number", (2, 14))
"""The comparison has no case with infinities in one of several inputs: in networks they spread as NaN."""


def known_faults(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> Mapping[str, KnownFault]:
    """Return operator -> fault. `nodes`: the model's nodes of ONNX's own operators, nested graphs included."""
    graph = model.graph
    datatypes = {
        value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)
    }
    datatypes.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    return {node.op_type: FLOAT_MOD for node in nodes if node.op_type == "Mod" and _is_float_mod(node, datatypes)}


def _is_float_mod(node: onnx.NodeProto, datatypes: Mapping[str, int]) -> bool:
    is_fmod = any(attribute.name == "fmod" and attribute.i for attribute in node.attribute)
    # FLOAT, FLOAT16, DOUBLE and BFLOAT16 of TensorProto.DataType in onnx.proto.
    floats = frozenset((1, 10, 11, 16))
    return not is_fmod and any(datatypes.get(name) in floats for name in (*node.input, *node.output))
