"""deploy/systemd's unit, and `Type=notify` with a real systemd."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.migraphx import CHECKOUT
from support.models import add_constant, drop
from support.waiting import PATIENCE_SECONDS, wait_until

UNIT = CHECKOUT / "deploy/systemd/rocserve.service"


def is_systemd_here() -> bool:
    """Whether systemd is PID 1, and starts units for this user."""
    has_systemd = Path("/run/systemd/system").is_dir() and shutil.which("systemd-run") is not None
    return has_systemd and os.geteuid() == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_understands_each_line_of_the_unit(tmp_path: Path) -> None:
    program = "/opt/rocserve/bin/rocserve"
    text = UNIT.read_text()
    assert f"ExecStart={program} serve " in text
    copy = tmp_path / UNIT.name
    # The program that the command names must exist.
    copy.write_text(text.replace(program, sys.executable))
    ran = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.fixture
def unit() -> Iterator[str]:
    """The name of a transient unit, which is stopped and forgotten at the end."""
    if not is_systemd_here():
        pytest.skip("no systemd here")
    name = f"rocserve-test-{uuid.uuid4().hex[:8]}.service"
    yield name
    for verb in ("stop", "reset-failed"):
        subprocess.run(["systemctl", verb, name], capture_output=True, check=False)


def shown(unit: str, field: str) -> str:
    """A property of the unit."""
    command = ["systemctl", "show", "--value", f"--property={field}", unit]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_systemd_waits_for_readiness_shows_the_status_and_restarts_what_was_killed(unit: str, tmp_path: Path) -> None:
    """The unit's own settings, but for those of its place: systemd-run returns when the server says READY=1."""
    drop(tmp_path / "models", "m", add_constant(1.0))
    settings = [line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    section = settings[settings.index("Type=notify") : settings.index("WantedBy=multi-user.target")]
    kept = [f"--property={line}" for line in section if not line.startswith("ExecStart=")]
    serve = [sys.executable, "-m", "rocserve.cli", "serve", str(tmp_path / "models"), "--allow-metrics=false"]
    ports = ["--grpc-address=127.0.0.1", "--grpc-port=0", "--http-address=127.0.0.1", "--http-port=0"]
    command = ["systemd-run", f"--unit={unit}", *kept, *serve, *ports, "--exit-on-error=false"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (shown(unit, "Type"), shown(unit, "ActiveState")) == ("notify", "active")
    wait_until(lambda: "1 model served" in shown(unit, "StatusText"), "the status")
    first = shown(unit, "MainPID")
    os.kill(int(first), signal.SIGKILL)
    wait_until(lambda: shown(unit, "MainPID") not in (first, "0"), "the restart")
    wait_until(lambda: shown(unit, "ActiveState") == "active", "readiness after the restart")
    assert shown(unit, "NRestarts") == "1"
    subprocess.run(["systemctl", "stop", unit], check=True, timeout=PATIENCE_SECONDS)
    assert shown(unit, "Result") in ("success", ""), "SIGTERM ends it in time"
