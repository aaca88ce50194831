"""Changes while models load, and loads beside each other."""

from __future__ import annotations

import shutil
from pathlib import Path

from .conftest import FakeLoader, Folders, Served, Start


async def test_files_that_change_during_a_load_are_never_served_mixed(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    served: Served = await start()
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
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    served: Served = await start()
    loader.hold("m")
    folders.model("m", 1, data="old")
    await served.until(lambda: loader.loads == [("m", 1)])
    folders.version("m", 1, "new")
    await served.until(lambda: loader.cancelled == [("m", 1)])
    loader.held["m"].set()
    await served.until(lambda: served.data("m") == "new")


async def test_files_that_change_and_change_back_during_a_load_are_loaded_all_the_same(
    start: Start, folders: Folders, loader: FakeLoader, tmp_path: Path
) -> None:
    served: Served = await start()
    held = loader.hold("m")
    folder = folders.model("m", 1)
    await served.until(lambda: served.state("m") == "LOADING")
    folder.rename(tmp_path / "away")
    held.set()
    await served.until(lambda: "changed while it was loading" in served.reason("m"))
    (tmp_path / "away").rename(folder)
    await served.until(lambda: served.state("m") == "READY")


async def test_a_folder_deleted_while_it_loads_is_called_off(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    served: Served = await start()
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


async def test_a_slow_load_keeps_no_other_model_waiting(start: Start, folders: Folders, loader: FakeLoader) -> None:
    served: Served = await start()
    loader.hold("slow")
    folders.model("slow", 1)
    await served.until(lambda: served.state("slow") == "LOADING")
    folders.model("quick", 1)
    await served.until(lambda: served.state("quick") == "READY")
    assert served.state("slow") == "LOADING"
    assert served.repository.is_ready(), "a model on its way makes nothing unready"
