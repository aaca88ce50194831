"""Ray Serve's autoscaling policy by the servers' queues. Serve pickles it by value for its controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

QUEUED = "queued"
"""The replicas' name for the number of requests that wait in their servers."""


class QueuePolicy:
    """Asks for so many replicas that at most `queued` requests wait in each on average, and for no fewer than Serve's
    policy. Serve counts calls, a stream as one; servers count requests that no instance has begun."""

    def __init__(self, queued: float) -> None:
        """`queued`: mean number of requests that may wait in a server."""
        self._queued = queued

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, before Serve applies its limits and delays."""
        queued = sum((context.aggregated_metrics or {}).get(QUEUED, {}).values())
        ongoing = context.total_num_requests / context.config.get_target_ongoing_requests()
        return max(queued / self._queued, ongoing), {}
