"""A request to an ensemble runs on the members that were served when it began: with real workers, which are loaded,
replaced and unloaded meanwhile."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from support.machine import ToldMachine
from support.request_models import Answers
from support.waiting import PATIENCE_SECONDS
from support.workers import LOG, mail_of

from rocserve.backends.registry import discover_backends
from rocserve.core.dispatch import Dispatcher
from rocserve.core.exchange import Exchange
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.serving import ServingTableHolder
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.model_repository import ModelRepository
from rocserve.repository.residency.resident_models import ResidentModels
from rocserve.repository.version_loader import WorkerVersionLoader
from rocserve.scheduling.queue import QueueLimits
from rocserve.settings import ControlMode, RepositorySettings, ResidencySettings, TimeLimits
from rocserve.workers.launcher import WorkerLauncher

pytestmark = pytest.mark.long

MODEL = """
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils

GENERATION = {generation}
FOLDER = pathlib.Path({folder!r})


class TritonPythonModel:
    def initialize(self, args):
        while {is_late} and not (FOLDER / "may-load").exists():
            time.sleep(0.01)

    def execute(self, requests):
        answers = []
        for request in requests:
            made, held = pb_utils.get_input_tensor_by_name(request, "{tensor}").as_numpy().ravel()
            time.sleep(0.003)
            if held and {waits}:
                (FOLDER / "began").touch()
                while not (FOLDER / "may-end").exists():
                    time.sleep(0.01)
            if {checks} and made != GENERATION:
                error = pb_utils.TritonError(f"mixed: {{made}} came to {{GENERATION}}")
                answers.append(pb_utils.InferenceResponse(error=error))
                continue
            output = np.array([GENERATION, held], np.int32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", output)]))
        return answers
"""
CONFIG = """
backend: "python"
input {{ name: "{tensor}" data_type: TYPE_INT32 dims: 2 }}
output {{ name: "OUT" data_type: TYPE_INT32 dims: 2 }}
"""
CHAIN = """
platform: "ensemble"
input {{ name: "X" data_type: TYPE_INT32 dims: 2 }}
output {{ name: "Y" data_type: TYPE_INT32 dims: 2 }}
ensemble_scheduling {{
  step {{ model_name: "{first}" model_version: -1
    input_map {{ key: "{reads}" value: "X" }} output_map {{ key: "OUT" value: "made" }} }}
  step {{ model_name: "{second}" model_version: -1
    input_map {{ key: "IN" value: "made" }} output_map {{ key: "OUT" value: "Y" }} }}
}}
"""
GENERATION, HELD = 0, 1


class Pipeline:
    """Serves `first`, which may hold a request, and `second`, which refuses what another generation of `first` made."""

    def __init__(
        self,
        plane: PlaneLoop,
        launcher: WorkerLauncher,
        folder: Path,
        mode: ControlMode,
        drain_seconds: float,
        room: int,
    ) -> None:
        self._plane = plane
        self.folder = folder
        self.tables = ServingTableHolder()
        self._dispatcher = Dispatcher(self.tables, plane.work_off)
        limits = TimeLimits(drain_timeout_seconds=drain_seconds)
        loader = WorkerVersionLoader(launcher, mail_of(plane), self._dispatcher, ToldMachine(), LOG, time_limits=limits)
        residents = ResidentModels(
            ResidencySettings(max_loaded_models=room or None),
            plane,
            self._dispatcher,
            pinned=(),
            limits=QueueLimits(),
            concurrent_loads=2,
            log=LOG,
        )
        settings = RepositorySettings((folder,), control_mode=mode, settle_seconds=0.2)
        self.repository = ModelRepository(settings, discover_backends(), loader.load, self.tables, LOG, residents)

    def write(self, name: str, generation: int = 0, tensor: str = "IN") -> None:
        (self.folder / name / "1").mkdir(parents=True, exist_ok=True)
        (self.folder / name / "config.pbtxt").write_text(CONFIG.format(tensor=tensor))
        text = MODEL.format(
            generation=generation,
            folder=str(self.folder),
            tensor=tensor,
            waits=name != "second",
            checks=name == "second",
            is_late=name == "late",
        )
        (self.folder / name / "1" / "model.py").write_text(text)

    def chain(self, name: str, first: str, second: str, reads: str = "IN") -> None:
        (self.folder / name / "1").mkdir(parents=True, exist_ok=True)
        config = CHAIN.format(first=first, second=second, reads=reads)
        (self.folder / name / "config.pbtxt").write_text(config)

    def ask(self, model: str = "chain", held: bool = False) -> Answers:
        answers = Answers()
        head = RequestHead(model, "", (InputHead("X", "INT32", (2,)),))
        request = InferRequest(head, "", [np.array([0, held], np.int32).tobytes()])
        self._plane.call_soon(functools.partial(self._dispatcher.dispatch, request, Exchange(answers)))
        return answers

    async def hold(self, model: str = "chain") -> Answers:
        """Send a request, and return when its first step runs, until `let_go`."""
        answers = self.ask(model, held=True)
        await until((self.folder / "began").exists)
        return answers

    def let_go(self) -> None:
        (self.folder / "may-end").touch()

    def worker(self, name: str) -> psutil.Process:
        """The process of the served version."""
        (pid,) = self.tables.table.find(name, "").worker_pids
        return psutil.Process(pid)

    def state(self, name: str) -> str:
        return next(row.state for row in self.repository.index(ready_only=False) if row.name == name)

    async def replace(self, generation: int, *names: str) -> None:
        """Load these models again, and publish them together."""
        for name in names:
            self.write(name, generation)
        with self.repository._table.one_publication():
            await asyncio.gather(*(self.repository.load(name, {}) for name in names))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def answer_of(answers: Answers) -> list[int]:
    assert not answers.errors, answers.errors
    return answers.array(0, "Y").tolist()


@pytest_asyncio.fixture(loop_scope="module")
async def start(plane: PlaneLoop, launcher: WorkerLauncher, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    started: list[Pipeline] = []

    async def build(
        *names: str, mode: ControlMode = ControlMode.EXPLICIT, drain_seconds: float = 0.0, room: int = 0
    ) -> Pipeline:
        """Start with `chain` of `first` and `second`, and load these models. `room`: for so many models; 0 = any."""
        pipeline = Pipeline(plane, launcher, tmp_path, mode, drain_seconds, room)
        for name in ("first", "second", "other"):
            pipeline.write(name)
        pipeline.chain("chain", "first", "second")
        started.append(pipeline)
        await pipeline.repository.start()
        for name in names:
            await pipeline.repository.load(name, {})
        return pipeline

    yield build
    for pipeline in started:
        pipeline.let_go()
        await asyncio.wait_for(pipeline.repository.stop(), PATIENCE_SECONDS)


async def test_no_request_runs_on_members_of_two_generations(start: Any) -> None:
    pipeline = await start("chain")
    is_over = False
    seen: set[int] = set()

    async def client() -> int:
        for count in itertools.count():
            if is_over:
                return count
            answers = await pipeline.ask().done()
            seen.add(answer_of(answers)[GENERATION])
        raise AssertionError

    clients = [asyncio.create_task(client()) for _ in range(6)]
    for generation in range(1, 21):
        await pipeline.replace(generation, "first", "second")
        answers = await pipeline.ask().done()
        assert answer_of(answers)[GENERATION] == generation, "a new request runs on the new members"
    is_over = True
    assert min(await asyncio.gather(*clients)) > 0
    assert seen == set(range(21))


@pytest.mark.parametrize(
    "way", ["unloaded", "unloaded with the ensemble", "replaced", "replaced by one that does not fit"]
)
async def test_a_member_ends_after_the_requests_that_began_with_it(start: Any, way: str) -> None:
    pipeline = await start("chain")
    worker = pipeline.worker("second")
    held = await pipeline.hold()
    if way == "unloaded":
        await pipeline.repository.unload("second", False)
    elif way == "unloaded with the ensemble":
        await pipeline.repository.unload("chain", True)
    else:
        pipeline.write("second", 1, "IN" if way == "replaced" else "RENAMED")
        await pipeline.repository.load("second", {})
    assert pipeline.state("second") == ("READY" if "replaced" in way else "UNLOADING")
    if way != "replaced":
        answers = await pipeline.ask().done()
        assert answers.errors, "the ensemble takes no new requests"
    assert worker.is_running()
    pipeline.let_go()
    assert answer_of(await held.done()) == [0, 1]
    await until(lambda: not worker.is_running())


async def test_a_request_to_another_ensemble_delays_no_end(start: Any) -> None:
    pipeline = await start("chain")
    pipeline.chain("beside", "other", "second")
    await pipeline.repository.load("beside", {})
    worker = pipeline.worker("first")
    held = await pipeline.hold("beside")
    await pipeline.replace(0, "first")
    await until(lambda: not worker.is_running())
    pipeline.let_go()
    assert answer_of(await held.done()) == [0, 1]


async def test_a_member_that_was_unloaded_for_room_is_loaded_for_its_step(start: Any) -> None:
    pipeline = await start("chain", room=2)
    worker = pipeline.worker("second")
    await pipeline.ask().done()
    held = await pipeline.hold()
    # Its load waits for the end of a member that the held request needs later.
    await pipeline.repository.load("other", {})
    assert not worker.is_running()
    pipeline.let_go()
    assert answer_of(await held.done()) == [0, 1]


async def test_a_member_that_hangs_is_killed_after_its_time_to_drain(start: Any) -> None:
    pipeline = await start("chain", drain_seconds=0.2)
    worker = pipeline.worker("first")
    held = await pipeline.hold()
    await pipeline.replace(0, "first")
    answers = await held.done()
    assert "had not answered within 0.2 s" in answers.errors[0].text
    assert not answer_of(await pipeline.ask().done())[HELD]
    await until(lambda: not worker.is_running())


async def test_an_ensemble_goes_on_with_a_member_longer_than_that_has_time_to_drain(start: Any) -> None:
    pipeline = await start(mode=ControlMode.POLL, drain_seconds=0.2)
    worker = pipeline.worker("first")
    pipeline.write("late")
    pipeline.write("first", 1, "RENAMED")
    pipeline.chain("chain", "first", "late", reads="RENAMED")
    await until(lambda: bool(pipeline.tables.table.find("first", "").config.inputs[0].name == "RENAMED"))
    await asyncio.sleep(0.5)
    assert answer_of(await pipeline.ask().done()) == [0, 0]
    assert worker.is_running()
    (pipeline.folder / "may-load").touch()
    await until(lambda: not worker.is_running())
    assert pipeline.state("chain") == "READY"
    assert answer_of(await pipeline.ask().done()) == [0, 0]
