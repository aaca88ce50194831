"""Stores of the other kinds together: Azure by Azurite, Google by fake-gcs-server, the hub and a web server by
stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.stores import AZURE_KEYS, GoogleBucket, azure_container, azure_server, files_of, google_server
from support.waiting import wait_until
from support.web_stores import WebServer, tar_of

Put = Callable[[dict[str, bytes]], None]


@pytest.fixture
def azure() -> Iterator[tuple[str, Put]]:
    name = f"container-{uuid4().hex}"
    with azure_server() as server:
        container = azure_container(server.port, name)
        yield f"as://http://127.0.0.1:{server.port}/devstoreaccount1/{name}/models", _each(container.put)


@pytest.fixture
def google() -> Iterator[tuple[str, Put]]:
    with google_server() as server:
        bucket = GoogleBucket(server.port, "bucket")
        yield f"gs://http://127.0.0.1:{server.port}/bucket/models", _each(bucket.put)


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        yield server


def _each(put: Callable[[str, bytes], object]) -> Put:
    def put_all(files: dict[str, bytes]) -> None:
        for key, content in files.items():
            put(key, content)

    return put_all


def test_all_kinds_are_followed_beside_each_other(
    azure: tuple[str, Put], google: tuple[str, Put], web: WebServer, tmp_path: Path
):
    stores: dict[str, tuple[str, Put]] = {
        "azure": azure,
        "google": google,
        "hub": ("hf://org/model", web.hub.update),
        "archive": (f"{web.url}/models.tar.gz", lambda files: web.files.update({"/models.tar.gz": tar_of(files)})),
    }

    def put(constant: float) -> None:
        for name, (_, put_files) in stores.items():
            put_files(files_of(drop(tmp_path / f"made-{constant}", name, add_constant(constant))))

    put(1.0)
    urls = [url for url, _ in stores.values()]
    flags = (f"--cache-directory={tmp_path / 'cache'}", "--repository-poll-secs=0.3", "--repository-settle-secs=0.2")
    environment = {**AZURE_KEYS, "HF_ENDPOINT": web.url}
    with RocserveProcess(urls, *flags, log=tmp_path / "log", environment=environment) as server:
        server.wait_until_ready()
        assert {name: answer(server, name) for name in stores} == {name: [2.0, 3.0] for name in stores}
        put(2.0)
        for name in stores:
            wait_until(lambda name=name: answer(server, name) == [3.0, 4.0], f"the second of {name}")


def answer(server: RocserveProcess, name: str) -> list[float]:
    entry = infer_input("X", np.array([[1, 2]], np.float32))
    with server.client() as client:
        values: list[float] = client.infer(name, [entry]).as_numpy("Y")[0].tolist()
        return values
