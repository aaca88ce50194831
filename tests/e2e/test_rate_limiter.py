"""Models that share a resource of the rate limiter."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.infer_inputs import infer_input
from support.paced_models import TENSORS, drop_paced
from support.server import RocserveProcess
from support.waiting import wait_until

LIMITED = """
instance_group {
  kind: KIND_CPU count: 1 rate_limiter { resources { name: "R" count: 2 global: true } }
}
"""


def spans(server: RocserveProcess, models: Sequence[str]) -> list[tuple[int, int]]:
    """The run of each of several concurrent requests: its begin and end."""
    answers: queue.Queue = queue.Queue()
    client = server.client()
    for model in models:
        client.async_infer(
            model, [infer_input("MS", np.array([30], np.int32))], lambda result, error: answers.put((result, error))
        )
    found = []
    for _ in models:
        result, error = answers.get(timeout=20)
        assert error is None, error
        began, ended = result.as_numpy("SPAN")
        found.append((int(began), int(ended)))
    return sorted(found)


def test_models_that_share_a_resource_run_one_at_a_time(serve, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    limited = TENSORS[: TENSORS.index("instance_group")] + LIMITED
    for name in ("one", "other"):
        drop_paced(repository, name, tensors=limited)
    drop_paced(repository, "greedy", tensors=limited.replace("count: 2", "count: 4"))
    server = serve(repository, flags=("--rate-limit=execution_count", "--rate-limit-resource=r:3"))
    client = server.client()
    wait_until(lambda: client.is_model_ready("one") and client.is_model_ready("other"), "two models")
    found = spans(server, ["one", "other"] * 6)
    for (_, ended), (began, _) in itertools.pairwise(found):
        assert ended <= began
    wait_until(
        lambda: any(entry.state == "UNAVAILABLE" for entry in client.get_model_repository_index().models), "a refusal"
    )
    (refused,) = [entry for entry in client.get_model_repository_index().models if entry.state == "UNAVAILABLE"]
    assert refused.name == "greedy"
    assert (
        'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the'
        " minimum required count is 4" in refused.reason
    )
