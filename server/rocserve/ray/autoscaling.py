"""Ray Serve's autoscaling policy by the servers' queues. Serve pickles it by value for its controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

QUEUED = "queued"
"""Name of the replicas' metric: the number of requests that wait in a replica's server."""


class QueuePolicy:
    """Asks for so many replicas that at most `queued` requests wait in each on average, but for no fewer than Serve's
    own policy would. Serve counts calls (a stream is one call); servers count requests that no instance has begun."""

    def __init__(self, queued: float) -> None:
        """`queued`: mean number of requests that may wait in a server."""
        self._queued = queued

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, before Serve applies its limits and delays."""
        queued = sum((context.aggregated_metrics or {}).get(QUEUED, {}).values())
        ongoing = context.total_num_requests / context.config.get_target_ongoing_requests()
        return max(queued / self._queued, ongoing), {}
