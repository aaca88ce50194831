from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.server_process import ServerFailed, ServerProcess, free_port


def test_a_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    server = ServerProcess("peer", command, free_port(), tmp_path / "log")
    with pytest.raises(ServerFailed, match=r"(?s)peer ended with status 3.*no such model"), server:
        pass
