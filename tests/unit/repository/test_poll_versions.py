"""Versions, their policy and the configuration as they change in the folder."""

from __future__ import annotations

import shutil

from .conftest import FakeLoader, Folders, Served, Start


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


async def test_removing_all_versions_unloads_them(start: Start, folders: Folders) -> None:
    folders.model("m", 1)
    served: Served = await start()
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


async def test_a_policy_that_no_version_fits_keeps_what_serves(start: Start, folders: Folders) -> None:
    folders.model("m", 1)
    served: Served = await start()
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


async def test_a_comment_in_the_config_reloads_nothing(start: Start, folders: Folders, loader: FakeLoader) -> None:
    folders.model("m", 1)
    served: Served = await start()
    folders.config("m", "# nothing new")
    await served.settle()
    assert loader.loads == [("m", 1)]
