"""Chooses the fixed batch sizes of a model whose engine compiles each shape. A batch is padded to the next size and its
results are sliced; a batch above the largest size runs in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rocserve.backends.host import Host
from rocserve.core.errors import invalid_argument
from rocserve.plane.freed_memory import private_bytes

Arrays = Mapping[str, np.ndarray[Any, Any]]
"""Tensors by name; a batch's rows are the first dimension."""

LARGEST_WITHOUT_CONFIGURATION = 4
"""The largest size if the configuration has no max_batch_size. A completed max_batch_size may exceed all requests, but
each size is compiled before the model serves."""

MOST_SIZES = 64
"""Each size is a separate program, which is compiled, kept in memory and warmed up."""
_LARGEST_SIZE = 2**31 - 1


def default_batch_sizes(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `largest` itself, ascending; empty if `largest` is 0 (no batch dimension)."""
    powers = (1 << exponent for exponent in range(largest.bit_length()))
    return tuple(sorted({*powers, largest})) if largest > 0 else ()


def parse_batch_sizes(text: str, largest: int | None, named: str = "parameter 'batch_sizes'") -> tuple[int, ...]:
    """Parse a list such as "1, 4, 8" into ascending, unique sizes. `named`: for errors. Raises ServeError
    (INVALID_ARGUMENT) if the text is not a list of at most MOST_SIZES sizes from 1 to `largest` (max_batch_size; None =
    the configuration leaves it open)."""
    if largest is not None and largest <= 0:
        raise invalid_argument(
            f'{named} is "{text}", but max_batch_size is 0, so the model has no batch dimension; set max_batch_size'
            f" or leave {named} out"
        )
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    sizes = sorted({int(word) if re.fullmatch("[0-9]{1,9}", word) else 0 for word in words})
    if sizes[0] < 1 or sizes[-1] > (_LARGEST_SIZE if largest is None else largest) or len(sizes) > MOST_SIZES:
        limit = "1 on" if largest is None else f"1 to max_batch_size, which is {largest}"
        example = "1, 8" if largest is None else f"1, {largest}"
        raise invalid_argument(
            f'{named} must be at most {MOST_SIZES} whole numbers from {limit}, as in "{example}", not "{text}"'
        )
    return tuple(sizes)


def wanted_batch_sizes(
    values: Mapping[str, str], largest: int | None, model: str, named: str = "parameter"
) -> tuple[int, ...]:
    """Return the size in the parameter `batch`, or the sizes in a list; empty if neither is set. `named`: for errors.
    Raises ServeError (INVALID_ARGUMENT) if `batch` is not a number or both are set, and as `parse_batch_sizes`."""
    # ONNX Runtime's MIGraphX provider uses the second name of the list.
    found = {
        name: text
        for name in ("batch_sizes", "migraphx_compile_batches", "batch")
        if (text := values.get(name, "").strip())
    }
    if not found:
        return ()
    name, text = next(iter(found.items()))
    if "batch" in found:
        if name != "batch":
            raise invalid_argument(
                f"model '{model}': 'batch' is the one batch size, '{name}' a list of them; remove one of them"
            )
        if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= _LARGEST_SIZE:
            raise invalid_argument(
                f"{named} '{name}' of model '{model}' must be a whole number from 1 to {_LARGEST_SIZE}, not \"{text}\""
            )
    return parse_batch_sizes(text, largest, f"{named} '{name}' of model '{model}'")


def pieces(rows: int, sizes: Sequence[int]) -> Sequence[tuple[slice, int]]:
    """Cut `rows` (at least 1) into the fewest pieces of `sizes` (ascending, not empty), padded as little as possible.
    Returns for each its rows in the batch, and the size that they are padded to."""
    largest = sizes[-1]
    whole, rest = divmod(rows, largest)
    parts = [(slice(index * largest, (index + 1) * largest), largest) for index in range(whole)]
    if rest:
        parts.append((slice(whole * largest, rows), next(size for size in sizes if size >= rest)))
    return parts


_RUN_ROWS = 2


def rows_that_fit(
    run: Callable[[int], object], batches: int, memory_bytes: int, host: Host | None = None
) -> int | None:
    """Return how many rows fit into memory in each of `batches` concurrent batches; None = not known. `run`: runs the
    model with a number of rows. `memory_bytes`: bound of this process, 0 = none. Each further row is assumed to need as
    much as the second, because the first run also allocates what every run needs once; engines keep their working
    memory."""
    run(1)
    before = private_bytes()
    run(_RUN_ROWS)
    used = private_bytes()
    row_bytes = used - before
    host_memory = (host or Host()).free_memory()
    free = [host_memory.free_bytes] if host_memory is not None else []
    if memory_bytes:
        free.append(max(memory_bytes - used, 0))
    if row_bytes <= 0 or not free:
        return None
    return max((_RUN_ROWS + min(free) // row_bytes) // batches, 1)
