"""Versions that are loaded on request: requests, loads, swaps and ends. The loader is a stand-in; the data plane's loop
and the repository are real."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.gpu_tree import GpuTree
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.host import Host
from rocserve.core.backoff import Backoff
from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.exchange import EndHook, Exchange, HookOrder
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.sequences import SequenceTag, sequence_id
from rocserve.repository import hot_reload
from rocserve.repository.engine_plan import SMALL_MODEL_BYTES
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.residency import resident_models
from rocserve.repository.retries import Retries
from rocserve.repository.scanner import RepositoryScanner
from rocserve.settings import ControlMode, ResidencySettings

from .conftest import FakeLoader, FakeVersion, Folders, Served

LOG = logging.getLogger("test")
_TWO = ResidencySettings(max_loaded_models=2)


@dataclass
class Answer:
    """A responder with its responses. Its request runs until `finish`."""

    version: FakeVersion | None = None
    error: ServeError | None = None
    left: Callable[[], None] | None = None
    responder: Any = None

    def send(self, answer: ServeError | None, final: bool = True) -> None:
        self.error = answer

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self.left = callback

    @property
    def has_come(self) -> bool:
        return self.version is not None or self.error is not None

    @property
    def data(self) -> str:
        return "" if self.version is None else self.version.data.decode()


@dataclass
class Rig:
    served: Served
    running: list[Answer] = field(default_factory=list)

    def ask(self, name: str, deadline: float | None = None, sequence: int = 0, finish: bool = True) -> Answer:
        """A request that is answered immediately when the model is loaded, unless it must go on running."""
        answer = Answer()
        tag = SequenceTag(sequence_id(sequence), True, False) if sequence else None
        request = InferRequest(RequestHead(name, "", ()), "", (), deadline, sequence=tag)
        if not finish:
            self.running.append(answer)
        answer.responder = finish
        self.served.plane.call_soon(lambda: self.served.dispatcher.dispatch(request, Exchange(answer)))  # type: ignore[arg-type]
        return answer

    async def answered(self, *answers: Answer) -> None:
        await self.served.until(lambda: all(answer.has_come for answer in answers), "an answer")

    async def loaded(self, name: str) -> None:
        answer = self.ask(name)
        await self.answered(answer)
        assert answer.error is None, answer.error

    @property
    def resident(self) -> set[str]:
        return {version.name for version in self.served.loader.loaded if not version.is_unloaded}


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def infer(version: FakeVersion, request: InferRequest, exchange: Exchange) -> None:
        assert not version.is_unloaded
        answer = exchange.client
        assert isinstance(answer, Answer)
        answer.version = version
        if version.on_request is not None:
            version.on_request()
        if answer.responder:
            exchange.send(None)
        else:
            version.in_flight += 1
            exchange.add(EndHook(HookOrder.CALL, functools.partial(setattr, version, "in_flight", 0)))
            answer.responder = exchange

    monkeypatch.setattr(FakeVersion, "infer", infer)


@pytest.fixture
def rig(make: Callable[..., Served]) -> Callable[..., Any]:
    async def build(residency: ResidencySettings = _TWO, **changes: Any) -> Rig:
        served = make(residency=residency, **changes)
        served.plane.start()
        await asyncio.wait_for(served.repository.start(), PATIENCE_SECONDS)
        return Rig(served)

    return build


def models(folders: Folders, *names: str, more: str = "") -> None:
    for name in names:
        folders.model(name, 1, data=name, more=more)


async def test_models_that_settle_together_are_published_together(
    folders: Folders, rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_reload, "_BATCH_SECONDS", PATIENCE_SECONDS)
    names = [f"m{number}" for number in range(30)]
    models(Folders(tmp_path / "made"), *names)
    host: Rig = await rig()
    publications: list[None] = []
    host.served.repository.subscribe(lambda: publications.append(None))
    for name in names:
        (tmp_path / "made" / name).rename(folders.root / name)
    await host.served.until(lambda: all(host.served.state(name) == "READY" for name in names))
    assert len(publications) < len(names) / 2
    publications.clear()
    for name in names:
        (folders.root / name).rename(tmp_path / "made" / name)
    await host.served.until(lambda: not any(host.served.state(name) == "READY" for name in names))
    assert len(publications) < len(names) / 2


async def test_models_are_registered_and_loaded_by_their_requests(folders: Folders, rig: Any) -> None:
    models(folders, "a", "b", "c")
    host: Rig = await rig()
    assert host.served.loader.loads == []
    assert host.served.repository.is_ready()
    assert host.served.rows("a") == {"1": ("READY", "not loaded: its first request loads it")}
    served = host.served.table.table.find("a", "")
    assert [tensor.name for tensor in served.config.inputs] == ["IN"]
    answers = [host.ask("a") for _ in range(3)]
    await host.answered(*answers)
    assert [answer.data for answer in answers] == ["a", "a", "a"]
    assert host.served.loader.loads == [("a", 1)], "one load for all who wait"
    assert host.served.rows("a") == {"1": ("READY", "")}
    await host.loaded("b")
    await host.loaded("c")
    await host.served.until(lambda: host.resident == {"a", "c"})
    await host.loaded("b")
    assert host.served.residents.counts.unloads_for_room == 2


async def test_counters_go_on_over_loads(folders: Folders, rig: Any) -> None:
    models(folders, "a", "b", "c")
    host: Rig = await rig()
    await host.loaded("a")
    host.served.loader.loaded[0].statistics.record_failure(0, 1)
    await host.loaded("b")
    await host.loaded("c")
    await host.loaded("a")
    await host.served.until(lambda: "a" in host.resident)
    assert host.served.table.table.find("a", "").statistics.snapshot().fail.count == 1


async def test_a_model_with_requests_in_flight_stays(folders: Folders, rig: Any) -> None:
    models(folders, "a", "b")
    host: Rig = await rig(ResidencySettings(max_loaded_models=1))
    running = host.ask("a", finish=False)
    await host.answered(running)
    waiting = host.ask("b")
    await host.served.until(lambda: host.served.reason("b") == "waits for room")
    assert host.resident == {"a"}
    host.served.plane.call_soon(functools.partial(running.responder.send, None))
    await host.answered(waiting)
    assert waiting.data == "b"


async def test_a_model_whose_sequences_may_go_on_stays(folders: Folders, rig: Any) -> None:
    models(folders, "a", more="sequence_batching { max_sequence_idle_microseconds: 400000 }")
    models(folders, "b")
    host: Rig = await rig(ResidencySettings(max_loaded_models=1))
    began = time.monotonic()
    await host.answered(host.ask("a", sequence=7))
    await host.loaded("b")
    assert time.monotonic() - began >= 0.4


async def test_pinned_and_named_models_are_loaded_at_the_start_and_stay(folders: Folders, rig: Any) -> None:
    models(folders, "named", "other", "third")
    models(folders, "pinned", more='parameters { key: "pinned" value { string_value: "true" } }')
    host: Rig = await rig(
        ResidencySettings(max_loaded_models=3), control_mode=ControlMode.EXPLICIT, load_models=("named", "*")
    )
    assert host.resident == {"named", "pinned"}
    for name in ("other", "third", "other", "third"):
        await host.loaded(name)
    assert {"named", "pinned"} <= host.resident


async def test_more_pinned_than_there_is_room_for_is_refused(folders: Folders, rig: Any) -> None:
    models(folders, "a", "b", more='parameters { key: "pinned" value { string_value: "true" } }')
    host: Rig = await rig(ResidencySettings(max_loaded_models=1))
    assert sorted(host.served.state(name) for name in "ab") == ["READY", "UNAVAILABLE"]
    reasons = host.served.reason("a") + host.served.reason("b")
    assert "there is no room for it next to the pinned models" in reasons


@pytest.mark.parametrize("mode", [ControlMode.POLL, ControlMode.EXPLICIT])
@pytest.mark.parametrize(
    ("parameter", "text"),
    [("idle_unload_secs", "expected a number of seconds, 0 for no limit"), ("pinned", "expected true or false")],
)
async def test_a_wrong_parameter_is_a_failed_load(
    folders: Folders, rig: Any, mode: ControlMode, parameter: str, text: str
) -> None:
    models(folders, "a", more=f'parameters {{ key: "{parameter}" value {{ string_value: "soon" }} }}')
    host: Rig = await rig(control_mode=mode)
    fault = f"Invalid argument: parameter '{parameter}': {text}, got 'soon'"
    if mode is ControlMode.EXPLICIT:
        with pytest.raises(ServeError, match=f"load failed for model 'a': version 1 is at UNAVAILABLE state: {fault}"):
            await host.served.repository.load("a", {})
    state, reason = host.served.rows("a")["1"]
    assert (state, reason.partition(" (failed")[0]) == ("UNAVAILABLE", fault)
    assert not host.served.repository.is_ready()


async def test_instances_that_are_threads_of_one_worker_are_estimated_as_one(
    folders: Folders, rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeVersion, "worker_pids", {}, raising=False)
    large = "l" * (SMALL_MODEL_BYTES + 1)
    group = "instance_group [ { count: 8 kind: KIND_CPU }, { count: 8 kind: KIND_CPU passive: true } ]"
    folders.model("threads", 1, data=large, more=group)
    folders.model("processes", 1, data="small", more=group)
    host: Rig = await rig(ResidencySettings(max_model_memory=64 << 20))
    refused, answer = host.ask("processes"), host.ask("threads")
    await host.answered(refused, answer)
    assert refused.error is not None
    assert "there is no room for it next to the pinned models: 96 MiB memory of the host" in refused.error.text
    assert answer.data == large


async def test_the_memory_of_each_gpu_has_a_limit_of_its_own(
    folders: Folders, rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 1 << 30
    tree = GpuTree(tmp_path / "sys")
    for bus in (1, 2):
        tree.add_gpu(version=90402, bus=bus)
    monkeypatch.setattr(resident_models, "Host", functools.partial(Host, system=tree.system, variables={}))
    monkeypatch.setattr(FakeVersion, "worker_pids", {}, raising=False)
    load = FakeLoader.load

    async def load_on_gpu(loader: FakeLoader, order: LoadOrder) -> FakeVersion:
        (group,) = order.definition.config.instance_groups
        used = tree.system / f"devices/pci0000:00/0000:0{group.gpus[0] + 1}:00.0/mem_info_vram_used"
        used.write_text(f"{int(used.read_text()) + 3 * gib}\n")
        return await load(loader, order)

    monkeypatch.setattr(FakeLoader, "load", load_on_gpu)
    for name, gpu in (("a", 0), ("b", 0), ("other", 1)):
        models(folders, name, more=f"instance_group {{ kind: KIND_GPU gpus: [ {gpu} ] }}")
    host: Rig = await rig(ResidencySettings(max_model_gpu_memory=4 * gib))
    for name in ("a", "other"):
        await host.loaded(name)
    assert host.resident == {"a", "other"}
    # By its files it seems to fit. The memory that it really takes is known after its load.
    await host.loaded("b")
    await host.served.until(lambda: len(host.resident) == 2)
    assert "other" in host.resident
    await host.loaded("a")
    await host.loaded("b")
    await host.served.until(lambda: host.resident == {"b", "other"})
    assert host.served.residents.counts.unloads_for_room >= 2


async def test_what_the_configuration_does_not_tell_is_learned_once(folders: Folders, root: Path, rig: Any) -> None:
    folders.version("bare", 1)
    (root / "bare" / "config.pbtxt").write_text('platform: "onnx_onnxv1"')
    models(folders, "a", "b")
    host: Rig = await rig()
    assert host.served.loader.loads == [("bare", 1)]
    await host.loaded("a")
    await host.loaded("b")
    await host.served.until(lambda: host.resident == {"a", "b"})


async def test_all_waiting_requests_get_a_failed_loads_error_and_do_not_repeat_it(
    folders: Folders, loader: FakeLoader, rig: Any
) -> None:
    models(folders, "a")
    host: Rig = await rig()
    host.served.residents.retries = Retries(Backoff(3600.0, 3600.0))
    loader.failing["a"] = unavailable("out of order")
    answers = [host.ask("a") for _ in range(3)]
    await host.answered(*answers)
    answers.append(host.ask("a"))
    await host.answered(*answers)
    for answer in answers:
        assert answer.error is not None
        assert answer.error.code is StatusCode.UNAVAILABLE
        assert "model 'a' version 1 could not be loaded: out of order (failed once" in answer.error.text
    assert loader.loads == [("a", 1)]
    assert host.served.state("a") == "UNAVAILABLE"
    assert host.served.repository.is_ready(), "one of thousands"
    del loader.failing["a"]
    (version,) = host.served.repository._table.models["a"].versions  # type: ignore[index]
    life = version._current
    assert life is not None and life.failure is not None
    life.failure = dataclasses.replace(life.failure, retry_at=0.0)
    assert host.served.reason("a") == "out of order (its next request loads it again)"
    held = loader.hold("a")
    answer = host.ask("a")
    await host.served.until(lambda: len(loader.loads) == 2)
    assert host.served.reason("a") == "is being loaded; failed before: out of order"
    held.set()
    await host.answered(answer)
    assert host.served.rows("a") == {"1": ("READY", "")}


async def test_the_log_has_a_failure_once(
    folders: Folders, loader: FakeLoader, rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def failures() -> list[str]:
        return [record.message for record in caplog.records if "failed to load" in record.message]

    # A pinned model is loaded at the start, the other one by a request.
    models(folders, "pinned", "other")
    loader.failing = {"pinned": unavailable("out of order"), "other": unavailable("broken")}
    host: Rig = await rig(load_models=("pinned",), retry_seconds=3600.0, longest_retry_seconds=3600.0)
    await host.served.until(lambda: host.served.state("pinned") == "UNAVAILABLE")
    assert len(failures()) == 1 and failures()[0].startswith("failed to load 'pinned' version 1: out of order (failed")
    caplog.clear()
    await host.answered(host.ask("other"))
    assert len([text for text in failures() if "'other' version 1: broken" in text]) == 1


async def test_waiting_is_bounded_by_deadlines_clients_and_flags(
    folders: Folders, loader: FakeLoader, rig: Any
) -> None:
    models(folders, "a")
    host: Rig = await rig(ResidencySettings(max_loaded_models=1, model_wait_seconds=0.5))
    loader.hold("a")
    # All arrive in one turn of the data plane's loop, so that none waits for another.
    gate = threading.Event()
    host.served.plane.call_soon(gate.wait)
    gone, patient, _, refused = (host.ask("a") for _ in range(4))
    host.served.plane.call_soon(lambda: gone.left is not None and gone.left())
    late = host.ask("a", deadline=time.monotonic() + 0.1)
    gate.set()
    await host.answered(late, gone, patient, refused)
    errors = [answer.error for answer in (late, gone, patient, refused)]
    assert [error.code.name for error in errors if error] == [
        "DEADLINE_EXCEEDED",
        "CANCELLED",
        "UNAVAILABLE",
        "UNAVAILABLE",
    ]
    assert "not loaded within 0.5 s" in str(patient.error)
    assert "Exceeds maximum queue size" in str(refused.error)
    loader.held["a"].set()
    await host.served.until(lambda: host.served.reason("a") == "")


async def test_nobody_waits_for_room_when_all_have_left(folders: Folders, rig: Any) -> None:
    models(folders, "a", "b")
    host: Rig = await rig(ResidencySettings(max_loaded_models=1))
    await host.answered(host.ask("a", finish=False))
    waiting = host.ask("b", deadline=time.monotonic() + 0.2)
    await host.answered(waiting)
    await host.served.until(lambda: host.served.reason("b") == "not loaded: its first request loads it")


async def test_a_replaced_version_that_still_ends_is_not_unloaded_for_room(
    folders: Folders, loader: FakeLoader, rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    models(folders, "a", "b")
    host: Rig = await rig()
    await host.loaded("a")
    old = loader.loaded[0]
    old.may_unload.clear()
    folders.version("a", 1, "new")
    await host.served.until(lambda: len(loader.loads) == 2 and host.served.data("a") == "new")
    await host.loaded("b")
    assert host.served.residents.counts.unloads_for_room == 0 and "to make room" not in caplog.text
    assert host.resident == {"a", "b"}
    old.may_unload.set()


async def test_idle_models_go(folders: Folders, rig: Any) -> None:
    models(folders, "a", more='parameters { key: "idle_unload_secs" value { string_value: "0.3" } }')
    models(folders, "b")
    host: Rig = await rig(ResidencySettings())
    assert host.resident == {"b"}, "without a limit all others are loaded"
    await host.loaded("a")
    await host.served.until(lambda: host.resident == {"b"})
    assert host.served.residents.counts.unloads_of_idle == 1
    await host.loaded("a")


async def test_an_idle_model_that_is_asked_when_it_is_about_to_go_goes_later(folders: Folders, rig: Any) -> None:
    models(folders, "a", more='parameters { key: "idle_unload_secs" value { string_value: "0.3" } }')
    host: Rig = await rig(ResidencySettings())
    await host.loaded("a")
    gate = threading.Event()
    host.served.plane.call_soon(gate.wait)
    running = host.ask("a", finish=False)
    # The data plane learns of the end of its idle time after the request.
    await asyncio.sleep(0.6)
    gate.set()
    await host.answered(running)
    await asyncio.sleep(0.6)
    assert host.resident == {"a"}
    host.served.plane.call_soon(functools.partial(running.responder.send, None))
    await host.served.until(lambda: not host.resident)


async def test_an_ensembles_members_are_loaded_with_it(folders: Folders, loader: FakeLoader, rig: Any) -> None:
    models(folders, "a")
    folders.ensemble("e", "a")
    host: Rig = await rig()
    assert host.served.rows("e") == {"1": ("READY", "")}
    assert loader.loads == [("e", 1)]


async def test_new_content_of_a_cold_model_is_registered_and_of_a_loaded_one_loaded(
    folders: Folders, loader: FakeLoader, rig: Any
) -> None:
    models(folders, "a", "b")
    host: Rig = await rig()
    await host.loaded("b")
    before = host.served.table.table.find("a", "")
    folders.version("a", 1, "new")
    folders.version("b", 1, "broken")
    await host.served.until(lambda: host.served.table.table.find("a", "") is not before)
    await host.served.until(lambda: "newer content failed to load" in host.served.reason("b"))
    assert loader.loads == [("b", 1), ("b", 1)]
    answers = host.ask("a"), host.ask("b")
    await host.answered(*answers)
    assert [answer.data for answer in answers] == ["new", "b"], "what is broken replaces nothing that is loaded"


async def test_files_that_change_under_a_cold_load_are_not_served_and_their_requests_get_the_new_ones(
    folders: Folders, loader: FakeLoader, rig: Any
) -> None:
    models(folders, "a")
    host: Rig = await rig()
    held = loader.hold("a")
    waiting = host.ask("a")
    await host.served.until(lambda: loader.loads == [("a", 1)])
    folders.version("a", 1, "new")
    held.set()
    await host.answered(waiting)
    assert waiting.data == "new"


async def test_files_that_go_under_a_cold_load_and_come_back_are_served(
    folders: Folders, loader: FakeLoader, rig: Any
) -> None:
    models(folders, "a")
    host: Rig = await rig()
    held = loader.hold("a")
    waiting = host.ask("a")
    await host.served.until(lambda: loader.loads == [("a", 1)])
    (folders.root / "a").rename(folders.root / ".aside")
    held.set()
    await host.served.until(lambda: not host.resident and len(loader.loaded) == 1)
    (folders.root / ".aside").rename(folders.root / "a")
    await host.answered(waiting)
    assert waiting.data == "a"


@pytest.mark.parametrize("more", ["bogus: 1", 'input { name: "x" data_type: TYPE_FP32 }'])
async def test_requests_to_a_cold_model_get_the_fault_of_its_new_configuration(
    folders: Folders, loader: FakeLoader, rig: Any, more: str
) -> None:
    models(folders, "a", "b")
    host: Rig = await rig()
    folders.config("a", more)
    await host.served.until(lambda: "newer content failed to load" in host.served.reason("a"))
    held = loader.hold("b")
    answers = [host.ask("a"), host.ask("b")]
    await host.served.until(lambda: ("b", 1) in loader.loads)
    folders.config("b", more)
    held.set()
    await host.answered(*answers)
    for name, answer in zip("ab", answers, strict=True):
        assert f"model '{name}' version 1 could not be loaded: " in str(answer.error)
        assert ("bogus" if "bogus" in more else "must specify 'dims'") in str(answer.error)
        assert host.served.state(name) == "UNAVAILABLE"
        folders.config(name)
    await host.served.until(lambda: host.served.state("a") == host.served.state("b") == "READY")
    await host.loaded("a")
    await host.loaded("b")


async def test_the_file_of_an_endpoint_that_is_another_by_now_is_not_waited_for(
    folders: Folders, rig: Any, tmp_path: Path
) -> None:
    models(folders, "a", "b")
    host: Rig = await rig(allow_amd_endpoints=True, worker_load_folders=(tmp_path,))
    file = tmp_path / "model.onnx"
    file.write_text("first")
    endpoints = host.served.repository.endpoints
    name = await endpoints.load("onnx", {"model": str(file)})
    await host.served.until(lambda: host.resident == {name})
    await host.loaded("a")
    await host.loaded("b")
    await host.served.until(lambda: name not in host.resident)
    file.write_text("second")
    refused = host.ask(name)
    await host.answered(refused)
    assert "its files have changed since it was registered" in str(refused.error)


async def test_clients_load_and_unload_by_name(folders: Folders, loader: FakeLoader, rig: Any) -> None:
    models(folders, "a", "b")
    host: Rig = await rig(control_mode=ControlMode.EXPLICIT)
    await host.served.repository.load("a", {})
    assert host.resident == {"a"}
    loader.failing["b"] = unavailable("out of order")
    with pytest.raises(ServeError, match="out of order"):
        await host.served.repository.load("b", {})
    waiting = host.ask("a", finish=False)
    await host.answered(waiting)
    await host.served.repository.unload("a", False)
    refused = host.ask("a")
    await host.answered(refused)
    assert "has no available versions" in str(refused.error)
    assert host.served.state("a") in ("UNAVAILABLE", "UNLOADING")


async def test_the_end_calls_loads_off(folders: Folders, loader: FakeLoader, rig: Any) -> None:
    models(folders, "a", "b")
    folders.ensemble("e", "b")
    host: Rig = await rig(ResidencySettings(max_loaded_models=1))
    loader.hold("a")
    waiting = [host.ask("a"), host.ask("b")]
    await host.served.until(lambda: loader.loads == [("e", 1), ("a", 1)])
    await asyncio.wait_for(host.served.repository.stop(), PATIENCE_SECONDS)
    await host.answered(*waiting)
    assert loader.cancelled == [("a", 1)]


async def test_what_is_removed_while_it_makes_room_is_not_loaded_again(
    folders: Folders, loader: FakeLoader, rig: Any
) -> None:
    models(folders, "a", "b")
    host: Rig = await rig(ResidencySettings(max_loaded_models=1), control_mode=ControlMode.EXPLICIT)
    await host.served.repository.load("a", {})
    loader.loaded[0].may_unload.clear()
    await host.served.repository.load("b", {})
    waiting = host.ask("a")
    await host.served.until(lambda: waiting.left is not None)
    await host.served.repository.unload("a", False)
    loader.loaded[0].may_unload.set()
    await host.answered(waiting)
    assert waiting.error is not None
    await host.served.until(lambda: host.served.rows("a") == {"1": ("UNAVAILABLE", "unloaded")})
    assert loader.loads == [("a", 1), ("b", 1)]
    assert host.served.residents.registered == 1


async def test_a_load_that_is_called_off_when_it_is_done_leaves_nothing(
    folders: Folders, loader: FakeLoader, rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models(folders, "a")
    host: Rig = await rig(control_mode=ControlMode.EXPLICIT, load_models=("*",))
    checked = asyncio.Event()

    async def changed_file(*_: Any) -> None:
        checked.set()
        await asyncio.sleep(PATIENCE_SECONDS)

    monkeypatch.setattr(RepositoryScanner, "changed_file", changed_file)
    waiting = host.ask("a")
    await checked.wait()
    await host.served.repository.unload("a", False)
    await host.answered(waiting)
    await host.served.until(lambda: not host.resident)


@pytest.mark.parametrize("mode", [ControlMode.EXPLICIT, ControlMode.NONE])
async def test_changed_files_that_nobody_follows_are_refused_until_they_are_loaded_by_name(
    folders: Folders, rig: Any, mode: ControlMode
) -> None:
    models(folders, "a")
    host: Rig = await rig(control_mode=mode, load_models=("*",))
    folders.version("a", 1, "new")
    refused = host.ask("a")
    await host.answered(refused)
    assert (
        "its files have changed since it was registered; load it again, or restart the server if it has"
        " --model-control-mode=none"
    ) in str(refused.error)
    if mode is ControlMode.NONE:
        return
    await host.served.repository.load("a", {})
    answer = host.ask("a")
    await host.answered(answer)
    assert answer.data == "new"
