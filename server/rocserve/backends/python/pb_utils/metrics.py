"""Counts custom metrics of models, in the worker, where models can read them. The server gets the changes, and shows
the sums over all workers."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable

from rocserve.backends.python.pb_utils.errors import TritonModelException, as_text
from rocserve.core import custom_metrics
from rocserve.core.custom_metrics import MetricChange, MetricChanges, MetricKind

_SENT_TOGETHER = 100
"""Time series in one message. Even with the most buckets that the server accepts, their changes fit."""


class Metric:
    """One time series. Made by MetricFamily.Metric, which returns the same object for equal labels."""

    def __init__(self, family: MetricFamily, labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        self._kind = family._kind
        # One character above the limit is enough for the server to refuse a longer text.
        most = custom_metrics.LONGEST_TEXT + 1
        shown = {label[:most]: text[:most] for label, text in labels.items()}
        self._head = (family._name[:most], family._kind, family._description[:most], shown)
        self._bounds = bounds
        self._on_change = family._metrics_of_model.changed.set
        self._lock = threading.Lock()
        self._value = self._added = 0.0
        self._is_set, self._changed = False, True
        self._counts = self._no_counts()

    def increment(self, value: float) -> None:
        """Raises TritonModelException if the metric is a histogram, or a counter would decrease."""
        self._check("increment", MetricKind.COUNTER, MetricKind.GAUGE)
        value = float(value)
        if self._kind is MetricKind.COUNTER and value < 0:
            raise TritonModelException(
                "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented"
                " monotonically by non-negative values."
            )
        with self._lock:
            self._value += value
            self._added += value
            self._changed = True
        self._on_change()

    def set(self, value: float) -> None:
        """Raises TritonModelException if the metric is not a gauge."""
        self._check("set", MetricKind.GAUGE)
        with self._lock:
            self._value = float(value)
            self._is_set = self._changed = True
        self._on_change()

    def observe(self, value: float) -> None:
        """Raises TritonModelException if the metric is not a histogram."""
        self._check("observe", MetricKind.HISTOGRAM)
        value = float(value)
        with self._lock:
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._added += value
            self._changed = True
        self._on_change()

    def value(self) -> float:
        """Return the value in this process. Raises TritonModelException if the metric is a histogram."""
        self._check("get", MetricKind.COUNTER, MetricKind.GAUGE)
        return self._value

    def take_change(self) -> MetricChange | None:
        """Return the change since the last call; None = no change."""
        with self._lock:
            if not self._changed:
                return None
            value = self._value if self._is_set else self._added
            counts = tuple(self._counts)
            change = MetricChange(*self._head, value, self._is_set, self._bounds, counts)
            self._added = 0.0
            self._is_set = self._changed = False
            self._counts = self._no_counts()
        return change

    def _no_counts(self) -> list[int]:
        return [0] * (len(self._bounds) + 1) if self._kind is MetricKind.HISTOGRAM else []

    def _check(self, verb: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            operation = "Value" if verb == "get" else verb.capitalize()
            raise TritonModelException(
                f"Failed to {verb} metric value: TRITONSERVER_METRIC_KIND_{self._kind.name} does not support"
                f" {operation}"
            )


class ModelMetrics:
    """All metrics of the model in this process. Models never wait for the server: a separate thread sends."""

    def __init__(self, send: Callable[[MetricChanges], None], gather_seconds: float = 0.2) -> None:
        self._send = send
        self._gather_seconds = gather_seconds
        self._lock = threading.Lock()
        self._kinds: dict[str, MetricKind] = {}
        self._metrics: dict[tuple[str, frozenset[tuple[str, str]]], Metric] = {}
        self.changed = threading.Event()
        self._sender = threading.Thread(target=self._run, name="metrics", daemon=True)

    def add_family(self, name: str, kind: MetricKind) -> None:
        """Raises TritonModelException if the name is invalid, or names a family of another kind."""
        if not custom_metrics.METRIC_NAME.fullmatch(name):
            raise TritonModelException("Error when creating MetricFamily: Invalid metric name")
        reserved = custom_metrics.RESERVED_PREFIXES
        if name.startswith(reserved):
            raise TritonModelException(
                f"Error when creating MetricFamily: '{name}' is reserved for the server, as are all names that begin"
                f" with {' or '.join(reserved)}"
            )
        with self._lock:
            if self._kinds.setdefault(name, kind) is not kind:
                raise TritonModelException(
                    "Error when creating MetricFamily: Family name already exists with different type"
                )

    def metric(self, family: MetricFamily, labels: dict[str, str], bounds: tuple[float, ...]) -> Metric:
        """Return the metric with these labels. A new metric is sent even before its first change."""
        key = (family._name, frozenset(labels.items()))
        with self._lock:
            if key not in self._metrics:
                self._metrics[key] = Metric(family, labels, bounds)
            if self._sender.ident is None:
                self._sender.start()
        self.changed.set()
        return self._metrics[key]

    def send(self) -> None:
        with self._lock:
            metrics = list(self._metrics.values())
        changes = tuple(change for metric in metrics if (change := metric.take_change()) is not None)
        for begin in range(0, len(changes), _SENT_TOGETHER):
            self._send(MetricChanges(changes[begin : begin + _SENT_TOGETHER]))

    def _run(self) -> None:
        while True:
            self.changed.wait()
            time.sleep(self._gather_seconds)
            self.changed.clear()
            self.send()


class MetricFamily:
    """Metrics of one name and kind, distinguished by their labels."""

    COUNTER, GAUGE, HISTOGRAM = MetricKind

    _metrics_of_model: ModelMetrics
    """Set in the subclass that a model sees."""

    def __init__(self, name: str | bytes, description: str | bytes, kind: MetricKind) -> None:
        if not isinstance(kind, MetricKind):
            raise TypeError(f"kind must be MetricFamily.COUNTER, GAUGE or HISTOGRAM, got {type(kind).__name__}")
        self._name = as_text(name, "the name of a MetricFamily")
        self._description = as_text(description, "the description of a MetricFamily")
        self._metrics_of_model.add_family(self._name, kind)
        self._kind = kind

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:  # noqa: N802
        """Raises TritonModelException if labels or their names are invalid, or the buckets do not fit the kind."""
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        label_texts = {str(name): str(value) for name, value in (labels or {}).items()}
        if not all(custom_metrics.LABEL_NAME.fullmatch(name) for name in label_texts):
            raise TritonModelException("Error when creating Metric: Invalid label name")
        is_histogram, bounds = self._kind is MetricKind.HISTOGRAM, tuple[float, ...]()
        if buckets is None or buckets == []:
            if is_histogram:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
        elif not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        elif not is_histogram:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        else:
            bounds = tuple(float(bound) for bound in buckets)
            if list(bounds) != sorted(set(bounds)):
                raise TritonModelException("Error when creating Metric: Bucket Boundaries must be strictly sorted")
        return self._metrics_of_model.metric(self, label_texts, bounds)
