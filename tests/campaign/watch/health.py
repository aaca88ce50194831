"""Watches health: probes for live and ready, over gRPC and HTTP, on separate connections, must be answered within a
bound."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable

import tritonclient.grpc as triton
from support.load import RETURNS_SOON
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

from campaign.findings import Findings
from campaign.stage import Stage

PAUSE_SECONDS = 0.25
GIVEN_UP_AFTER = PATIENCE_SECONDS
"""Timeout of a probe, after which the next one may find the server again."""
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1), *RETURNS_SOON]
"""Otherwise gRPC lets all clients of a process share one connection."""


class HealthWatch:
    """Sends one probe after another, and keeps the longest time."""

    def __init__(self, name: str, server: str, probe: Callable[[], bool], bound_seconds: float, stage: Stage) -> None:
        self.name = name
        self._server = server
        self.probes = 0
        self.slowest = 0.0
        self._probe = probe
        self._bound = bound_seconds
        self._stage = stage
        self._findings: Findings = stage.findings
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(2 * GIVEN_UP_AFTER)

    def _run(self) -> None:
        while not self._stopping.wait(PAUSE_SECONDS):
            begun = time.monotonic()
            try:
                healthy, why = self._probe(), "the answer was no"
            except Exception as error:
                healthy, why = False, f"{type(error).__name__}: {error}"
            taken = time.monotonic() - begun
            if not healthy and self._stage.damage.was_out(self._server, begun, begun + taken):
                continue
            self.probes += 1
            self.slowest = max(self.slowest, taken)
            if not healthy:
                self._findings.add("unhealthy", f"{self.name}, after {taken:.1f} s: {why}")
            elif taken > self._bound:
                self._findings.add("health slow", f"{self.name} took {taken:.1f} s, bound {self._bound} s")


def _by_http(server: RocserveProcess, path: str) -> Callable[[], bool]:
    """Probe by HTTP on a new connection, as kubelet does."""

    def probe() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=GIVEN_UP_AFTER)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        finally:
            connection.close()

    return probe


def _by_grpc(server: RocserveProcess) -> Callable[[], bool]:
    """Probe by gRPC on one lasting connection."""
    client = triton.InferenceServerClient(server.address, channel_args=OWN_CONNECTION)
    return lambda: bool(
        client.is_server_live(client_timeout=GIVEN_UP_AFTER) and client.is_server_ready(client_timeout=GIVEN_UP_AFTER)
    )


def _by_new_grpc(server: RocserveProcess) -> Callable[[], bool]:
    """Probe by gRPC on a new connection."""

    def probe() -> bool:
        with triton.InferenceServerClient(server.address, channel_args=OWN_CONNECTION) as client:
            return bool(client.is_server_ready(client_timeout=GIVEN_UP_AFTER))

    return probe


def health_watches(stage: Stage, bound_seconds: float) -> list[HealthWatch]:
    return [
        HealthWatch(f"{name} {how}", name, probe, bound_seconds, stage)
        for name, server in stage.servers.items()
        for how, probe in (
            ("HTTP live", _by_http(server, "/v2/health/live")),
            ("HTTP ready", _by_http(server, "/v2/health/ready")),
            ("gRPC", _by_grpc(server)),
            ("gRPC, new connection", _by_new_grpc(server)),
        )
    ]
