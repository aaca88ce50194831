"""Memory that a process has freed stays for its next request until it is given back, in pieces."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rocserve.plane.freed_memory import GIVEN_BACK_AT_ONCE

MIB = 1 << 20

MESSAGES = """
import ctypes, os, sys

class Messages:
    # Blocks of memory, and which of their pages still hold what was written after they were freed.

    def __init__(self, count, mib):
        self.blocks = [bytearray(b"x") * (mib << 20) for _ in range(count)]
        self.places = []
        for block in self.blocks:
            start = ctypes.addressof(ctypes.c_char.from_buffer(block))
            # Every 16th page, in its middle: malloc writes at the ends of what is free.
            self.places += range(start + 2048, start + len(block), 16 * 4096)
        self.memory = os.open("/proc/self/mem", os.O_RDONLY)

    def held_bytes(self):
        return 16 * 4096 * sum(self._is_held(place) for place in self.places)

    def _is_held(self, place):
        try:
            return os.pread(self.memory, 1, place) == b"x"
        except OSError:  # It is not mapped any more.
            return False
"""

KEPT = """
import threading
from rocserve.plane.freed_memory import FreedMemory

count, mib, of_any_size = map(int, sys.argv[1:])
freed = FreedMemory(bool(of_any_size))

def run():
    messages = Messages(count, mib)
    full = messages.held_bytes()
    messages.blocks.clear()
    kept = messages.held_bytes()
    left = [kept, *(messages.held_bytes() for _ in freed.give_back()), messages.held_bytes()]
    print(full, kept, left[-1], max(before - after for before, after in zip(left, left[1:])))

thread = threading.Thread(target=run)
thread.start() if of_any_size else run()
"""


def sizes(count: int = 20, mib: int = 4, of_any_size: bool = False, **environment: str) -> tuple[int, ...]:
    """Bytes of messages that a process has when it uses them, has freed them, and has trimmed; with a further thread if
    they may be of any size. A separate process, because the setting stays."""
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", MESSAGES + KEPT, *map(str, (count, mib, int(of_any_size)))]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return tuple(map(int, shown.stdout.split()))


@pytest.mark.parametrize("arguments", [(20, 4), (2, 40, True)])
def test_what_is_freed_is_kept_until_it_is_given_back(arguments: tuple[int, ...]) -> None:
    full, kept, left, most_at_once = sizes(*arguments)
    assert full == 80 * MIB
    assert kept > full - 10 * MIB
    assert left < full - 70 * MIB
    assert most_at_once < GIVEN_BACK_AT_ONCE + 4 * MIB


def test_what_the_operator_has_told_glibc_stays() -> None:
    full, kept, *_ = sizes(MALLOC_MMAP_THRESHOLD_="65536")
    assert kept < full - 70 * MIB
