from __future__ import annotations

import io
import json
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from rich.console import Console
from support.waiting import PATIENCE_SECONDS

from rocserve.cli import main
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.verbs import status, status_model, status_poll
from rocserve.verbs.status import status_table
from rocserve.verbs.status_poll import StatusPoll, StatusRow
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


class Server:
    """Answers a poll's calls as a client does."""

    def __init__(self, *index: IndexEntry) -> None:
        self.index = list(index)
        self.counted: list[Any] = []
        self.properties: dict[str, Mapping[str, str]] = {}
        self.asked: list[tuple[str, str]] = []

    def repository_index(self, timeout: float) -> list[IndexEntry]:
        return self.index

    def statistics(self, timeout: float) -> list[Any]:
        return self.counted

    def model_metadata(self, model: str, version: str, timeout: float) -> Any:
        self.asked.append((model, version))
        if model not in self.properties:
            raise RocserveError("it has gone")
        return SimpleNamespace(properties=self.properties[model])


def polled(server: Any, now: float = 0.0) -> list[StatusRow]:
    return StatusPoll(server).rows(now)


def test_rows_join_index_and_statistics() -> None:
    server = Server(
        IndexEntry("b", "10", "READY", ""),
        IndexEntry("b", "9", "UNAVAILABLE", "its file is empty"),
        IndexEntry("a", "", "", ""),
    )
    server.counted = [statistics("b", "10", ok=4, failed=1, elements=6, runs=2)]
    rows = polled(server)
    assert [(row.model, row.version) for row in rows] == [("a", ""), ("b", "9"), ("b", "10")]
    assert rows[0].figures == {}
    assert rows[1].reason == "its file is empty"
    assert {name: str(figure) for name, figure in rows[2].figures.items()} == {
        "ok": "4", "failed": "1", "batch": "3.00", "total ms": "9.000", "queue ms": "2.000", "compute ms": "5.500",
    }  # fmt: skip


def test_rates_are_between_two_polls() -> None:
    server: Any = Server(IndexEntry("m", "1", "READY", ""))
    poll = StatusPoll(server)

    def rate(now: float, *counted: Any) -> Any:
        server.counted = list(counted)
        return poll.rows(now)[0].figures.get("req/s")

    assert rate(100.0, statistics("m", "1", ok=10, failed=2)) is None
    assert rate(102.0, statistics("m", "1", ok=20, failed=4)) == "6.0"
    assert rate(103.0, statistics("m", "1", ok=20, failed=4)) == "0.0"
    # Loaded again: the counters start at zero.
    assert rate(104.0, statistics("m", "1", ok=1)) == "0.0"
    assert rate(105.0) is None


def test_a_version_that_never_ran_has_no_means() -> None:
    server = Server(IndexEntry("m", "1", "READY", ""))
    server.counted = [statistics("m", "1")]
    (row,) = polled(server)
    assert {name: str(figure) for name, figure in row.figures.items()} == {"ok": "0", "failed": "0"}


def test_a_reason_cannot_play_with_the_terminal() -> None:
    (row,) = polled(Server(IndexEntry("m", "1", "UNAVAILABLE", "tensor 'x\x1b[2J\n'")))
    assert row.reason == "tensor 'x\\x1b[2J\\n'"


def test_an_engine_is_asked_for_once_and_again_when_the_version_has_been_away() -> None:
    facts = {
        "m": {"engine": "migraphx", "target": "ref", "precision": "fp16", "devices": "cpu"},
        "o": {"engine": "onnxruntime"},
        "e": {},
    }
    index = [IndexEntry(name, "1", "READY", "") for name in facts]
    server: Any = Server()
    server.properties = facts
    poll = StatusPoll(server)

    def engines(*entries: IndexEntry) -> dict[str, Any]:
        server.index = list(entries)
        return {row.model: row.figures.get("engine", "") for row in poll.rows(0.0)}

    shown = {"m": "migraphx ref fp16", "o": "onnxruntime", "e": ""}
    for _ in range(2):
        assert engines(*index, IndexEntry("l", "1", "LOADING", "")) == {**shown, "l": ""}
    assert server.asked == [("m", "1"), ("o", "1"), ("e", "1")]
    assert engines(IndexEntry("m", "1", "UNLOADING", ""), *index[1:]) == {**shown, "m": ""}
    assert engines(*index) == shown
    assert server.asked[3:] == [("m", "1")]
    assert engines(*index, IndexEntry("gone", "1", "READY", "")) == {**shown, "gone": ""}


def test_an_engine_is_asked_for_when_a_model_that_was_not_loaded_has_been() -> None:
    server: Any = Server(IndexEntry("m", "1", "READY", "not loaded: its first request loads it"))
    server.properties = {"m": {}}
    poll = StatusPoll(server)
    assert "engine" not in poll.rows(0.0)[0].figures
    server.index = [IndexEntry("m", "1", "READY", "")]
    server.properties = {"m": {"engine": "onnxruntime"}}
    assert poll.rows(1.0)[0].figures["engine"] == "onnxruntime"


def test_models_of_one_name_in_several_namespaces_have_no_figures_of_each_other() -> None:
    server: Any = Server(*(IndexEntry(name, "1", "READY", "") for name in ("a", "m", "m", "z")))
    # A client cannot name one of several.
    server.properties = {"a": {"engine": "onnxruntime"}, "z": {"engine": "onnxruntime"}}
    server.counted = [statistics(name, "1", ok=3) for name in ("a", "m", "m", "z")]
    rows = StatusPoll(server).rows(0.0)
    assert [row.figures.get("engine") for row in rows] == ["onnxruntime", None, None, "onnxruntime"]
    assert ["ok" in row.figures for row in rows] == [True, False, False, True]


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
        "ModelConfig": pb.ModelConfigResponse(config={"name": "digits[bold]", "max_batch_size": 8}),
        "ServerMetadata": pb.ServerMetadataResponse(name="rocserve\x1b[2J", version="9.9"),
        "ServerReady": pb.ServerReadyResponse(ready=True),
        "RepositoryIndex": index,
        "ModelStatistics": counters,
    }


@contextmanager
def served(address: str) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[_Handler()])
    port = server.add_insecure_port(address)
    server.start()
    yield address.replace(":0", f":{port}")
    server.stop(None).wait()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (status, status_poll, status_model):
        monkeypatch.setattr(module, "CALL_TIMEOUT_S", PATIENCE_SECONDS)


@pytest.fixture
def address(calls: None) -> Iterator[str]:
    with served("127.0.0.1:0") as address:
        yield address


def test_printed_once_and_plain_into_a_pipe(address: str) -> None:
    output = io.StringIO()
    status.run(status.StatusOptions(address), Console(file=output))
    lines = output.getvalue().splitlines()
    assert "\x1b" not in output.getvalue()
    assert lines[0].strip() == rf"rocserve\x1b[2J 9.9 at {address}: ready"
    (served,) = [line.split() for line in lines if "digits[bold]" in line]
    assert served[:8] == ["digits[bold]", "1", "READY", "onnxruntime", "1234", "7", "-", "8.00"]
    (failed,) = [line for line in lines if "broken" in line]
    assert "UNAVAILABLE" in failed
    assert ("a long reason " * 20).strip() in failed
    # Without the ruled line, which would be as wide as the reason.
    assert len(lines) == 4


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
    status.run(status.StatusOptions(address, once=True), Console(file=output, width=width, force_terminal=True))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    header = next(line.split() for line in text.splitlines() if line.split()[:1] == ["model"])
    if width > 20:
        assert header == ["model", "version", "state", *figures, *(["reason"] if beside else [])]
        assert all(len(line) <= width for line in text.splitlines()[2:])
    below = "broken 2: a long reason a long reason"
    assert (below in " ".join(text.split())) is not beside


@pytest.mark.parametrize(("width", "shown"), [(200, True), (112, True), (70, False)])
def test_engines_are_shown_where_there_is_room(width: int, shown: bool) -> None:
    row = StatusRow("digits", "1", "READY", "", {"engine": "migraphx gpu fp16", "ok": "1", "failed": "0"})
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(status_table(console, "title", [row, StatusRow("off", "", "", "", {})]))
    lines = captured.get().splitlines()
    assert ("engine" in captured.get(), "migraphx gpu fp16" in captured.get()) == (shown, shown)
    assert all(len(line) <= width for line in lines)


def test_a_long_name_is_folded_and_takes_no_state_away() -> None:
    rows = [StatusRow(name, "1", "UNAVAILABLE", "", {"ok": "1", "failed": "0"}) for name in ("digits", "detr-" * 30)]
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with console.capture() as captured:
        console.print(status_table(console, "title", rows))
    assert captured.get().count("UNAVAILABLE") == 2
    assert captured.get().count("detr-") == 30


def test_one_object_of_json(address: str) -> None:
    output = io.StringIO()
    status.run(status.StatusOptions(address, json=True), Console(file=output))
    shown = json.loads(output.getvalue())
    assert {name: shown[name] for name in ("version", "url", "ready")} == {
        "version": "9.9", "url": address, "ready": True,
    }  # fmt: skip
    (failed,) = [model for model in shown["models"] if model["model"] == "broken"]
    assert (failed["state"], failed["reason"]) == ("UNAVAILABLE", "a long reason " * 20)
    (served,) = [model for model in shown["models"] if model["model"] == "digits[bold]"]
    assert (served["ok"], served["failed"], served["batch"], served["req_per_s"]) == (1234, 7, 8.0, None)


def test_what_needs_help_is_printed_first(address: str) -> None:
    output = io.StringIO()
    status.run(status.StatusOptions(address), Console(file=output))
    names = [line.split()[0] for line in output.getvalue().splitlines()[2:]]
    assert names == ["broken", "digits[bold]"]


REPORT = {
    "reason": "ModuleNotFoundError: No module named 'x'", "traceback": "Traceback\n  File \"1/model.py\", line 1",
    "attempts": 2, "failed_ms": 1_000, "retry_ms": 0, "waits_for_files": True, "file_count": 9,
    "files": [{"path": "1/model.py", "bytes": 2048, "changed_ms": 1_000, "is_changed": True}],
    "config_file": "config.pbtxt", "config_text": "one\ntwo\x1b[2J", "config_line": 2, "config_is_cut": False,
}  # fmt: skip


@pytest.fixture
def reports() -> Iterator[tuple[str, list[str]]]:
    """The address of an HTTP port that gives a load report, and the URLs that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps(REPORT).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="reports").start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_a_failed_model_as_text(address: str, reports: tuple[str, list[str]]) -> None:
    output = io.StringIO()
    url, asked = reports
    status.run(status.StatusOptions(address, http_url=url, model="broken"), Console(file=output))
    lines = output.getvalue().splitlines()
    assert asked == ["/v2/load-report?name=broken&version=2"]
    assert lines[:2] == ["broken version 2: UNAVAILABLE", "  ModuleNotFoundError: No module named 'x'"]
    assert lines[2].startswith("  tried 2 times, last at ")
    assert lines[2].endswith("; not tried again until its files change")
    assert lines[3:7] == ["", "traceback", "  Traceback", '    File "1/model.py", line 1']
    assert lines[8] == "files, the last changed 1 of 9"
    assert lines[9].endswith("2.0 KiB  1/model.py  changed since the version that is served")
    assert lines[11:] == ["config.pbtxt, as it is written", "       1  one", "  >    2  two\\x1b[2J"]


def test_a_model_without_a_report(address: str) -> None:
    output = io.StringIO()
    status.run(status.StatusOptions(address, http_url="127.0.0.1:1", model="broken"), Console(file=output))
    assert "http://127.0.0.1:1/v2/load-report gives none" in output.getvalue()
    assert "a long reason" in output.getvalue()


def test_a_unix_socket_does_not_tell_the_http_address(tmp_path: Path, calls: None) -> None:
    output = io.StringIO()
    # The kernel accepts only short paths.
    with tempfile.TemporaryDirectory() as folder, served(f"unix:{folder}/grpc.sock") as address:
        status.run(status.StatusOptions(address, model="broken"), Console(file=output))
    assert "as --url is a Unix socket: name the server's HTTP address with --http-url, too" in output.getvalue()
    assert "a long reason" in output.getvalue()
    assert "8000" not in output.getvalue()


def test_a_served_model_has_its_configuration(address: str) -> None:
    output = io.StringIO()
    status.run(status.StatusOptions(address, model="digits[bold]"), Console(file=output))
    lines = output.getvalue().splitlines()
    assert lines[:2] == [
        "digits[bold] version 1: READY",
        "  engine onnxruntime, ok 1234, failed 7, batch 8.00, total ms 0.000",
    ]
    assert lines[3:] == ["configuration, as it is served", '  name: "digits[bold]"', "  max_batch_size: 8"]
    output = io.StringIO()
    status.run(status.StatusOptions(address, json=True, model="digits[bold]"), Console(file=output))
    (version,) = json.loads(output.getvalue())["versions"]
    assert (version["ok"], version["config"]) == (1234, 'name: "digits[bold]"\nmax_batch_size: 8\n')


def test_a_model_that_there_is_not(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "brokn", "--url", address]) == 1
    told = capsys.readouterr().err
    assert f"the server at {address} has no model 'brokn'" in told
    assert "did you mean 'broken'?" in told


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--once", "--url", "127.0.0.1:1"]) == 1
    assert "rocserve status: no answer from a server at 127.0.0.1:1" in capsys.readouterr().err
