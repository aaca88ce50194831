"""Groups of real workers for tests, and batches for them."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from rocserve.core.custom_metrics import MetricChanges
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig
from rocserve.core.requests import Member, RequestForm, RequestLayout
from rocserve.core.tensors import Buffer, TensorHead, tensor_from_numpy
from rocserve.plane.loop import PlaneLoop
from rocserve.settings import EngineSettings
from rocserve.workers.instance import Instance, InstanceMail
from rocserve.workers.launcher import WorkerLauncher
from rocserve.workers.messages import LaunchOptions, Load, WorkerPlan
from rocserve.workers.results import BatchOutcome
from rocserve.workers.version_workers import VersionWorkers
from rocserve.workers.worker import Worker
from support.outputs import tensors_of
from support.waiting import PATIENCE_SECONDS, until

LOG = logging.getLogger("rocserve.test.workers")

_Result = TypeVar("_Result")


def on_plane(plane: PlaneLoop, call: Callable[[], _Result]) -> _Result:
    """Run the call on the data plane's thread; return or raise what the call does."""
    done = threading.Event()
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    plane.call_soon(run)
    assert done.wait(PATIENCE_SECONDS), "the data plane did not take the call"
    if errors:
        raise errors[0]
    return results[0]


def mail_of(plane: PlaneLoop, poll_seconds: float = 0.0) -> InstanceMail:
    """The mail of instances on a loop."""
    mail = InstanceMail(plane, poll_seconds)
    on_plane(plane, lambda: plane.add_source(mail))
    return mail


@dataclass
class Events:
    """The events of groups."""

    opened: list[Instance] = field(default_factory=list)
    lost: list[Instance] = field(default_factory=list)
    restarts: list[tuple[str, float]] = field(default_factory=list)
    recoveries: int = 0
    lines: list[str] = field(default_factory=list)
    """Lines of progress."""
    properties: list[Mapping[str, str]] = field(default_factory=list)
    silences: list[str] = field(default_factory=list)
    changes: list[MetricChanges] = field(default_factory=list)
    """Changes of the metrics that models define."""


class _Recorded(VersionWorkers):
    """Records its events."""

    recorded: Events

    def instance_opened(self, instance: Instance) -> None:
        self.recorded.opened.append(instance)

    def instance_lost(self, instance: Instance) -> None:
        self.recorded.lost.append(instance)

    def restarting(self, reason: str, delay_seconds: float) -> None:
        self.recorded.restarts.append((reason, delay_seconds))

    def recovered(self) -> None:
        self.recorded.recoveries += 1

    def progress(self, text: str, is_check: bool) -> None:
        self.recorded.lines.append(text)

    def _note_silence(self, worker: Any, seconds: Sequence[float]) -> None:
        super()._note_silence(worker, seconds)
        self.recorded.silences.append(self._silence_line)

    def described(self, properties: Mapping[str, str]) -> None:
        self.recorded.properties.append(properties)

    def measured(self, changes: MetricChanges) -> None:
        self.recorded.changes.append(changes)


@dataclass
class Answer:
    """A batch's outcome, with copies of its outputs."""

    error: ServeError | None
    failures: dict[int, ServeError]
    outputs: list[dict[str, np.ndarray]]
    times: tuple[int, int, int]
    begun: int | None

    @property
    def facts(self) -> dict[str, str]:
        return dict(entry.decode().split("=", 1) for entry in self.outputs[0]["SUM"])


@dataclass
class BatchInput:
    """One input of a batch: its whole shape, and each request's part."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    parts: Sequence[Buffer]


@functools.cache
def _form(heads: tuple[TensorHead, ...], requested: tuple[str, ...], rows: int) -> RequestForm:
    """Equal forms are one object: forms are compared by identity."""
    return RequestForm(RequestLayout(heads, requested, rows))


def members_of(inputs: Sequence[BatchInput], requested: Sequence[str], sizes: Sequence[int]) -> list[Member]:
    """The requests of a batch: request number i has part i of each input, and `sizes[i]` rows."""
    members = []
    for index, size in enumerate(sizes):
        heads = tuple(
            TensorHead(entry.name, entry.datatype, (size, *entry.shape[1:]) if len(sizes) > 1 else entry.shape)
            for entry in inputs
        )
        data = [memoryview(entry.parts[index]).cast("B") for entry in inputs]
        members.append((_form(heads, tuple(requested), size), data, 0, b""))
    return members


def execute(
    instance: Instance,
    inputs: Sequence[BatchInput],
    requested: Sequence[str],
    sizes: Sequence[int],
    on_outcome: Callable[[BatchOutcome], None],
    is_grouped: bool = False,
) -> None:
    """Call Instance.execute with a batch of these inputs."""
    members = members_of(inputs, requested, sizes)
    on_plane(instance.plane, lambda: instance.execute(is_grouped, members, on_outcome))


def batch_input(name: str, *arrays: np.ndarray) -> BatchInput:
    """Make one input from the arrays of several requests."""
    tensors = [tensor_from_numpy(name, array) for array in arrays]
    shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:]) if arrays[0].ndim else ()
    return BatchInput(name, tensors[0].datatype, shape, [tensor.data for tensor in tensors])


def submit(
    instance: Instance,
    inputs: Sequence[BatchInput],
    requested: Sequence[str],
    sizes: Sequence[int],
    is_grouped: bool = False,
) -> asyncio.Future[Answer]:
    """Run a batch; its answer arrives in the test's event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Answer] = loop.create_future()

    def on_outcome(outcome: BatchOutcome) -> None:
        outputs = []
        if outcome.error is None:
            outputs = [
                {tensor.name: np.array(tensor.numpy()) for tensor in tensors_of(outcome.outputs_of(index))}
                for index in range(len(sizes))
            ]
        times = (outcome.input_end_ns, outcome.output_start_ns, outcome.compute_end_ns)
        answer = Answer(outcome.error, dict(outcome.failures), outputs, times, outcome.begun)
        # A second outcome would raise InvalidStateError in the loop.
        loop.call_soon_threadsafe(future.set_result, answer)

    execute(instance, inputs, requested, sizes, on_outcome, is_grouped)
    return future


def add_sub_inputs(rows: int = 1, value: int = 0) -> list[BatchInput]:
    a = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16) + value
    return [batch_input("A", a), batch_input("B", np.full((rows, 16), 3, np.int32))]


def run_add_sub(instance: Instance, rows: int = 1, value: int = 0) -> asyncio.Future[Answer]:
    return submit(instance, add_sub_inputs(rows, value), ("SUM", "DIFFERENCE"), (rows,))


def config_of(behaviour: str, **changes: object) -> ModelConfig:
    settings: dict[str, object] = {
        "name": "m",
        "max_batch_size": 64,
        "inputs": tuple(InputConfig(name, DataType.INT32, (16,)) for name in ("A", "B")),
        "outputs": tuple(OutputConfig(name, DataType.INT32, (16,)) for name in ("SUM", "DIFFERENCE")),
        "parameters": {"behaviour": behaviour},
    }
    return ModelConfig(**{**settings, **changes})  # type: ignore[arg-type]


class Workshop:
    """Makes groups, and ends those that still run."""

    def __init__(self, plane: PlaneLoop, launcher: WorkerLauncher, folder: Path) -> None:
        self.plane = plane
        self.mail = mail_of(plane)
        self.launcher = launcher
        self.folder = folder
        self.events = Events()
        self._groups: list[VersionWorkers] = []

    async def until_stuck(self, count: int = 1) -> None:
        """Wait until so many batches and loads are in engines that do not end them."""
        await until(lambda: len(list(self.folder.glob("stuck-*"))) >= count, "the engine's turn")

    def group(
        self,
        behaviour: str = "add_sub",
        *,
        plans: Sequence[WorkerPlan] = (WorkerPlan(InstanceKind.CPU, None, 1),),
        config: ModelConfig | None = None,
        engine: str = "rocserve_test_engine",
        forked: bool = True,
        preload: Sequence[str] = (),
        interpreter: str = "",
        loader: tuple[str, ...] = (),
        shared_worker: str = "",
        **changes: object,
    ) -> VersionWorkers:
        config = config or config_of(behaviour)
        folder = str(self.folder)
        model_file = str(self.folder / "model.onnx")
        settings = EngineSettings(cache_directory="/somewhere")
        is_shared = bool(shared_worker)
        load = Load(
            config.name, 1, folder, folder, model_file, engine, config, settings=settings, shares_process=is_shared
        )
        options = LaunchOptions(
            title=f"rocserve:{config.name}",
            forked=forked and not interpreter and not loader,
            preload=tuple(preload),
            interpreter=interpreter,
            loader=loader,
            output_prefix=f"shared worker '{shared_worker}': " if is_shared else f"{config.name}:1: ",
            readable=(folder,),
            model_name=config.name,
            shared_worker=shared_worker,
        )
        group = _Recorded(
            [Worker(replace(load, plan=plan), options.of(plan)) for plan in plans],
            launcher=self.launcher,
            mail=self.mail,
            log=LOG,
            **changes,  # type: ignore[arg-type]
        )
        group.recorded = self.events
        self._groups.append(group)
        return group

    async def serving(self, behaviour: str = "add_sub", **changes: object) -> VersionWorkers:
        """A group that is loaded and warmed up."""
        group = self.group(behaviour, **changes)  # type: ignore[arg-type]
        await group.load()
        config = changes.get("config") or config_of(behaviour)
        await group.warm_up(config)  # type: ignore[arg-type]
        return group

    async def close(self) -> None:
        for group in self._groups:
            await group.stop(0.0)


OwnChildren = Callable[[], list[psutil.Process]]
"""The type of the fixture `own_children`."""


def pids(group: VersionWorkers) -> list[int]:
    """The process ids of the running workers."""
    return list(group.models_of_workers)


def running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_descriptors() -> set[tuple[int, str]]:
    """This process's descriptors and their targets. A test compares sets, not counts: descriptors of earlier tests may
    be closed at any time."""
    gc.collect()
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # The descriptor through which the folder itself was read.
            found.add((int(entry.name), str(entry.readlink())))
    return found
