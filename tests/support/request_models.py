"""Models that see single requests, served by real workers without gRPC."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rocserve.backends.base import BackendSpec, EngineSpec
from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import FolderReading
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError
from rocserve.core.exchange import Exchange
from rocserve.core.parameters import Parameters
from rocserve.core.requests import InferRequest, InputHead, RequestedOutput, RequestHead
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.sequences import take_sequence
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.version_loader import LoadedEnsemble, LoadedModelVersion, WorkerVersionLoader
from rocserve.workers.launcher import WorkerLauncher
from support.machine import ToldMachine
from support.waiting import PATIENCE_SECONDS
from support.workers import mail_of

LOG = logging.getLogger("rocserve.test.request_models")

REGISTRY = BackendRegistry(
    [
        BackendSpec(
            "python",
            ("python",),
            (EngineSpec("python", "rocserve_request_engine", thread_safe=False, forks_from_zygote=True),),
            ("model.py",),
            default_max_batch_size=0,
            answers_requests=True,
        )
    ]
)

CONFIG = """
backend: "python"
max_batch_size: 8
input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }}
parameters {{ key: "behaviour" value {{ string_value: "{behaviour}" }} }}
parameters {{ key: "target" value {{ string_value: "{target}" }} }}
{more}
"""

DECOUPLED = "model_transaction_policy { decoupled: true }"


class Answers:
    """A responder that records its responses."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told = asyncio.Event()
        self.responses: list[InferResponse] = []
        self.errors: list[ServeError] = []
        self.expects_many = False
        self.ended = False

    def expect_many(self) -> None:
        self.expects_many = True

    def send(self, answer: Answer, final: bool = True) -> None:
        if isinstance(answer, ServeError):
            self._tell(lambda: self.errors.append(answer), final)
        elif answer is None:
            self._tell(lambda: None, final)
        else:
            answer.data = [bytes(data) for data in answer.data]
            answer.slot = None  # The slot would keep the instance alive.
            self._tell(lambda: self.responses.append(answer), final)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        pass

    def _tell(self, keep: Callable[[], None], final: bool) -> None:
        def receive() -> None:
            assert not self.ended, "more came after the end"
            keep()
            self.ended = final
            self._told.set()

        self._loop.call_soon_threadsafe(receive)

    async def until(self, condition: Callable[[Answers], object], seconds: float = PATIENCE_SECONDS) -> Answers:
        async with asyncio.timeout(seconds):
            while not condition(self):
                self._told.clear()
                await self._told.wait()
        return self

    async def done(self, seconds: float = PATIENCE_SECONDS) -> Answers:
        return await self.until(lambda answers: answers.ended, seconds)

    @property
    def out(self) -> list[list[float]]:
        """The output OUT of each response, flattened."""
        return [self.array(index, "OUT").ravel().tolist() for index in range(len(self.responses))]

    def array(self, index: int, name: str) -> np.ndarray:
        (tensor,) = [tensor for tensor in self.responses[index].outputs if tensor.name == name]
        return tensor.numpy()


class RequestModels:
    """Loads models and sends requests to them."""

    def __init__(self, plane: PlaneLoop, launcher: WorkerLauncher, folder: Path) -> None:
        self.tables = ServingTableHolder()
        self._dispatcher = Dispatcher(self.tables, plane.work_off)
        self._plane = plane
        self.folder = folder
        self._loader = WorkerVersionLoader(launcher, mail_of(plane), self._dispatcher, ToldMachine(), LOG)
        self._loaded: dict[str, LoadedModelVersion | LoadedEnsemble] = {}
        self._heads: dict[str, RequestHead] = {}

    async def load(self, name: str, behaviour: str = "echo", more: str = "", target: str = "") -> LoadedModelVersion:
        folder = self.folder / name
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").touch()
        (folder / "config.pbtxt").write_text(CONFIG.format(behaviour=behaviour, target=target, more=more))
        (definition,) = FolderReading(folder, REGISTRY).definitions()
        loaded = await self._loader.load(LoadOrder(definition, 1, folder / "1"))
        self._loaded[name] = loaded
        self._publish()
        return loaded

    def _publish(self) -> None:
        self.tables.table = ServingTable(
            {name: ServedModel(name, {1: version}, version) for name, version in self._loaded.items()}
        )

    def ask(
        self,
        name: str,
        values: object = ((1.0,),),
        outputs: tuple[str, ...] = ("OUT",),
        request_id: str = "r",
        parameters: Parameters | None = None,
    ) -> Answers:
        array = np.asarray(values, np.float32)
        sequence, others = take_sequence(parameters or {})
        head = RequestHead(
            name,
            "",
            (InputHead("IN", "FP32", array.shape),),
            tuple(RequestedOutput(output) for output in outputs),
            others,
        )
        # Equal heads are one object, as front ends make them.
        head = self._heads.setdefault(repr(head), head)
        answers = Answers()
        request = InferRequest(head, request_id, [memoryview(array).cast("B")], sequence=sequence)
        self._plane.call_soon(functools.partial(self._dispatcher.dispatch, request, Exchange(answers)))
        return answers

    async def unload(self, name: str) -> None:
        version = self._loaded.pop(name)
        self._publish()
        await version.unload()

    async def close(self) -> None:
        for name in list(self._loaded):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self.unload(name)
