"""Ends the worker when rocAL does not come back.

A call into rocAL holds Python's global lock until it returns, so no thread of this process could notice, let alone
interrupt, one that never does: not the one that watches the server, not a timer. The faulthandler module has the one
timer that needs no lock. It writes where every thread is and ends the process, which the server then starts again.
"""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator

_STANDARD_ERROR = 2
"""The descriptor, which leads to the server's log whatever has become of sys.stderr."""


@contextlib.contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """For calls that must return within this time; one at a time in a process."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
