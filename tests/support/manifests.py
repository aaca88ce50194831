"""The manifests of deploy/, as kubectl renders them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from support.migraphx import CHECKOUT
from support.stores import tool

DEPLOY = CHECKOUT / "deploy"


def rendered(folder: str) -> str:
    """What `kubectl apply -k` would send for a folder. The test skips without kubectl."""
    kubectl = shutil.which("kubectl") or tool("kubectl/kubectl")
    ran = subprocess.run([kubectl, "kustomize", str(DEPLOY / folder)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def objects(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(text) if found]


def the(kind: str, text: str, name: str = "") -> dict[str, Any]:
    """The one object of a kind (and of a name, if there are several)."""
    (found,) = [one for one in objects(text) if one["kind"] == kind and name in ("", one["metadata"]["name"])]
    return found


def read(file: Path) -> dict[str, Any]:
    """The one object in a file."""
    (found,) = objects(file.read_text())
    return found
