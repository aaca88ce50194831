"""Hugging Face's repositories, from a stand-in of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.web_stores import WebServer

from rocserve.core.remote_places import parse_remote
from rocserve.repository.remote.objects import ObjectChanged, StoreError
from rocserve.repository.remote.web_sources import HubSource


@pytest.fixture
def web(web: WebServer) -> WebServer:
    web.hub = {
        "onnx/m/1/model.onnx": bytes(200),
        "onnx/m/config.pbtxt": b"config",
        "onnx/m/labels file.txt": b"labels",
        "README.md": b"read",
    }
    return web


def source_of(web: WebServer, url: str = "hf://org/model", **environment: str) -> HubSource:
    return HubSource(parse_remote(url), {"HF_ENDPOINT": web.url, **environment})


async def contents(source: HubSource, folder: Path) -> dict[str, bytes]:
    found = {}
    for item in await source.listing():
        await source.fetch(item, folder / "file", lambda _: None)
        found[item.key] = (folder / "file").read_bytes()
    return found


async def test_all_files_of_a_commit_are_objects(web: WebServer, tmp_path: Path) -> None:
    assert await contents(source_of(web), tmp_path) == web.hub


async def test_a_page_may_name_other_pages_too(web: WebServer) -> None:
    web.other_links = f'<{web.url}/first>; title="a; b"; rel="first", '
    assert {item.key for item in await source_of(web).listing()} == set(web.hub)


async def test_a_listing_whose_pages_go_round_has_failed(web: WebServer) -> None:
    web.other_links = f'<{web.url}/api/models/org/model/tree/{web.commit}?recursive=true>; rel="next", '
    with pytest.raises(StoreError, match="got a page that leads back to an earlier one"):
        await source_of(web).listing()


async def test_a_folder_may_be_named(web: WebServer, tmp_path: Path) -> None:
    found = await contents(source_of(web, "hf://org/model/onnx"), tmp_path)
    assert set(found) == {"m/1/model.onnx", "m/config.pbtxt", "m/labels file.txt"}


async def test_a_commit_is_listed_once(web: WebServer) -> None:
    source = source_of(web)
    await source.listing()
    web.asked.clear()
    await source.listing()
    assert web.asked == ["/api/models/org/model/revision/main"]


async def test_content_that_is_not_what_the_hub_says_is_refused(web: WebServer, tmp_path: Path) -> None:
    source = source_of(web)
    items = {item.key: item for item in await source.listing()}
    for key in ("onnx/m/1/model.onnx", "onnx/m/config.pbtxt"):
        web.damaged = key
        with pytest.raises(ObjectChanged, match="with digest"):
            await source.fetch(items[key], tmp_path / "file", lambda _: None)


async def test_a_token_is_sent(web: WebServer, tmp_path: Path) -> None:
    web.token = "secret"
    with pytest.raises(StoreError, match=r"401.*check HF_TOKEN"):
        await source_of(web, HOME=str(tmp_path)).listing()
    assert await contents(source_of(web, HF_TOKEN="secret"), tmp_path) == web.hub
    (tmp_path / "token").write_text("secret\n")
    assert await contents(source_of(web, HF_HOME=str(tmp_path)), tmp_path) == web.hub
    # As in a secret that was made from a file.
    assert await contents(source_of(web, HF_TOKEN="secret\n"), tmp_path) == web.hub


def test_an_error_names_the_file_of_a_token_that_is_not_text(web: WebServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(StoreError, match=r"expected a token in .*/token, got: 'utf-8' codec can't decode"):
        source_of(web, HF_HOME=str(tmp_path))


@pytest.mark.parametrize("answer", [b"<html>Sign in</html>", b"[]", b"null", b"{}"])
async def test_an_error_says_which_form_of_answers_was_expected(web: WebServer, answer: bytes) -> None:
    web.files["/api/models/org/other/revision/main"] = answer
    with pytest.raises(StoreError, match="expected a listing, got"):
        await source_of(web, "hf://org/other").listing()


@pytest.mark.parametrize("change", [{"path": None}, {"path": 7}, {"size": None}, {"size": "many"}, {"oid": {}}])
async def test_a_hub_that_lists_nonsense_has_failed(web: WebServer, tmp_path: Path, change: dict[str, object]) -> None:
    entry = {"type": "file", "path": "config.pbtxt", "size": 6, "oid": "1" * 40} | change
    web.files["/api/models/org/other/revision/main"] = b'{"sha": "1"}'
    web.files["/api/models/org/other/tree/1"] = json.dumps([entry]).encode()
    source = source_of(web, "hf://org/other")
    with pytest.raises(StoreError, match="expected"):
        for item in await source.listing():
            await source.fetch(item, tmp_path / "file", lambda _: None)


async def test_a_listing_that_ends_early_has_failed(web: WebServer) -> None:
    web.cut = "/api/models/org/model/revision/main"
    with pytest.raises(StoreError, match="expected a listing, got: IncompleteRead"):
        await source_of(web).listing()
