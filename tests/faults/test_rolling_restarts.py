"""Servers that are restarted under load: no client notices, directly or behind nginx. `ROUNDS=10 pytest -s
tests/faults/test_rolling_restarts.py` restarts each of two servers ten times, and prints figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from string import Template
from typing import Self

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from support.infer_inputs import infer_input
from support.migraphx import CHECKOUT
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.waiting import wait_until

from benchmarks.server_process import free_port
from rocserve_client import Balancing, Client

ROUNDS = int(os.environ.get("ROUNDS", "1"))
FLAGS = ("--listen-when-loaded", "--drain-seconds=5", "--max-connection-age-secs=2")
SERVICE_CONFIG = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
ROUND_ROBIN: list[tuple[str, str | int]] = [
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.use_local_subchannel_pool", 1),
]
THREADS = 2
"""Threads of each client, and so its requests in flight."""
PAUSE_SECONDS = 0.0 if ROUNDS > 1 else 0.1
"""The pause after each request: within a drain of 5 s each client still sends a hundred, on a busy machine some."""
SECONDS = 60
"""A request without an answer by then has failed."""
X = np.array([[1, 2]], np.float32)
Way = Callable[[], float]
"""Sends one request."""


class Clients:
    """Clients that send requests all the time in separate threads. `failures`: by the client's name, how often requests
    failed and why."""

    def __init__(self, ways: Mapping[str, Callable[[], Way]]) -> None:
        self.answers: Counter[str] = Counter()
        self.failures: list[tuple[str, str]] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=one) for one in ways.items() for _ in range(THREADS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait(self) -> None:
        """Wait until each client has received another twenty answers."""
        before = self.answers.copy()
        wait_until(lambda: all(self.answers[name] >= before[name] + 20 for name in before), "answers of all clients")

    def _ask(self, name: str, connect: Callable[[], Way]) -> None:
        way = connect()
        while not self._stopping.wait(PAUSE_SECONDS):
            try:
                assert way() == 2.0
            except Exception as error:
                self.failures.append((name, str(error)))
            else:
                self.answers[name] += 1


@contextmanager
def nginx(folder: Path, grpc_servers: Sequence[str], http_servers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Run nginx in front of the servers, as docker/ configures it; return its gRPC and HTTP addresses."""
    program = shutil.which("nginx") or pytest.skip("no nginx here: Debian's nginx-light brings it")
    own = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def lines(servers: Sequence[str]) -> str:
        return "".join(f"server {server} max_fails=3 fail_timeout=1s;" for server in servers)

    template = Template((CHECKOUT / "docker/nginx/rocserve.conf.template").read_text())
    site = template.safe_substitute(
        ROCSERVE_GRPC_SERVERS=lines(grpc_servers),
        ROCSERVE_HTTP_SERVERS=lines(http_servers),
        ROCSERVE_REUSE="400ms",
        ROCSERVE_GRPC_LISTEN=own[0],
        ROCSERVE_HTTP_LISTEN=own[1],
    )
    (folder / "site.conf").write_text(site)
    paths = "".join(f"{one}_temp_path {folder};" for one in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    whole = f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}"
    (folder / "nginx.conf").write_text(f"{whole} http {{ access_log off; {paths} include {folder}/site.conf; }}")
    command = [program, "-c", folder / "nginx.conf", "-e", folder / "error.log"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until((folder / "pid").exists, "nginx")
            yield own[0], own[1]
        finally:
            process.terminate()


def grpc_way(address: str, options: Sequence[tuple[str, str | int]] = ()) -> Way:
    client = triton.InferenceServerClient(address, channel_args=options)
    return lambda: float(client.infer("m", [infer_input("X", X)], client_timeout=SECONDS).as_numpy("Y")[0, 0])


def http_way(address: str) -> Way:
    client = triton_http.InferenceServerClient(address, network_timeout=SECONDS)
    return lambda: float(client.infer("m", [infer_input("X", X, triton_http)]).as_numpy("Y")[0, 0])


def connections_to(port: int) -> int:
    """This process's connections to a server: one for each thread of tritonclient, and one of rocserve_client."""
    found = psutil.Process().net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.raddr.port == port for one in found if one.raddr)


@pytest.mark.timeout(1200 * ROUNDS)
def test_restarts_lose_no_request_and_a_kill_only_those_in_hand(repository: Path, tmp_path: Path):
    drop(repository, "m", add_constant(1.0))
    with ExitStack() as running:
        logs = (tmp_path / f"{number}.log" for number in count())

        def start(port: int, http_port: int) -> RocserveProcess:
            ports = (f"--grpc-port={port}", f"--http-port={http_port}")
            return running.enter_context(RocserveProcess([repository], *FLAGS, *ports, log=next(logs)))

        servers = [start(free_port(), free_port()) for _ in range(2)]
        addresses = "ipv4:" + ",".join(server.address for server in servers)
        places = [server.http_address for server in servers]
        grpc_address, http_address = running.enter_context(nginx(tmp_path, [s.address for s in servers], places))
        own = running.enter_context(Client(addresses, balancing=Balancing()))
        ways: dict[str, Callable[[], Way]] = {
            "tritonclient": lambda: grpc_way(addresses, ROUND_ROBIN),
            "rocserve_client": lambda: lambda: float(own.infer("m", {"X": X}, timeout=SECONDS)["Y"][0, 0]),
            "nginx": lambda: grpc_way(grpc_address),
            "nginx, HTTP": lambda: http_way(http_address),
        }
        with Clients(ways) as load:
            for index in list(range(len(servers))) * ROUNDS:
                load.wait()
                port, http_port = servers[index].port, servers[index].http_port
                assert servers[index].terminate() == 0
                servers[index] = start(port, http_port)
                # Channels reconnect after a pause; at the next restart each must have connections again.
                wait_until(lambda port=port: connections_to(port) > THREADS, "connections of all channels")
            load.wait()
            print(f"{ROUNDS} x 2 restarts: {dict(load.answers)}, failed: {load.failures}")
            assert load.failures == []
            servers[0].kill()
            load.wait()
        print(f"one killed: {dict(load.answers)}, failed: {load.failures}")
        # Clients that retry lose no request; nginx retries over HTTP.
        failed = Counter(name for name, _ in load.failures)
        assert set(failed) <= {"tritonclient", "nginx"}
        # nginx also keeps connections to the server open.
        assert failed["tritonclient"] <= THREADS
        assert failed["nginx"] <= 4 * THREADS


def test_compose_takes_the_file_that_has_nginx_before_two_servers():
    program = shutil.which("docker-compose") or pytest.skip("no docker-compose here: Debian's package brings it")
    subprocess.run([program, "-f", CHECKOUT / "docker/compose-balanced.yaml", "config", "-q"], check=True)
