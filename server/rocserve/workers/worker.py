"""A worker of a version: what it loads, how it is started, and its state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.workers.load_limit import LoadLimit
from rocserve.workers.messages import LaunchOptions, Load
from rocserve.workers.process import WorkerSession


@dataclass(slots=True, eq=False)
class Worker:
    """One of the workers, over all its restarts."""

    load: Load
    options: LaunchOptions
    limit: LoadLimit = field(init=False)
    """Of its present load."""
    session: WorkerSession | None = None
    """None while it is being started, and after its end."""
    supervision: asyncio.Task[None] | None = None
    load_check: LoadCheckReport = NOT_CHECKED
    down_reason: str = ""
    """Why it is being restarted; "" = it is not."""
    progress: str = ""
    is_checking: bool = False
    """`progress` is about the check of the model."""
    silent_seconds: Sequence[float] = ()
    """How long each of its silent instances has not answered."""
