"""How much memory a process has had at most."""

from __future__ import annotations

from pathlib import Path

_PEAK = "VmHWM:"


def peak_bytes(pid: int | None = None) -> int:
    """Of the process (None = this one), without what the process that started it had; 0 where it cannot be told.

    Not from getrusage(2), whose maximum a new process inherits.
    """
    try:
        text = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(_PEAK):
            return int(line.split()[1]) * 1024
    return 0
