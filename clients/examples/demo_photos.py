"""Shows the demo's third part: photographs that come with scientific packages, classified by EfficientNet-Lite0."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from picture_sheet import Tile, write_picture_sheet
from rich.console import Console

from rocserve_tools.images.asking import ask_all, print_faults
from rocserve_tools.images.classify import classifier, findings_table
from rocserve_tools.images.drawing import read_picture

NETWORK = "efficientnet_lite0"
MODEL = f"{NETWORK}_image"
CLASSES_SHOWN = 3
PHOTOGRAPHS = {
    "sklearn/datasets/images/china.jpg": ("palace",),
    "sklearn/datasets/images/flower.jpg": ("daisy",),
    "matplotlib/mpl-data/sample_data/grace_hopper.jpg": ("military uniform",),
    "skimage/data/chelsea.png": ("tabby, tabby cat", "tiger cat", "Egyptian cat"),
    "skimage/data/coffee.png": ("espresso",),
    "skimage/data/rocket.jpg": ("missile", "projectile, missile"),
}
"""Files in their packages, with the right classes; ImageNet has no temple, and two names for rockets."""


def photographs(folder: Path) -> Mapping[Path, tuple[str, ...]]:
    """Copy the installed photographs to the folder, and return them with their classes."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, classes in PHOTOGRAPHS.items():
        package, _, path = name.partition("/")
        spec = importlib.util.find_spec(package)
        file = Path(spec.submodule_search_locations[0], path) if spec and spec.submodule_search_locations else None
        if file is not None and file.is_file():
            found[Path(os.path.relpath(shutil.copy(file, folder)))] = classes
    return found


def with_weights(sample: Path, copy: Path, console: Console) -> tuple[Path, bool]:
    """Return a repository like the sample, with the network's weights, and whether the weights could be fetched. If the
    sample has no weights, they go into a copy."""
    weights = Path(NETWORK, "1", "model.onnx")
    if (sample / weights).is_file():
        return sample, True
    # Links are followed, because their targets need not lie in the copy.
    shutil.copytree(sample, copy, dirs_exist_ok=True)
    if not (copy / weights).is_file():
        command = [str(Path(sysconfig.get_path("scripts")) / "rocserve"), "get", NETWORK]
        subprocess.run([*command, "--model-repository", str(copy)], check=False)
    has_weights = (copy / weights).is_file()
    if not has_weights:
        console.print(f"{NETWORK} could not be fetched: no photographs this time", style="bold yellow")
    return copy, has_weights


def show_photographs(address: str, output: Path, console: Console) -> bool:
    """Classify the photographs and write a sheet. Returns whether each has a right class among its best three."""
    expected = photographs(output / "demo-photographs")
    if len(expected) < len(PHOTOGRAPHS):
        missing = sorted({Path(name).name for name in PHOTOGRAPHS} - {path.name for path in expected})
        console.print(f"{', '.join(missing)}: their packages are not installed here", style="bold yellow")
    if not expected:
        return True
    findings = asyncio.run(ask_all(address, MODEL, list(expected), partial(classifier, CLASSES_SHOWN)))
    console.print(findings_table(findings))
    print_faults(findings)
    tiles = []
    right = 0
    for finding in findings:
        is_right = any(found.label in expected[finding.image] for found in finding.found)
        right += is_right
        if not is_right:
            console.print(f"{finding.image.name}: expected {' or '.join(expected[finding.image])}", style="bold red")
        best = "\n".join(f"{found.score:.0%} {found.label}" for found in finding.found)
        tiles.append(Tile(read_picture(finding.image), best or finding.error))
    sheet = output / "demo-photographs.png"
    summary = f"{right} of {len(findings)} photographs right among the best {CLASSES_SHOWN} classes"
    write_picture_sheet(tiles, f"rocserve, {MODEL}: {summary}", sheet)
    console.print(summary, soft_wrap=True)
    console.print(f"photographs with labels: {sheet}", soft_wrap=True)
    return right == len(findings)
