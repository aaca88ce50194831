"""Forms batches of requests that are padded (core/padding.py): of unlike lengths, in one bucket.

The batch is that of the oldest request: the oldest of the others in its bucket join it. So each bucket is a queue of
its own, and the queues take turns by their oldest requests. If room is left, requests of smaller buckets join, the
next smaller first, as long as the batch has few padded elements for each real one: they run earlier than in a queue of
their own, and what they cost is bounded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from rocserve.core.padding import Bucket
from rocserve.core.requests import InferRequest
from rocserve.core.validation import RequestPlan
from rocserve.scheduling.batch_policy import BatchDecision, DynamicBatcher

MOST_PADDED = 0.25
"""Padded elements for each real one that a batch may have with a request of a smaller bucket."""
MOST_SEEN = 1024
"""Waiting requests among which a batch is chosen: looking at each takes some 50 ns of the data plane's thread."""


class BucketBatcher:
    """Chooses requests for a DynamicBatcher, which then sees only those that may run together."""

    def __init__(self, batcher: DynamicBatcher, keeps_order: bool) -> None:
        """`keeps_order`: no request may run before an earlier one."""
        self.largest = self._rows = batcher.largest
        self._batcher = batcher
        self._keeps_order = keeps_order

    def decide(self, queue: Iterable[InferRequest], now_ns: int) -> BatchDecision:
        """Decide as DynamicBatcher does. While the oldest request waits for others of its bucket, another bucket's
        batch may run."""
        if self._keeps_order:
            return self._decide_in_order(queue, now_ns)
        waits: BatchDecision | None = None
        groups = self._groups(queue)
        for bucket, own in groups.items():
            self.largest = max(self.largest, self._rows * bucket.row_work)
            members = self._with_smaller(bucket, own, groups)
            decision = self._batcher.decide(members, now_ns)._replace(chosen=members)
            if decision.request_count:
                return decision
            if waits is None or decision.decide_again_at_ns < waits.decide_again_at_ns:
                waits = decision
        assert waits is not None, "the queue is not empty"
        return waits

    def _groups(self, queue: Iterable[InferRequest]) -> Mapping[Bucket, list[InferRequest]]:
        """Return the requests by bucket, in their order, as far as they are needed for a batch."""
        groups: dict[Bucket, list[InferRequest]] = {}
        first: InferRequest | None = None
        rows = 0
        for seen, request in enumerate(queue):
            bucket = _bucket(request.plan)
            if first is None:
                first, own = request, bucket
            elif rows >= self._rows or seen >= MOST_SEEN or (request.level != first.level and len(groups) > 1):
                # Requests of a lower level must not pass those of a higher one that do not join.
                break
            if bucket is own:
                rows += request.plan.batch_size
            groups.setdefault(bucket, []).append(request)
        return groups

    def _with_smaller(
        self, bucket: Bucket, own: list[InferRequest], groups: Mapping[Bucket, list[InferRequest]]
    ) -> Sequence[InferRequest]:
        """Return a bucket's requests, followed by those of smaller buckets that may join."""
        if len(groups) == 1:
            return own
        filling = _Filling(own[0].plan)
        for request in own:
            filling.add(request.plan)
        members = own.copy()
        for other in sorted(groups, key=_row_elements, reverse=True):
            for request in groups[other] if other is not bucket else ():
                if filling.rows + request.plan.batch_size > self._rows or not filling.add_smaller(request.plan):
                    break
                members.append(request)
        return members

    def _decide_in_order(self, queue: Iterable[InferRequest], now_ns: int) -> BatchDecision:
        members: list[InferRequest] = []
        filling: _Filling | None = None
        for request in queue:
            plan = request.plan
            filling = filling or _Filling(plan)
            if plan.bucket is filling.bucket:
                filling.add(plan)
            elif not filling.add_smaller(plan):
                # The next request does not join, so the batch cannot grow.
                count = self._batcher.decide(members, now_ns).request_count
                return BatchDecision(count or len(members), is_full=True)
            members.append(request)
            if filling.rows > self._rows:
                break
        return self._batcher.decide(members, now_ns)


class _Filling:
    """Counts what is in a batch of a bucket."""

    __slots__ = ("_key", "_real", "bucket", "rows")

    def __init__(self, first: RequestPlan) -> None:
        self.bucket = _bucket(first)
        self.rows = 0
        self._key = first.batch_key
        self._real = 0

    def add(self, plan: RequestPlan) -> None:
        self.rows += plan.batch_size
        self._real += plan.real_elements

    def add_smaller(self, plan: RequestPlan) -> bool:
        """Add a request of another bucket, if that is smaller and few elements are then padded; return whether it
        was."""
        own, other = self.bucket, _bucket(plan)
        if plan.batch_key != self._key or any(map(operator.gt, other.sizes, own.sizes)):
            return False
        real = self._real + plan.real_elements
        if (self.rows + plan.batch_size) * own.row_elements > (1 + MOST_PADDED) * real:
            return False
        self.add(plan)
        return True


def _bucket(plan: RequestPlan) -> Bucket:
    assert plan.bucket is not None, "a model whose requests are padded"
    return plan.bucket


def _row_elements(bucket: Bucket) -> int:
    return bucket.row_elements
