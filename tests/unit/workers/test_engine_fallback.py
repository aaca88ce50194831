"""A model that its engine cannot load, and the engine that replaces it; with real workers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.dispatching import dispatcher_of
from support.machine import ToldMachine
from support.waiting import until
from support.workers import mail_of, open_descriptors

from rocserve.backends.base import BackendSpec, EngineChoice, EngineSpec, Machine
from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import FolderReading
from rocserve.core.custom_metrics import event_labels
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.load_check import LoadCheckFailed
from rocserve.core.model_config import ModelConfig
from rocserve.core.serving import ServingTableHolder
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.version_loader import LoadedModelVersion, WorkerVersionLoader
from rocserve.scheduling.rate_limiter import RateLimiter
from rocserve.settings import RateLimitResource
from rocserve.workers.launcher import WorkerLauncher

pytestmark = pytest.mark.long

COMPILER = EngineSpec(
    "compiler", "rocserve_reporting_engine", thread_safe=False, forks_from_zygote=True, needs_migraphx=True
)
PLAIN = EngineSpec("plain", "rocserve_plain_engine", thread_safe=True, forks_from_zygote=True)
LOG = logging.getLogger("rocserve.test.fallback")


def choose(config: ModelConfig, machine: Machine) -> EngineChoice:
    wanted = config.parameters.get("engine", "")
    fallback = None if wanted == COMPILER.name else EngineChoice(PLAIN, f"in the place of {COMPILER.name}")
    return EngineChoice(COMPILER, "it is there", fallback, auto_takes_gpus=True)


REGISTRY = BackendRegistry(
    [BackendSpec("onnx", ("onnx_onnxv1",), (PLAIN, COMPILER), ("model.onnx",), choose_engine=choose)]
)


class Loads:
    """Loads models of the backend above, and records their reports."""

    def __init__(self, loader: WorkerVersionLoader, folder: Path) -> None:
        self.fallbacks = loader.fallbacks
        self.failed_checks = loader.failed_checks
        self.checks: list[str] = []
        self.progress: list[str] = []
        self.folder = folder / "m"
        self.loader = loader
        self._loaded: list[LoadedModelVersion] = []

    def _note(self, text: str, is_check: bool) -> None:
        (self.checks if is_check else self.progress).append(text)

    async def load(self, behaviour: str, more: str = "", **parameters: str) -> LoadedModelVersion:
        (self.folder / "1").mkdir(parents=True, exist_ok=True)
        (self.folder / "1" / "model.onnx").touch()
        entries = "".join(
            f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
            for name, value in {"behaviour": behaviour, **parameters}.items()
        )
        (self.folder / "config.pbtxt").write_text(f'platform: "onnx_onnxv1" max_batch_size: 4 {entries} {more}')
        return await self.loaded()

    async def loaded(self) -> LoadedModelVersion:
        (definition,) = FolderReading(self.folder, REGISTRY).definitions()
        order = LoadOrder(definition, 1, self.folder / "1", on_progress=self._note)
        loaded = await self.loader.load(order)
        assert isinstance(loaded, LoadedModelVersion)
        self._loaded.append(loaded)
        return loaded

    async def close(self) -> None:
        for loaded in self._loaded:
            await loaded.unload()


@pytest_asyncio.fixture(loop_scope="module")
async def loads(plane: PlaneLoop, launcher: WorkerLauncher, tmp_path: Path) -> AsyncIterator[Loads]:
    dispatcher = dispatcher_of(ServingTableHolder())
    loader = WorkerVersionLoader(launcher, mail_of(plane), dispatcher, ToldMachine(migraphx=""), LOG)
    loads = Loads(loader, tmp_path)
    yield loads
    await loads.close()


FAILURES = {
    "fails": "Unknown operator: MyFancyOp",
    "crashes": "worker ended while loading (killed by signal 6)",
    "warm_up_fails": "the program gives no numbers",
}


@pytest.mark.parametrize(("behaviour", "text"), FAILURES.items())
async def test_the_next_engine_takes_over_and_it_is_said(
    loads: Loads, caplog: pytest.LogCaptureFixture, behaviour: str, text: str
) -> None:
    loaded = await loads.load(behaviour)
    reason = f"engine compiler cannot load it: {text}"
    assert loaded.available
    assert loaded.status_reason == f"served by plain instead: {reason}"
    assert loaded.properties == {
        "engine": "plain",
        "engine_reason": reason,
        "engine_replaces": "compiler",
        "devices": "cpu",
    }
    assert loads.fallbacks == {event_labels(model="m", version=1, engine="compiler", replaced_by="plain"): 1}
    (warning,) = [record for record in caplog.records if record.name == LOG.name and record.levelname == "WARNING"]
    assert warning.message == f"model 'm' version 1: {reason}; engine plain replaces it"


async def test_an_engine_that_is_named_has_no_fallback(loads: Loads) -> None:
    with pytest.raises(ServeError) as caught:
        await loads.load("fails", engine="compiler")
    assert (caught.value.code, caught.value.text) == (StatusCode.UNAVAILABLE, "Unknown operator: MyFancyOp")
    assert not loads.fallbacks


async def test_a_gpu_is_never_replaced_by_the_cpu_unasked(loads: Loads) -> None:
    on_gpu = "instance_group { kind: KIND_GPU gpus: 0 }"
    with pytest.raises(ServeError) as caught:
        await loads.load("fails", on_gpu)
    assert caught.value.code is StatusCode.UNAVAILABLE
    assert caught.value.text.startswith(
        "Unknown operator: MyFancyOp; engine plain cannot replace it: instance group m_0 of model m has kind"
        " KIND_GPU but no GPUs are available to the backend 'onnx' (engine plain runs it: in the place of compiler);"
        " use KIND_CPU or KIND_AUTO, or set parameter 'engine' to \"auto\" to accept the CPU"
    )
    loaded = await loads.load("fails", on_gpu, engine="auto")
    assert (loaded.properties["engine"], loaded.properties["devices"]) == ("plain", "cpu")


async def test_a_model_that_the_rate_limiter_refuses_leaves_no_memory(loads: Loads, plane: PlaneLoop) -> None:
    limiter = RateLimiter([RateLimitResource("r", 1)], plane.call_soon, LOG)
    loads.loader = dataclasses.replace(loads.loader, limiter=limiter)
    more = 'instance_group { kind: KIND_CPU rate_limiter { resources { name: "r" count: 2 } } }'
    before = open_descriptors()
    with pytest.raises(ServeError, match='Resource count for "r" is limited to 1'):
        await loads.load("works", more)
    await until(lambda: open_descriptors() <= before, "the end of the heap")


async def test_both_engines_fail(loads: Loads) -> None:
    with pytest.raises(ServeError) as caught:
        await loads.load("fails", plain="fails")
    assert (caught.value.code, caught.value.text) == (
        StatusCode.INTERNAL,
        "engine plain: nor can this one; earlier, engine compiler cannot load it: Unknown operator: MyFancyOp",
    )
    assert not loads.fallbacks


async def test_what_is_wrong_with_the_configuration_is_no_engines_fault(loads: Loads) -> None:
    declared = (
        'input { name: "OTHER" data_type: TYPE_FP32 dims: 2 } output { name: "OUT" data_type: TYPE_FP32 dims: 2 }'
    )
    with pytest.raises(ServeError, match="unexpected inference input 'OTHER'"):
        await loads.load("", declared)


async def test_the_engine_that_was_wanted(loads: Loads) -> None:
    loaded = await loads.load("goes_on")
    assert loaded.properties == {
        "engine": "compiler",
        "engine_reason": "it is there",
        "devices": "cpu",
        "target": "ref",
        "batch_sizes": "1",
    }
    await until(lambda: loaded.status_reason == "compiling batch size 2: compile, 1 s")
    assert loaded.available
    (loads.folder / "second_compiled").touch()
    await until(lambda: loaded.status_reason == "")
    assert loaded.properties["batch_sizes"] == "1, 2"
    assert loads.progress[:2] == ["compiling batch size 1: parse, 0 s", ""]


async def test_a_restart_that_compiles_says_both(loads: Loads) -> None:
    loaded = await loads.load("dies")
    assert loaded.status_reason == ""
    (loads.folder / "die").touch()
    why = "restarting: worker ended unexpectedly (killed by signal 9)"
    await until(lambda: loaded.status_reason == f"{why}; compiling batch size 1: compile, 1 s")
    assert not loaded.available
    (loads.folder / "compiled").touch()
    await until(lambda: loaded.available)
    assert loaded.status_reason == "" and not loads.fallbacks


async def test_a_load_says_what_it_is_at_until_it_is_called_off(loads: Loads) -> None:
    load = asyncio.create_task(loads.load("compiles"))
    await until(lambda: "compiling batch size 1: compile, 2 s" in loads.progress)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert not loads.fallbacks


async def test_the_properties_show_what_a_check_has_found(loads: Loads, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    loaded = await loads.load("checked")
    assert loads.checks == ["running 3 inputs"]
    assert loaded.properties["load_check"] == "3 inputs, largest error 2e-6; rows are independent"
    assert loaded.status_reason == ""
    assert "m 1: 3 inputs, largest error 2e-6; rows are independent; 0.42 s" in caplog.messages
    assert loaded.load_check.seconds == 0.42 and not loads.failed_checks


async def test_an_engine_that_fails_its_check_is_replaced(loads: Loads) -> None:
    loaded = await loads.load("fails_its_check")
    reason = "engine compiler fails its load check: output 'OUT' differs by 1.8 from the reference"
    assert loaded.status_reason == f"served by plain instead: {reason}"
    assert loads.failed_checks == {event_labels(model="m", version=1, kind="reference"): 1}


async def test_a_named_engine_that_fails_its_check_is_refused(loads: Loads) -> None:
    with pytest.raises(LoadCheckFailed) as caught:
        await loads.load("fails_its_check", engine="compiler")
    assert (caught.value.kind, caught.value.code) == ("reference", StatusCode.INVALID_ARGUMENT)
    assert caught.value.text == "output 'OUT' differs by 1.8 from the reference"
    assert not caught.value.can_pass, "the same files fail again"


COUPLES = "rows depend on each other: output 'OUT' of a row changes by 0.3 with its neighbours"


async def test_dependent_rows_that_are_joined_as_written(loads: Loads, caplog: pytest.LogCaptureFixture) -> None:
    loaded = await loads.load("couples_rows")
    assert loaded.config.max_batch_size == 4
    assert loaded.status_reason == f"requests are joined although {COUPLES}"
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"model 'm' version 1: requests are joined although {COUPLES}"]
    assert loads.failed_checks == {event_labels(model="m", version=1, kind="rows"): 1}


async def test_a_strict_check_refuses_to_join_dependent_rows(loads: Loads) -> None:
    with pytest.raises(LoadCheckFailed) as caught:
        await loads.load("couples_rows", load_check="strict")
    assert caught.value.text == (
        f'max_batch_size is 4, but {COUPLES}; write max_batch_size: 0, or set parameter "load_check" to "on" to serve'
        " it with a warning"
    )
    assert loads.failed_checks == {event_labels(model="m", version=1, kind="rows"): 1} and not loads.fallbacks


async def test_a_mode_that_does_not_exist(loads: Loads) -> None:
    with pytest.raises(ServeError, match='must be one of on, warn, strict, off, not "often"'):
        await loads.load("checked", load_check="often")


DIALECT = """
name: "m"
platform: "onnx_onnxv1"
inputs [ { name: "IN" datatype: "FP32" shape: [2] } ]
outputs [ { name: "OUT" datatype: "FP32" shape: [2] } ]
parameters { key: "behaviour" value { string_param: "couples_rows" } }
"""


async def test_what_only_a_dialect_wants_to_join_is_not_joined_and_no_reason_to_warn(loads: Loads) -> None:
    (loads.folder / "1").mkdir(parents=True)
    (loads.folder / "1" / "model.onnx").touch()
    (loads.folder / "config.pbtxt").write_text(DIALECT)
    loaded = await loads.loaded()
    assert loaded.config.max_batch_size == 0
    assert loaded.status_reason == ""
    assert loaded.properties["load_check"] == COUPLES
    assert not loads.failed_checks
