"""The fixed list of batch sizes that a model runs at, where an engine compiles each shape: a batch is padded up to the
next size of the list and its results are sliced; one above the largest is run in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocserve.backends.host import Host
from rocserve.core.errors import invalid_argument
from rocserve.core.freed_memory import private_bytes

Arrays = Mapping[str, np.ndarray[Any, Any]]
"""By tensor; the rows of a batch along the first dimension."""

LARGEST_WITHOUT_CONFIGURATION = 4
"""The largest size where the configuration does not say max_batch_size: a completed one may be more than anybody
sends, and each size is compiled before the model serves."""

MOST_SIZES = 64
"""Each is a program of its own: compiled, kept in memory, warmed up."""
_ONE_SIZE = "batch"
_LISTS = ("batch_sizes", "migraphx_compile_batches")
"""The second is the name that ONNX Runtime's provider has for it."""
_LARGEST_SIZE = 2**31 - 1


def default_batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4 ... and `largest` itself, ascending; none for a model without a batch dimension (0)."""
    powers = (1 << exponent for exponent in range(largest.bit_length()))
    return tuple(sorted({*powers, largest})) if largest > 0 else ()


def parse_batch_sizes(text: str, largest: int, named: str = "parameter 'batch_sizes'") -> tuple[int, ...]:
    """The sizes that `text` lists, e.g. "1, 4, 8": ascending, each once. `named`: what errors call it. Raises:
    ServeError: INVALID_ARGUMENT; it is no such list, or a size is not within 1 to `largest` (max_batch_size)."""
    if largest <= 0:
        raise invalid_argument(
            f'{named} is "{text}", but max_batch_size is 0, so the model has no batch dimension; set max_batch_size'
            f" or leave {named} out"
        )
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    sizes = sorted({int(word) if re.fullmatch("[0-9]{1,9}", word) else 0 for word in words})
    if sizes[0] < 1 or sizes[-1] > largest or len(sizes) > MOST_SIZES:
        raise invalid_argument(
            f"{named} must be at most {MOST_SIZES} whole numbers from 1 to max_batch_size, which is {largest},"
            f' as in "1, {largest}", not "{text}"'
        )
    return tuple(sizes)


def wanted_batch_sizes(
    values: Mapping[str, str], largest: int, model: str, named: str = "parameter"
) -> tuple[int, ...]:
    """The sizes that `values`, by the names of parameters, ask for: the one of `batch`, or those of a list; none where
    neither is there. `named`: what errors call such a parameter. Raises: ServeError: INVALID_ARGUMENT; `batch` is no
    number or there is a list beside it, and as `parse_batch_sizes`."""
    given = {name: text for name in (*_LISTS, _ONE_SIZE) if (text := values.get(name, "").strip())}
    if not given:
        return ()
    name, text = next(iter(given.items()))
    if _ONE_SIZE in given:
        if name != _ONE_SIZE:
            raise invalid_argument(
                f"model '{model}': '{_ONE_SIZE}' is the one batch size, '{name}' a list of them; remove one of them"
            )
        if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= _LARGEST_SIZE:
            raise invalid_argument(
                f"{named} '{name}' of model '{model}' must be a whole number from 1 to {_LARGEST_SIZE}, not \"{text}\""
            )
    return parse_batch_sizes(text, largest, f"{named} '{name}' of model '{model}'")


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a batch that run together."""

    start: int
    """The first row's place in the batch."""
    rows: int
    batch_size: int
    """What they are padded to."""


def pieces(rows: int, sizes: Sequence[int]) -> tuple[Piece, ...]:
    """How a batch of `rows` (at least 1) runs where only `sizes` (ascending, not empty) can: as few pieces as can be,
    each padded as little as can be."""
    largest = sizes[-1]
    whole, rest = divmod(rows, largest)
    parts = [Piece(index * largest, largest, largest) for index in range(whole)]
    if rest:
        parts.append(Piece(whole * largest, rest, next(size for size in sizes if size >= rest)))
    return tuple(parts)


_RUN_ROWS = 2


def rows_that_fit(
    run: Callable[[int], object], batches: int, memory_bytes: int, host: Host | None = None
) -> int | None:
    """The rows of each of a number of batches at once; None = no bound is known. `run` runs the model with a number of
    rows; this process may have `memory_bytes`, 0 = any.

    What the second row adds is what each further one takes: the first one's run also has what every run has once. The
    engine keeps what a run has worked in.
    """
    run(1)
    before = private_bytes()
    run(_RUN_ROWS)
    used = private_bytes()
    row_bytes = used - before
    around = (host or Host()).free_memory()
    free = [around.free_bytes] if around is not None else []
    if memory_bytes:
        free.append(max(memory_bytes - used, 0))
    if row_bytes <= 0 or not free:
        return None
    return max((_RUN_ROWS + min(free) // row_bytes) // batches, 1)
