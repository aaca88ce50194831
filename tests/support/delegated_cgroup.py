"""Delegates a cgroup of version 2 to a server of the tests, as systemd does, if this machine has cgroups of version
2."""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.waiting import wait_until

NO_CGROUP = "no delegated cgroup v2 here"
_MOUNTED = Path("/sys/fs/cgroup")


@contextmanager
def delegated_cgroup() -> Iterator[Path]:
    """A context with the folder of a cgroup. At the end it is removed with all cgroups that a server left in it. Skips
    the test if none can be made."""
    folder = _make()
    if folder is None:
        pytest.skip(NO_CGROUP)
    try:
        yield folder
    finally:
        # Leftovers of a server that was killed or has never started.
        (folder / "cgroup.kill").write_text("1")
        wait_until(lambda: "populated 0" in (folder / "cgroup.events").read_text(), "the end of all processes")
        for inner in (*folder.iterdir(), folder):
            if inner.is_dir():
                inner.rmdir()


def python_within(folder: Path, program: Path) -> str:
    """Write a script to `program` that runs Python in that cgroup from its first instruction."""
    processes = shlex.quote(str(folder / "cgroup.procs"))
    program.write_text(f'#!/bin/sh\necho $$ > {processes} && exec {shlex.quote(sys.executable)} "$@"\n')
    program.chmod(0o755)
    return str(program)


def _make() -> Path | None:
    """Make a cgroup below the nearest one around this process that delegates memory and tasks."""
    own = next((line[4:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::/")), "")
    for parent in (_MOUNTED / own, *(_MOUNTED / own).parents):
        try:
            handed_on = (parent / "cgroup.subtree_control").read_text().split()
            if {"memory", "pids"} <= set(handed_on) and os.access(parent / "cgroup.procs", os.W_OK):
                folder = parent / f"rocserve-test-{uuid.uuid4().hex[:8]}"
                folder.mkdir()
                os.setxattr(folder, "user.delegate", b"1")
                return folder
        except OSError:
            continue
    return None
