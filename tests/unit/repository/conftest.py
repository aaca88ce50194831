"""A loader whose loads the tests hold, fail and count; and model folders as users write them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.base import BackendSpec, EngineSpec
from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import ModelDefinition
from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError, internal
from rocserve.core.load_check import NOT_CHECKED
from rocserve.core.model_config import ModelConfig
from rocserve.core.model_names import ModelKey
from rocserve.core.serving import IndexEntry, ServedModel, ServingTableHolder
from rocserve.core.statistics import ModelStatistics
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.debounce import Debounce
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.model_repository import ModelRepository
from rocserve.repository.residency.resident_models import ResidentModels
from rocserve.repository.scanner import RepositoryScanner
from rocserve.scheduling.queue import QueueLimits
from rocserve.settings import ControlMode, RepositorySettings, ResidencySettings

SETTLE_SECONDS = 0.2

_ENGINE = EngineSpec("tests", "tests.engine", thread_safe=True, forks_from_zygote=True)
REGISTRY = BackendRegistry(
    [
        BackendSpec("onnx", ("onnx_onnxv1", "onnxruntime"), (_ENGINE,), ("model.onnx",), models_are_data=True),
        BackendSpec("python", ("python",), (_ENGINE,), ("model.py",)),
        BackendSpec("compiled", ("compiled",), (dataclasses.replace(_ENGINE, needs_migraphx=True),), ("model.mxr",)),
    ]
)

CONFIG = """
platform: "onnx_onnxv1"
max_batch_size: 8
input {{ name: "{input}" data_type: TYPE_INT32 dims: 4 }}
output {{ name: "OUT" data_type: TYPE_INT32 dims: 4 }}
{more}
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "E_IN" data_type: TYPE_INT32 dims: 4 }
output { name: "E_OUT" data_type: TYPE_INT32 dims: 4 }
ensemble_scheduling {
  step { model_name: "%s" model_version: -1
         input_map { key: "IN" value: "E_IN" } output_map { key: "OUT" value: "E_OUT" } }
}
"""


def make_scanner(*roots: Path, **settings: Any) -> RepositoryScanner:
    return RepositoryScanner(RepositorySettings(roots, **settings), REGISTRY, logging.getLogger("test"))


class FakeVersion:
    """Implements load_order.LoadedVersion."""

    def __init__(self, definition: ModelDefinition, version: int, data: bytes, on_change: Callable[[], None]) -> None:
        self.name = definition.name
        self.version = version
        self.config: ModelConfig = definition.config
        self.config_message = definition.serialized
        self.statistics = ModelStatistics()
        self.properties: dict[str, str] = {}
        self.load_check = NOT_CHECKED
        self.data = data
        """The content of the version's file when it was loaded."""
        self.available = True
        self.status_reason = ""
        self.on_change = on_change
        self.is_cold = False
        self.has_statistics = True
        self.on_request: Callable[[], None] | None = None
        self.in_flight = 0
        self.is_unloaded = False
        self.unloads_at_once = False
        self.members: dict[str, Any] = {}
        """The members of an ensemble's new requests."""
        self.has_left = False
        """The ensemble gets no new requests."""
        self.may_unload = asyncio.Event()
        self.may_unload.set()

    def infer(self, request: Any, responder: Any) -> None:
        raise NotImplementedError

    def watch_use(self, on_request: Callable[[], None]) -> None:
        self.on_request = on_request

    def want(self) -> None:
        """It is loaded."""

    async def ensure_loaded(self) -> None:
        """It is loaded."""

    @property
    def keeps_members(self) -> bool:
        return bool(self.members)

    def follow_members(self, served: Mapping[str, ServedModel], is_decoupled: bool) -> None:
        self.members = {step.member: served[step.member].latest for step in self.config.ensemble_steps}
        self.has_left = False

    def leave_members(self) -> None:
        self.has_left = True

    async def unload(self, at_once: bool = False) -> None:
        self.unloads_at_once = at_once
        await self.may_unload.wait()
        self.is_unloaded = True


@dataclass
class FakeLoader:
    """Loads versions in memory. A version whose file starts with "broken" fails to load."""

    loads: list[tuple[str, int]] = field(default_factory=list)
    loaded: list[FakeVersion] = field(default_factory=list)
    cancelled: list[tuple[str, int]] = field(default_factory=list)
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    progress: dict[str, Callable[..., None]] = field(default_factory=dict)
    """Model -> the function that reports its load's progress."""
    failing: dict[str, Exception] = field(default_factory=dict)
    running: int = 0
    most_running: int = 0

    def hold(self, name: str) -> asyncio.Event:
        """Loads of this model begin, read their file, and end when the event is set."""
        self.held[name] = asyncio.Event()
        return self.held[name]

    async def load(self, order: LoadOrder) -> FakeVersion:
        definition, version, name = order.definition, order.version, order.definition.name
        self.loads.append((name, version))
        self.progress[name] = lambda text, is_check=False: order.on_progress(text, is_check)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            data = b""
            if not definition.is_ensemble:
                data = (order.folder / "model.onnx").read_bytes()
            await asyncio.sleep(0)
            if name in self.held:
                await self.held[name].wait()
            if name in self.failing:
                raise self.failing[name]
        except asyncio.CancelledError:
            self.cancelled.append((name, version))
            raise
        except FileNotFoundError as error:
            raise internal(f"no model file: {error.filename}") from error
        finally:
            self.running -= 1
        if data.startswith(b"broken"):
            raise ServeError(internal("").code, f"cannot parse the model of version {version}")
        self.loaded.append(FakeVersion(definition, version, data, order.on_change))
        return self.loaded[-1]

    def alive(self, name: str) -> list[FakeVersion]:
        return [version for version in self.loaded if version.name == name and not version.is_unloaded]


class Folders:
    """Writes model folders."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def model(self, name: str, *versions: int, data: str = "good", more: str = "", tensor: str = "IN") -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        for version in versions:
            self.version(name, version, data)
        self.config(name, more, tensor)
        return folder

    def config(self, name: str, more: str = "", tensor: str = "IN") -> None:
        (self.root / name / "config.pbtxt").write_text(CONFIG.format(input=tensor, more=more))

    def version(self, name: str, version: int, data: str = "good") -> Path:
        folder = self.root / name / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.onnx").write_text(data)
        return folder

    def ensemble(self, name: str, member: str) -> Path:
        folder = self.root / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(ENSEMBLE % member)
        return folder


@dataclass
class Served:
    """A repository under test, with its table and index."""

    repository: ModelRepository
    table: ServingTableHolder
    loader: FakeLoader
    plane: PlaneLoop
    dispatcher: Dispatcher
    residents: ResidentModels

    def data(self, name: str, version: str = "") -> str:
        """The content of the file from which the served version was loaded; the error's text if none is served."""
        try:
            found = self.table.table.find(name, version)
        except ServeError as error:
            return error.text
        assert isinstance(found, FakeVersion)
        assert not found.is_unloaded, "the table offers what is unloaded"
        return found.data.decode()

    def rows(self, name: str) -> dict[str, tuple[str, str]]:
        return {row.version: (row.state, row.reason) for row in self.index() if row.name == name}

    def state(self, name: str, version: str = "1") -> str:
        return self.rows(name).get(version, ("", ""))[0]

    def reason(self, name: str, version: str = "1") -> str:
        return self.rows(name).get(version, ("", ""))[1]

    def index(self) -> list[IndexEntry]:
        return self.repository.index(ready_only=False)

    async def until(self, condition: Callable[[], bool], what: str = "") -> None:
        """Wait until the condition holds; a failure shows the index."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not condition():  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pytest.fail(f"{what or 'it'} did not come; index: {self.index()}; loads: {self.loader.loads}")

    @contextmanager
    def unsettled(self) -> Iterator[Debounce[ModelKey]]:
        """A context in which no change settles, however long it takes."""
        debounce = self.repository._context.debounce
        debounce._settle_seconds = math.inf
        yield debounce
        debounce._settle_seconds = SETTLE_SECONDS

    async def settle(self) -> None:
        """Wait until every change has been scanned and followed."""
        await asyncio.sleep(SETTLE_SECONDS * 3 + 0.3)


Start = Callable[..., Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


@pytest.fixture
def folders(root: Path) -> Folders:
    return Folders(root)


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
async def make(root: Path, loader: FakeLoader) -> AsyncIterator[Callable[..., Served]]:
    """Makes repositories that are stopped after the test. Their data plane runs only if a test starts it."""
    made: list[Served] = []

    def build(*roots: Path, residency: ResidencySettings | None = None, **changes: Any) -> Served:
        settings: dict[str, Any] = {
            "control_mode": ControlMode.POLL,
            "settle_seconds": SETTLE_SECONDS,
            "retry_seconds": 0.3,
            **changes,
        }
        log, table, plane = logging.getLogger("test"), ServingTableHolder(), PlaneLoop(logging.getLogger("test"))
        dispatcher = Dispatcher(table, plane.work_off)
        residents = ResidentModels(
            residency or ResidencySettings(),
            plane,
            dispatcher,
            pinned=changes.get("load_models", ()),
            limits=QueueLimits(max_requests=3),
            concurrent_loads=2,
            log=log,
        )
        repository = ModelRepository(
            RepositorySettings(roots or (root,), **settings), REGISTRY, loader.load, table, log, residents
        )
        made.append(Served(repository, table, loader, plane, dispatcher, residents))
        return made[-1]

    yield build
    for event in loader.held.values():
        event.set()
    for served in made:
        await asyncio.wait_for(served.repository.stop(), PATIENCE_SECONDS)
        served.plane.stop()


@pytest.fixture
async def start(make: Callable[..., Served]) -> Callable[..., Any]:
    """Makes a repository and waits until it has started."""

    async def build(*roots: Path, **changes: Any) -> Served:
        served = make(*roots, **changes)
        await asyncio.wait_for(served.repository.start(), PATIENCE_SECONDS)
        return served

    return build


@pytest.fixture
def m(folders: Folders) -> Path:
    """The folder of a good model."""
    return folders.model("m", 1)


@pytest.fixture
async def served(start: Callable[..., Any]) -> Served:
    """A repository that follows its folder, started with the models of the fixtures before it."""
    started: Served = await start()
    return started
