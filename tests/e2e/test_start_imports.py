"""What the processes of a server import at its start: each package there costs every start time and memory."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

from support.models import add_constant, drop
from support.server import RocserveProcess
from support.waiting import wait_until

_IMPORT = "import time:"
"""Begins a line of `python -X importtime`."""


def imported(log: str) -> set[str]:
    """The modules that the server's process has imported."""
    lines = (line for line in log.splitlines() if line.startswith(_IMPORT))
    return {line.rpartition("|")[2].strip() for line in lines}


def libraries(server: RocserveProcess) -> set[str]:
    """The packages of which the zygote has loaded a compiled part."""
    zygote = server.zygote()
    assert zygote is not None
    parts = {part for library in zygote.memory_maps() for part in Path(library.path).parts}
    return parts & {"numpy", "onnxruntime", "cv2", "google", "grpc", "torch"}


PROGRAM = ("-X", "importtime", "-m", "rocserve.cli")


def test_a_server_imports_nothing_before_it_is_needed(repository: Path, tmp_path: Path) -> None:
    with RocserveProcess([repository], "--repository-poll-secs=1", log=tmp_path / "log", program=PROGRAM) as server:
        server.wait_until_ready()
        wait_until(lambda: "There is no model yet" in server.printed)
        # What Python itself imports in this environment, for example by .pth files.
        bare = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", ""], capture_output=True, text=True, check=True
        )
        modules = imported(server.log_text) - imported(bare.stderr)
        packages = {name.partition(".")[0] for name in modules} & packages_distributions().keys()
        # grpc imports its other packages, which are empty, if they are installed.
        packages = {name for name in packages if not name.startswith("grpc_")} - {"rocserve", "typing_extensions"}
        assert packages == {"google", "grpc", "httptools", "numpy", "watchdog"}
        assert modules.isdisjoint(("email", "importlib.metadata", "rocserve.config.preprocess.models"))
        assert libraries(server) == set()

        drop(repository, "plus_one", add_constant(1.0))
        wait_until(lambda: server.client().is_model_ready("plus_one"))
        assert libraries(server) == {"numpy", "onnxruntime"}


def test_the_zygote_imports_the_engines_of_the_models_that_are_there(repository: Path, tmp_path: Path) -> None:
    drop(repository, "plus_one", add_constant(1.0))
    with RocserveProcess([repository], log=tmp_path / "log", program=PROGRAM) as server:
        server.wait_until_ready()
        wait_until(lambda: "plus_one" in server.printed)
        assert "rich" not in imported(server.log_text)
        assert libraries(server) == {"numpy", "onnxruntime"}
