"""What a program's print says: how many of which operators, what was fused, what memory it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rocserve.backends.migraphx.binding.program_text import (
    PrintedInstruction,
    allocated_bytes,
    fused_operators,
    plain_operator,
    read_program_text,
)

_COPIED_LITERAL = "hip::hip_copy_literal"
"""A constant, brought to the GPU once."""
_TO_GPU, _FROM_GPU = "hip::copy_to_gpu", "hip::copy_from_gpu"
_HOUSEKEEPING = ("check_context", "load", "hip::hip_allocate_memory", "hip::allocate_memory", _COPIED_LITERAL)
"""Of a compiled program: what computes nothing."""


@dataclass(frozen=True, slots=True)
class OperatorCount:
    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was made of several operators."""

    name: str
    operators: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Copies:
    count: int
    bytes: int
    """Of one run."""


@dataclass(frozen=True, slots=True)
class ProgramSummary:
    operators: tuple[OperatorCount, ...]
    """What is done in a run, the most frequent first; a kernel counts under its own name."""
    instructions: int
    """How many are done in a run."""
    kernels: tuple[Kernel, ...]
    """The fused ones."""
    constant_bytes: int
    """The weights."""
    scratch_bytes: int
    """Allocated once for what lies between inputs and outputs; 0 where the target allocates as it runs."""
    result_bytes: int
    """All that the instructions of one run give, were each kept."""
    to_gpu: Copies
    from_gpu: Copies


def summarise_program(text: str, known_operators: frozenset[str] = frozenset()) -> ProgramSummary:
    """`known_operators`: plain names of operators, of the program before it was compiled, say."""
    instructions = read_program_text(text)
    computing = [one for one in instructions if one.is_computing and not _is_housekeeping(one)]
    counts = Counter(one.title for one in computing)
    return ProgramSummary(
        operators=tuple(OperatorCount(name, count) for name, count in counts.most_common()),
        instructions=len(computing),
        kernels=_kernels(computing, known_operators),
        constant_bytes=sum(one.bytes for one in instructions if one.operator in ("@literal", _COPIED_LITERAL)),
        scratch_bytes=allocated_bytes(instructions),
        result_bytes=sum(one.bytes for one in computing),
        to_gpu=_copies(instructions, _TO_GPU),
        from_gpu=_copies(instructions, _FROM_GPU),
    )


def plain_counts(summary: ProgramSummary) -> Counter[str]:
    """The operators without the target's name before them."""
    counts: Counter[str] = Counter()
    for operator in summary.operators:
        counts[plain_operator(operator.name)] += operator.count
    return counts


def _is_housekeeping(one: PrintedInstruction) -> bool:
    return one.operator.startswith(_HOUSEKEEPING)


def _kernels(computing: Sequence[PrintedInstruction], known: frozenset[str]) -> tuple[Kernel, ...]:
    counts = Counter(one.symbol for one in computing if one.symbol)
    made_of = {name: fused_operators(name, known) for name in counts}
    return tuple(Kernel(name, made_of[name], count) for name, count in counts.most_common() if len(made_of[name]) > 1)


def _copies(instructions: Sequence[PrintedInstruction], operator: str) -> Copies:
    found = [one for one in instructions if one.operator == operator]
    return Copies(len(found), sum(one.bytes for one in found))
