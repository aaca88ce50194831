"""Keeps MIGraphX's measurements from compiles for a GPU: its problem cache, the fastest kernel for each problem.

MIGraphX reads the file that $MIGRAPHX_PROBLEM_CACHE names before a compile, and writes it afterwards, without a lock
and not atomically. So each compile gets a copy; after success, its additions are merged into the file.

The file is JSON, written by all versions as a list of pairs: [problem, solution], or since 2026 [device, list of these
pairs]. Problems are compared by their text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocserve.cache.folders import try_lock

VARIABLE = "MIGRAPHX_PROBLEM_CACHE"
_MOST_BYTES = 32 << 20
"""A larger file starts anew: tens of thousands of problems, which MIGraphX reads before each compile."""

Pairs = list[list[Any]]


@dataclass(frozen=True, slots=True)
class ProblemCache:
    file: Path
    """For one environment and one way of tuning."""
    warn: Callable[[str], None]

    @contextmanager
    def copied(self, copy: Path, measures: bool = True) -> Iterator[None]:
        """Copy the file for a compile within the context, and merge the compile's file, unless the context raises.
        `measures`: False = the compile takes any kernel for a problem that it does not find. A file that cannot be used
        is left out with a warning."""
        known = self._read(self.file)
        try:
            if known:
                copy.write_text(json.dumps(known))
            yield
            if measures and (found := self._read(copy)) and found != known:
                self._merge(found)
        finally:
            copy.unlink(missing_ok=True)

    def _merge(self, found: Pairs) -> None:
        new, lock = self.file.with_suffix(".new"), None
        # Another process's merge takes a fraction of a second.
        deadline = time.monotonic() + 10.0
        try:
            while (lock := try_lock(self.file.with_suffix(".lock"))) is None:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.05)
            new.write_text(json.dumps(merged(self._read(self.file), found)))
            new.replace(self.file)
        except OSError as error:
            self.warn(f"cannot keep MIGraphX's measurements of kernels in {self.file}: {error.strerror or error}")
        finally:
            if lock is not None:
                lock.release()

    def _read(self, file: Path) -> Pairs:
        """Return the file's pairs; empty = there is none, or it cannot be used."""
        fault = ""
        try:
            size = file.stat().st_size
            if size > _MOST_BYTES:
                fault = f"it has {size} bytes, at most {_MOST_BYTES} are used"
            else:
                found = json.loads(file.read_bytes()) or []
                if _are_pairs(found):
                    return list(found)
                fault = "it is not a list of pairs"
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            fault = str(error)
        if fault:
            self.warn(f"{file}, with MIGraphX's measurements of kernels, is not used and will be replaced: {fault}")
        return []


def merged(known: Pairs, found: Pairs) -> Pairs:
    """Return the pairs of both, those of `found` where both have one. Problems without a solution are left out: older
    versions write problems that they were still measuring, and treat them as solved."""
    pairs = {_text(key): [key, solution] for key, solution in known}
    for key, solution in found:
        if solution is None:
            continue
        if isinstance(solution, list) and solution and _are_pairs(solution):
            _, earlier = pairs.get(_text(key), (key, []))
            solution = merged(earlier if _are_pairs(earlier) else [], solution)
        pairs[_text(key)] = [key, solution]
    return [*pairs.values()]


def _are_pairs(value: Any) -> bool:
    """Return whether the value is a mapping as MIGraphX writes it, whose keys are objects."""
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], dict) for pair in value
    )


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
