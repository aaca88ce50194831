"""Parses the text that MIGraphX prints of a program: modules, with one instruction per line.

module: "main"
x = @param:x -> float_type, {1, 3, 8, 8}, {192, 64, 8, 1}
@5 = gpu::code_object[code_object=9168,symbol_name=mlir_convolution_add_relu](@4,x,@3) -> float_type, {1, 4}, {4, 1}
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rocserve.backends.migraphx.binding import NUMPY_DTYPES

ELEMENT_BYTES = {**{name: dtype.itemsize for name, dtype in NUMPY_DTYPES.items()}, "fp4x2": 1}
"""MIGraphX's name of a datatype -> bytes of an element. An element of fp4x2 is two fp4 numbers in one byte."""


@dataclass(frozen=True, slots=True)
class PrintedInstruction:
    name: str
    """The name in other instructions: @5, or a parameter's name."""
    operator: str
    """E.g. convolution, ref::add, gpu::code_object, @param, @literal."""
    symbol: str
    """A code object's kernel; "" for other operators."""
    bytes: int
    """Size of the result; 0 = varies."""

    @property
    def title(self) -> str:
        return f"{self.operator} {self.symbol}" if self.symbol else self.operator

    @property
    def is_computing(self) -> bool:
        """Whether the instruction computes: it is not a parameter, a constant or the end of a module."""
        return self.operator not in ("@param", "@literal", "@return", "@outline")


def read_program_text(text: str) -> list[PrintedInstruction]:
    """Return the instructions of all modules in their order. Other lines are ignored."""
    instructions = []
    for line in re.finditer(r"^[ \t]*(?P<name>\S+) = (?P<rest>.+)$", text, re.MULTILINE):
        expression, arrow, shape = line["rest"].rpartition(" -> ")
        if not arrow:
            expression, shape = line["rest"], ""
        match = re.match(r"^@literal(?=\{)|^[^\[({]+", expression)
        operator = match[0] if match else expression
        if operator.startswith("@param:"):
            operator = "@param"
        symbol = re.search(r"\bsymbol_name=(?P<symbol>[^,\]]+)", expression)
        size = 0
        # A tuple has several shapes, a varying dimension none.
        for found in re.finditer(r"(?P<type>\w+)_type, \{(?P<dims>[\d, ]*)\}, \{[\d, ]*\}", shape):
            dimensions = [int(dimension) for dimension in found["dims"].split(",") if dimension.strip()]
            size += math.prod(dimensions) * ELEMENT_BYTES.get(found["type"], 0)
        kernel = symbol["symbol"] if symbol else ""
        instructions.append(PrintedInstruction(line["name"], operator.strip(), kernel, size))
    return instructions


def allocated_bytes(instructions: Iterable[PrintedInstruction]) -> int:
    """Return the working memory that a compiled GPU program allocates once; 0 = runs allocate their memory."""
    return sum(one.bytes for one in instructions if one.operator.endswith("allocate_memory"))


def plain_operator(operator: str) -> str:
    """Remove the target's prefix: ref::add -> add."""
    for prefix in ("ref::", "cpu::", "dnnl::", "gpu::", "hip::"):
        operator = operator.removeprefix(prefix)
    return operator


def fused_operators(symbol: str, known: frozenset[str]) -> tuple[str, ...]:
    """Return the operators in a fused kernel's name: mlir_convolution_add_relu -> convolution, add, relu. `known`: the
    operator names that may contain underscores. The rest of the name is split at each underscore."""
    words = symbol.removeprefix("mlir_").removesuffix("_kernel").split("_")
    found: list[str] = []
    while words:
        for length in range(len(words), 0, -1):
            candidate = "_".join(words[:length])
            if length == 1 or candidate in known:
                found.append(candidate)
                words = words[length:]
                break
    return tuple(found)
