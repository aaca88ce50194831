"""Virtual environments of peers: each is filled by pip once, below a cache folder, and kept between runs."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path("~/.cache/rocserve").expanduser()
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class PeerUnavailable(RuntimeError):
    """A peer cannot be installed on this machine; the message names the missing part."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment of the Python that runs the benchmarks."""

    folder: Path

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{PYTHON_VERSION}" / "site-packages"

    def versions(self) -> dict[str, str]:
        """Versions of installed packages, by name in lower case."""
        found = importlib.metadata.distributions(path=[str(self.site_packages)])
        return {distribution.metadata["Name"].lower(): distribution.version for distribution in found}

    def provision(
        self,
        requirements: Sequence[str],
        without_dependencies: Sequence[str] = (),
        complete: Callable[[], None] = lambda: None,
    ) -> None:
        """Make and fill the environment, unless that was done before with the same requirements. Raises PeerUnavailable
        if pip fails, or `complete` raises it.

        Args:
            without_dependencies: requirements that are installed first, without their dependencies.
            complete: called after pip.
        """
        wanted = json.dumps([*without_dependencies, *requirements])
        stamp = self.folder / "provisioned.json"
        with folder_lock(self.folder.parent):
            if stamp.is_file() and stamp.read_text() == wanted:
                return
            # The remains of an interrupted run are removed.
            shutil.rmtree(self.folder, ignore_errors=True)
            # The pip that is here fills it: to install another one takes seconds.
            _run_step([sys.executable, "-m", "venv", "--without-pip", str(self.folder)])
            python = str(self.programs / "python")
            pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet"]
            if without_dependencies:
                _run_step([*pip, "--no-deps", *without_dependencies])
            _run_step([*pip, *requirements])
            complete()
            stamp.write_text(wanted)


def _run_step(command: list[str]) -> None:
    """Run one installation command; PeerUnavailable carries the end of what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if finished.returncode:
        output = "\n".join((finished.stdout + finished.stderr).splitlines()[-15:])
        raise PeerUnavailable(f"`{' '.join(command)}` ended with status {finished.returncode}:\n{output}")


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock the folder against a second run, which waits and then finds the work done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
