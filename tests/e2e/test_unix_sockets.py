"""A server whose clients connect through Unix sockets."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.infer_inputs import infer_input
from support.models import add_constant, drop
from support.tools import Command
from support.unix_server import UnixServer
from support.waiting import PATIENCE_SECONDS

from rocserve_client import Client, RocserveError

ME = os.getuid()


@pytest.fixture
def folder() -> Iterator[Path]:
    # The kernel accepts only short paths.
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def test_both_protocols_users_and_a_killed_server(
    repository: Path, folder: Path, tmp_path: Path, command: Command
) -> None:
    drop(repository, "m", add_constant(1.0))
    flags = (f"--admin-address=uid:{ME + 1}", "--max-request-rate-per-client=1000000")
    with UnixServer(repository, folder, tmp_path / "server.log", *flags) as server:
        entry = infer_input("X", np.array([[1, 2]], np.float32))
        assert server.client().infer("m", [entry]).as_numpy("Y").tolist() == [[2, 3]]
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
        code, text = server.call("POST", "/v2/models/m/infer", body)
        assert code == 200
        assert json.loads(text)["outputs"][0]["data"] == [2, 3]

        # Admin calls are another user's.
        expected = f"which this server takes from uid:{ME + 1}, and this one comes from uid:{ME};"
        code, text = server.call("POST", "/v2/logging", {"log_verbose_level": 1})
        assert code == 403
        assert expected in text
        with Client(server.grpc) as client, pytest.raises(RocserveError, match=expected):
            client.load_model("m")

        assert "rocserve" in (shown := command("status", "--once", f"--url={server.grpc}")).out, shown.err
        one = command("status", "--once", f"--url={server.grpc}", f"--http-url=unix:{server.http}", "m")
        assert "m version 1: READY" in one.out, one.err

        # A second server cannot have the sockets, and takes nothing from the first.
        log = tmp_path / "second.log"
        second = UnixServer(repository, folder, log)
        second.begin()
        assert second.process is not None
        assert second.process.wait(PATIENCE_SECONDS) == 1
        assert f"cannot serve gRPC at {server.grpc}: Address already in use" in second.log_text
        assert f"cannot serve HTTP at unix:{server.http}: Address already in use" in second.log_text
        assert server.client().is_server_live()

        server.restart(signal.SIGKILL)
        assert server.client().infer("m", [entry]).as_numpy("Y").tolist() == [[2, 3]]
        assert server.terminate() == 0
        assert list(folder.iterdir()) == []
