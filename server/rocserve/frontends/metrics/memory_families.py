"""The metrics of the memory that requests and answers take."""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.metrics.exposition import MetricFamily, Sample


def memory_families(memory: RequestMemory) -> Iterable[MetricFamily]:
    use = memory.use()
    yield MetricFamily(
        "rocserve_request_memory_bytes",
        "gauge",
        "Bytes of requests that come in, wait and run, and of answers that are not yet read",
        (Sample({"kind": "request"}, use.request_bytes), Sample({"kind": "answer"}, use.answer_bytes)),
    )
    yield MetricFamily(
        "rocserve_request_memory_limit_bytes",
        "gauge",
        "What requests and answers may take (--max-request-memory)",
        (Sample({}, memory.limit_bytes),),
    )
    yield MetricFamily(
        "rocserve_request_memory_refusals_total",
        "counter",
        "Requests and answers that there was no memory for",
        (Sample({"kind": "request"}, use.refused_requests), Sample({"kind": "answer"}, use.refused_answers)),
    )
