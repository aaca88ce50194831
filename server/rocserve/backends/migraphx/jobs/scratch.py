"""The memory that a program for a GPU works in, beside its weights, inputs and outputs."""

from __future__ import annotations

from rocserve.backends.migraphx.binding.interface import Program
from rocserve.backends.migraphx.binding.program_text import allocated_bytes, instructions_of, read_program_text


def scratch_bytes(program: Program) -> int | None:
    """What a compiled program allocates once; None where it says nothing of that, as on other targets."""
    return allocated_bytes(instructions_of(read_program_text(program.text()))) or None
