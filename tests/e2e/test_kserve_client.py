"""KServe's own Python clients, from an environment of their own, against the real server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.server import RocserveProcess

from benchmarks.environments import CACHE, PYTHON_VERSION, Environment, PeerUnavailable

CALLS = Path(__file__).parents[1] / "support" / "kserve_calls.py"
EXPECTED = {"live": True, "ready": True, "model": True, "unknown model": False, "sums": [2, 4, 6, 8]}


@pytest.fixture(scope="module")
def kserve() -> Environment:
    environment = Environment(CACHE / "kserve-peer" / f"python{PYTHON_VERSION}")
    try:
        environment.provision(["kserve==0.21.0"])
    except PeerUnavailable as error:
        pytest.skip(f"no kserve here: {error}")
    return environment


@pytest.mark.timeout(600)
def test_its_clients_are_served_over_rest_and_grpc(kserve: Environment, http_server: RocserveProcess) -> None:
    command = [str(kserve.programs / "python"), str(CALLS), http_server.address, http_server.http_address]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [EXPECTED, EXPECTED]
