"""The group http_peers: rocserve and HTTP servers that are popular in Python, each in its own environment. All compute
the same with numpy in a Python model; tensors are JSON in the form that each server documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from benchmarks.cases import SEED, Case, Quantity, Target, expect_outputs
from benchmarks.comparison import Comparison, compare
from benchmarks.contenders import ServedContender
from benchmarks.environments import CACHE, PYTHON_VERSION, Environment
from benchmarks.http_request import HttpRequest, json_request, plain_json_request
from benchmarks.models import ADD_SUB_LENGTH, add_sub
from benchmarks.rocserve_peer import rocserve_server
from benchmarks.server_process import ServerProcess, free_port

HTTP_PEERS_GROUP = "http_peers"
SERVICES = Path(__file__).parent / "http_services"
LEFT, RIGHT = numpy.random.default_rng(SEED).integers(-1000, 1000, (2, 1, ADD_SUB_LENGTH), dtype=numpy.int32)
INPUTS = {"INPUT0": LEFT, "INPUT1": RIGHT}
V2_REQUEST = json_request("add_sub", INPUTS)
RATIO = 3.0
"""rocserve's rate divided by each peer's."""


@dataclass(frozen=True, slots=True)
class HttpPeer:
    """A server that pip can install. {port} and {folder} are replaced in command and variables."""

    name: str
    requirements: tuple[str, ...]
    """The server first."""
    command: tuple[str, ...]
    """The first word is a program of its environment."""
    ready_path: str
    request: HttpRequest
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""

    @property
    def environment(self) -> Environment:
        return Environment(CACHE / "http-peers" / f"python{PYTHON_VERSION}-{self.requirements[0]}")

    def server(self, port: int, folder: Path) -> ServerProcess:
        """The server of an installed environment; `folder` is for what it writes."""
        program, *arguments = [part.format(port=port, folder=folder) for part in self.command]
        variables = {name: value.format(port=port, folder=folder) for name, value in self.variables.items()}
        return ServerProcess(
            self.name,
            [str(self.environment.programs / program), *arguments],
            None,
            folder / f"{self.name}.log",
            {**os.environ, "PYTHONPATH": str(SERVICES), **variables},
            http_port=port,
            ready_path=self.ready_path,
        )


# All of them use uvicorn, which takes httptools and uvloop if they are installed. MLServer's workers do not start with
# newer uvloops.
_UVICORN = ("httptools", "uvloop<0.22", "numpy")


def _mlserver(name: str, workers: int) -> HttpPeer:
    return HttpPeer(
        name,
        ("mlserver==1.7.1", *_UVICORN),
        ("mlserver", "start", "{folder}"),
        "/v2/health/ready",
        V2_REQUEST,
        {
            "MLSERVER_DEBUG": "false",
            "MLSERVER_PARALLEL_WORKERS": str(workers),
            "MLSERVER_HOST": "127.0.0.1",
            "MLSERVER_HTTP_PORT": "{port}",
            "MLSERVER_GRPC_PORT": "0",
            "MLSERVER_METRICS_ENDPOINT": "",
            "MLSERVER_ENVIRONMENTS_DIR": "{folder}/mlserver",
            "MLSERVER_MODEL_NAME": "add_sub",
            "MLSERVER_MODEL_IMPLEMENTATION": "mlserver_add_sub.AddSub",
        },
    )


HTTP_PEERS = (
    _mlserver("MLServer", workers=1),
    _mlserver("MLServer in one process", workers=0),
    HttpPeer(
        "LitServe",
        ("litserve==0.2.19", *_UVICORN),
        ("python", str(SERVICES / "litserve_add_sub.py"), "{port}"),
        "/health",
        plain_json_request("/predict", INPUTS),
    ),
    HttpPeer(
        "BentoML",
        ("bentoml==1.4.39", *_UVICORN),
        ("bentoml", "serve", "bentoml_add_sub:AddSub", "--host=127.0.0.1", "--port={port}"),
        "/readyz",
        plain_json_request("/add_sub", INPUTS),
        {"BENTOML_HOME": "{folder}/bentoml", "BENTOML_DO_NOT_TRACK": "True"},
    ),
)


def http_peer_cases() -> list[Case]:
    """add/sub on 1 and 32 connections."""
    return [
        Case(
            group=HTTP_PEERS_GROUP,
            title=f"add_sub, JSON over HTTP, concurrency {connections}",
            model="add_sub",
            dynamic_batching=None,
            unit="requests/s",
            units_per_request=1.0,
            connections=connections,
            streams=1,
            message=b"",
            check=expect_outputs(LEFT + RIGHT, LEFT - RIGHT),
            targets=tuple(Target(Quantity.RATE, peer.name, RATIO) for peer in HTTP_PEERS),
        )
        for connections in (1, 32)
    ]


def http_peer_facts() -> list[str]:
    """The measured versions; the environments must be installed."""
    versions = {peer.requirements[0].replace("==", " "): peer.environment.versions() for peer in HTTP_PEERS}
    servers = ", ".join(
        f"{server} (numpy {found['numpy']}, uvicorn {found['uvicorn']}, httptools {found['httptools']})"
        for server, found in versions.items()
    )
    return [
        f"http_peers: {servers}; uvloop in each",
        "http_peers: one model worker in a separate process, as in rocserve, but for BentoML and for MLServer in one"
        " process, which run the model on the HTTP server's event loop; no batching, access logs and metrics off",
    ]


def measure_http_peers(
    rounds: int, seconds: float, folder: Path, report: Callable[[str], None]
) -> Sequence[Comparison]:
    """Install missing peers, start them and rocserve, measure, end them. Raises PeerUnavailable if pip cannot install a
    peer."""
    for peer in HTTP_PEERS:
        peer.environment.provision(peer.requirements)
    repository = folder / "repository"
    add_sub("add_sub", dynamic_batching=False, python=True).write_for_rocserve(repository)
    ours = rocserve_server(repository, free_port(), folder / "rocserve.log", http_port=free_port())
    servers = [(ours, V2_REQUEST), *((peer.server(free_port(), folder), peer.request) for peer in HTTP_PEERS)]
    with ExitStack() as stack:
        contenders = [ServedContender(stack.enter_context(server), folder, request) for server, request in servers]
        return [compare(case, contenders, rounds, seconds, report) for case in http_peer_cases()]
