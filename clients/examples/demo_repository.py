"""The repository that the demo serves: the sample itself, or a copy with untrained weights where it has none."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from rocserve.tools.untrained.origin import is_untrained

WEIGHTS = {"resnet50": Path("resnet50/1/model.onnx"), "yolov4": Path("yolov4/1/model.onnx")}
"""By the name that `rocserve get` knows."""


@dataclass(frozen=True, slots=True)
class DemoRepository:
    folder: Path
    is_untrained: bool
    """Whether a network's weights are."""


def complete_repository(sample: Path, copy: Path) -> DemoRepository:
    """The sample, where it has all weights; else `copy`, made like it, with untrained weights for what is missing.

    What a copy has of weights is kept: building them takes a while.

    Raises:
        SystemExit: the weights could not be built.
    """
    if all((sample / weights).is_file() for weights in WEIGHTS.values()):
        return DemoRepository(sample, any(is_untrained(sample / weights) for weights in WEIGHTS.values()))
    # Links are followed: what they lead to need not lie in the copy.
    shutil.copytree(sample, copy, dirs_exist_ok=True)
    missing = [name for name, weights in WEIGHTS.items() if not (copy / weights).is_file()]
    if missing:
        command = [str(Path(sysconfig.get_path("scripts")) / "rocserve"), "get", *missing, "--untrained"]
        status = subprocess.run([*command, "--model-repository", str(copy)], check=False).returncode
        if status != 0:
            raise SystemExit(f"'rocserve get --untrained' ended with exit status {status}")
    return DemoRepository(copy, any(is_untrained(copy / weights) for weights in WEIGHTS.values()))
