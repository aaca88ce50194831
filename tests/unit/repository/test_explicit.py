"""Explicit mode: loads and unloads by request; and mode none."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.config.definition import ModelDefinition
from rocserve.config.preprocess import models
from rocserve.config.preprocess.generated import GeneratedModel
from rocserve.core.errors import ServeError, StatusCode, internal
from rocserve.core.model_config import ModelConfig
from rocserve.repository import scanner as scanner_file
from rocserve.repository import table
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.scan import ModelScan, scan_model
from rocserve.settings import ControlMode

from .conftest import CONFIG, FakeLoader, FakeVersion, Folders, Served, Start

CONFIG_JSON = json.dumps(
    {
        "platform": "onnx_onnxv1",
        "max_batch_size": 4,
        "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [4]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [4]}],
    }
)


@pytest.fixture
def explicit(start: Start) -> Start:
    async def build(*names: str, **changes: Any) -> Served:
        changes = {"allow_remote_files": True, "allow_remote_models": True, **changes}
        served: Served = await start(control_mode=ControlMode.EXPLICIT, load_models=names, **changes)
        return served

    return build


@pytest.fixture
async def served(explicit: Start) -> Served:
    started: Served = await explicit()
    return started


async def error_of(call: Awaitable[None]) -> tuple[StatusCode, str]:
    with pytest.raises(ServeError) as caught:
        await call
    return caught.value.code, caught.value.text


async def test_only_what_is_named_is_loaded_at_the_start(explicit: Start, folders: Folders) -> None:
    folders.model("m", 1)
    folders.model("n", 1)
    served: Served = await explicit("m")
    assert served.data("m") == "good"
    assert served.rows("n") == {"": ("", "")}
    assert served.data("n") == "Request for unknown model: 'n' is not found; served are: m"
    assert [row.name for row in served.repository.index(ready_only=True)] == ["m"]
    assert served.repository.is_ready()


async def test_a_name_that_is_not_there_at_the_start_is_a_failed_model(explicit: Start) -> None:
    served: Served = await explicit("absent")
    assert served.repository.failed_models() == {
        "absent": "failed to load 'absent', failed to poll from model repository"
    }
    assert not served.repository.is_ready()


async def test_load_reload_and_unload(served: Served, folders: Folders, loader: FakeLoader) -> None:
    folders.model("m", 1)
    await served.repository.load("m", {})
    assert served.data("m") == "good"
    folders.version("m", 1, "new")
    await served.settle()
    assert served.data("m") == "good", "nothing is loaded unasked"
    await served.repository.load("m", {})
    assert served.data("m") == "new"
    await served.repository.load("m", {})
    assert loader.loads == [("m", 1), ("m", 1)], "the third found nothing new"
    await served.repository.unload("m", False)
    assert served.data("m") == "Request for unknown model: 'm' has no available versions"
    await served.until(lambda: served.rows("m") == {"1": ("UNAVAILABLE", "unloaded")})
    assert loader.alive("m") == []
    assert served.repository.is_ready()
    await served.repository.load("m", {})
    assert served.data("m") == "new"


ALL = "version_policy { all {} }"


async def test_one_version_is_loaded_and_unloaded_by_itself(
    served: Served, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1, 2, 3)  # The policy selects the latest.
    await served.repository.load("m", {"version": 1})
    await served.repository.load("m", {"version": "2"})
    assert [version for version, (state, _) in served.rows("m").items() if state == "READY"] == ["1", "2"]
    assert loader.loads == [("m", 1), ("m", 2)], "the first was not loaded again"
    await served.repository.unload("m", False, 1)
    await served.until(lambda: served.rows("m")["1"] == ("UNAVAILABLE", "unloaded"))
    assert served.data("m", "1") == "Request for unknown model: 'm' version 1 is not at ready state"
    assert served.data("m", "2") == "good"
    await served.repository.unload("m", False, 7)  # As for a model that is not loaded.
    # A load without a version applies the policy again.
    await served.repository.load("m", {})
    await served.until(lambda: len(loader.alive("m")) == 1)
    assert served.data("m", "3") == "good"
    await served.repository.unload("m", False, 3)
    await served.until(lambda: loader.alive("m") == [])
    assert served.data("m") == "Request for unknown model: 'm' has no available versions"
    await served.repository.load("m", {"version": 2})
    assert served.data("m") == "good"
    assert served.repository.is_ready()


async def test_a_version_that_fails_leaves_the_others(served: Served, folders: Folders, loader: FakeLoader) -> None:
    folders.model("m", 1, 2, more=ALL)
    folders.version("m", 2, "broken")
    await error_of(served.repository.load("m", {}))
    assert served.data("m", "1") == "good"
    # The failed version goes on being wanted, and does not keep another from being unloaded or loaded.
    await served.repository.unload("m", False, 1)
    await served.until(lambda: loader.alive("m") == [])
    await served.repository.load("m", {"version": 1})
    assert served.data("m", "1") == "good"
    _, text = await error_of(served.repository.load("m", {"version": 2}))
    assert text.startswith("load failed for model 'm': version 2 is at UNAVAILABLE state")
    assert "version 1" not in text
    assert served.data("m", "1") == "good"


async def test_a_version_that_cannot_be_loaded_is_refused_by_name(explicit: Start, folders: Folders) -> None:
    served: Served = await explicit(max_model_versions=2)
    folders.model("m", 1, 2, 3)
    assert await error_of(served.repository.load("m", {"version": 4})) == (
        StatusCode.INVALID_ARGUMENT,
        "failed to load 'm', it has no version 4; its versions are: 1, 2, 3",
    )
    for version in (1, 2):
        await served.repository.load("m", {"version": version})
    _, text = await error_of(served.repository.load("m", {"version": 3}))
    assert text.startswith("failed to load 'm', 3 of its versions would be served, at most 2 are possible")
    assert served.data("m", "1") == served.data("m", "2") == "good"


async def test_the_last_version_of_an_ensemble_takes_it_away(explicit: Start, folders: Folders) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await explicit("e")
    assert served.state("e") == "READY"
    await served.repository.unload("e", False, 1)
    await served.until(lambda: served.state("e") != "READY")
    assert served.data("m") == "good"


@pytest.mark.parametrize("version", [True, -1, b"1", "", "latest", "1.0", "-1", "1" * 19])
async def test_a_version_is_a_number(served: Served, folders: Folders, version: Any) -> None:
    folders.model("m", 1)
    code, text = await error_of(served.repository.load("m", {"version": version}))
    assert (code, text) == (
        StatusCode.INVALID_ARGUMENT,
        f"expected the number of a version as parameter 'version', got {version!r}",
    )


async def test_new_folders_are_listed_without_being_loaded(served: Served, folders: Folders) -> None:
    folders.model("m", 1)
    await served.until(lambda: served.rows("m") == {"": ("", "")})


async def test_what_cannot_be_found_or_read_is_answered_in_tritons_words(served: Served, folders: Folders) -> None:
    polled = "failed to load '{}', failed to poll from model repository"
    folders.model("typo", 1, more="max_bach_size: 8")
    assert await error_of(served.repository.load("typo", {})) == (StatusCode.INTERNAL, polled.format("typo"))
    assert "max_bach_size" in served.reason("typo", ""), "the index tells the reason"
    folders.model("named", 1, more='name: "other"')
    assert await error_of(served.repository.load("named", {})) == (StatusCode.INTERNAL, polled.format("named"))
    folders.model("broken", 1, data="broken")
    assert await error_of(served.repository.load("broken", {})) == (
        StatusCode.INVALID_ARGUMENT,
        "load failed for model 'broken': version 1 is at UNAVAILABLE state: Internal: cannot parse the model of"
        " version 1;\n",
    )
    assert served.state("broken") == "UNAVAILABLE"


@pytest.mark.parametrize("name", ["", ".", "..", "../m", "a/b", "m\0"])
async def test_names_that_are_paths_are_not_found(served: Served, name: str) -> None:
    code, _ = await error_of(served.repository.load(name, {"config": CONFIG_JSON, "file:1/model.onnx": b"x"}))
    assert code is StatusCode.INTERNAL


async def test_a_reload_that_fails_keeps_what_serves_and_may_be_tried_again(
    explicit: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    served: Served = await explicit("m")
    folders.version("m", 1, "broken")
    for _ in range(2):
        await error_of(served.repository.load("m", {}))
    assert loader.loads == [("m", 1)] * 3
    assert served.data("m") == "good"
    assert served.state("m") == "READY"
    assert served.reason("m") == "newer content failed to load: cannot parse the model of version 1"


async def test_files_in_the_request_take_the_place_of_the_folder_and_go_with_the_model(
    explicit: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    served: Served = await explicit("m")
    await served.repository.load("m", {"config": CONFIG_JSON, "file:7/model.onnx": b"given"})
    assert served.data("m", "7") == "given"
    await served.until(lambda: served.rows("m")["1"] == ("UNAVAILABLE", "unloaded"))
    await served.repository.load("new", {"config": CONFIG_JSON, "file:1/model.onnx": b"no folder at all"})
    assert served.data("new") == "no folder at all"


async def test_among_namespaces_too_files_in_the_request_replace_the_folders_model_when_they_serve(
    start: Start, folders: Folders
) -> None:
    folders.model("m", 1)
    served: Served = await start(
        control_mode=ControlMode.EXPLICIT, model_namespacing=True, load_models=("m",), allow_remote_files=True
    )
    with pytest.raises(ServeError, match="cannot parse the model"):
        await served.repository.load("m", {"config": CONFIG_JSON, "file:1/model.onnx": b"broken"})
    assert served.data("m") == "good"
    await served.repository.load("m", {"config": CONFIG_JSON, "file:1/model.onnx": b"given"})
    assert served.data("m") == "given"
    await served.repository.load("m", {})
    assert served.data("m") == "good"
    assert len(served.index()) == 1, "the model keeps its namespace"


Private = Callable[[], set[Path]]


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Private:
    """Lists the folder of temporary folders."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return lambda: set(folder.iterdir())


async def test_private_files_are_deleted_when_the_model_is_unloaded(private: Private, served: Served) -> None:
    await served.repository.load("m", {"config": CONFIG_JSON, "file:1/model.onnx": b"given"})
    await error_of(served.repository.load("m", {"config": CONFIG_JSON, "file:1/model.onnx": b"broken"}))
    assert len(private()) == 2
    await served.repository.unload("m", False)
    # The error that the client got refers to itself, so only the garbage collector removes it.
    await served.until(lambda: gc.collect() >= 0 and not private())


async def test_private_files_of_a_server_that_was_killed_go_when_another_starts(
    private: Private, served: Served, explicit: Start
) -> None:
    await served.repository.load("m", {"config": CONFIG_JSON, "file:1/model.onnx": b"given"})
    (kept,) = private()
    (kept.with_name("rocserve-model-left") / "m/1").mkdir(parents=True)
    kept.with_name("rocserve-other").mkdir()
    await explicit()
    assert private() == {kept, kept.with_name("rocserve-other")}


async def test_private_files_are_open_to_workers_of_another_user_under_any_umask(
    private: Private, served: Served
) -> None:
    before = os.umask(0o077)
    try:
        await served.repository.load("m", {"config": CONFIG_JSON, "file:1/model.onnx": b"x", "file:labels.txt": b"y"})
    finally:
        os.umask(before)
    (folder,) = private()
    modes = {path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert modes == {"m": 0o755, "m/1": 0o755, "m/1/model.onnx": 0o644, "m/labels.txt": 0o644}
    # Another client would have to know its name.
    assert stat.S_IMODE(folder.stat().st_mode) == 0o711


@pytest.mark.parametrize("key", ["file:model.onnx", "file:x/model.onnx", "file:01/model.onnx"])
async def test_files_outside_a_version_make_no_version(served: Served, key: str) -> None:
    code, text = await error_of(served.repository.load("m", {"config": CONFIG_JSON, key: b"x"}))
    assert code is StatusCode.INVALID_ARGUMENT
    assert text.endswith("at least one version must be available under the version policy of model 'm'")


@pytest.mark.parametrize("files", [["A" * 256], ["1/model.onnx", "1/model.onnx/more"]])
async def test_files_that_cannot_be_written(served: Served, files: list[str]) -> None:
    parameters = {"config": CONFIG_JSON, **{f"file:{path}": b"x" for path in files}}
    code, text = await error_of(served.repository.load("m", parameters))
    assert code is StatusCode.INTERNAL
    assert text == "failed to load 'm', failed to poll from model repository"


async def test_loading_an_ensemble_loads_its_members(explicit: Start, folders: Folders, loader: FakeLoader) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await explicit()
    await served.repository.load("e", {})
    assert loader.loads == [("m", 1), ("e", 1)]
    assert served.state("e") == "READY"
    await served.repository.load("e", {})
    assert loader.loads == [("m", 1), ("e", 1)]


async def test_an_ensemble_whose_member_is_missing_or_does_not_fit_is_answered_in_tritons_words(
    explicit: Start, folders: Folders
) -> None:
    folders.ensemble("e", "m")
    served: Served = await explicit()
    assert await error_of(served.repository.load("e", {})) == (
        StatusCode.INVALID_ARGUMENT,
        "load failed for model 'e': ensemble e contains models that are not available or ambiguous: m",
    )
    folders.model("m", 1, tensor="X")
    assert await error_of(served.repository.load("e", {})) == (
        StatusCode.INVALID_ARGUMENT,
        "load failed for model 'e': in ensemble e, ensemble tensor E_IN is mapping to non-existing input IN in model m",
    )
    assert served.state("m") == "READY"


async def test_a_circle_of_ensembles_ends_with_an_error(explicit: Start, folders: Folders) -> None:
    folders.ensemble("e", "f")
    folders.ensemble("f", "e")
    served: Served = await explicit()
    code, _ = await asyncio.wait_for(error_of(served.repository.load("e", {})), PATIENCE_SECONDS)
    assert code is StatusCode.INVALID_ARGUMENT


async def test_unloading_the_dependents_leaves_members_that_others_need(
    explicit: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.ensemble("e", "m")
    folders.ensemble("f", "m")
    folders.model("m", 1)
    served: Served = await explicit("e", "f")
    await served.repository.unload("e", True)
    assert served.state("f") == "READY"
    assert served.data("m") == "good"
    await served.repository.unload("f", True)
    await served.until(lambda: loader.alive("m") == [])


async def test_the_dependents_may_be_of_another_namespace(
    start: Start, folders: Folders, loader: FakeLoader, tmp_path: Path
) -> None:
    other = Folders(tmp_path / "other")
    for name in ("m", "shared"):
        other.model(name, 1)
    folders.ensemble("e", "m")
    folders.ensemble("f", "shared")
    other.ensemble("g", "shared")
    served: Served = await start(
        folders.root, other.root, control_mode=ControlMode.EXPLICIT, model_namespacing=True, load_models=("e", "f", "g")
    )
    await served.repository.unload("e", True)
    await served.until(lambda: loader.alive("m") == [])
    await served.repository.unload("f", True)
    assert served.state("g") == "READY"
    assert served.data("shared") == "good", "another ensemble needs it"


@pytest.mark.parametrize("way", ["unloaded", "replaced"])
async def test_an_ensemble_that_loses_its_member_leaves_it_after_the_publication(
    explicit: Start, folders: Folders, way: str
) -> None:
    folders.model("m", 1)
    folders.ensemble("e", "m")
    served: Served = await explicit("e")
    e, m = (served.table.table.find(name, "") for name in ("e", "m"))
    offered: list[bool] = []
    leave = e.leave_members

    def note() -> None:
        offered.append(e in served.table.table.models["e"].versions.values())
        leave()

    e.leave_members = note
    if way == "unloaded":
        await served.repository.unload("m", False)
    else:
        folders.config("m", tensor="RENAMED")
        await served.repository.load("m", {})
    assert served.state("e") == "UNAVAILABLE"
    assert e.has_left
    assert not any(offered)
    assert e.members == {"m": m}, "a request that has found the ensemble runs on them"
    folders.config("m")
    await served.repository.load("m", {})
    assert served.state("e") == "READY"
    assert not e.has_left
    assert e.members["m"] is served.table.table.find("m", "") is not m


async def test_unloading_a_member_suspends_the_ensemble_until_it_is_loaded_again(
    explicit: Start, folders: Folders
) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await explicit("e")
    await served.repository.unload("m", False)
    assert served.state("e") == "UNAVAILABLE"
    await served.repository.load("m", {})
    assert served.state("e") == "READY"


async def test_a_load_waits_for_the_preset_models_of_its_own_model_and_members_alone(
    explicit: Start, folders: Folders, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(config: ModelConfig, definition: ModelDefinition, folder: Path) -> tuple[GeneratedModel, ...]:
        text = CONFIG.format(input="IN", more="").encode()
        files = {PurePosixPath("config.pbtxt"): text, PurePosixPath("1/model.onnx"): b"good"}
        return (GeneratedModel(f"{config.name}_image", files),)

    monkeypatch.setattr(models, "preset_models", made)
    folders.model("m", 1, more='parameters { key: "preprocess" value { string_value: "imagenet" } }')
    folders.model("other", 1)
    folders.ensemble("e", "m")
    served: Served = await explicit()
    held = loader.hold("m_image")
    loads = [asyncio.create_task(served.repository.load(name, {})) for name in ("m", "e")]
    await served.until(lambda: ("m_image", 1) in loader.loads)
    await asyncio.wait_for(served.repository.load("other", {}), PATIENCE_SECONDS)
    assert not any(load.done() for load in loads)
    held.set()
    await asyncio.wait_for(asyncio.gather(*loads), PATIENCE_SECONDS)
    assert served.data("m_image") == "good"


async def test_an_unload_calls_off_a_load(m: Path, served: Served, loader: FakeLoader) -> None:
    loader.hold("m")
    asking = asyncio.create_task(error_of(served.repository.load("m", {})))
    await served.until(lambda: loader.loads == [("m", 1)])
    await served.repository.unload("m", False)
    code, text = await asyncio.wait_for(asking, PATIENCE_SECONDS)
    assert code is StatusCode.UNAVAILABLE
    assert "unloaded before" in text
    assert loader.cancelled == [("m", 1)]


async def test_many_clients_may_load_the_same_model_at_once(m: Path, served: Served, loader: FakeLoader) -> None:
    await asyncio.gather(*(served.repository.load("m", {}) for _ in range(10)))
    assert loader.loads == [("m", 1)]


async def test_files_that_change_during_a_load_are_loaded_again(
    explicit: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1, data="half")
    served: Served = await explicit()
    held = loader.hold("m")
    asking = asyncio.create_task(served.repository.load("m", {}))
    await served.until(lambda: loader.loads == [("m", 1)])
    folders.version("m", 1, "whole")
    held.set()
    await asyncio.wait_for(asking, PATIENCE_SECONDS)
    assert served.data("m") == "whole"
    assert [version.data for version in loader.alive("m")] == [b"whole"]


async def test_files_that_change_during_each_load_are_named(
    explicit: Start, folders: Folders, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = loader.load

    async def writes(order: LoadOrder) -> FakeVersion:
        (order.folder / f"{len(loader.loads)}.log").touch()
        return await load(order)

    monkeypatch.setattr(loader, "load", writes)
    folders.model("m", 1)
    served: Served = await explicit()
    code, text = await error_of(served.repository.load("m", {}))
    changed = f"('1/{len(loader.loads) - 1}.log' last); it can be loaded again when they have settled"
    assert (code, changed in text) == (StatusCode.INVALID_ARGUMENT, True)
    assert served.state("m") == "UNAVAILABLE" and changed in served.reason("m")
    assert changed in served.repository.failed_models()["m"] and not served.repository.is_ready()
    event = (await served.repository.events.after(0, 0.0))[-1]
    assert (event.state, event.reason) == ("UNAVAILABLE", served.reason("m"))


async def test_the_end_of_an_unload_is_an_event(explicit: Start, m: Path, loader: FakeLoader) -> None:
    served: Served = await explicit("m")
    loader.loaded[0].may_unload.clear()
    await served.repository.unload("m", False)
    assert served.state("m") == "UNLOADING"
    *_, last = await served.repository.events.after(0, 0.0)
    assert last.state == "UNLOADING"
    loader.loaded[0].may_unload.set()
    (event,) = await served.repository.events.after(last.number, PATIENCE_SECONDS)
    assert (event.state, event.reason) == ("UNAVAILABLE", "unloaded")


async def test_a_start_that_is_cancelled_leaves_no_load(
    make: Callable[..., Served], folders: Folders, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    folders.model("m", 1)
    folders.ensemble("e", "m")
    loader.hold("m")
    served = make(control_mode=ControlMode.EXPLICIT, load_models=("e",))
    before = asyncio.all_tasks()
    starting = asyncio.create_task(served.repository.start())
    await served.until(lambda: loader.loads == [("m", 1)])
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await served.until(lambda: asyncio.all_tasks() == before)
    gc.collect()
    assert not served.rows("m") and "never retrieved" not in caplog.text


async def test_a_load_whose_folder_goes_meanwhile_is_over(
    explicit: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    served: Served = await explicit(settle_seconds=1.0)
    held = loader.hold("m")
    asking = asyncio.create_task(error_of(served.repository.load("m", {})))
    await served.until(lambda: loader.loads == [("m", 1)])
    folders.version("m", 1, "changed")
    held.set()
    await served.until(lambda: "changed while it was loading" in served.reason("m"))
    shutil.rmtree(folders.root / "m")
    _, text = await asyncio.wait_for(asking, PATIENCE_SECONDS)
    assert text == "failed to load 'm', failed to poll from model repository"
    assert served.state("m") != "LOADING", "nothing loads it"


@pytest.mark.parametrize("namespaces", [False, True])
async def test_a_mounted_model_is_loaded_by_its_configurations_name(
    start: Start, tmp_path: Path, namespaces: bool
) -> None:
    folder = Folders(tmp_path).model("models", 1, more='name: "resnet"')
    served: Served = await start(folder, control_mode=ControlMode.EXPLICIT, model_namespacing=namespaces)
    await served.repository.load("resnet", {})
    assert served.data("resnet") == "good"


async def test_models_that_clients_brought_are_forgotten_some_time_after_their_unload(
    explicit: Start, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_REMOVED_SHOWN", 2)
    folders.model("m", 1)
    served: Served = await explicit("m")
    await served.repository.unload("m", False)
    for number in range(5):
        await served.repository.load(f"n{number}", {"config": CONFIG_JSON, "file:1/model.onnx": b"x"})
        await served.repository.unload(f"n{number}", False)
    await served.until(lambda: served.rows("n4") == {"1": ("UNAVAILABLE", "unloaded")})
    assert [row.name for row in served.index()] == ["m", "n3", "n4"], "those of the repository stay"
    _, text = await error_of(served.repository.load("n4", {"config": CONFIG_JSON, "file:1/model.onnx": b"broken"}))
    assert "cannot parse the model" in text
    assert not served.repository.is_ready(), "a client has asked for it"


async def test_mode_none_loads_all_once_and_follows_nothing(start: Start, folders: Folders, loader: FakeLoader) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    folders.model("bad", 1, data="broken")
    served: Served = await start(control_mode=ControlMode.NONE)
    assert served.state("e") == "READY"
    assert served.rows("bad") == {"1": ("UNAVAILABLE", "Internal: cannot parse the model of version 1")}
    assert list(served.repository.failed_models()) == ["bad"]
    folders.version("m", 2)
    shutil.rmtree(folders.root / "bad")
    await served.settle()
    assert sorted(loader.loads) == [("bad", 1), ("e", 1), ("m", 1)]
    code, text = await error_of(served.repository.load("m", {}))
    assert (code, text) == (
        StatusCode.UNAVAILABLE,
        "explicit model load / unload is not allowed if polling is enabled",
    )


async def test_what_can_be_read_but_not_loaded_is_refused_for_each_version_and_not_tried_again(
    served: Served, folders: Folders
) -> None:
    folders.model("shapeless", 1, 2, more='version_policy { all { } } input { name: "x" data_type: TYPE_FP32 }')
    fault = "Invalid argument: model input 'x' must specify 'dims' for shapeless"
    assert await error_of(served.repository.load("shapeless", {})) == (
        StatusCode.INVALID_ARGUMENT,
        "load failed for model 'shapeless':"
        f" version 1 is at UNAVAILABLE state: {fault};\nversion 2 is at UNAVAILABLE state: {fault};\n",
    )
    assert served.reason("shapeless", "1") == fault, "nothing is said of a next try"
    assert served.reason("shapeless", "2") == fault


async def test_a_load_scans_its_own_folder_alone(
    explicit: Start, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("m", "n"):
        folders.model(name, 1)
    scanned: list[str] = []

    def scan(model: ModelScan, *arguments: Any) -> ModelScan:
        scanned.append(model.name)
        return scan_model(model, *arguments)

    monkeypatch.setattr(scanner_file, "scan_model", scan)
    monkeypatch.setattr(scanner_file, "_YOUNG_SECONDS", 0)
    served: Served = await explicit("m", "n", poll_seconds=3600)
    await served.until(lambda: scanned.count("n") == 3, "the scans of the start, of the load's end and of the index")
    scanned.clear()
    await served.repository.load("m", {})
    assert scanned == ["m"]
    folders.version("m", 1, "new")
    await served.repository.load("m", {})
    assert served.data("m") == "new"


async def test_the_members_of_an_ensemble_are_loaded_from_all_namespaces(
    start: Start, folders: Folders, tmp_path: Path
) -> None:
    """As in Triton, although requests cannot name them then."""
    other = Folders(tmp_path / "other")
    folders.ensemble("e", "m")
    folders.model("m", 1)
    other.model("m", 1)
    served: Served = await start(
        folders.root, other.root, control_mode=ControlMode.EXPLICIT, model_namespacing=True, load_models=("e",)
    )
    assert served.state("e") == "READY"
    assert "There are 2 identifiers of model 'm'" in served.data("m")


async def test_a_reload_loads_what_has_not_changed(served: Served, folders: Folders, loader: FakeLoader) -> None:
    folders.model("m", 1)
    await served.repository.reload("m")
    await served.repository.reload("m")
    assert (served.state("m"), loader.loads) == ("READY", [("m", 1)] * 2)
    await served.repository.load("m", {})
    assert len(loader.loads) == 2
    loader.failing["m"] = internal("no luck")
    assert "no luck" in (await error_of(served.repository.reload("m")))[1]
    assert served.state("m") == "READY"
    assert (await error_of(served.repository.reload("nothing")))[0] is StatusCode.INTERNAL


async def test_a_server_that_loads_at_its_start_only_reloads_nothing(start: Start, folders: Folders) -> None:
    folders.model("m", 1)
    served: Served = await start(control_mode=ControlMode.NONE)
    assert (await error_of(served.repository.reload("m")))[0] is StatusCode.UNAVAILABLE
