"""One remote repository: when listed objects are copied, from a stand-in of a web server or hub."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.waiting import until
from support.web_stores import WebServer, tar_of

from rocserve.core.remote_places import parse_remote
from rocserve.repository.remote.copy import CopyRoom
from rocserve.repository.remote.remote_repositories import RemoteRepositories, RemoteRepository, open_source
from rocserve.settings.repository import RepositorySettings

LOG = logging.getLogger("tests")
MODEL = {"m/1/model.onnx": bytes(200), "m/config.pbtxt": b"config"}


@pytest.fixture
def web(web: WebServer) -> WebServer:
    web.hub = dict(MODEL)
    return web


def opened(web: WebServer, home: Path, url: str = "hf://org/model", limit: int | None = None) -> RemoteRepository:
    place = replace(parse_remote(url), home=home)
    room = CopyRoom(home, limit)
    source = open_source(place, {"HF_ENDPOINT": web.url}, room)
    repository = RemoteRepository(place, source, 0.0, room, LOG)
    repository.open_copy()
    return repository


def files(repository: RemoteRepository) -> dict[str, bytes]:
    root = repository.place.root
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def asked_for_files(web: WebServer) -> list[str]:
    found = [path.rpartition("/")[2] for path in web.asked if "/resolve/" in path]
    web.asked.clear()
    return found


async def test_a_fault_that_nobody_foresees_is_not_met_again_and_again(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []

    async def scan(self: RemoteRepository, takes: bool) -> None:
        tries.append(takes)
        raise ValueError("unforeseen")

    monkeypatch.setattr(RemoteRepository, "scan", scan)
    remotes = RemoteRepositories(RepositorySettings(poll_seconds=3600.0), LOG)
    following = asyncio.create_task(remotes._follow(opened(web, tmp_path)))
    await until(lambda: tries)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(following, 0.2)
    assert tries == [True]


async def test_only_what_differs_is_taken(web: WebServer, tmp_path: Path) -> None:
    repository = opened(web, tmp_path)
    await repository.scan(takes=True)
    assert files(repository) == web.hub
    asked_for_files(web)
    web.hub["m/config.pbtxt"] = b"other"
    await repository.scan(takes=True)
    await repository.scan(takes=True)
    assert asked_for_files(web) == ["config.pbtxt"]
    assert files(repository) == web.hub


async def test_a_change_counts_when_two_looks_have_seen_it(web: WebServer, tmp_path: Path) -> None:
    repository = opened(web, tmp_path)
    await repository.scan(takes=True)
    web.hub["m/config.pbtxt"] = b"other"
    await repository.scan(takes=True)
    assert files(repository) == MODEL
    state, reason = repository.notes()["m"]
    assert (state.value, "settle" in reason) == ("LOADING", True)
    await repository.scan(takes=True)
    assert files(repository) == web.hub
    assert repository.notes() == {}


async def test_what_is_gone_twice_is_removed(web: WebServer, tmp_path: Path) -> None:
    await opened(web, tmp_path).scan(takes=True)
    web.hub.clear()
    again = opened(web, tmp_path)
    await again.scan(takes=True)
    assert files(again) == MODEL
    await again.scan(takes=True)
    assert files(again) == {}


async def test_a_clock_that_is_wrong_only_delays(web: WebServer, tmp_path: Path) -> None:
    web.files["/models.tar"] = tar_of(MODEL, mode="w")
    web.date = "Mon, 01 Jan 2125 00:00:00 GMT"
    repository = opened(web, tmp_path, f"{web.url}/models.tar")
    await repository.scan(takes=True)
    assert files(repository) == {}
    await repository.scan(takes=True)
    assert files(repository) == MODEL


async def test_what_came_whole_is_not_taken_again(web: WebServer, tmp_path: Path) -> None:
    web.pinned, web.damaged = "c0ffee", "m/1/model.onnx"
    first = opened(web, tmp_path)
    # The other download may be cancelled before it is complete.
    while not any(not file.suffix for file in (tmp_path / "incoming").rglob("*") if file.is_file()):
        await first.scan(takes=True)
    assert "with digest" in first.notes()["m"][1]
    assert files(first) == {}
    # Another server: requests of cancelled downloads may still arrive at the first one.
    with WebServer() as other:
        other.hub, other.pinned = dict(MODEL), web.pinned
        again = opened(other, tmp_path)
        await again.scan(takes=True)
        assert asked_for_files(other) == ["model.onnx"]
    assert files(again) == MODEL


async def test_without_room_nothing_is_taken_and_the_note_says_so(web: WebServer, tmp_path: Path) -> None:
    repository = opened(web, tmp_path, limit=100)
    await repository.scan(takes=True)
    assert files(repository) == {}
    assert "or raise --remote-cache-size-bytes" in repository.notes()["m"][1]


async def test_a_copy_that_somebody_cleared_is_taken_again(web: WebServer, tmp_path: Path) -> None:
    repository = opened(web, tmp_path / "home")
    await repository.scan(takes=True)
    (tmp_path / "home").rename(tmp_path / "elsewhere")
    await repository.scan(takes=True)
    await repository.scan(takes=True)
    assert files(repository) == MODEL


async def test_names_that_lead_out_are_refused_and_others_taken(web: WebServer, tmp_path: Path) -> None:
    web.hub |= {"evil/../../outside": b"x", "../outside": b"x"}
    repository = opened(web, tmp_path / "home")
    await repository.scan(takes=True)
    assert files(repository) == MODEL
    assert "not a path within a folder" in repository.notes()["evil"][1]
    assert os.listdir(tmp_path) == ["home"]  # noqa: PTH208 - a test may wait
