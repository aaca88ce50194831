"""Repositories in buckets: a real server, a real S3 server, and all that may go wrong between them."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from support.infer_inputs import infer_input
from support.load import ConstantLoad
from support.models import add_constant, drop
from support.repository_index import index_of, reason_of, rows_of
from support.server import RocserveProcess
from support.stores import S3_KEYS, BetweenStore, StoreServer, files_of, s3_bucket, s3_server
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

READY = {"1": ("READY", "")}


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with s3_server() as server:
        yield server


class Elsewhere:
    """A bucket, the faulty proxy in front of it, and the servers."""

    def __init__(self, store: StoreServer, folder: Path) -> None:
        name = f"bucket-{uuid4().hex}"
        self.bucket = s3_bucket(store.port, name)
        self.between = BetweenStore(store.port)
        self.url = f"s3://127.0.0.1:{self.between.port}/{name}/models"
        self.listing = f"^/{name}$"
        self.folder = folder
        self._servers: list[RocserveProcess] = []

    def serve(self, *flags: str, more: tuple[Path, ...] = ()) -> RocserveProcess:
        """Start a server, which need not become ready."""
        server = RocserveProcess(
            [self.url, *more],
            f"--cache-directory={self.folder / 'cache'}",
            "--repository-poll-secs=0.3",
            "--repository-settle-secs=0.2",
            *flags,
            log=self.folder / f"server-{len(self._servers)}.log",
            environment=S3_KEYS,
        )
        self._servers.append(server)
        server.start()
        return server

    def put(self, name: str, constant: float, version: int = 1) -> None:
        """Put a model that adds a constant."""
        folder = drop(self.folder / f"made-{constant}", name, add_constant(constant), version=version)
        for key, content in files_of(folder).items():
            self.bucket.put(key, content)

    def put_empty(self, key: str) -> None:
        """Put an empty object by HTTP, because the library cannot name an object with a "/" at its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.between.port)
        connection.request("PUT", f"{self.listing[1:-1]}/models/{key}", headers={"Content-Length": "0"})
        assert connection.getresponse().status == 200

    def end(self) -> None:
        self.between.close()
        for server in self._servers:
            server.kill()


@pytest.fixture
def elsewhere(store: StoreServer, tmp_path: Path) -> Iterator[Elsewhere]:
    """A bucket with a model m, which adds 1."""
    found = Elsewhere(store, tmp_path)
    found.put("m", 1.0)
    yield found
    found.end()


@pytest.fixture(scope="module")
def polled(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Elsewhere, RocserveProcess]]:
    """One polling server for the tests that only change the bucket; each test has its own models."""
    found = Elsewhere(store, tmp_path_factory.mktemp("polled"))
    found.put("m", 1.0)
    local = drop(tmp_path_factory.mktemp("local"), "local", add_constant(5.0)).parent
    server = found.serve(more=(local,))
    server.wait_until_ready()
    yield found, server
    found.end()


def answer(server: RocserveProcess, name: str) -> list[float] | str:
    entry = infer_input("X", np.array([[1, 2]], np.float32))
    with server.client() as client:
        try:
            values: list[float] = client.infer(name, [entry]).as_numpy("Y")[0].tolist()
            return values
        except InferenceServerException as error:
            return str(error.message())


def wait_for(server: RocserveProcess, name: str, constant: float) -> None:
    wait_until(lambda: answer(server, name) == [1 + constant, 2 + constant], f"{name} with {constant}")


def store_row(elsewhere: Elsewhere, server: RocserveProcess) -> str:
    """The index's row for the store; "": none."""
    return "".join(row.reason for row in rows_of(server) if row.name == elsewhere.url)


def test_a_bucket_is_followed_beside_a_folder(polled: tuple[Elsewhere, RocserveProcess]):
    elsewhere, server = polled
    assert answer(server, "m") == [2.0, 3.0]
    assert answer(server, "local") == [6.0, 7.0]
    elsewhere.put("dropped", 2.0)
    wait_for(server, "dropped", 2.0)
    elsewhere.put("dropped", 3.0, version=2)
    wait_for(server, "dropped", 3.0)
    assert index_of(server, "dropped")["2"] == ("READY", "")
    elsewhere.bucket.delete("dropped/1/model.onnx", "dropped/2/model.onnx")
    wait_until(lambda: "READY" not in str(index_of(server, "dropped")), "the end of the model that was deleted")
    assert answer(server, "m") == [2.0, 3.0]


def test_a_swap_in_the_bucket_loses_no_request(polled: tuple[Elsewhere, RocserveProcess]):
    elsewhere, server = polled
    elsewhere.put("swapped", 1.0)
    wait_for(server, "swapped", 1.0)
    with ConstantLoad(server.address, "swapped", {1.0, 2.0, 3.0}, threads=4) as load:
        for constant in (2.0, 3.0, 1.0):
            elsewhere.put("swapped", constant)
            load.wait_until_answered_by(constant)
    assert (load.failures, load.wrong) == ([], [])


@pytest.mark.parametrize(("status", "text"), [(403, "check AWS_ACCESS_KEY_ID"), (404, "removed or replaced")])
def test_an_object_that_is_refused_or_vanishes_keeps_what_serves(
    polled: tuple[Elsewhere, RocserveProcess], status: int, text: str
):
    elsewhere, server = polled
    name = f"refused{status}"
    elsewhere.put(name, 1.0)
    wait_for(server, name, 1.0)
    elsewhere.between.faults.status[f"{name}/1/model.onnx"] = status
    elsewhere.put(name, 2.0)
    wait_until(lambda: text in reason_of(server, name), "the reason in the index")
    assert index_of(server, name)["1"][0] == "READY"
    assert answer(server, name) == [2.0, 3.0]
    elsewhere.put(f"beside{status}", 4.0)
    wait_for(server, f"beside{status}", 4.0)
    elsewhere.between.faults.status.clear()
    wait_for(server, name, 2.0)
    wait_until(lambda: index_of(server, name) == READY, "an index without the reason")


LEADS_OUT = (
    b'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Contents>'
    b"<Key>models/m/../../../outside</Key><LastModified>2020-01-01T00:00:00Z</LastModified><Size>3</Size>"
    b'<ETag>"a"</ETag></Contents></ListBucketResult>'
)


@pytest.mark.parametrize(
    ("listing", "text"),
    [
        (b"<html>Sign in</html>", "the listing lacks"),
        (b"<ListBucketResult></ListBucketResult>", "the listing lacks"),
        (LEADS_OUT, "rename or remove that object"),
    ],
)
def test_a_listing_that_lies_unloads_nothing(polled: tuple[Elsewhere, RocserveProcess], listing: bytes, text: str):
    elsewhere, server = polled
    elsewhere.between.faults.bodies[elsewhere.listing] = listing
    wait_until(lambda: text in str(rows_of(server)), "the reason in the index")
    assert answer(server, "m") == [2.0, 3.0]
    elsewhere.between.faults.bodies.clear()
    wait_until(lambda: text not in str(rows_of(server)), "an index without the reason")
    assert not list(elsewhere.folder.rglob("outside"))


def test_an_ensemble_has_a_version_by_an_empty_object(polled: tuple[Elsewhere, RocserveProcess]):
    elsewhere, server = polled
    config = """
        platform: "ensemble" max_batch_size: 64
        input { name: "X" data_type: TYPE_FP32 dims: 2 } output { name: "Y" data_type: TYPE_FP32 dims: 2 }
        ensemble_scheduling { step { model_name: "m" model_version: -1
            input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }
    """
    for name, empty in {"as_git_keeps": "1/.gitkeep", "as_consoles_make": "1/"}.items():
        elsewhere.bucket.put(f"{name}/config.pbtxt", config.encode())
        elsewhere.put_empty(f"{name}/{empty}")
        wait_for(server, name, 1.0)


def test_a_large_object_comes_in_parts_and_the_index_tells_how_far(polled: tuple[Elsewhere, RocserveProcess]):
    elsewhere, server = polled
    content = random.Random(7).randbytes(20_000_000)
    gate = elsewhere.between.faults.gates["large/1/weights"] = threading.Event()
    elsewhere.bucket.put("large/1/weights", content)
    elsewhere.put("large", 1.0)
    reasons: list[str] = []

    def is_told() -> bool:
        reasons.append(reason_of(server, "large"))
        return "MB" in reasons[-1]

    wait_until(is_told, "how far it is")
    gate.set()
    assert "being copied from s3://" in reasons[-1]
    wait_for(server, "large", 1.0)
    assert [file.read_bytes() == content for file in elsewhere.folder.rglob("models/large/1/weights")] == [True]
    assert sum(count for path, count in elsewhere.between.faults.asked.items() if path.endswith("weights")) >= 3


def test_an_outage_changes_nothing_and_a_restart_does_without_the_store(elsewhere: Elsewhere):
    server = elsewhere.serve()
    server.wait_until_ready()
    # A second server of the machine finds the first one's copy.
    asked = elsewhere.between.faults.asked
    taken = asked.total() - asked[""]
    second = elsewhere.serve()
    second.wait_until_ready()
    assert answer(second, "m") == [2.0, 3.0]
    assert asked.total() - asked[""] == taken
    second.kill()

    elsewhere.between.faults.status["."] = 503
    wait_until(lambda: any(row.name == elsewhere.url for row in rows_of(server)), "the store's row")
    row = next(row for row in rows_of(server) if row.name == elsewhere.url)
    assert row.state == "UNAVAILABLE"
    assert elsewhere.url not in row.reason, "the row's name is the address"
    assert "503" in row.reason
    assert "the earlier copy stays served" in row.reason
    assert answer(server, "m") == [2.0, 3.0]
    before = asked[""]
    wait_until(lambda: asked[""] > before + 8, "two more looks, each with its retries")
    assert server.log_text.count("expected a listing") == 1
    server.terminate()

    elsewhere.between.close()
    again = elsewhere.serve()
    again.wait_until_ready()
    assert answer(again, "m") == [2.0, 3.0]


CLOCK = b"<Error><Code>RequestTimeTooSkewed</Code><Message>Too large.</Message></Error>"
NO_BUCKET = b"<Error><Code>NoSuchBucket</Code><Message>There is none.</Message></Error>"


@pytest.mark.parametrize(
    ("name", "faults", "text"),
    [
        # Longer than a request may take without data.
        ("slow", {"seconds": 60.0}, "the server will retry"),
        ("clock", {"bodies": CLOCK, "status": 403}, "set this machine's clock"),
        ("bucket", {"bodies": NO_BUCKET, "status": 404}, "NoSuchBucket; check the URL's bucket"),
    ],
    ids=["slow", "clock", "bucket"],
)
def test_a_store_that_fails_costs_no_request_and_the_index_says_why(
    polled: tuple[Elsewhere, RocserveProcess], name: str, faults: dict[str, Any], text: str
):
    elsewhere, server = polled
    elsewhere.put(name, 1.0)
    wait_for(server, name, 1.0)
    with ConstantLoad(server.address, name, {1.0, 2.0}, threads=2, pause_seconds=0.5) as load:
        for kind, fault in faults.items():
            getattr(elsewhere.between.faults, kind)["."] = fault
        wait_until(lambda: text in store_row(elsewhere, server), "the store's row")
        for kind in faults:
            getattr(elsewhere.between.faults, kind).clear()
        elsewhere.put(name, 2.0)
        wait_until(lambda: load.answered[2.0], "an answer of what was put meanwhile")
    assert (load.failures, load.wrong) == ([], [])
    wait_until(lambda: store_row(elsewhere, server) == "", "an index without the store's row")


def test_a_store_that_was_never_reached_makes_nobody_ready(elsewhere: Elsewhere):
    elsewhere.between.faults.status["."] = 403
    server = elsewhere.serve()
    wait_until(lambda: "check AWS_ACCESS_KEY_ID" in server.log_text, "the reason in the log")
    assert not server.client().is_server_ready()
    elsewhere.between.faults.status.clear()
    wait_for(server, "m", 1.0)
    server.wait_until_ready()


def test_a_store_that_was_never_reached_ends_a_server_that_ends_on_errors(elsewhere: Elsewhere):
    elsewhere.between.faults.status["."] = 403
    server = elsewhere.serve("--exit-on-error=true")
    assert server.process is not None
    assert server.process.wait(PATIENCE_SECONDS) == 1
    assert f"these models failed to load: {elsewhere.url}" in server.log_text


def test_a_model_is_taken_when_it_is_loaded(elsewhere: Elsewhere):
    elsewhere.put("unused", 7.0)
    server = elsewhere.serve("--model-control-mode=explicit", "--load-model=m")
    server.wait_until_ready()
    assert answer(server, "m") == [2.0, 3.0]
    assert not [path for path in elsewhere.between.faults.asked if "unused" in path]
    assert [row.name for row in rows_of(server)] == ["m", "unused"]
    with server.client() as client:
        elsewhere.put("m", 2.0)
        assert answer(server, "m") == [2.0, 3.0]
        client.load_model("m")
        assert answer(server, "m") == [3.0, 4.0]
        client.load_model("unused")
        assert answer(server, "unused") == [8.0, 9.0]
        with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
            client.load_model("none")
        elsewhere.between.faults.status["."] = 403
        client.unload_model("m")
        # Copied models are served without the store.
        client.load_model("m")
        assert answer(server, "m") == [3.0, 4.0]


def test_all_is_loaded_once_in_mode_none_with_credentials_of_tritons_file(elsewhere: Elsewhere, tmp_path: Path):
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps({"s3": {"": {"key_id": "k", "secret_key": "s", "region": "eu-west-1"}}}))
    environment = {"TRITON_CLOUD_CREDENTIAL_PATH": str(file)}
    flags = (f"--cache-directory={tmp_path / 'cache'}", "--model-control-mode=none")
    with RocserveProcess([elsewhere.url], *flags, log=tmp_path / "log", environment=environment) as server:
        server.wait_until_ready()
        assert answer(server, "m") == [2.0, 3.0]
