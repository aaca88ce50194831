"""Triton's own load generator against the server, with the server-side figures that it reads from the statistics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.perf_analyzer import PerfAnalyzer, Row, provision_perf_analyzer
from support.server import RocserveProcess
from support.simple_models import drop_simple_models

from benchmarks.environments import PeerUnavailable

pytestmark = pytest.mark.timeout(900)

SERVER_SIDE = ("Server Queue", "Server Compute Input", "Server Compute Infer", "Server Compute Output")
SWEEP = ("--concurrency-range", "1:3:2")
RATES = ("--request-rate-range", "100:200:100")
SHARED = ("--shared-memory", "system", "--output-shared-memory-size", "64")
SEQUENCES = ("--num-of-sequences", "3", "--sequence-length", "8", "--input-data", "zero")


@pytest.fixture(scope="module")
def perf_analyzer() -> PerfAnalyzer:
    try:
        return provision_perf_analyzer()
    except PeerUnavailable as error:
        pytest.skip(f"no Triton here: {error}")


@pytest.fixture(scope="module")
def server(perf_analyzer: PerfAnalyzer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("perf-analyzer")
    repository = folder / "repository"
    drop_simple_models(repository)
    flags = ("--http-address=127.0.0.1", "--http-port=0", "--allow-client-shm=true")
    with RocserveProcess([repository], *flags, log=folder / "server.log") as running:
        running.wait_until_ready()
        yield running


CASES = [
    pytest.param("grpc", "simple", SWEEP, 2, id="gRPC: concurrency"),
    pytest.param("grpc", "simple", (*SWEEP, "--async"), 2, id="gRPC: concurrency, asynchronous"),
    pytest.param("grpc", "simple", RATES, 2, id="gRPC: request rates"),
    pytest.param("grpc", "simple", (*SWEEP, "--async", "--streaming"), 2, id="gRPC: streams"),
    pytest.param("grpc", "simple", (*SWEEP, *SHARED), 2, id="gRPC: shared memory"),
    pytest.param("grpc", "simple", (*SWEEP, "-b", "4"), 2, id="gRPC: batches of four"),
    pytest.param("grpc", "simple_dyna_sequence", (*SWEEP, *SEQUENCES), 2, id="gRPC: sequences"),
    pytest.param("grpc", "simple_sequence", (*SEQUENCES, "--async", "--streaming"), 1, id="gRPC: streams of sequences"),
    pytest.param("http", "simple", SWEEP, 2, id="HTTP: concurrency"),
    pytest.param("http", "simple", (*SWEEP, "--async"), 2, id="HTTP: concurrency, asynchronous"),
    pytest.param("http", "simple", RATES, 2, id="HTTP: request rates"),
    pytest.param("http", "simple", (*SWEEP, *SHARED), 2, id="HTTP: shared memory"),
    pytest.param("http", "simple_dyna_sequence", (*SWEEP, *SEQUENCES), 2, id="HTTP: sequences"),
]


@pytest.mark.parametrize(("protocol", "model", "options", "levels"), CASES)
def test_a_run(
    server: RocserveProcess,
    perf_analyzer: PerfAnalyzer,
    tmp_path: Path,
    protocol: str,
    model: str,
    options: tuple[str, ...],
    levels: int,
) -> None:
    url = server.address if protocol == "grpc" else server.http_address
    before = counts(server, model)
    rows = perf_analyzer.run(url, protocol, model, *options, table=tmp_path / "table.csv")
    assert len(rows) == levels
    for row in rows:
        check_level(row)
    inferences, executions, successes = (now - then for now, then in zip(counts(server, model), before, strict=True))
    assert inferences >= successes >= executions > 0


def check_level(row: Row) -> None:
    """The server's own figures are there, and are parts of what the client has seen."""
    assert row["Inferences/Second"] > 0
    assert row["Server Compute Infer"] > 0
    assert sum(row[name] for name in SERVER_SIDE) <= row["Avg latency"]
    assert row["p50 latency"] <= row["p99 latency"]


def counts(server: RocserveProcess, model: str) -> tuple[int, int, int]:
    """Inferences, executions, successful requests."""
    row = server.client().get_inference_statistics(model).model_stats[0]
    return row.inference_count, row.execution_count, row.inference_stats.success.count
