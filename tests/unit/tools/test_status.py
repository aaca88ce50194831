from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from rich.console import Console

from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.tools import status
from rocserve.tools.status import StatusEngines, StatusRow, StatusRows, status_table
from rocserve_client import Duration, IndexEntry, ModelStatistics, RocserveError

NONE = Duration()


def statistics(name: str, version: str, ok: int = 0, failed: int = 0, elements: int = 0, runs: int = 0) -> Any:
    ms = 1_000_000
    return ModelStatistics(
        name=name,
        version=version,
        last_inference_ms=0,
        inference_count=elements,
        execution_count=runs,
        success=Duration(ok, 9 * ms * ok),
        fail=Duration(failed, 0),
        queue=Duration(ok, 2 * ms * ok),
        compute_input=Duration(ok, 1 * ms * ok),
        compute_infer=Duration(ok, 4 * ms * ok),
        compute_output=Duration(ok, ms * ok // 2),
        cache_hit=NONE,
        cache_miss=NONE,
    )


def test_rows_join_index_and_statistics() -> None:
    index = [
        IndexEntry("b", "10", "READY", ""),
        IndexEntry("b", "9", "UNAVAILABLE", "its file is empty"),
        IndexEntry("a", "", "", ""),
    ]
    rows = StatusRows().update(index, [statistics("b", "10", ok=4, failed=1, elements=6, runs=2)], now=0.0)
    assert [(row.model, row.version) for row in rows] == [("a", ""), ("b", "9"), ("b", "10")]
    assert rows[0].succeeded is None
    assert rows[1].reason == "its file is empty"
    busy = rows[2]
    assert (busy.succeeded, busy.failed, busy.mean_batch) == (4, 1, 3.0)
    assert (busy.request_ms, busy.queue_ms, busy.compute_ms) == (9.0, 2.0, 5.5)
    assert busy.rate is None


def test_rates_are_between_two_polls() -> None:
    index = [IndexEntry("m", "1", "READY", "")]
    rows = StatusRows()
    rows.update(index, [statistics("m", "1", ok=10, failed=2)], now=100.0)
    assert rows.update(index, [statistics("m", "1", ok=20, failed=4)], now=102.0)[0].rate == 6.0
    assert rows.update(index, [statistics("m", "1", ok=20, failed=4)], now=103.0)[0].rate == 0.0
    # Loaded again: the counters begin anew.
    assert rows.update(index, [statistics("m", "1", ok=1)], now=104.0)[0].rate == 0.0
    assert rows.update(index, [], now=105.0)[0].rate is None


def test_a_version_that_never_ran_has_no_means() -> None:
    (row,) = StatusRows().update([IndexEntry("m", "1", "READY", "")], [statistics("m", "1")], now=0.0)
    assert (row.succeeded, row.mean_batch, row.queue_ms, row.compute_ms) == (0, None, None, None)


def test_a_reason_cannot_play_with_the_terminal() -> None:
    (row,) = StatusRows().update([IndexEntry("m", "1", "UNAVAILABLE", "tensor 'x\x1b[2J\n'")], [], now=0.0)
    assert row.reason == "tensor 'x\\x1b[2J\\n'"


def test_an_engine_is_asked_for_once_and_again_when_the_version_has_been_away() -> None:
    asked: list[tuple[str, str]] = []
    facts = {
        "m": {"engine": "migraphx", "target": "ref", "precision": "fp16", "devices": "cpu"},
        "o": {"engine": "onnxruntime"},
        "e": {},
    }

    def properties(model: str, version: str) -> Mapping[str, str]:
        asked.append((model, version))
        if model not in facts:
            raise RocserveError("it has gone")
        return facts[model]

    engines = StatusEngines(properties)
    index = [IndexEntry(name, "1", "READY", "") for name in facts]
    loading = IndexEntry("l", "1", "LOADING", "")
    shown = {("m", "1"): "migraphx ref fp16", ("o", "1"): "onnxruntime", ("e", "1"): ""}
    for _ in range(2):
        assert engines.update([*index, loading]) == shown
    assert asked == [("m", "1"), ("o", "1"), ("e", "1")]
    assert ("m", "1") not in engines.update([IndexEntry("m", "1", "UNLOADING", ""), *index[1:]])
    assert engines.update(index) == shown
    assert asked[3:] == [("m", "1")]
    assert engines.update([*index, IndexEntry("gone", "1", "READY", "")]) == shown


class _Handler(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method.rpartition("/")[2]
        return grpc.unary_unary_rpc_method_handler(
            lambda _, context: answers()[method],
            getattr(pb, f"{method}Request").FromString,
            lambda message: message.SerializeToString(),
        )


def answers() -> dict[str, Any]:
    index = pb.RepositoryIndexResponse()
    index.models.add(name="digits[bold]", version="1", state="READY")
    index.models.add(name="broken", version="2", state="UNAVAILABLE", reason="a long reason " * 20)
    counters = pb.ModelStatisticsResponse()
    row = counters.model_stats.add(name="digits[bold]", version="1", inference_count=32, execution_count=4)
    row.inference_stats.success.count, row.inference_stats.fail.count = 1234, 7
    metadata = pb.ModelMetadataResponse(name="digits[bold]", properties={"engine": "onnxruntime"})
    return {
        "ModelMetadata": metadata,
        "ServerMetadata": pb.ServerMetadataResponse(name="rocserve", version="9.9"),
        "ServerReady": pb.ServerReadyResponse(ready=True),
        "RepositoryIndex": index,
        "ModelStatistics": counters,
    }


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[_Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_printed_once_and_plain_into_a_pipe(address: str) -> None:
    output = io.StringIO()
    assert status.run(status.StatusOptions(address), Console(file=output)) == 0
    lines = output.getvalue().splitlines()
    assert "\x1b" not in output.getvalue()
    assert lines[0].strip() == f"rocserve 9.9 at {address}: ready"
    (served,) = [line.split() for line in lines if "digits[bold]" in line]
    assert served[:8] == ["digits[bold]", "1", "READY", "onnxruntime", "1234", "7", "-", "8.00"]
    (failed,) = [line for line in lines if "broken" in line]
    assert "UNAVAILABLE" in failed
    assert ("a long reason " * 20).strip() in failed


@pytest.mark.parametrize(
    ("width", "figures", "beside"),
    [
        (200, ["engine", "ok", "failed", "req/s", "batch", "total", "ms", "queue", "ms", "compute", "ms"], True),
        (126, ["engine", "ok", "failed", "req/s", "batch", "total", "ms", "queue", "ms", "compute", "ms"], False),
        (92, ["engine", "ok", "failed", "req/s", "total", "ms"], False),
        (80, ["ok", "failed", "req/s", "total", "ms"], False),
        (64, ["ok", "failed", "req/s"], False),
        (20, ["ok", "failed"], False),
    ],
)
def test_a_narrow_terminal_loses_figures_rather_than_reasons(
    address: str, width: int, figures: list[str], beside: bool
) -> None:
    output = io.StringIO()
    assert (
        status.run(status.StatusOptions(address, once=True), Console(file=output, width=width, force_terminal=True))
        == 0
    )
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    header = next(line.split() for line in text.splitlines() if line.split()[:1] == ["model"])
    if width > 20:
        assert header == ["model", "version", "state", *figures, *(["reason"] if beside else [])]
        assert all(len(line) <= width for line in text.splitlines()[2:])
    below = "broken 2: a long reason a long reason"
    assert (below in " ".join(text.split())) is not beside


@pytest.mark.parametrize(("width", "shown"), [(200, True), (112, True), (70, False)])
def test_engines_are_shown_where_there_is_room(width: int, shown: bool) -> None:
    row = StatusRow("digits", "1", "READY", "", "migraphx gpu fp16", succeeded=1, failed=0)
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(status_table(console, "title", [row, StatusRow("off", "", "", "")]))
    lines = captured.get().splitlines()
    assert ("engine" in captured.get(), "migraphx gpu fp16" in captured.get()) == (shown, shown)
    assert all(len(line) <= width for line in lines)


def test_followed_on_a_terminal_until_interrupted(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=200)
    assert status.run(status.StatusOptions(address, 0.5), console) == 0
    assert pauses == [0.5, 0.5, 0.5]
    assert len(re.findall("1234", output.getvalue())) >= 3


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert status.run(status.StatusOptions("127.0.0.1:1", once=True)) == 1
    assert "no answer from a server at 127.0.0.1:1" in capsys.readouterr().err
