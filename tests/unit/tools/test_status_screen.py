"""The screen of `rocserve status`: what keys do, and the whole in a real terminal."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from rich.text import Text
from support.waiting import wait_until

from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.verbs import keys
from rocserve.verbs.keys import Keys, key_names
from rocserve.verbs.status_poll import StatusRow
from rocserve.verbs.status_rows import ATTENTION, counts, in_order, matching
from rocserve.verbs.status_screen import Screen


def row(model: str, state: str = "READY", reason: str = "", rate: float = 0.0, failures: float = 0.0) -> StatusRow:
    figures = {"engine": "onnxruntime", "ok": f"{10 * rate:.0f}", "failed": "0", "req/s": f"{rate:.1f}"}
    return StatusRow(model, "1", state, reason, figures if state == "READY" else {}, rate, failures)


MIXED = [
    row("asleep", ""),
    row("broken", "UNAVAILABLE", "no such file"),
    row("busy", rate=90.0),
    row("failing", rate=1.0, failures=0.5),
    row("idle"),
    row("loading", "CHECKING"),
]


def names(rows: Sequence[StatusRow]) -> list[str]:
    return [one.model for one in rows]


def test_failing_and_busy_ones_come_first() -> None:
    assert names(in_order(MIXED, ATTENTION)) == ["broken", "failing", "loading", "busy", "idle", "asleep"]
    assert names(in_order(MIXED, "model")) == names(MIXED)
    assert names(in_order(MIXED, "req/s"))[:3] == ["busy", "failing", "idle"]


def test_all_words_must_match() -> None:
    assert names(matching(MIXED, "NO file")) == ["broken"]
    assert names(matching(MIXED, "onnx")) == ["busy", "failing", "idle"]
    assert names(matching(MIXED, "unavail")) == ["broken"]
    assert names(matching(MIXED, " ")) == names(MIXED)


def test_counts() -> None:
    assert counts(MIXED) == "3 ready, 1 loading, 1 failed, 1 not loaded, 91.0 requests/s"
    assert counts([]) == "0 ready, 0 failed, 0.0 requests/s"


def test_keys_of_terminals() -> None:
    assert key_names("\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[1~\x1b[4~\r\x7fq/ä") == [
        keys.UP, keys.DOWN, keys.PAGE_UP, keys.PAGE_DOWN, keys.HOME, keys.END, keys.ENTER, keys.BACKSPACE,
        "q", "/", "ä",
    ]  # fmt: skip
    assert key_names("\x1b") == [keys.ESCAPE]
    # Keys without a meaning here do nothing, and are not taken for several others.
    assert key_names("\x1b[15~\x1b[1;5C\x00s") == ["s"]


def test_keys_that_come_byte_by_byte() -> None:
    terminal, keyboard = os.openpty()
    woken, wake = os.pipe()
    with Keys(keyboard, woken) as read:
        os.write(terminal, b"\x1b[B")
        assert read.read(5.0) == [keys.DOWN]
        os.write(terminal, "é".encode()[:1])
        assert read.read(5.0) == []
        os.write(terminal, "é".encode()[1:] + b"\x1b")
        assert read.read(5.0) == ["é", keys.ESCAPE]
        os.write(wake, b"1")
        assert read.read(5.0) == []
    for descriptor in (terminal, keyboard, woken, wake):
        os.close(descriptor)


def drawn(screen: Screen, width: int = 100, height: int = 10) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as captured:
        console.print(screen)
    return [line.rstrip() for line in captured.get().splitlines()]


def screen_of(rows: Sequence[StatusRow], details: Callable[[StatusRow], Sequence[Text]] | None = None) -> Screen:
    screen = Screen(details or (lambda one: [Text(f"all about {one.model}")]))
    screen.take("rocserve at here: ready", rows)
    return screen


def press(screen: Screen, *pressed: str, **size: int) -> list[str]:
    for key in pressed:
        screen.press(key)
        lines = drawn(screen, **size)
    return lines


SIXTY = [row(f"m{place:02}") for place in range(60)]


def test_the_table_scrolls() -> None:
    screen = screen_of(SIXTY)
    lines = drawn(screen)
    assert lines[0] == "rocserve at here: ready"
    assert lines[1] == "60 ready, 0 failed, 0.0 requests/s; sorted by attention"
    assert lines[3].split()[:3] == ["model", "version", "state"]
    assert (lines[4][:3], lines[8][:3], len(lines)) == ("m00", "m04", 10)
    assert lines[9].endswith("1-5 of 60")
    assert press(screen, keys.DOWN, keys.DOWN)[4][:3] == "m00"
    assert press(screen, keys.PAGE_DOWN)[8][:3] == "m06"
    assert press(screen, keys.END)[8][:3] == "m59"
    assert press(screen, keys.PAGE_UP)[4][:3] == "m55"
    assert press(screen, keys.HOME)[4][:3] == "m00"


def test_the_chosen_row_stays_chosen_when_the_order_changes() -> None:
    opened: list[str] = []
    screen = screen_of(SIXTY, lambda one: [Text(opened.append(one.model) or "")])
    press(screen, *[keys.DOWN] * 3)
    busy = [replace(one, rate=1.0) if one.model == "m50" else one for one in SIXTY]
    screen.take("", busy)
    press(screen, keys.ENTER)
    assert opened == ["m03"]
    screen.take("", busy[10:])
    press(screen, keys.ESCAPE, keys.ENTER)
    # The chosen one has gone.
    assert opened == ["m03", "m50"]


def test_a_filter() -> None:
    screen = screen_of(SIXTY)
    lines = press(screen, "/", "m", "5", "q", keys.BACKSPACE)
    assert lines[1].startswith("10 of 60 match 'm5'; 60 ready")
    assert lines[4][:3] == "m50"
    assert lines[9].startswith("filter: m5")
    # Then keys are keys again.
    lines = press(screen, keys.ENTER, keys.DOWN)
    assert lines[9].endswith("esc all   1-5 of 10")
    assert press(screen, keys.ESCAPE)[9].endswith("48-52 of 60")
    assert press(screen, "/", "z", "z", keys.ENTER, keys.ENTER, keys.DOWN)[9].endswith("0-0 of 0")
    assert not screen.is_over
    press(screen, "q")
    assert screen.is_over


def test_sorting() -> None:
    screen = screen_of(MIXED)
    assert drawn(screen)[4].startswith("broken")
    assert [press(screen, "s")[1].rpartition(" ")[2] for _ in range(3)] == ["model", "ok", "failed"]
    lines = press(screen, "s")
    assert (lines[1].endswith("sorted by req/s"), lines[4].split()[0]) == (True, "busy")


def test_a_model_is_opened_and_scrolled() -> None:
    screen = screen_of(SIXTY, lambda one: [Text(f"line {place} of {one.model}") for place in range(30)])
    lines = press(screen, keys.END, keys.ENTER)
    assert lines[2] == "line 0 of m59"
    assert lines[9].endswith("1-7 of 30")
    assert press(screen, keys.PAGE_DOWN, keys.DOWN)[2] == "line 7 of m59"
    assert press(screen, keys.END)[8] == "line 29 of m59"
    # Polls go on meanwhile.
    screen.take("later", SIXTY)
    assert drawn(screen)[2] == "line 23 of m59"
    assert press(screen, keys.ESCAPE)[8][:3] == "m59"


def test_long_lines_of_a_model_are_wrapped_to_any_width() -> None:
    screen = screen_of(SIXTY, lambda one: [Text("word " * 40)])
    assert press(screen, keys.ENTER, width=100)[9].endswith("1-2 of 2")
    assert drawn(screen, width=50)[9].endswith("1-4 of 4")


def test_a_server_that_is_gone_leaves_its_last_table() -> None:
    screen = screen_of(SIXTY)
    screen.take(screen.title, screen.rows, "no answer from a server at here")
    lines = drawn(screen)
    assert lines[2] == "no answer from a server at here"
    assert lines[5][:3] == "m00"
    screen.take(screen.title, SIXTY)
    assert drawn(screen)[4][:3] == "m00"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_each_line_fits(width: int) -> None:
    rows = [*MIXED, row("a-name-of-many-letters-" * 5, "UNAVAILABLE", "a long reason " * 30)]
    lines = drawn(screen_of(rows), width=width, height=12)
    assert all(len(line) <= width for line in lines)
    if width >= 40:
        # States are never lost.
        assert sum("UNAVAIL" in line for line in lines) == 2
    assert ("a long reason" in " ".join(lines)) == (width >= 120)


def test_a_terminal_of_a_few_lines() -> None:
    assert len(drawn(screen_of(SIXTY), height=3)) == 3


class _Handler(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method.rpartition("/")[2]
        return grpc.unary_unary_rpc_method_handler(
            lambda _, context: self.answers()[method],
            getattr(pb, f"{method}Request").FromString,
            lambda message: message.SerializeToString(),
        )

    def answers(self) -> dict[str, Any]:
        index = pb.RepositoryIndexResponse()
        for place in range(60):
            index.models.add(name=f"model_{place:02}", version="1", state="READY")
        index.models[59].state, index.models[59].reason = "UNAVAILABLE", "no such file"
        return {
            "ModelMetadata": pb.ModelMetadataResponse(properties={"engine": "onnxruntime"}),
            "ModelConfig": pb.ModelConfigResponse(config={"name": "served", "max_batch_size": 8}),
            "ServerMetadata": pb.ServerMetadataResponse(name="rocserve", version="9.9"),
            "ServerReady": pb.ServerReadyResponse(ready=True),
            "RepositoryIndex": index,
            "ModelStatistics": pb.ModelStatisticsResponse(),
        }


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4), handlers=[_Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


class Terminal:
    """A terminal of 30 rows, in which a command runs."""

    def __init__(self, socket: Path, command: Sequence[str]) -> None:
        self._tmux = ("tmux", "-S", str(socket), "-f", "/dev/null")
        shown = f"{shlex.join(command)}; echo left with $?; stty -a | grep -o ' icanon'; exec sleep 1000"
        self._run("new-session", "-d", "-x", "110", "-y", "30", "sh", "-c", shown)

    def _run(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], capture_output=True, text=True, check=True).stdout

    def press(self, *pressed: str) -> None:
        self._run("send-keys", *pressed)

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._run("capture-pane", "-p").split("\n")]

    def shows(self, *texts: str) -> Callable[[], bool]:
        return lambda: all(text in "\n".join(self.lines()) for text in texts)

    def end(self) -> None:
        self._run("kill-server")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_in_a_terminal(address: str, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "rocserve.cli", "status", f"--url={address}", "--http-url=127.0.0.1:1")
    terminal = Terminal(tmp_path / "tmux", command)
    try:
        wait_until(terminal.shows("59 ready, 1 failed", "1-25 of 60"), "the table")
        # What fails is on top, and the whole screen is used.
        assert terminal.lines()[4].split()[:3] == ["model_59", "1", "UNAVAILABLE"]
        assert terminal.lines()[28].startswith("model_23")
        terminal.press("End")
        wait_until(terminal.shows("36-60 of 60", "model_58"), "the end of the table")
        terminal.press("/", "model_4")
        wait_until(terminal.shows("filter: model_4", "10 of 60 match 'model_4'"), "the filter")
        terminal.press("Enter", "Down", "Enter")
        wait_until(terminal.shows("model_41 version 1: READY", "max_batch_size: 8"), "the model")
        terminal.press("Escape")
        wait_until(terminal.shows("1-10 of 10"), "the table again")
        terminal.press("Escape")
        wait_until(terminal.shows("of 60"), "all models")
        terminal.press("s")
        wait_until(terminal.shows("sorted by model"), "another order")
        terminal.press("Home", "End", "Enter")
        wait_until(terminal.shows("model_59 version 1: UNAVAILABLE", "no such file", "/v2/load-report"), "its reason")
        terminal.press("q")
        # The terminal is as before.
        wait_until(terminal.shows("left with 0", "icanon"), "the end")
    finally:
        terminal.end()
