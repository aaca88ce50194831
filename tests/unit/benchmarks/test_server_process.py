from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from benchmarks.server_process import ServerFailed, ServerProcess, free_port


def test_a_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    server = ServerProcess("peer", command, free_port(), tmp_path / "log")
    with pytest.raises(ServerFailed, match=r"(?s)peer ended with status 3.*no such model"), server:
        pass


def test_a_free_port_is_given_to_no_connection_meanwhile() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < max(first_of_kernel, 20_000)
    with socket.socket() as taken:
        taken.bind(("", ports.pop()))
