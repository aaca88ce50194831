"""Several repositories, links, mounts, and folders that come and go."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from rocserve.repository import watch

from .conftest import FakeLoader, Folders, Served, Start


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


async def test_a_name_in_two_repositories_from_the_start_is_not_served(
    start: Start, folders: Folders, tmp_path: Path
) -> None:
    folders.model("m", 1)
    second = Folders(tmp_path / "second")
    second.model("m", 1)
    served: Served = await start(folders.root, second.root)
    assert served.state("m", "") == "UNAVAILABLE"
    assert "model appears in two or more repositories: " in served.repository.failed_models()["m"]


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
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    served: Served = await start()
    away = folders.root.with_name("away")
    folders.root.rename(away)
    await served.settle()
    assert served.data("m") == "good"
    away.rename(folders.root)
    await asyncio.sleep(watch.UNWATCHED_POLL_SECONDS + 0.5)
    folders.version("m", 2, "after")
    await served.until(lambda: served.data("m") == "after")
    assert loader.loads == [("m", 1), ("m", 2)]


async def test_a_repository_that_is_not_there_at_the_start_is_served_when_it_comes(
    start: Start, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(watch, "UNWATCHED_POLL_SECONDS", 0.1)
    served: Served = await start(tmp_path / "later")
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


@pytest.mark.long
async def test_a_folder_that_comes_and_goes_without_end_is_never_taken_for_gone(
    start: Start, folders: Folders, loader: FakeLoader, tmp_path: Path
) -> None:
    folder = folders.model("m", 1)
    served: Served = await start(settle_seconds=0.5)
    for _ in range(8):
        folder.rename(tmp_path / "away")
        await asyncio.sleep(0.2)
        (tmp_path / "away").rename(folder)
        await asyncio.sleep(0.3)
        assert served.data("m") == "good"
    assert loader.loads == [("m", 1)]


async def test_a_chain_of_models_in_one_folder_is_an_ensemble_and_its_members(
    start: Start, root: Path, loader: FakeLoader
) -> None:
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
    served: Served = await start()
    names = [row.name for row in served.index()]
    assert len(names) == 3
    assert "chain" in names
    assert {row.state for row in served.index()} == {"READY"}, served.index()
    shutil.rmtree(root / "chain")
    await served.until(lambda: {row.reason for row in served.index()} == {"unloaded"})
    assert not any(model.versions for model in served.table.table.all_models)
