"""Nothing is left of an unloaded version, immediately after its unload."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.request_models import DECOUPLED, RequestModels
from support.waiting import until

from rocserve.plane.loop import PlaneLoop
from rocserve.repository.connected_workers import ConnectedWorkers
from rocserve.repository.version_loader import LoadedModelVersion
from rocserve.scheduling.model_scheduler import ModelScheduler
from rocserve.scheduling.scheduler import Scheduler
from rocserve.scheduling.sequence.scheduler import SequenceScheduler
from rocserve.workers.instance import Instance

pytestmark = pytest.mark.long

PARTS = (LoadedModelVersion, ConnectedWorkers, ModelScheduler, SequenceScheduler, Instance)
CONFIGS = {
    "plain": "",
    "batches": "dynamic_batching { max_queue_delay_microseconds: 1000 }",
    "in order": "dynamic_batching { preserve_ordering: true }",
    "decoupled": DECOUPLED,
    "sequences": "sequence_batching { }",
    "oldest": "sequence_batching { oldest { max_candidate_sequences: 4 } }",
}


@pytest.mark.parametrize("more", CONFIGS.values(), ids=CONFIGS)
async def test_schedulers_are_called_on_the_data_planes_thread_alone(
    models: RequestModels, plane: PlaneLoop, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    called: dict[str, set[int]] = {}

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called.setdefault(name, set()).add(threading.get_ident())
            return method(*arguments, **named)

        return call

    for kind in (Scheduler, ModelScheduler, SequenceScheduler):
        for name, method in list(vars(kind).items()):
            if inspect.isfunction(method) and name != "__init__":
                monkeypatch.setattr(kind, name, watched(name, method))
    await models.load("m", more=more)
    sequence = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    assert (await models.ask("m", parameters=sequence).done()).out == [[1.0]]
    await models.unload("m")
    # The caller is notified before the scheduler releases everything.
    await until(lambda: "_break_cycles" in called)
    assert called.keys() >= {"attach", "submit", "_finish", "close"}
    assert set().union(*called.values()) == {plane.thread}


def living() -> list[object]:
    return [thing for thing in gc.get_objects() if isinstance(thing, PARTS)]


def parts(left: Sequence[object]) -> set[str]:
    """The classes of the living parts, except those that other tests have left."""
    return {type(thing).__name__ for thing in living() if not any(thing is other for other in left)}


@pytest.mark.parametrize("more", CONFIGS.values(), ids=CONFIGS)
async def test_unloaded_versions_do_not_wait_for_the_garbage_collector(models: RequestModels, more: str) -> None:
    """It runs seldom, and until then each version would keep its instances' memory."""
    gc.collect()
    gc.disable()
    left = living()
    try:
        await models.load("m", more=more)
        sequence = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
        answers = await models.ask("m", parameters=sequence).done()
        assert answers.out == [[1.0]]
        assert parts(left) >= {"RequestInstance", "LoadedModelVersion", "ConnectedWorkers"}
        await models.unload("m")
        await until(lambda: not parts(left))
    finally:
        gc.enable()
