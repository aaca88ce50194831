"""A request's sequence parameters (the sequence extension of KServe v2), and the order of a sequence's requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.errors import ServeError, invalid_argument, unimplemented
from rocserve.core.parameters import Parameters

SequenceId = int | str
"""An unsigned 64-bit number or a text. 0 and "" mean no sequence. 1 and "1" are two sequences."""

SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END = "sequence_id", "sequence_start", "sequence_end"
SEQUENCE_PARAMETERS = frozenset({SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END})

START_FLAG, END_FLAG = 1, 2
"""The bits that Triton's models see."""


@dataclass(frozen=True, slots=True)
class SequenceTag:
    """A request's place in its sequence. Separate from the head, so that a sequence's requests share one head."""

    id: SequenceId = 0
    starts: bool = False
    ends: bool = False

    @property
    def flags(self) -> int:
        return START_FLAG * self.starts + END_FLAG * self.ends


NO_SEQUENCE = SequenceTag()


def take_sequence(parameters: Parameters) -> tuple[SequenceTag | None, Parameters]:
    """Return the sequence parameters (None = there are none) and the others. Raises ServeError (INVALID_ARGUMENT)."""
    if SEQUENCE_PARAMETERS.isdisjoint(parameters):
        return None, parameters
    others = {name: value for name, value in parameters.items() if name not in SEQUENCE_PARAMETERS}
    identity = parameters.get(SEQUENCE_ID, 0)
    if isinstance(identity, bool | float):
        raise wrong_type(SEQUENCE_ID)
    return SequenceTag(
        sequence_id(identity), _flag(parameters, SEQUENCE_START), _flag(parameters, SEQUENCE_END)
    ), others


def sequence_id(value: int | str) -> SequenceId:
    """Return the id, negative numbers as unsigned, as in Triton. Raises ServeError (UNIMPLEMENTED) for a long text."""
    if isinstance(value, int):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    if len(value.encode(errors="replace")) > 128:
        raise unimplemented("string correlation ID cannot be longer than 128 characters")
    return value


def wrong_type(parameter: str) -> ServeError:
    expected = "int64_param or string_param" if parameter == SEQUENCE_ID else "bool_param"
    return invalid_argument(f"invalid value type for '{parameter}' parameter, expected {expected}.")


def _flag(parameters: Parameters, name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise wrong_type(name)
    return value


SequenceKey = tuple[str, SequenceId]
"""Model name and sequence id."""


class SequenceOrder:
    """Keeps the order of a sequence while one of its requests needs several turns of the loop before it is scheduled.
    Used on one thread. The key None means no sequence: such requests are never held."""

    def __init__(self) -> None:
        self.held: dict[SequenceKey | None, deque[Callable[[], None]]] = {}
        """Sequence with a held request -> functions that start the later ones. Callers first test if it is empty."""

    def wait_if_held(self, key: SequenceKey | None, begin: Callable[[], None]) -> bool:
        """Return whether a request of the sequence is held. If so, `begin` is called later, in order."""
        waiting = self.held.get(key)
        if waiting is None:
            return False
        waiting.append(begin)
        return True

    def hold(self, key: SequenceKey | None) -> None:
        """Delay later requests of the sequence until `release`."""
        if key is not None:
            self.held[key] = deque()

    def release(self, key: SequenceKey | None) -> None:
        """Start the requests after the held one, which was scheduled or has failed."""
        waiting = self.held.pop(key, None)
        while waiting:
            waiting.popleft()()
            if key in self.held:
                # That request is held too; the rest wait after it.
                self.held[key] += waiting
                return
