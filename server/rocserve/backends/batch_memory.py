"""How many rows a batch may have in the memory that is there, as runs of one row and of two show it."""

from __future__ import annotations

from collections.abc import Callable

from rocserve.backends.free_memory import free_host_memory
from rocserve.backends.host import Host
from rocserve.core.heap_trim import private_bytes

_RUN_ROWS = 2


def rows_that_fit(
    run: Callable[[int], object], batches: int, memory_bytes: int, host: Host | None = None
) -> int | None:
    """The rows of each of so many batches at once; None = no bound is known.

    What the second row adds is what each further one takes: the first one's run also has what every run has once. The
    engine keeps what a run has worked in.

    Args:
        run: runs the model with so many rows.
        memory_bytes: that this process may have; 0 = any.
    """
    run(1)
    before = private_bytes()
    run(_RUN_ROWS)
    used = private_bytes()
    row_bytes = used - before
    around = free_host_memory(host or Host())
    free = [around.free_bytes] if around is not None else []
    if memory_bytes:
        free.append(max(memory_bytes - used, 0))
    if row_bytes <= 0 or not free:
        return None
    return max((_RUN_ROWS + min(free) // row_bytes) // batches, 1)
