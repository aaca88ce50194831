"""The autoscaling policy of Ray Serve by the queues of the servers. Serve's controller takes it by value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

QUEUED = "queued"
"""The name under which replicas report how many requests wait in their servers."""


class QueuePolicy:
    """As many replicas that at most `queued` requests wait in each, and never fewer than Serve's own policy says.

    Serve counts calls, a stream as one; servers count requests that no instance of a model has begun with.
    """

    def __init__(self, queued: float) -> None:
        """`queued`: how many requests may wait in a server, as a mean."""
        self._queued = queued

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The number of replicas that are needed, before Serve applies its bounds and delays."""
        queued = sum((context.aggregated_metrics or {}).get(QUEUED, {}).values())
        ongoing = context.total_num_requests / context.config.get_target_ongoing_requests()
        return max(queued / self._queued, ongoing), {}
