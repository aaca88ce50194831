"""A server whose clients connect through Unix sockets."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton

from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until


class UnixServer(RocserveProcess):
    """Serves a repository of one model. `folder`: where the sockets are; the kernel accepts only short paths."""

    def __init__(self, repository: Path, folder: Path, log: Path, *flags: str, **more: Any) -> None:
        self.grpc, self.http = f"unix:{folder}/grpc.sock", f"{folder}/http.sock"
        addresses = (f"--grpc-address={self.grpc}", f"--http-address=unix:{self.http},mode=0660")
        super().__init__([repository], "--front-ends=0", *addresses, *flags, log=log, **more)

    def start(self, *more_flags: str) -> None:
        self.begin(*more_flags)
        wait_until(lambda: "1 model served" in self.log_text[self._begins :], "the model")

    def client(self) -> triton.InferenceServerClient:
        return triton.InferenceServerClient(self.grpc)

    def call(self, method: str, target: str, body: object = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("localhost", timeout=PATIENCE_SECONDS)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self.http)
        connection.request(method, target, None if body is None else json.dumps(body))
        response = connection.getresponse()
        status, text = response.status, response.read().decode()
        connection.close()
        return status, text
