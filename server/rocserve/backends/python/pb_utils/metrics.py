"""Custom metrics of models. They are counted in the worker and can be read back; no endpoint exports them yet."""

from __future__ import annotations

import enum
import logging
import threading
from typing import Any

from rocserve.backends.python.pb_utils.errors import TritonModelException

_LOG = logging.getLogger(__name__)


class MetricKind(enum.Enum):
    COUNTER = "COUNTER"
    GAUGE = "GAUGE"
    HISTOGRAM = "HISTOGRAM"


class Metric:
    """One time series. Made by MetricFamily.Metric, which gives the same one for equal labels."""

    def __init__(self, kind: MetricKind) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._value = 0.0

    def increment(self, value: float) -> None:
        """
        Raises:
            TritonModelException: the metric is a histogram, or a counter is to go down.
        """
        if self._kind is MetricKind.HISTOGRAM:
            raise self._unsupported("increment", "Increment")
        if self._kind is MetricKind.COUNTER and value < 0:
            raise TritonModelException(
                "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented"
                " monotonically by non-negative values."
            )
        with self._lock:
            self._value += value

    def set(self, value: float) -> None:
        """
        Raises:
            TritonModelException: the metric is no gauge.
        """
        if self._kind is not MetricKind.GAUGE:
            raise self._unsupported("set", "Set")
        self._value = float(value)

    def observe(self, value: float) -> None:
        """An observation of a histogram; nothing keeps it, because a model cannot read a histogram back.

        Raises:
            TritonModelException: the metric is no histogram.
        """
        if self._kind is not MetricKind.HISTOGRAM:
            raise self._unsupported("observe", "Observe")

    def value(self) -> float:
        """
        Raises:
            TritonModelException: the metric is a histogram.
        """
        if self._kind is MetricKind.HISTOGRAM:
            raise self._unsupported("get", "Value")
        return self._value

    def _unsupported(self, verb: str, operation: str) -> TritonModelException:
        return TritonModelException(
            f"Failed to {verb} metric value: TRITONSERVER_METRIC_KIND_{self._kind.value} does not support {operation}"
        )


class MetricFamily:
    """Metrics of one name and kind, told apart by their labels."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        if not isinstance(kind, MetricKind):
            raise TypeError(f"kind must be MetricFamily.COUNTER, GAUGE or HISTOGRAM, got {type(kind).__name__}")
        self._kind = kind
        self._metrics: dict[frozenset[tuple[str, str]], Metric] = {}
        _LOG.warning("metric family '%s' is kept in the model's process only: the server does not export it yet", name)

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:  # noqa: N802
        """
        Raises:
            TritonModelException: the labels are no dict, or the buckets do not go with the kind.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        self._check_buckets(buckets)
        return self._metrics.setdefault(frozenset((labels or {}).items()), Metric(self._kind))

    def _check_buckets(self, buckets: Any) -> None:
        if buckets is None:
            if self._kind is MetricKind.HISTOGRAM:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
            return
        if not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
