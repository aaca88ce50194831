"""What services are made of where nobody looks at requests."""

from __future__ import annotations

import logging

from rocserve.core.serving import ServingTableHolder
from rocserve.observability.tracing.creation import create_tracing
from rocserve.services.observation import RequestObserver


def no_observer(tables: ServingTableHolder) -> RequestObserver:
    log = logging.getLogger("test.requests")
    log.setLevel(logging.INFO)
    return RequestObserver(create_tracing((), "test", log), tables, log)
