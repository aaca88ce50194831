"""Poll mode: several repositories, links, mounts, folders that appear and disappear; faults in a folder, which are
reported, retried and harm no served model; changes during loads, and concurrent loads; changes of versions, version
policy and configuration."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until
from support.workers import open_descriptors
from watchdog.observers import inotify_c

from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.repository import watch
from rocserve.repository.load_order import LoadOrder

from .conftest import FakeLoader, FakeVersion, Folders, Served, Start


async def test_a_name_that_turns_up_in_a_second_repository_is_an_error_and_what_serves_goes_on(
    start: Start, folders: Folders, tmp_path: Path, loader: FakeLoader
) -> None:
    (tmp_path / "second").mkdir()
    second = Folders(tmp_path / "second")
    folders.model("m", 1, data="first")
    second.model("n", 1)
    served: Served = await start(folders.root, second.root)
    assert served.state("n") == "READY"
    folder = second.model("m", 1, data="second")
    await served.until(lambda: "model appears in two or more repositories: " in served.reason("m"))
    assert served.data("m") == "first"
    shutil.rmtree(folder)
    await served.until(lambda: served.rows("m") == {"1": ("READY", "")})


async def test_the_swap_of_a_mounted_config_map_loads_the_new_files(start: Start, root: Path) -> None:
    Folders(root / "..2024_1").model("m", 1, data="old")
    (root / "..data").symlink_to("..2024_1")
    (root / "m").symlink_to("..data/m")
    served: Served = await start()
    assert served.data("m") == "old"
    Folders(root / "..2024_2").model("m", 1, data="new")
    (root / "..data_tmp").symlink_to("..2024_2")
    (root / "..data_tmp").rename(root / "..data")
    shutil.rmtree(root / "..2024_1")
    await served.until(lambda: served.data("m") == "new")


async def test_a_link_out_of_the_repository_is_not_read(start: Start, folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = folders.model("m", 1)
    served: Served = await start()
    (folder / "2").mkdir()
    (folder / "2" / "model.onnx").symlink_to(tmp_path / "secret")
    await served.until(lambda: "leads out of the model repository" in served.reason("m", "2"))
    assert served.data("m") == "good"


@pytest.mark.long
async def test_a_repository_that_vanishes_and_comes_back_keeps_serving_and_is_followed_again(
    m: Path, served: Served, folders: Folders, loader: FakeLoader
) -> None:
    away = folders.root.with_name("away")
    folders.root.rename(away)
    await served.settle()
    assert served.data("m") == "good"
    reason = "this repository cannot be read: No such file or directory; its models stay unchanged"
    await served.until(lambda: served.rows(str(folders.root)) == {"": ("UNAVAILABLE", reason)})
    assert served.state("m") == "READY"
    away.rename(folders.root)
    await asyncio.sleep(watch.UNWATCHED_POLL_SECONDS + 0.5)
    await served.until(lambda: not served.rows(str(folders.root)))
    folders.version("m", 2, "after")
    await served.until(lambda: served.data("m") == "after")
    assert loader.loads == [("m", 1), ("m", 2)]


async def test_a_repository_that_is_not_there_at_the_start_is_served_when_it_comes(
    start: Start, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(watch, "UNWATCHED_POLL_SECONDS", 0.1)
    served: Served = await start(tmp_path / "later")
    assert served.state(str(tmp_path / "later"), "") == "UNAVAILABLE"
    Folders(tmp_path / "later").model("m", 1)
    await served.until(lambda: served.data("m") == "good")


async def test_without_notifications_polling_finds_the_change(start: Start, folders: Folders, monkeypatch: Any) -> None:
    def refuse() -> None:
        raise OSError(24, "inotify instance limit reached")

    monkeypatch.setattr(watch, "Observer", refuse)
    monkeypatch.setattr(watch, "UNWATCHED_POLL_SECONDS", 0.1)
    served: Served = await start()
    folders.model("m", 1)
    await served.until(lambda: served.data("m") == "good")


async def test_where_not_all_folders_can_be_watched_they_are_polled_until_they_can(
    start: Start, folders: Folders, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    add_watch, left = inotify_c.inotify_add_watch, [2]

    def limited(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            ctypes.set_errno(errno.ENOSPC)
            return -1
        return int(add_watch(*arguments))

    monkeypatch.setattr(inotify_c, "inotify_add_watch", limited)
    monkeypatch.setattr(watch, "has_watches_left", lambda: left[0] > 0)
    monkeypatch.setattr(watch, "UNWATCHED_POLL_SECONDS", 0.1)
    folders.model("m", 1)
    folders.model("n", 1)
    served: Served = await start(poll_seconds=1000)
    assert "inotify watch limit reached" in caplog.text
    for name in ("m", "n"):
        folders.version(name, 1, "changed")
    await served.until(lambda: served.data("m") == served.data("n") == "changed")
    left[0] = 1000
    await served.until(lambda: left[0] < 997, "watches of all folders")


def test_whether_watches_are_left_can_be_asked_without_keeping_one() -> None:
    before = open_descriptors()
    assert watch.has_watches_left()
    wait_until(lambda: open_descriptors() <= before)


async def test_a_model_folder_of_a_mount_is_named_by_its_configuration(start: Start, tmp_path: Path) -> None:
    folder = Folders(tmp_path).model("models", 1, more='name: "resnet"')
    served: Served = await start(folder)
    assert served.data("resnet") == "good"


async def test_a_bare_model_file_at_the_root_is_served(start: Start, root: Path) -> None:
    (root / "model.onnx").write_text("good")
    served: Served = await start()
    assert served.data(root.name) == "good"
    (root / "model.onnx").write_text("newer")
    await served.until(lambda: served.data(root.name) == "newer")


async def test_a_folder_that_comes_and_goes_without_end_is_never_taken_for_gone(
    start: Start, folders: Folders, loader: FakeLoader, tmp_path: Path
) -> None:
    """Each time that it is seen, the settle time begins anew."""
    folder = folders.model("m", 1)
    served: Served = await start()
    with served.unsettled() as debounce:
        for _ in range(3):
            folder.rename(tmp_path / "away")
            await served.until(lambda: "m" in debounce.unsettled)
            (tmp_path / "away").rename(folder)
            await served.until(lambda: not debounce.unsettled)
    assert debounce.due() is None
    assert served.data("m") == "good"
    assert loader.loads == [("m", 1)]


async def test_a_chain_of_models_in_one_folder_is_an_ensemble_and_its_members(
    start: Start, root: Path, loader: FakeLoader
) -> None:
    write_chain(root)
    served: Served = await start()
    names = [row.name for row in served.index()]
    assert len(names) == 3
    assert "chain" in names
    assert {row.state for row in served.index()} == {"READY"}, served.index()
    shutil.rmtree(root / "chain")
    await served.until(lambda: {row.reason for row in served.index()} == {"unloaded"})
    assert not any(model.versions for model in served.table.table.all_models)


async def test_a_folder_whose_name_another_had_is_taken_up_at_once_when_that_goes(
    start: Start, root: Path, folders: Folders
) -> None:
    write_chain(root)
    served: Served = await start(retry_seconds=1000.0, longest_retry_seconds=1000.0)
    member = next(row.name for row in served.index() if row.name != "chain")
    folders.model(member, 1, data="own")
    await served.settle()
    assert served.data(member) == "good"
    shutil.rmtree(root / "chain")
    await served.until(lambda: served.data(member) == "own")
    write_chain(root)
    await served.settle()
    assert served.data(member) == "own"
    assert "chain" not in {row.name for row in served.index() if row.state == "READY"}
    shutil.rmtree(root / member)
    await served.until(lambda: (served.state("chain"), served.data(member)) == ("READY", "good"))


def write_chain(root: Path) -> None:
    """Write the ensemble `chain` and its members."""
    (root / "chain" / "1").mkdir(parents=True)
    (root / "chain" / "1" / "model.onnx").write_text("good")
    stages = []
    for name, source, result in (("chain", "", "middle"), ("second", "middle", "end")):
        ends = [("inputs", "IN", source), ("outputs", "OUT", result)]
        tensors = "".join(
            f'[[models.{what}]]\nname = "{tensor}"\ndatatype = "FP32"\nshape = [4]\nid = "{identity}"\n'
            for what, tensor, identity in ends
        )
        stages.append(f'[[models]]\nname = "{name}"\nplatform = "onnx_onnxv1"\nid = "model.onnx"\n{tensors}')
    (root / "chain" / "config.toml").write_text("\n".join(stages))


async def test_the_index_shows_a_typo_in_the_config_and_the_old_version_serves(
    m: Path, served: Served, folders: Folders, loader: FakeLoader
) -> None:
    folders.config("m", "max_bach_size: 8")
    await served.until(lambda: "max_bach_size" in served.reason("m"))
    assert served.state("m") == "READY"
    assert served.reason("m").startswith("newer content failed to load: ")
    assert "config.pbtxt" in served.reason("m")
    assert served.data("m") == "good"
    assert served.repository.is_ready()
    assert served.repository.failed_models() == {}
    folders.config("m")
    await served.until(lambda: served.rows("m") == {"1": ("READY", "")})
    assert loader.loads == [("m", 1)], "the config is what it was, so nothing need be loaded"


async def test_the_index_shows_a_typo_in_the_config_of_a_new_model(served: Served, folders: Folders) -> None:
    folders.model("m", 1, more="max_bach_size: 8")
    await served.until(lambda: served.state("m", "") == "UNAVAILABLE")
    assert "max_bach_size" in served.reason("m", "")
    folders.config("m")
    await served.until(lambda: served.rows("m") == {"1": ("READY", "")})
    assert served.repository.is_ready()


async def test_a_broken_version_leaves_the_good_one_and_is_retried_when_its_files_change(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    served: Served = await start(retry_seconds=1000.0, longest_retry_seconds=1000.0)
    folders.version("m", 2, "broken")
    await served.until(lambda: served.state("m", "2") == "UNAVAILABLE")
    assert "cannot parse the model of version 2 (failed once, next try in " in served.reason("m", "2")
    assert served.data("m") == "good"
    assert served.data("m", "2") == "Request for unknown model: 'm' version 2 is not at ready state"
    assert served.repository.is_ready(), "what serves goes on, so nothing is unready"
    folders.version("m", 2, "repaired")
    await served.until(lambda: served.data("m") == "repaired")
    assert loader.loads == [("m", 1), ("m", 2), ("m", 2)]


async def test_a_broken_version_that_is_taken_away_again_leaves_no_trace(
    m: Path, served: Served, folders: Folders
) -> None:
    folder = folders.version("m", 2, "broken")
    await served.until(lambda: served.state("m", "2") == "UNAVAILABLE")
    shutil.rmtree(folder)
    await served.until(lambda: served.rows("m") == {"1": ("READY", "")})


async def test_a_served_version_overwritten_with_something_broken_goes_on_serving(
    m: Path, served: Served, folders: Folders
) -> None:
    folders.version("m", 1, "broken")
    await served.until(lambda: "newer content failed to load: cannot parse" in served.reason("m"))
    assert served.state("m") == "READY"
    assert served.data("m") == "good"
    assert served.repository.is_ready()


async def test_failures_are_retried_later_and_later_with_the_reason(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    loader.failing["m"] = ServeError(StatusCode.UNAVAILABLE, "the device is lost")
    served: Served = await start(retry_seconds=0.1)
    await served.until(lambda: len(loader.loads) >= 4)
    await served.until(lambda: "the device is lost" in served.reason("m"))
    await served.until(lambda: "times, next try in" in served.reason("m"))
    del loader.failing["m"]
    await served.until(lambda: served.state("m") == "READY")
    assert served.reason("m") == ""


async def test_a_failure_of_the_files_waits_until_they_change(
    start: Start, folders: Folders, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    folders.model("m", 1)
    folders.model("typo", 1, more="max_bach_size: 8")
    loader.failing["m"] = invalid_argument("this is not a model")
    # Retries would come long before the changed files have settled.
    served: Served = await start(retry_seconds=0.001, longest_retry_seconds=0.001)
    waits = " (failed once, not tried again until its files change)"
    await served.until(lambda: served.reason("m") == f"Invalid argument: this is not a model{waits}")
    assert served.reason("typo", "").endswith(waits)
    del loader.failing["m"]
    folders.version("m", 1, "repaired")
    folders.config("typo")
    await served.until(lambda: {served.state("m"), served.state("typo")} == {"READY"})
    assert loader.loads.count(("m", 1)) == 2
    assert sum("failed to read model folder 'typo'" in message for message in caplog.messages) == 1


async def test_an_exception_that_nobody_foresaw_is_a_failure_with_its_text(
    start: Start, folders: Folders, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    folders.model("m", 1)
    loader.failing["m"] = ZeroDivisionError("oh")
    served: Served = await start(retry_seconds=0.01)
    assert "ZeroDivisionError: oh" in served.reason("m")
    await served.until(lambda: len(loader.loads) >= 3)
    assert sum(record.exc_info is not None for record in caplog.records) == 1, "its traceback comes once"


async def test_files_that_change_during_a_load_are_never_served_mixed(
    served: Served, folders: Folders, loader: FakeLoader
) -> None:
    held = loader.hold("m")
    folders.model("m", 1, data="half")
    await served.until(lambda: served.state("m") == "LOADING")
    folders.version("m", 1, "whole")
    held.set()
    seen = set()

    def is_whole() -> bool:
        seen.add(served.data("m"))
        return served.data("m") == "whole"

    await served.until(is_whole)
    assert "half" not in seen
    assert [version.data for version in loader.alive("m")] == [b"whole"]


async def test_a_load_is_called_off_when_newer_content_has_settled(
    served: Served, folders: Folders, loader: FakeLoader
) -> None:
    loader.hold("m")
    folders.model("m", 1, data="old")
    await served.until(lambda: loader.loads == [("m", 1)])
    folders.version("m", 1, "new")
    await served.until(lambda: loader.cancelled == [("m", 1)])
    loader.held["m"].set()
    await served.until(lambda: served.data("m") == "new")


async def test_files_that_change_and_change_back_during_a_load_are_loaded_all_the_same(
    served: Served, folders: Folders, loader: FakeLoader, tmp_path: Path
) -> None:
    held = loader.hold("m")
    folder = folders.model("m", 1)
    await served.until(lambda: served.state("m") == "LOADING")
    folder.rename(tmp_path / "away")
    held.set()
    # Or the end of the folder has settled already.
    await served.until(lambda: "changed while it was loading" in served.reason("m") or not served.rows("m"))
    (tmp_path / "away").rename(folder)
    await served.until(lambda: served.state("m") == "READY")


async def test_the_index_names_the_file_that_a_model_writes_into_its_own_folder(
    start: Start,
    folders: Folders,
    loader: FakeLoader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load = loader.load
    is_writing = True

    async def writes(order: LoadOrder) -> FakeVersion:
        loaded = await load(order)
        if is_writing:
            with (order.folder / "started.log").open("a") as file:
                file.write("started\n")
        return loaded

    monkeypatch.setattr(loader, "load", writes)
    served: Served = await start()
    folders.model("m", 1)
    await served.until(lambda: len(loader.loads) >= 2)
    changed = "its files changed while it was loading ('1/started.log' last)"
    assert changed in served.reason("m")
    await served.until(lambda: len(loader.loads) >= 5)
    assert changed in served.reason("m")
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    (warning,) = [one for one in told if "started.log" in one]
    assert warning.startswith("'1/started.log' of model 'm' has changed during each of 3 loads")
    is_writing = False
    await served.until(lambda: served.state("m") == "READY")
    assert served.reason("m") == ""


async def test_a_folder_deleted_while_it_loads_is_called_off(
    served: Served, folders: Folders, loader: FakeLoader
) -> None:
    loader.hold("m")
    folder = folders.model("m", 1)
    await served.until(lambda: loader.loads == [("m", 1)])
    shutil.rmtree(folder)
    await served.until(lambda: served.rows("m") == {})
    await served.until(lambda: loader.cancelled == [("m", 1)])
    assert loader.alive("m") == []
    assert served.data("m") == "Request for unknown model: 'm' is not found"


async def test_many_models_load_beside_each_other_but_not_too_many(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    served: Served = await start(concurrent_loads=3)
    held = [loader.hold(f"m{number}") for number in range(12)]
    for number in range(12):
        folders.model(f"m{number}", 1)
    await served.until(lambda: loader.running == 3)
    await served.settle()
    assert loader.running == 3
    for event in held:
        event.set()
    await served.until(lambda: all(served.state(f"m{number}") == "READY" for number in range(12)))
    assert loader.most_running == 3


async def test_a_slow_load_keeps_no_other_model_waiting(served: Served, folders: Folders, loader: FakeLoader) -> None:
    loader.hold("slow")
    folders.model("slow", 1)
    await served.until(lambda: served.state("slow") == "LOADING")
    folders.model("quick", 1)
    await served.until(lambda: served.state("quick") == "READY")
    assert served.state("slow") == "LOADING"
    assert served.repository.is_ready(), "a model on its way makes nothing unready"


async def test_removing_a_version_loads_the_one_before_it_first(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1, data="one")
    folders.version("m", 2, "two")
    served: Served = await start()
    held = loader.hold("m")
    shutil.rmtree(folders.root / "m" / "2")
    await served.until(lambda: served.state("m", "1") == "LOADING")
    assert served.data("m") == "two"
    held.set()
    await served.until(lambda: served.data("m") == "one")
    await served.until(lambda: served.rows("m")["2"] == ("UNAVAILABLE", "unloaded"))


async def test_removing_all_versions_unloads_them(m: Path, served: Served, folders: Folders) -> None:
    shutil.rmtree(folders.root / "m" / "1")
    await served.until(lambda: served.rows("m").get("1") == ("UNAVAILABLE", "unloaded"))
    assert "at least one version must be available under the version policy of model 'm'" in served.reason("m", "")


async def test_a_new_version_under_the_policy_all_loads_only_itself(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1, 2, more="version_policy { all {} }")
    served: Served = await start()
    folders.version("m", 3)
    await served.until(lambda: served.state("m", "3") == "READY")
    assert sorted(loader.loads) == [("m", 1), ("m", 2), ("m", 3)]
    assert len(loader.alive("m")) == 3


async def test_a_changed_version_policy_alone_reloads_nothing(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1, 2)
    served: Served = await start()
    folders.config("m", "version_policy { all {} }")
    await served.until(lambda: served.state("m", "1") == "READY")
    assert loader.loads == [("m", 2), ("m", 1)]
    folders.config("m", "version_policy { specific { versions: 1 } }")
    await served.until(lambda: served.rows("m") == {"1": ("READY", ""), "2": ("UNAVAILABLE", "unloaded")})
    assert loader.loads == [("m", 2), ("m", 1)]


async def test_a_policy_that_no_version_fits_keeps_what_serves(m: Path, served: Served, folders: Folders) -> None:
    folders.config("m", "version_policy { specific { versions: 9 } }")
    await served.until(lambda: "at least one version must be available" in served.reason("m"))
    assert served.state("m") == "READY"
    assert served.data("m") == "good"


async def test_a_changed_config_reloads_every_served_version_beside_the_old(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1, 2, more="version_policy { all {} }")
    served: Served = await start()
    held = loader.hold("m")
    folders.config("m", 'version_policy { all {} } parameters { key: "a" value { string_value: "b" } }')
    await served.until(lambda: len(loader.loads) == 4)
    assert served.data("m", "1") == "good"
    assert served.rows("m")["1"] == ("READY", "newer content is being loaded")
    held.set()
    await served.until(lambda: served.table.table.find("m", "1").config.parameters == {"a": "b"})
    await served.until(lambda: len(loader.alive("m")) == 2)
    assert served.repository.is_ready()


async def test_a_comment_in_the_config_reloads_nothing(
    m: Path, served: Served, folders: Folders, loader: FakeLoader
) -> None:
    folders.config("m", "# nothing new")
    await served.settle()
    assert loader.loads == [("m", 1)]
