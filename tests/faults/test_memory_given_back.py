"""The server returns the memory that large requests took when they are over."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.http_requests import ask
from support.server import RocserveProcess
from support.stretch_model import grpc_inputs, http_request, stretch_values, write_stretch
from support.waiting import wait_until

MIB = 1 << 20
CLIENTS = 64


@pytest.mark.parametrize("ask_by", ["gRPC", "HTTP"])
def test_memory_after_large_traffic(serve, repository: Path, ask_by: str) -> None:
    write_stretch(repository)
    server: RocserveProcess = serve(repository)
    process = server.server_process()
    values = stretch_values(request_bytes=4 * MIB, answer_bytes=4 * MIB)
    infer(server, values, ask_by)
    before = process.memory_info().rss
    workers = server.workers()
    for worker in workers:
        worker.suspend()
    threads = [threading.Thread(target=infer, args=(server, values, ask_by)) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: process.memory_info().rss > before + 100 * MIB, "memory of requests that wait")
    for worker in workers:
        worker.resume()
    for thread in threads:
        thread.join()
    wait_until(
        lambda: process.memory_info().rss < before + 64 * MIB,
        f"memory of at most 64 MiB above {before / MIB:.0f} MiB",
    )


def infer(server: RocserveProcess, values, ask_by: str) -> None:
    if ask_by == "gRPC":
        with server.client() as client:
            assert client.infer("stretch", grpc_inputs(values)).as_numpy("Y").size == 4 * MIB
        return
    head, _, body = http_request(values).partition(b"\r\n\r\n")
    headers = dict(line.split(": ") for line in head.decode().splitlines()[1:])
    status, answer = ask(server, "POST", "/v2/models/stretch/infer", body, headers)
    assert status == 200
    assert len(answer) > 4 * MIB
