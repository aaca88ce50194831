"""Method of inference.GRPCInferenceService that takes one message and gives one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message


@dataclass(frozen=True, slots=True)
class QuickMethod:
    """Answered in place, on any thread."""

    request: type[Message]
    answer: Callable[[Any], Message]


@dataclass(frozen=True, slots=True)
class SlowMethod:
    """Answered by a task of the event loop."""

    request: type[Message]
    answer: Callable[[Any], Awaitable[Message]]


Method = QuickMethod | SlowMethod
