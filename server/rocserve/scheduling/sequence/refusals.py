"""Answers requests that are not to run, and counts them."""

from __future__ import annotations

import time

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.statistics import ModelStatistics
from rocserve.scheduling.entry import QueuedRequest
from rocserve.scheduling.ordering import OrderedResponder


def refuse(entry: QueuedRequest, error: ServeError, statistics: ModelStatistics) -> None:
    """Tell a request that has waited why it is not run."""
    now = time.monotonic_ns()
    entry.note_unrun()
    if error.code is StatusCode.CANCELLED:
        statistics.record_cancellation(entry.queue_start_ns, now)
    else:
        statistics.record_rejection(entry.queue_start_ns, now)
    responder = entry.responder
    if isinstance(responder, OrderedResponder):
        # It need not wait for the answers to others.
        responder = responder.out_of_turn()
    responder.fail(error)
