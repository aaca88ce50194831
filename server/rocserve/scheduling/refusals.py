"""Requests that are not to run: why, said to their clients, counted, and said in the log."""

from __future__ import annotations

import logging
import time

from rocserve.core.errors import ServeError, StatusCode, internal
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest
from rocserve.core.statistics import ModelStatistics
from rocserve.core.trace import QUEUE_START
from rocserve.scheduling.batch import FormedBatch
from rocserve.scheduling.response_sequencer import OrderedResponder

Refused = tuple[InferRequest, ServeError]
"""A request that is not to run, and why."""


def refuse(entry: InferRequest, error: ServeError, statistics: ModelStatistics) -> None:
    """Tell a request that has waited why it is not run."""
    now = time.monotonic_ns()
    if entry.trace is not None:
        entry.trace.note(QUEUE_START, entry.queue_start_ns)
    if error.code is StatusCode.CANCELLED:
        statistics.record_cancellation(entry.queue_start_ns, now)
    else:
        statistics.record_rejection(entry.queue_start_ns, now)
        statistics.note_failure(error.text)
    responder = entry.responder
    if isinstance(responder, OrderedResponder):
        # It need not wait for the answers to others.
        responder = responder.out_of_order()
    responder.fail(error)


def cancelled() -> ServeError:
    """Its client has gone."""
    return ServeError(StatusCode.CANCELLED, "the request was cancelled before it ran")


def not_handed_over(batch: FormedBatch, error: Exception, model_name: str, log: logging.Logger) -> ServeError:
    """What the requests of a batch are told that could not be given to its worker. Called while the error is being
    handled, which the log gets whole."""
    prefix = request_prefix([entry.id for entry in batch.undropped])
    log.exception("%sa batch of model '%s' could not be handed to its worker", prefix, model_name)
    return internal(f"the batch could not be handed to the worker: {error}")
