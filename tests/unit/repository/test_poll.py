"""Poll mode on real folders, with real notifications and the real clock; only the loads are simulated."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.repository import table
from rocserve.settings import ReadinessRule

from .conftest import FakeLoader, Folders, Served, Start


async def test_what_is_there_at_the_start_is_ready_when_start_returns(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1, 2)
    folders.model("bad", 1, data="broken")
    served: Served = await start()
    assert served.data("m") == "good"
    assert served.rows("m") == {"2": ("READY", "")}, "the default policy serves the latest version"
    assert served.state("bad") == "UNAVAILABLE"
    assert "cannot parse the model of version 1" in served.reason("bad")
    assert list(served.repository.failed_models()) == ["bad"]
    assert not served.repository.is_ready()
    assert served.data("bad", "1") == "Request for unknown model: 'bad' version 1 is not at ready state"
    assert served.data("bad") == "Request for unknown model: 'bad' has no available versions"


async def test_not_ready_before_the_first_loads_have_ended(
    make: Callable[..., Served], folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    held = loader.hold("m")
    served = make()
    starting = asyncio.create_task(served.repository.start())
    await served.until(lambda: served.state("m") == "LOADING")
    assert not served.repository.is_ready()
    assert not starting.done()
    held.set()
    await starting
    assert served.repository.is_ready()
    assert served.data("m") == "good"
    assert "version 7" in served.data("m", "7")


async def test_a_version_copied_byte_by_byte_is_loaded_once_and_whole(
    m: Path, served: Served, folders: Folders, loader: FakeLoader
) -> None:
    """Each byte that a scan sees begins the settle time anew."""
    scanner, seen = served.repository._context.scanner, set[float]()
    folder = folders.root / "m" / "2"
    folder.mkdir()

    def is_seen(nbytes: int) -> bool:
        version = scanner.latest.models["m"].versions.get(2)  # type: ignore[call-overload]
        return version is not None and version.total_bytes == nbytes and "m" in debounce.unsettled

    with served.unsettled() as debounce, (folder / "model.onnx").open("wb", buffering=0) as file:
        for count, byte in enumerate(b"a version that takes a while", 1):
            file.write(bytes([byte]))
            await served.until(lambda count=count: is_seen(count))
            (_, since) = debounce._candidates["m"]  # type: ignore[index]
            seen.add(since)
            assert served.data("m") == "good"
        assert len(seen) == count
    assert loader.loads == [("m", 1)]
    await served.until(lambda: served.data("m") == "a version that takes a while")
    assert loader.loads == [("m", 1), ("m", 2)]


async def test_the_old_version_serves_until_the_new_one_is_warm_and_is_then_unloaded(
    m: Path, served: Served, folders: Folders, loader: FakeLoader
) -> None:
    old = loader.loaded[0]
    old.may_unload.clear()
    held = loader.hold("m")
    folders.version("m", 2, "new")
    await served.until(lambda: served.state("m", "2") == "LOADING")
    assert served.data("m") == "good"
    assert served.repository.is_ready(), "a version on its way makes nothing unready"
    held.set()
    await served.until(lambda: served.data("m") == "new")
    await served.until(lambda: served.state("m", "1") == "UNLOADING")
    old.may_unload.set()
    await served.until(lambda: served.rows("m")["1"] == ("UNAVAILABLE", "unloaded"))
    assert old.is_unloaded
    assert served.repository.is_ready()


async def test_a_folder_renamed_out_is_unloaded_and_comes_back_when_renamed_in(
    m: Path, served: Served, loader: FakeLoader, tmp_path: Path
) -> None:
    shutil.move(m, tmp_path / "away")
    await served.until(lambda: served.rows("m") == {"1": ("UNAVAILABLE", "unloaded")})
    assert served.data("m") == "Request for unknown model: 'm' has no available versions"
    assert served.repository.is_ready()
    (tmp_path / "away").rename(m)
    await served.until(lambda: served.state("m") == "READY")
    assert len(loader.alive("m")) == 1


async def test_models_that_have_been_gone_for_long_are_forgotten(
    start: Start, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_REMOVED_SHOWN", 1)
    made = [folders.model(name, 1) for name in ("a", "b", "c", "stays")]
    served: Served = await start()
    for folder in made[:3]:
        shutil.rmtree(folder)
        await served.until(lambda name=folder.name: served.rows(name) in ({}, {"1": ("UNAVAILABLE", "unloaded")}))
    folders.version("stays", 2)
    await served.until(lambda: served.state("stays", "2") == "READY")
    assert sorted(served.table.table.models) == ["c", "stays"]
    assert served.data("a") == "Request for unknown model: 'a' is not found; served are: stays"


async def test_a_version_with_an_older_time_than_before_is_taken(
    start: Start, folders: Folders, tmp_path: Path
) -> None:
    folders.model("m", 1, data="first")
    served: Served = await start()
    (tmp_path / "old.onnx").write_text("other")
    os.utime(tmp_path / "old.onnx", (1_000_000_000, 1_000_000_000))
    (tmp_path / "old.onnx").rename(folders.root / "m" / "1" / "model.onnx")
    await served.until(lambda: served.data("m") == "other")


async def test_a_crashed_worker_shows_and_the_version_stays_in_the_table(
    m: Path, served: Served, loader: FakeLoader
) -> None:
    calls: list[bool] = []
    unsubscribe = served.repository.subscribe(lambda: calls.append(served.repository.is_ready()))
    version = loader.loaded[0]
    version.available = False
    version.status_reason = "restarting: worker killed by signal 9"
    await asyncio.to_thread(version.on_change)
    await served.until(lambda: calls == [False])
    assert served.rows("m") == {"1": ("UNAVAILABLE", "restarting: worker killed by signal 9")}
    assert served.data("m") == "good", "its scheduler says what becomes of requests"
    version.available, version.status_reason = True, ""
    version.on_change()
    await served.until(lambda: calls == [False, True])
    unsubscribe()
    version.on_change()
    await asyncio.sleep(0.05)
    assert calls == [False, True]


async def test_a_folder_that_is_no_model_is_shown_and_makes_nothing_unready(start: Start, root: Path) -> None:
    (root / "docs").mkdir()
    served: Served = await start()
    assert served.state("docs", "") == "UNKNOWN"
    assert served.repository.is_ready()
    assert served.repository.failed_models() == {}


async def test_a_new_folder_loads_from_the_first_scan_that_finds_it(start: Start, folders: Folders) -> None:
    served: Served = await start()
    with served.unsettled() as debounce:
        folders.model("m", 1)
        await served.until(lambda: "m" in debounce.unsettled)
        assert served.rows("m") == {"": ("LOADING", "waiting until its files settle")}
    await served.until(lambda: served.state("m") == "READY")


async def test_without_strict_readiness_failures_do_not_count(start: Start, folders: Folders) -> None:
    folders.model("bad", 1, data="broken")
    served: Served = await start(readiness=ReadinessRule.STARTED)
    assert served.repository.is_ready()


async def test_stopping_calls_off_loads_and_unloads_everything(
    make: Callable[..., Served], folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    folders.model("slow", 1)
    loader.hold("slow")
    served = make()
    starting = asyncio.create_task(served.repository.start())
    await served.until(lambda: served.state("m") == "READY" and served.state("slow") == "LOADING")
    await asyncio.wait_for(served.repository.stop(), PATIENCE_SECONDS)
    assert loader.cancelled == [("slow", 1)]
    assert loader.alive("m") == []
    assert served.data("m") != "good"
    assert not served.repository.is_ready()
    await asyncio.wait_for(starting, PATIENCE_SECONDS)
    await served.settle()
    assert sorted(loader.loads) == [("m", 1), ("slow", 1)], "nothing is loaded after the stop"


async def test_a_reload_loads_what_has_not_changed_and_the_old_version_serves_until_then(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1, data="same")
    served: Served = await start(folders.root)
    loader.held["m"] = asyncio.Event()
    await served.repository.reload("m")
    await served.until(lambda: len(loader.loads) == 2)
    assert served.data("m") == "same"
    loader.held["m"].set()
    await served.until(lambda: served.rows("m") == {"1": ("READY", "")})
    assert loader.loads == [("m", 1)] * 2
    # Only once.
    folders.model("n", 1)
    await served.until(lambda: served.state("n") == "READY")
    assert loader.loads.count(("m", 1)) == 2


async def test_a_failed_load_is_tried_again_when_somebody_asks(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    loader.failing["m"] = invalid_argument("no luck")
    folders.model("m", 1)
    served: Served = await start(folders.root)
    assert served.state("m") == "UNAVAILABLE"
    # It is not tried again by itself until its files change.
    loader.failing.clear()
    await served.repository.reload("m")
    await served.until(lambda: served.state("m") == "READY")
    with pytest.raises(ServeError, match="there is no folder 'nothing'"):
        await served.repository.reload("nothing")


async def test_a_reload_that_fails_leaves_what_serves(start: Start, folders: Folders, loader: FakeLoader) -> None:
    folders.model("m", 1, data="good")
    served: Served = await start(folders.root)
    loader.failing["m"] = invalid_argument("no luck")
    await served.repository.reload("m")
    await served.until(lambda: "no luck" in served.reason("m"))
    assert served.state("m") == "READY"
    assert served.data("m") == "good"
