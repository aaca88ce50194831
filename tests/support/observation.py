"""Observers of requests for tests: none, or a sink that keeps its traces."""

from __future__ import annotations

import logging

from rocserve.core.serving import ServingTableHolder
from rocserve.core.trace import TraceGroup
from rocserve.observability.tracing.trace_settings import TraceSetting
from rocserve.observability.tracing.tracing import create_tracing
from rocserve.services.inference import RequestObserver


def no_observer(tables: ServingTableHolder) -> RequestObserver:
    log = logging.getLogger("test.requests")
    log.setLevel(logging.INFO)
    return RequestObserver(create_tracing((), "test", log), tables, log)


class HeldSink:
    """Keeps all traces that it receives."""

    def __init__(self) -> None:
        self.groups: list[TraceGroup] = []
        self.retired: list[TraceSetting] = []
        self.is_closed = False

    def take(self, setting: TraceSetting, group: TraceGroup) -> None:
        self.groups.append(group)

    def retire(self, setting: TraceSetting) -> None:
        self.retired.append(setting)

    def close(self) -> None:
        self.is_closed = True
