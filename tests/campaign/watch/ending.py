"""The end of a campaign: which models serve again, how the servers end, what they leave behind, and what their logs
say."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from support.processes import has_ended, send
from support.repository_index import rows_of
from support.server import RocserveProcess
from support.shared_memory import FOLDER as SHARED_MEMORY
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

from campaign.findings import Findings
from campaign.stage import Stage
from campaign.watch.resources import ResourceWatch
from rocserve.observability.json_lines import LONGEST_LINE

RECOVERY_SECONDS = PATIENCE_SECONDS
END_SECONDS = PATIENCE_SECONDS
LEFT_SECONDS = PATIENCE_SECONDS
SHARED_SECONDS = 10.0
"""Other programs make files there, and remove them soon or keep them open."""
PROCESS_NUMBER = re.compile(r"(?<![0-9a-f])\d+(?![0-9a-f])")
"""Other programs put process numbers into the names of their shared memory."""
HEAD_OF_LINE = re.compile(r"[A-Z]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] ")
"""The head of a log line: level and day, time, process, place."""
TIME_OF_DAY = re.compile(r"\b(\d\d):(\d\d):(\d\d\.\d+)")
DAY_SECONDS = 86400
USERS_CODE = "model.py"
"""A traceback through a model's own file belongs in the log."""
UNLOADED = ("UNAVAILABLE", "unloaded")
"""The index's state and reason for earlier versions."""

IndexRows = dict[tuple[str, str], tuple[str, str]]


def index_rows(server: RocserveProcess) -> IndexRows:
    """(model, version) -> (state, reason)."""
    return {(row.name, row.version): (row.state, row.reason) for row in rows_of(server)}


def check_recovery(stage: Stage, name: str, before: IndexRows) -> None:
    """Check that every model is as it was before the first action, whichever version serves now."""
    server = stage.servers[name]
    expected = _states(before)
    now: IndexRows | str = ""

    def is_back() -> bool:
        nonlocal now
        try:
            now = index_rows(server)
        except InferenceServerException as error:
            now = str(error)
            return False
        return _states(now) == expected

    try:
        wait_until(is_back, seconds=RECOVERY_SECONDS)
    except AssertionError:
        stage.findings.add("not recovered", f"{name}: the index is {now}, expected {expected}")


def _states(rows: IndexRows) -> dict[str, set[tuple[str, str]]]:
    models: dict[str, set[tuple[str, str]]] = {}
    for (model, _), state in rows.items():
        if state != UNLOADED:
            models.setdefault(model, set()).add(state)
    return models


def end(stage: Stage, watch: ResourceWatch) -> None:
    """Send SIGTERM; check the exit status and what is left."""
    server = stage.servers[watch.name]
    assert server.process is not None
    if server.process.poll() is not None:
        stage.findings.add("server ended", f"{watch.name}: with status {server.process.returncode} before its end")
        return
    family = watch.family | set(server.family())
    try:
        status = server.terminate(END_SECONDS)
    except subprocess.TimeoutExpired as error:
        stage.findings.add("hangs at the end", f"{watch.name}: {error}")
        return
    if status:
        stage.findings.add("exit status", f"{watch.name} ended with status {status} at SIGTERM")
    with suppress(AssertionError):
        wait_until(lambda: not any(map(_is_left, family)), seconds=LEFT_SECONDS)
    for process in filter(_is_left, family):
        stage.findings.add("process left", f"{watch.name}: {process}")
        send(process, signal.SIGKILL)
    for port in (server.port, server.http_port):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                stage.findings.add("socket left", f"{watch.name}: port {port} still takes connections")


def _is_left(process: psutil.Process) -> bool:
    return process.is_running() and not has_ended(process.pid)


def shared_files() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def check_files(stage: Stage, shared_before: set[str], watches: Sequence[ResourceWatch]) -> None:
    """Check that nothing new is in /dev/shm and nothing in the servers' temporary folder."""
    servers = [server.process.pid for server in stage.servers.values() if server.process is not None]
    ours = {os.getpid(), *servers, *(process.pid for watch in watches for process in watch.family)}
    new: set[str] = set()

    def is_nothing_new() -> bool:
        names = {name for name in shared_files() - shared_before if not _is_others(name, ours)}
        new.clear()
        new.update(names - _in_use(ours) if names else names)
        return not new

    try:
        wait_until(is_nothing_new, seconds=SHARED_SECONDS)
    except AssertionError:
        stage.findings.add("shared memory left", f"in {SHARED_MEMORY}: {sorted(new)}")
    left = [path for path in (stage.folder / "temporary").rglob("*") if path.is_file() and not _is_cache(path)]
    if left:
        stage.findings.add("temporary files left", f"{left}")


def _in_use(ours: set[int]) -> set[str]:
    """The shared memory that other processes have open or mapped."""
    found: set[str] = set()
    for pid in set(psutil.pids()) - ours:
        with suppress(OSError):
            entries = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
            entries += Path(f"/proc/{pid}/maps").read_text().split()
            found |= {entry.removeprefix(f"{SHARED_MEMORY}/") for entry in entries if entry.startswith("/dev/shm/")}
    return found


def _is_others(name: str, ours: set[int]) -> bool:
    numbers = {int(number) for number in PROCESS_NUMBER.findall(name)}
    return bool(numbers) and not numbers & ours


def _is_cache(path: Path) -> bool:
    return ".cache" in path.parts


def check_log(stage: Stage, name: str) -> None:
    log = stage.servers[name].log_text
    if log.startswith("{"):
        check_json(stage.findings, name, log)
        log = plain(log)
    for traceback in tracebacks(log):
        if USERS_CODE not in traceback:
            stage.findings.add("traceback", f"{name}:\n{traceback}", moment_of(traceback))


def check_json(findings: Findings, name: str, log: str) -> None:
    """Check that each line is a whole object of JSON, whatever was killed or written meanwhile."""
    for number, line in enumerate(log.splitlines(), start=1):
        try:
            is_whole = isinstance(json.loads(line), dict)
        except ValueError:
            is_whole = False
        if not is_whole or len(line) >= LONGEST_LINE:
            findings.add("line of the log", f"{name}: line {number} is not one of JSON: {line[:400]!r}")


def plain(log: str) -> str:
    """A log of JSON as the other format has it."""
    lines = []
    for line in log.splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            head = f"{record['level'][0]}0000 {record['time'][11:-1]} {record['process']} {record['place']}] "
            speaker = f"{record.get('model')}:{record['worker']}: " if "worker" in record else ""
            lines.append(f"{head}{speaker}{record.get('text', '')}")
            lines += record.get("traceback", "").splitlines()
    return "\n".join(lines)


def moment_of(line: str) -> float | None:
    """time.monotonic() for the time of day (UTC) in a log line."""
    if (found := TIME_OF_DAY.search(line)) is None:
        return None
    hours, minutes, seconds = (float(part) for part in found.groups())
    ago = (time.time() - (hours * 3600 + minutes * 60 + seconds)) % DAY_SECONDS
    return time.monotonic() - ago


def tracebacks(log: str) -> Iterator[str]:
    """The tracebacks, each from its first line to its error, with the log line that it belongs to. The lines of a
    worker's traceback have the log's head and the model's name, and other lines may stand between them."""
    lines = log.splitlines()
    for index, line in enumerate(lines):
        before, found, _ = line.partition("Traceback (most recent call last)")
        if not found:
            continue
        speaker = _without_head(before)
        whole = lines[max(0, index - 1) : index + 1]
        for further in lines[index + 1 :]:
            text = _without_head(further)
            if speaker and not text.startswith(speaker):
                continue
            whole.append(further)
            if not text.startswith(f"{speaker} "):
                break
        yield "\n".join(whole)


def _without_head(line: str) -> str:
    return HEAD_OF_LINE.sub("", line, 1)
