"""Ensembles and their members, in poll mode."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable

from .conftest import FakeLoader, Folders, Served, Start

MISSING = "ensemble e contains models that are not available or ambiguous: m"


def served_ensemble(served: Served) -> bool:
    return bool(served.table.table.models["e"].versions)


async def test_an_ensemble_is_ready_with_its_members_whatever_the_order(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.ensemble("e", "m")
    folders.ensemble("a_outer", "inner")
    folders.model("m", 1)
    folders.model("inner", 1)
    served: Served = await start()
    assert served.rows("e") == {"1": ("READY", "")}
    assert served.rows("a_outer") == {"1": ("READY", "")}
    assert loader.loads.index(("m", 1)) < loader.loads.index(("e", 1))
    assert served.repository.is_ready()


async def test_an_ensemble_waits_for_members_that_load(
    make: Callable[..., Served], folders: Folders, loader: FakeLoader
) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    held = loader.hold("m")
    served = make()
    starting = asyncio.create_task(served.repository.start())
    await served.until(lambda: served.state("e") == "LOADING")
    assert served.reason("e") == MISSING
    held.set()
    await starting
    assert served.state("e") == "READY"


async def test_an_ensemble_without_its_member_says_so_and_is_ready_when_it_comes(
    start: Start, folders: Folders
) -> None:
    folders.ensemble("e", "m")
    served: Served = await start()
    assert served.rows("e") == {"1": ("UNAVAILABLE", MISSING)}
    assert served.repository.failed_models() == {"e": MISSING}
    folders.model("m", 1)
    await served.until(lambda: served.state("e") == "READY")
    assert served.reason("e") == ""


async def test_an_ensemble_goes_and_comes_with_its_member_and_is_not_loaded_anew(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await start()
    shutil.move(folders.root / "m", folders.root.parent / "away")
    await served.until(lambda: served.rows("e") == {"1": ("UNAVAILABLE", MISSING)})
    assert not served_ensemble(served), "no table offers an ensemble without its member"
    assert not served.repository.is_ready()
    shutil.move(folders.root.parent / "away", folders.root / "m")
    await served.until(lambda: served.state("e") == "READY")
    assert served_ensemble(served)
    assert loader.loads.count(("e", 1)) == 1


async def test_a_members_reload_never_takes_the_ensemble_away(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await start()
    offered: list[bool] = []
    served.repository.subscribe(lambda: offered.append(served_ensemble(served)))
    folders.version("m", 2, "new")
    await served.until(lambda: served.data("m") == "new")
    folders.version("m", 2, "newer")
    await served.until(lambda: served.data("m") == "newer")
    folders.version("m", 3, "broken")
    await served.until(lambda: served.state("m", "3") == "UNAVAILABLE")
    assert offered
    assert all(offered)
    assert loader.loads.count(("e", 1)) == 1
    assert served.rows("e") == {"1": ("READY", "")}


async def test_a_member_that_no_longer_fits_makes_the_ensemble_unavailable_with_the_reason(
    start: Start, folders: Folders
) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await start()
    folders.config("m", tensor="RENAMED")
    await served.until(lambda: served.state("e") == "UNAVAILABLE")
    assert served.reason("e") == "in ensemble e, ensemble tensor E_IN is mapping to non-existing input IN in model m"
    folders.config("m")
    await served.until(lambda: served.state("e") == "READY")


async def test_an_ensemble_in_an_ensemble_follows_its_members_member(start: Start, folders: Folders) -> None:
    outer = folders.ensemble("outer", "e")
    config = (outer / "config.pbtxt").read_text()
    (outer / "config.pbtxt").write_text(config.replace('"IN"', '"E_IN"').replace('"OUT"', '"E_OUT"'))
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await start()
    assert served.state("outer") == "READY"
    shutil.move(folders.root / "m", folders.root.parent / "away")
    await served.until(lambda: served.state("outer") == "UNAVAILABLE")
    assert served.reason("outer") == "ensemble outer contains models that are not available or ambiguous: e"
    shutil.move(folders.root.parent / "away", folders.root / "m")
    await served.until(lambda: served.state("outer") == "READY")


async def test_a_circle_of_ensembles_is_told(start: Start, folders: Folders) -> None:
    folders.ensemble("e", "f")
    folders.ensemble("f", "e")
    served: Served = await start()
    assert served.state("e") == "UNAVAILABLE"
    assert "circular dependency between ensembles: e -> f -> e" in served.reason("e")


async def test_a_broken_new_config_of_an_ensemble_keeps_it(start: Start, folders: Folders) -> None:
    folder = folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await start()
    config = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(config.replace('"m"', '"absent"'))
    await served.until(lambda: "not available or ambiguous: absent" in served.reason("e"))
    assert served.state("e") == "READY"
    assert served_ensemble(served)
    (folder / "config.pbtxt").write_text(config)
    await served.until(lambda: served.rows("e") == {"1": ("READY", "")})


async def test_stopping_unloads_ensembles_before_their_members(
    make: Callable[..., Served], folders: Folders, loader: FakeLoader
) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served = make()
    await served.repository.start()
    (ensemble,) = loader.alive("e")
    ensemble.may_unload.clear()
    stopping = asyncio.create_task(served.repository.stop())
    await asyncio.sleep(0.2)
    assert served.data("m") == "good", "the ensemble's last requests still need it"
    ensemble.may_unload.set()
    await asyncio.wait_for(stopping, 5.0)
    assert loader.alive("m") == []
