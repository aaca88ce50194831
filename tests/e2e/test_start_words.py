"""What the command prints and logs: at its start, when a start fails, when a drop fails."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import subprocess
import sys
import termios
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from support.metrics import FLAGS as METRICS
from support.metrics import port_of, scrape
from support.models import add_constant, drop
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve import cli


def run(*arguments: str) -> str:
    """The output of a server that ends by itself."""
    command = [sys.executable, "-m", "rocserve.cli", "serve", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert ran.returncode == 1
    return ran.stderr


def test_the_log_names_a_failed_model_of_the_start_once(repository: Path) -> None:
    drop(repository, "broken", b"no model")
    ends = "at least one version must be available under the version policy of model 'none'"
    drop(repository, "none", add_constant(1.0), "version_policy { specific { versions: 9 } }")
    log = run(f"--model-repository={repository}", "--grpc-port=0", "--http-port=0", "--metrics-port=0")
    assert log.count("failed to load 'broken' version 1: ") == 1
    assert "model 'broken' failed to load" not in log
    assert log.count(f"model 'none' failed to load: {ends}") == 1
    assert "next try" not in log
    assert "ending, because these models failed to load: broken, none; --exit-on-error=false serves the others" in log


def test_the_log_names_all_ports_in_use_together(repository: Path) -> None:
    with ExitStack() as others:
        ports = {}
        for name in ("HTTP", "gRPC", "metrics"):
            other = others.enter_context(socket.socket())
            other.bind(("127.0.0.1", 0))
            other.listen()
            ports[name] = other.getsockname()[1]
        flags = [f"--{name.lower()}-{what}" for name in ports for what in ("address=127.0.0.1", f"port={ports[name]}")]
        log = run(f"--model-repository={repository}", *flags, "--grpc-infer-thread-count=4")
    assert log.count("--grpc-infer-thread-count has no effect: rocserve has no gRPC threads and queues") == 1
    for name, port in ports.items():
        message = f"cannot serve {name} at 127.0.0.1:{port}: Address already in use; name another with"
        flag = name.lower()
        assert log.count(f"{message} --{flag}-port, or switch {name} off with --allow-{flag}=false") == 1


PYTHON_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU count: 2 }
"""
WAITS_FOR_A_SERVICE = """
from pathlib import Path


def connect():
    raise ConnectionError("the service is not there")


class TritonPythonModel:
    def initialize(self, args):
        if not Path({path!r}).exists():
            connect()

    def execute(self, requests): ...
"""


def test_the_log_shows_once_what_a_model_raises_from_its_own_file_on(serve, repository: Path, tmp_path: Path) -> None:
    service = tmp_path / "service"
    drop(repository, "typo", "import json\n\nclass TritonPythonModel\n    pass\n", PYTHON_CONFIG)
    drop(repository, "waits", WAITS_FOR_A_SERVICE.format(path=str(service)), PYTHON_CONFIG)
    server = serve(repository)
    says = f"not served: typo, waits; `rocserve status --url={server.address}` says why"
    wait_until(lambda: says in server.log_text, says)
    wait_until(lambda: "failed 2 times, next try in" in server.log_text, "the second failure")
    service.touch()
    wait_until(lambda: "successfully loaded 'waits' version 1" in server.log_text, "the load that heals itself")
    lines = [line.partition("] ")[2] for line in server.log_text.splitlines()]
    file = f'  File "{repository}/{{}}/1/model.py", line {{}}'
    assert [line for line in lines if line.startswith("typo:1: ")] == [
        f"typo:1: {file.format('typo', 3)}",
        "typo:1:     class TritonPythonModel",
        "typo:1:                            ^",
        "typo:1: SyntaxError: expected ':'",
    ]
    assert [line for line in lines if line.startswith("waits:1: ")] == [
        "waits:1: Traceback (most recent call last):",
        f"waits:1: {file.format('waits', 12)}, in initialize",
        "waits:1:     connect()",
        f"waits:1: {file.format('waits', 6)}, in connect",
        'waits:1:     raise ConnectionError("the service is not there")',
        "waits:1: ConnectionError: the service is not there",
    ]
    told = [line for line in lines if line.startswith("failed to load 'typo' version 1: ")]
    assert len(told) == 1
    assert told[0].endswith(" (failed once, not tried again until its files change)")


def test_a_start_tells_what_is_served_and_a_broken_drop_harms_no_other_model(
    serve, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop(repository, "plain", add_constant(1.0))
    server = serve(repository, flags=(*METRICS, "--worker-user=same"))
    wait_until(lambda: "1 model served" in server.log_text)
    page = f"http://127.0.0.1:{server.http_port}/"
    lines = [(line[0], line.partition("] ")[2]) for line in server.log_text.splitlines()]
    assert {level for level, _ in lines} == {"I"}
    checks = [text for _, text in lines if text.startswith("plain 1: ")]
    assert [text.partition("; ")[0] for text in checks] == ["plain 1: rows are independent"]
    assert [text.partition(" at ")[0] for _, text in lines if text not in checks] == [
        "Started Metrics Service",
        "Started HTTPService",
        "Started GRPCInferenceService",
        "1 model served",
    ]
    assert lines[1][1].endswith(f", with a page at {page}")
    with urllib.request.urlopen(page, timeout=PATIENCE_SECONDS) as answer:
        assert b"<!doctype html>" in answer.read().lower()
    # The broken one: the log, the index and the metrics show it.
    drop(repository, "bad", b"no model")
    wait_until(lambda: "the new model 'bad' is not served; the server stays ready" in server.log_text)
    with urllib.request.urlopen(f"{page}v2/health/ready", timeout=PATIENCE_SECONDS) as answer:
        assert answer.status == 200
    assert server.client().is_server_ready()
    port = port_of(server)
    wait_until(lambda: scrape(port).get('rocserve_model_served{model="bad"}') == "0", "the metric of the new model")
    assert scrape(port)['rocserve_model_served{model="plain"}'] == "1"

    def is_told() -> bool:
        """Between two tries; during a try the state is LOADING."""
        cli.main(["status", f"--url={server.address}", "--once"])
        shown = capsys.readouterr().out
        assert ": ready" in shown
        return re.search(r"^bad .* UNAVAILABLE .*Protobuf parsing failed", shown, re.MULTILINE) is not None

    wait_until(is_told, "the row of the broken model")
    # A verbose log says more.
    server.client().update_log_settings({"log_verbose_level": 1})
    drop(repository, "later", add_constant(1.0))
    wait_until(lambda: "successfully loaded 'later' version 1" in server.log_text)
    assert "autofilled max_batch_size to 64 for model 'later'" in server.log_text
    assert "model 'later' version 1: engine onnxruntime: " in server.log_text


def test_a_model_of_many_tensors_leaves_the_table_narrow(serve, repository: Path) -> None:
    drop(repository, "narrow", add_constant(1.0))
    version = repository / "wide" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("class TritonPythonModel:\n    def execute(self, requests): ...\n")
    outputs = "".join(f'output {{ name: "OUT_{number}" data_type: TYPE_INT32 dims: [1] }}\n' for number in range(1000))
    inputs = 'input { name: "IN" data_type: TYPE_INT32 dims: [1] }\n'
    (version.parent / "config.pbtxt").write_text(f'backend: "python"\n{inputs}{outputs}')
    server = serve(repository)
    wait_until(lambda: "2 models served" in server.log_text)
    wait_until(lambda: server.printed.endswith("\n\n"))
    table = server.printed.splitlines()
    row = next(line for line in table if line.startswith("wide "))
    named = ", ".join(f"OUT_{number} INT32 [1]" for number in range(8))
    assert f"  {named}, and 992 more  READY" in row
    assert max(map(len, table)) < 300


def test_a_start_whose_table_nobody_reads_holds_nothing_up(repository: Path, tmp_path: Path) -> None:
    for number in range(20):
        drop(repository, f"broken_{number}", b"no model")
    log = tmp_path / "server.log"
    os.mkfifo(log.with_suffix(".out"))
    reader = os.open(log.with_suffix(".out"), os.O_RDONLY | os.O_NONBLOCK)
    # The smallest output buffer: 64 KiB take the lines of hundreds of broken models.
    held = fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    with RocserveProcess([repository], log=log) as server:
        wait_until(lambda: "0 models served" in server.log_text)
        # The rest is printed by the loop.
        drop(repository, "good", add_constant(1.0))
        wait_until(lambda: server.client().is_model_ready("good"))
        waits = bytearray(4)

        def is_full() -> bool:
            fcntl.ioctl(reader, termios.FIONREAD, waits)
            return int.from_bytes(waits, sys.byteorder) == held

        wait_until(is_full, "an output that is full")
        read = os.read(reader, 1 << 20)

        def is_all_read() -> bool:
            nonlocal read
            with suppress(BlockingIOError):
                read += os.read(reader, 1 << 20)
            return read.endswith(b"\n\n")

        wait_until(is_all_read)
        assert server.terminate() == 0
    os.close(reader)
    assert all(f"\nbroken_{number} 1: ".encode() in read for number in range(20))
