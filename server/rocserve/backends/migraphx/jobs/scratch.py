"""The memory that a program for a GPU works in, beside its weights, inputs and outputs."""

from __future__ import annotations

from rocserve.backends.migraphx.binding.interface import Program
from rocserve.backends.migraphx.program_text import instructions_of, read_program_text

_ALLOCATION = "allocate_memory"


def scratch_bytes(program: Program) -> int | None:
    """What a compiled program allocates once; None where it says nothing of that, as on other targets."""
    sizes = [
        instruction.bytes
        for instruction in instructions_of(read_program_text(program.text()))
        if instruction.operator.endswith(_ALLOCATION)
    ]
    return sum(sizes) if sizes else None
